"""What the front decides of a tier, against models that know everything."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvmesh.blockservice.tiers.brain import Contents, Promotion, ReadTime, TierSource, WriteBehind
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.tiers.ssd.sketch import FrequencySketch
from tests.support.nodes import keys_of

KEYS = keys_of(*range(12))
Key = st.sampled_from(KEYS)
Some = st.lists(Key, unique=True, max_size=6)


class TierModel(RuleBasedStateMachine):
    """Two parts of three ranks each; every rank's keys are known."""

    @initialize()
    def start(self) -> None:
        self.source = TierSource()
        self.parts = [Contents(3), Contents(3)]
        self.source.parts += self.parts
        self.ranks: list[list[dict[bytes, int]]] = [[{} for _ in range(3)] for _ in self.parts]
        self.announced: set[bytes] = set()

    def there(self, part: int) -> set[bytes]:
        return set.intersection(*(set(rank) for rank in self.ranks[part]))

    @rule(part=st.integers(0, 1), rank=st.integers(0, 2), sealed=Some, removed=Some, size=st.integers(1, 9))
    def changed(self, part: int, rank: int, sealed: list[bytes], removed: list[bytes], size: int) -> None:
        before, mine = self.there(part), self.ranks[part][rank]
        removed = [key for key in removed if key in mine]
        for key in removed:
            del mine[key]
        middle = self.there(part)
        sealed = [key for key in sealed if key not in mine]
        mine.update(dict.fromkeys(sealed, size))
        changes = self.parts[part].changed(rank, sealed, removed, [size] * len(sealed))
        assert set(changes.removed) == before - middle
        assert set(changes.sealed) == self.there(part) - middle
        assert all(self.parts[part].sizes[key] == size for key in sealed)

    @rule(part=st.integers(0, 1))
    def lost(self, part: int) -> None:
        self.parts[part].clear()
        self.ranks[part] = [{} for _ in range(3)]

    @rule()
    def announce(self) -> None:
        changes = self.source.take_changes()
        assert not set(changes.sealed) & set(changes.removed)
        self.announced -= set(changes.removed)
        self.announced |= set(changes.sealed)
        assert self.announced == set(self.source.keys())

    @invariant()
    def agrees(self) -> None:
        for part, contents in enumerate(self.parts):
            there = self.there(part)
            assert set(contents.keys()) == there and len(contents) == len(there)
            assert {key for key in KEYS if key in contents} == there
            known = set().union(*self.ranks[part])
            assert {key for key in KEYS if contents.known(key)} == known == set(contents.sizes)
        assert sorted(self.source.keys()) == sorted(self.there(0) | self.there(1))


TestTierModel = TierModel.TestCase
TestTierModel.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def fill(store: NodeStore, keys: list[bytes], behind: WriteBehind) -> None:
    for key, extent in zip(keys, store.begin(keys), strict=True):
        assert extent is not None
        store.seal(key)
        behind.added()


def test_the_coldest_above_the_threshold_go_down_once() -> None:
    store, there, behind = NodeStore(20, high_percent=100), Contents(1), WriteBehind(50, 3)
    keys = keys_of(*range(14))
    fill(store, keys, behind)
    written: list[bytes] = []
    while batch := behind.next(store, there, ()):
        assert len(batch) <= 3
        written += batch
        there.changed(0, batch, ())
    assert written == keys[:4], "14 of 20 are in use: 4 above half, the oldest"
    assert behind.next(store, there, ()) == []
    fill(store, keys_of("one more"), behind)
    assert behind.next(store, there, ()) == keys[4:5]


def test_the_last_ones_are_not_left_for_ever() -> None:
    store, there, behind = NodeStore(100, high_percent=100), Contents(1), WriteBehind(0, 64)
    keys = keys_of(*range(43))
    fill(store, keys[:40], behind)
    first = behind.next(store, there, ())
    there.changed(0, first, ())
    fill(store, keys[40:], behind)
    assert first == keys[:40] and behind.next(store, there, ()) == [], "a look would cost more than it brings"
    assert behind.hurry()
    last = behind.next(store, there, ())
    there.changed(0, last, ())
    assert last == keys[40:] and not behind.hurry()


