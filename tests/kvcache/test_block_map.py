"""BlockMap: announcements in any order, answers equal to those of a dict of sets at every moment however little is
swept, short steps, memory as promised."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache import block_map
from kvmesh.kvcache.announce import BATCH_KEYS, Announcement, Announcer, snapshot_parts
from kvmesh.kvcache.block_map import MAX_GONE, BlockMap, Verdict
from kvmesh.kvcache.node_store import NodeStore
from tests.support.plain_block_map import PlainBlockMap

KEYS = [bytes([i]) * 16 for i in range(12)]
A, B, C = KEYS[:3]


def batch(seq: int, *sealed: bytes, removed: tuple[bytes, ...] = (), store: str = "s", life: int = 1) -> Announcement:
    return Announcement(store, life, seq, sealed, removed)


def part(seq: int, index: int, *sealed: bytes, more: bool = False) -> Announcement:
    return Announcement("s", 1, seq, sealed, snapshot=True, part=index, more=more)


def filled(holds: dict[str, set[bytes]]) -> BlockMap:
    blocks = BlockMap()
    for store, keys in holds.items():
        assert blocks.apply(batch(1, *keys, store=store) if keys else batch(0, store=store)) is Verdict.APPLIED
    return blocks


# ── what is said of one store ────────────────────────────────────────────────────────────────────────


def test_batches_are_taken_in_order_and_once() -> None:
    blocks = BlockMap()
    assert blocks.apply(batch(2, A)) is Verdict.GAP
    assert (blocks.slot("s"), blocks.seq("s"), blocks.incarnation("s"), len(blocks)) == (0, 0, 1, 0)
    assert blocks.apply(batch(1, A, B)) is Verdict.APPLIED
    assert blocks.apply(batch(1, C)) is Verdict.DUPLICATE
    assert blocks.apply(batch(3, C)) is Verdict.GAP
    assert blocks.apply(batch(2, C, removed=(A,))) is Verdict.APPLIED
    assert blocks.apply(batch(2)) is Verdict.DUPLICATE  # "I am at 2"
    assert blocks.apply(batch(3)) is Verdict.GAP  # "I am at 3": what was in it is missing here
    assert (sorted(blocks.keys_of("s")), blocks.seq("s"), blocks.count("s")) == ([B, C], 2, 2)


def test_a_snapshot_shows_with_its_last_part() -> None:
    blocks = BlockMap()
    blocks.apply(batch(1, A))
    assert blocks.apply(part(5, 1, C)) is Verdict.GAP
    assert blocks.apply(part(5, 0, B, more=True)) is Verdict.PARTIAL
    assert blocks.apply(part(5, 2, A)) is Verdict.GAP
    assert blocks.apply(part(5, 0, B, more=True)) is Verdict.DUPLICATE
    assert blocks.keys_of("s") == [A]
    assert blocks.apply(part(5, 1, C)) is Verdict.APPLIED
    assert blocks.apply(part(5, 1, C)) is Verdict.DUPLICATE
    assert (sorted(blocks.keys_of("s")), blocks.seq("s")) == ([B, C], 5)
    assert blocks.apply(part(4, 0)) is Verdict.DUPLICATE
    assert blocks.apply(batch(6, A)) is Verdict.APPLIED


def test_batches_between_two_parts_count_and_may_overtake_the_snapshot() -> None:
    blocks = BlockMap()
    assert blocks.apply(part(2, 0, A, more=True)) is Verdict.PARTIAL
    assert blocks.apply(batch(1, B)) is Verdict.APPLIED
    assert blocks.apply(part(2, 1, C)) is Verdict.APPLIED
    assert sorted(blocks.keys_of("s")) == [A, C]
    assert blocks.apply(part(4, 0, A, more=True)) is Verdict.PARTIAL
    assert blocks.apply(batch(3, B)) is Verdict.APPLIED
    assert blocks.apply(batch(4, removed=(A,))) is Verdict.APPLIED
    assert blocks.apply(part(4, 1, A)) is Verdict.DUPLICATE
    assert sorted(blocks.keys_of("s")) == [B, C]


def test_a_newer_snapshot_takes_the_place_of_a_half_told_one() -> None:
    blocks = BlockMap()
    assert blocks.apply(part(3, 0, A, more=True)) is Verdict.PARTIAL
    assert blocks.apply(part(4, 0, B, more=True)) is Verdict.PARTIAL
    assert blocks.apply(part(3, 1, C)) is Verdict.DUPLICATE
    assert blocks.apply(part(4, 1)) is Verdict.APPLIED
    assert blocks.keys_of("s") == [B]


def test_a_new_life_starts_from_nothing_and_the_old_one_is_over() -> None:
    blocks = BlockMap()
    blocks.apply(batch(1, A, life=5))
    assert blocks.apply(batch(0, life=6)) is Verdict.APPLIED
    assert (len(blocks), blocks.incarnation("s"), blocks.store_of(blocks.slot("s") or 0)) == (0, 6, "s")
    assert blocks.apply(batch(1, A, life=5)) is Verdict.STALE
    assert blocks.apply(batch(7, A, life=7)) is Verdict.GAP
    assert blocks.apply(batch(1, A, life=6)) is Verdict.STALE


def test_a_dropped_store_is_forgotten_but_for_its_age() -> None:
    blocks = filled({"s": {A, B}, "t": {B}})
    assert blocks.drop("s", 0) == 0  # it lives a newer life
    assert blocks.drop("s", 1) == 2
    assert (blocks.holders(B), blocks.holders(A), blocks.slot("s"), blocks.stores()) == (["t"], [], None, ["t"])
    assert blocks.apply(batch(1, A, life=0)) is Verdict.STALE
    assert blocks.drop("nobody", 7) == blocks.drop("nobody") == 0
    assert not blocks.sweep(2)
    assert blocks.apply(batch(1, C, store="new")) is Verdict.APPLIED
    assert blocks.slot("new") == 0  # the slot of s, without its keys
    assert blocks.keys_of("new") == [C]
    with pytest.raises(KeyError, match="slot 5"):
        blocks.store_of(5)
    blocks.drop("t")
    assert blocks.apply(batch(1, A, store="t", life=0)) is Verdict.APPLIED
    blocks.check_integrity()


def test_names_that_come_and_go_leave_little_behind() -> None:
    blocks = BlockMap()
    for i in range(MAX_GONE + 50):
        blocks.apply(batch(1, A, store=str(i)))
        blocks.drop(str(i), 1)
        blocks.sweep(1)
    assert (len(blocks._gone), len(blocks._slots), len(blocks)) == (
        MAX_GONE,
        2,
        0,
    )  # a second slot while one is dropped


HUGE = st.sampled_from([0, 1, 2, -1, 2**63, 2**64 - 1, 10**30])


@given(
    st.lists(st.builds(Announcement, st.just("s"), HUGE, HUGE, snapshot=st.booleans(), part=HUGE, more=st.booleans()))
)
def test_no_number_is_too_strange(said: list[Announcement]) -> None:
    blocks = BlockMap()
    for announcement in said:
        blocks.apply(announcement)
        blocks.check_integrity()


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a key has 3 bytes, not 16"):
        BlockMap().apply(batch(1, A, b"abc"))
    with pytest.raises(ValueError, match="a key has 17 bytes, not 16"):
        BlockMap().apply(batch(1, removed=(A + b"x",)))


# ── what the announcer says ──────────────────────────────────────────────────────────────────────────


def seal(store: NodeStore, *keys: bytes) -> None:
    store.begin(keys)
    for key in keys:
        store.seal(key)


def test_one_announcement_at_a_time_until_it_is_heard() -> None:
    store = NodeStore(99)
    announcer = Announcer("s", 1, store)
    assert announcer.next() is None
    assert announcer.next(force=True) == batch(0)
    announcer.acked(False)
    seal(store, A)
    first = announcer.next()
    assert first == batch(1, A)
    assert announcer.next(force=True) is None
    seal(store, B)
    announcer.failed()
    assert announcer.next() == first
    announcer.acked(False)
    assert announcer.next() == batch(2, B)
    announcer.acked(False)
    assert (announcer.next(), announcer.seq) == (None, 2)
    assert announcer.next(force=True) == batch(2)


def test_a_wanted_snapshot_comes_next_in_parts_and_then_what_changed_meanwhile() -> None:
    store = NodeStore(99)
    announcer = Announcer("s", 1, store, max_keys=2)
    seal(store, A, B)
    announcer.next()
    announcer.acked(want_snapshot=True)
    seal(store, C)
    assert announcer.next() == part(2, 0, A, B, more=True)
    announcer.acked(False)
    seal(store, *KEYS[3:6])
    assert announcer.next() == part(2, 1, C)
    announcer.acked(False)
    assert announcer.next() == batch(3, *KEYS[3:5])
    announcer.acked(False)
    assert announcer.next() == batch(4, KEYS[5])
    announcer.restart()
    announcer.acked(False)  # the answer of somebody who has forgotten us
    assert announcer.next() == part(5, 0, A, B, more=True)
    store.drop_all()
    announcer.acked(want_snapshot=True)
    assert announcer.next() == part(6, 0)


def test_a_big_store_is_told_in_parts() -> None:
    keys = [i.to_bytes(16, "little") for i in range(2 * BATCH_KEYS + 1)]
    parts = list(snapshot_parts("s", 1, 9, keys))
    assert [(len(p.sealed), p.part, p.more) for p in parts] == [
        (BATCH_KEYS, 0, True),
        (BATCH_KEYS, 1, True),
        (1, 2, False),
    ]
    blocks = BlockMap()
    assert [blocks.apply(p) for p in parts] == [Verdict.PARTIAL, Verdict.PARTIAL, Verdict.APPLIED]
    assert len(blocks) == blocks.count("s") == len(keys)


# ── questions ────────────────────────────────────────────────────────────────────────────────────────

HOLDINGS = st.dictionaries(st.sampled_from(["p", "q", "r", "s"]), st.sets(st.sampled_from(KEYS)))
WANTED = st.lists(st.sampled_from(KEYS), max_size=8, unique=True)


@settings(max_examples=300)
@given(holds=HOLDINGS, keys=WANTED, asked=st.sets(st.sampled_from(["p", "q", "r", "s"])), start=st.integers(0, 8))
def test_answers_equal_those_of_plain_sets(
    holds: dict[str, set[bytes]], keys: list[bytes], asked: set[str], start: int
) -> None:
    blocks = filled(holds)
    among = sum(1 << slot for store in asked if (slot := blocks.slot(store)) is not None)
    held = {store: [key in holds[store] for key in keys] for store in sorted(holds) if store in asked}

    def leading(there: list[bool]) -> int:
        return next((i for i, here in enumerate(there) if not here), len(there))

    for key in keys:
        assert sorted(blocks.holders(key)) == sorted(store for store in holds if key in holds[store])
    match = {blocks.store_of(slot): n for slot, n in blocks.match(keys, among).items()}
    assert match == {store: leading(there) for store, there in held.items() if leading(there)}
    runs = {store: leading(there[start:]) for store, there in held.items()}
    slot, length = blocks.run(keys, start, among)
    assert length == max(runs.values(), default=0)
    if length:
        assert blocks.store_of(slot) == min(
            (store for store in runs if runs[store] == length), key=lambda store: blocks.slot(store) or 0
        )
    else:
        assert slot == -1
    anybody = [any(there[i] for there in held.values()) for i in range(len(keys))]
    assert blocks.reach(keys, start, among) == start + leading(anybody[start:])
    assert len(blocks) == len(set().union(*holds.values()))
    assert blocks.replicas == sum(map(len, holds.values()))
    blocks.check_integrity()


# ── every step is short ──────────────────────────────────────────────────────────────────────────────

NAMES = ["a", "b", "c"]

key_sets = st.lists(st.sampled_from(KEYS), max_size=6).map(tuple)
announcements = st.builds(
    Announcement,
    store_id=st.sampled_from(NAMES),
    incarnation=st.integers(1, 2),
    seq=st.integers(0, 6),
    sealed=key_sets,
    removed=key_sets,
    snapshot=st.just(False),
) | st.builds(
    Announcement,
    store_id=st.sampled_from(NAMES),
    incarnation=st.integers(1, 2),
    seq=st.integers(0, 6),
    sealed=key_sets,
    snapshot=st.just(True),
    part=st.integers(0, 2),
    more=st.booleans(),
)
drops = st.tuples(st.sampled_from(NAMES), st.sampled_from([None, 1, 2]))
sweeps = st.integers(0, 5)


@settings(max_examples=300)
@given(st.lists(announcements | drops | sweeps, max_size=40))
def test_equals_plain_sets_after_every_step_however_little_is_swept(steps: list[object]) -> None:
    plain, steady = PlainBlockMap(), BlockMap()
    for step in steps:
        match step:
            case Announcement():
                assert steady.apply(step) is plain.apply(step)
            case (store_id, incarnation):
                assert steady.drop(store_id, incarnation) == plain.drop(store_id, incarnation)
            case int():
                steady.sweep(step)
        _same(plain, steady)
    while steady.sweep(3):
        pass
    _same(plain, steady)
    for store_id in NAMES:  # staged parts are the only hidden content left
        plain.drop(store_id)
        steady.drop(store_id)
    while steady.sweep(100):
        pass
    assert steady.unswept == 0
    assert len(steady) == len(plain.keys()) == 0
    assert steady._masks == {}
    steady.check_integrity()


def _same(plain: PlainBlockMap, steady: BlockMap) -> None:
    steady.check_integrity()
    everyone = 0
    assert sorted(steady.stores()) == sorted(plain.shown)
    for name, store in plain.shown.items():
        assert sorted(steady.keys_of(name)) == sorted(store.keys)
        assert (steady.incarnation(name), steady.seq(name), steady.count(name)) == (
            (store.incarnation, store.seq, len(store.keys))
        )
        slot = steady.slot(name)
        assert slot is not None
        everyone |= 1 << slot
        assert set(steady.held(name, steady.log_of(name))) == store.keys
    assert steady.replicas == sum(len(store.keys) for store in plain.shown.values())
    assert len(steady) >= len(plain.keys())
    for key in KEYS:
        assert sorted(steady.holders(key)) == sorted(plain.holders(key))
        assert steady.mask(key) & ~everyone == 0
    leading = {steady.store_of(slot): n for slot, n in steady.match(KEYS, (1 << 64) - 1).items()}
    for name, store in plain.shown.items():
        held = next((n for n, key in enumerate(KEYS) if key not in store.keys), len(KEYS))
        assert leading.pop(name, 0) == held
    assert not leading


@settings(max_examples=200)
@given(
    st.lists(st.tuples(key_sets, key_sets, st.integers(0, 9)), min_size=5, max_size=40),
    st.integers(0, 2),
)
def test_a_log_that_is_being_shortened_names_all_that_is_held(
    steps: list[tuple[tuple[bytes, ...], tuple[bytes, ...], int]], at_a_time: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_map, "SHORTEN_KEYS", at_a_time)
        patch.setattr(block_map, "_is_long", lambda store: True)
        blocks, held = BlockMap(), set[bytes]()
        for seq, (sealed, removed, kind) in enumerate(steps, 1):
            if kind == 9:
                held = set(sealed)
                blocks.apply(Announcement("a", 1, seq, sealed, snapshot=True))
            elif kind == 8:
                blocks.sweep(2)
                blocks.drop("a", 1)
                held = set(sealed)
                blocks.apply(Announcement("a", 1, seq, sealed, snapshot=True))
            elif sealed or removed:
                held = held - set(removed) | set(sealed)
                assert blocks.apply(Announcement("a", 1, seq, sealed, removed)) is Verdict.APPLIED
            else:
                blocks.apply(Announcement("a", 1, seq, snapshot=True))
                held = set()
            assert set(blocks.held("a", blocks.log_of("a"))) == held == set(blocks.keys_of("a"))
            blocks.check_integrity()
        blocks.drop("a")
        while blocks.sweep(3):
            pass
        assert (blocks._masks, blocks._shortening) == ({}, {})


class Counted(dict[bytes, int]):
    """Counts how often it is asked."""

    asked = 0

    def get(self, *args: object) -> int:
        self.asked += 1
        return super().get(*args)  # type: ignore[call-overload, no-any-return]


def test_no_batch_costs_more_than_its_keys_and_yet_the_log_stays_short() -> None:
    def key(i: int) -> bytes:
        return i.to_bytes(16, "little")

    blocks = BlockMap()
    masks = blocks._masks = Counted()
    held, batch, seq, most = 4_000, 50, 1000, 0
    toggled = [key(10**9 + i) for i in range(10)]  # sealed again as soon as they are removed
    for n in range(1, seq + 1):  # the same ones for ever
        same = tuple(key(i % held) for i in range(n * batch, (n + 1) * batch))
        blocks.apply(Announcement("a", 1, n, same, same))
        assert len(blocks.log_of("a")) <= 16 * (4 * blocks.count("a") + 4_096)
    blocks.apply(Announcement("a", 1, (seq := seq + 1), snapshot=True))
    for i in range(0, 8 * held, batch):
        before, seq = masks.asked, seq + 1
        sealed = (*(key(n) for n in range(i, i + batch)), *toggled)
        removed = (*(key(n - held) for n in range(i, i + batch) if n >= held), *toggled)
        assert blocks.apply(Announcement("a", 1, seq, sealed, removed)) is Verdict.APPLIED
        most = max(most, masks.asked - before)
        assert len(blocks.log_of("a")) <= 16 * (4 * blocks.count("a") + 4_096)
    assert most <= 10 * (batch + len(toggled))
    assert set(blocks.keys_of("a")) == {*toggled, *(key(n) for n in range(7 * held, 8 * held))}
    blocks.check_integrity()


def test_what_is_dropped_vanishes_at_once_and_is_cleared_in_slices() -> None:
    steady = BlockMap()
    keys = [i.to_bytes(16, "big") for i in range(1000)]
    for part in snapshot_parts("a", 1, 1, keys, 300):
        verdict = steady.apply(part)
    assert verdict is Verdict.APPLIED
    assert steady.replicas == len(steady) == 1000
    steady.drop("a")
    assert steady.holders(keys[0]) == []
    assert steady.replicas == len(steady) == 0
    assert steady.unswept == 1000
    assert steady.sweep(400)
    assert steady.unswept == 600
    assert steady.sweep(599)
    assert not steady.sweep(1)
    assert steady.unswept == 0
    steady.check_integrity()
    assert steady.apply(Announcement("b", 1, 1, (keys[3],))) is Verdict.APPLIED
    assert steady.slot("b") == 0  # its slot is free again


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("stores", "replicas", "limit"), [(10, 1, 160), (1000, 1, 160), (10, 2, 150), (1000, 3, 180)])
def test_memory_is_what_it_says(stores: int, replicas: int, limit: int) -> None:
    """Bytes a block. The estimate is within 20 % of what the allocator counts; where announcements bring others
    a replica, whose keys share an int that the estimate counts for each, it is above that."""
    rng, seqs, blocks = random.Random(1), dict.fromkeys(range(stores), 0), 30_000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        blocks_of = BlockMap()
        for _ in range(blocks // 100):
            packed = rng.randbytes(100 * 16)
            for store in rng.sample(range(stores), replicas):
                seqs[store] += 1
                keys = tuple(packed[at : at + 16] for at in range(0, len(packed), 16))
                blocks_of.apply(Announcement(f"store-{store}", 1, seqs[store], keys))
        del packed, keys
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert (len(blocks_of), blocks_of.replicas) == (blocks, replicas * blocks)
    shared = 1.0 if replicas > 1 else 0.0
    assert 0.8 * taken < blocks_of.memory_bytes() < (1.2 + 0.4 * shared) * taken
    assert taken / blocks < limit


def test_churn_leaves_nothing_behind() -> None:
    """A store that holds 100 blocks at any time, after 100,000 have passed through it."""
    blocks = BlockMap()
    keys = [i.to_bytes(16, "big") for i in range(100_000)]
    for seq in range(1, 1001):
        new, old = keys[100 * (seq - 1) : 100 * seq], keys[100 * (seq - 2) : 100 * (seq - 1)] if seq > 1 else ()
        blocks.apply(batch(seq, *new, removed=tuple(old)))
    assert blocks.keys_of("s") == keys[-100:]
    assert blocks.memory_bytes() < 100_000
    blocks.check_integrity()
