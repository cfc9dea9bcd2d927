"""SteadyBlockMap says what BlockMap says, at every moment, however little is swept."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache import steady_map
from kvmesh.kvcache.announce import Announcement, snapshot_parts
from kvmesh.kvcache.block_map import BlockMap, Verdict
from kvmesh.kvcache.steady_map import SteadyBlockMap

KEYS = [bytes([i]) * 16 for i in range(12)]
STORES = ["a", "b", "c"]

key_sets = st.lists(st.sampled_from(KEYS), max_size=6).map(tuple)
announcements = st.builds(
    Announcement,
    store_id=st.sampled_from(STORES),
    incarnation=st.integers(1, 2),
    seq=st.integers(0, 6),
    sealed=key_sets,
    removed=key_sets,
    snapshot=st.just(False),
) | st.builds(
    Announcement,
    store_id=st.sampled_from(STORES),
    incarnation=st.integers(1, 2),
    seq=st.integers(0, 6),
    sealed=key_sets,
    snapshot=st.just(True),
    part=st.integers(0, 2),
    more=st.booleans(),
)
drops = st.tuples(st.sampled_from(STORES), st.sampled_from([None, 1, 2]))
sweeps = st.integers(0, 5)


@settings(max_examples=300)
@given(st.lists(announcements | drops | sweeps, max_size=40))
def test_equals_the_plain_map_after_every_step(steps: list[object]) -> None:
    plain, steady = BlockMap(), SteadyBlockMap()
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
    for store_id in STORES:  # staged parts are the only hidden content left
        plain.drop(store_id)
        steady.drop(store_id)
    while steady.sweep(100):
        pass
    assert steady.unswept == 0
    assert len(steady) == len(plain) == 0
    assert steady._masks == {}
    steady.check_integrity()


def _same(plain: BlockMap, steady: SteadyBlockMap) -> None:
    steady.check_integrity()
    everyone = 0
    for store_id in STORES:
        assert sorted(steady.keys_of(store_id)) == sorted(plain.keys_of(store_id))
        assert (steady.seq(store_id), steady.count(store_id)) == (plain.seq(store_id), plain.count(store_id))
        assert steady.incarnation(store_id) == plain.incarnation(store_id)
        slot = steady.slot(store_id)
        assert (slot is None) == (plain.slot(store_id) is None)
        everyone |= 0 if slot is None else 1 << slot
        assert set(steady.held(store_id, steady.log_of(store_id))) == set(plain.keys_of(store_id))
    assert steady.replicas == plain.replicas
    assert len(steady) >= len(plain)
    for key in KEYS:
        assert sorted(steady.holders(key)) == sorted(plain.holders(key))
        assert steady.mask(key) & ~everyone == 0
    leading = {steady.store_of(slot): n for slot, n in steady.match(KEYS, (1 << 64) - 1).items()}
    assert leading == {plain.store_of(slot): n for slot, n in plain.match(KEYS, (1 << 64) - 1).items()}


@settings(max_examples=200)
@given(
    st.lists(st.tuples(key_sets, key_sets, st.integers(0, 9)), min_size=5, max_size=40),
    st.integers(0, 2),
)
def test_a_log_that_is_being_shortened_names_all_that_is_held(
    steps: list[tuple[tuple[bytes, ...], tuple[bytes, ...], int]], at_a_time: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steady_map, "SHORTEN_KEYS", at_a_time)
        patch.setattr(steady_map, "_is_long", lambda store: True)
        blocks, held = SteadyBlockMap(), set[bytes]()
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

    blocks = SteadyBlockMap()
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
    steady = SteadyBlockMap()
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