def test_what_is_on_its_way_or_was_refused_is_not_asked_again_before_more_comes() -> None:
    store, there, behind = NodeStore(4, high_percent=100), Contents(1), WriteBehind(0, 2)
    keys = keys_of(*range(4))
    fill(store, keys[:2], behind)
    first = behind.next(store, there, ())
    assert behind.next(store, there, first) == []
    behind.refused(first)
    assert behind.next(store, there, ()) == []
    fill(store, keys[2:3], behind)
    assert behind.next(store, there, ()) == first, "tried again with the next look"
    store.remove(keys[:2])
    assert behind.next(store, there, ()) == keys[2:3]


def test_whoever_waits_for_room_makes_it_look_below_the_threshold() -> None:
    store, there, behind = NodeStore(10, high_percent=100), Contents(1), WriteBehind(80, 8)
    keys = keys_of(*range(8))
    fill(store, keys, behind)
    assert behind.next(store, there, ()) == []
    assert behind.next(store, there, (), extra=5) == keys[:5]


@given(seed=st.integers(0, 1 << 30), percent=st.integers(0, 70), most=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_nothing_that_could_have_been_written_in_time_is_lost(seed: int, percent: int, most: int) -> None:
    """Blocks come one by one, the tier takes a batch after each: what leaves DRAM is below, or was never idle."""
    rng = random.Random(seed)
    total = rng.randint(20, 60)
    store, there, behind = NodeStore(total, high_percent=95, low_percent=90), Contents(1), WriteBehind(percent, most)
    sealed: set[bytes] = set()
    for n in range(3 * total):
        key = keys_of(f"{seed} {n}")[0]
        for begun in store.begin([key]):
            assert begun is not None
        store.seal(key)
        sealed.add(key)
        behind.added()
        if rng.random() < 0.3:
            store.touch(rng.sample(sorted(store.keys()), 1))
        while batch := behind.next(store, there, ()):
            extents = store.borrow(batch)
            there.changed(0, batch, ())
            store.release(extents)
            store.evict_first(batch)
        assert sealed <= {*store.keys(), *there.keys()}


def test_what_was_read_from_below_stays_when_it_is_used_more_than_the_next_to_go() -> None:
    store, there = NodeStore(4, high_percent=100), Contents(1)
    sketch = FrequencySketch(64)
    promotion = Promotion(sketch)
    keys = keys_of(*range(4))
    there.changed(0, keys, ())
    for key, extent in zip(keys, store.begin(keys), strict=True):
        assert extent is not None
        store.seal(key)
        sketch.add(key)
    once, often = keys[2], keys[3]
    for _ in range(3):
        sketch.add(often)
    promotion.sealed(once, 10)
    promotion.sealed(often, 20)
    assert promotion.settle(store, there, 5) == 0
    assert promotion.waiting, "they are still of use to whoever they were read for"
    assert promotion.settle(store, there, 20) == 1
    assert store.coldest(1) == [once] and store.coldest(4)[1:] != [often]
    assert promotion.settle(store, there, 99) == 0


def test_with_room_left_everything_stays() -> None:
    store, there = NodeStore(8, high_percent=100), Contents(1)
    promotion, keys = Promotion(FrequencySketch(64)), keys_of(*range(2))
    there.changed(0, keys, ())
    store.begin(keys)
    for key in keys:
        store.seal(key)
        promotion.sealed(key, 1)
    assert promotion.settle(store, there, 2) == 2 and store.coldest(1) == keys[:1]


def test_read_times_are_told_apart_from_the_rate_when_sizes_differ() -> None:
    reads = ReadTime()
    assert (reads.read_ns, reads.bytes_per_s) == (0, 0)
    reads.add(1 << 20, 1_000_000)
    assert (reads.read_ns, reads.bytes_per_s) == (0, (1 << 20) * 1000)
    for n in (1, 4, 16, 2, 8, 32):
        reads.add(n << 20, 500_000 + n * 1_000_000)  # half a millisecond, then a MiB each
    for n in (1, 4, 16, 2, 8, 32) * 20:
        reads.add(n << 20, 500_000 + n * 1_000_000)
    assert abs(reads.read_ns - 500_000) < 5_000
    assert abs(reads.bytes_per_s / ((1 << 20) * 1000) - 1) < 0.01
