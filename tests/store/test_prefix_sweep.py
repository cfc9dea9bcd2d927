"""A prefix that is forgotten vanishes at once and is cleared away slice by slice, whatever stores say meanwhile."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.keys import TAG_BYTES
from kvmesh.services.store import block_map
from kvmesh.services.store.block_map import MAX_SWEEPS, MasterMap

KEYS = [tag + bytes([i]) * 12 for tag in (b"tag1", b"tag2") for i in range(3)]
STORES = ["a", "b#ssd"]

some_keys = st.lists(st.sampled_from(KEYS), max_size=4, unique=True)
store_ids = st.sampled_from(STORES)


class Machine(RuleBasedStateMachine):
    """`shown`: what each store has by its own words and by removals, computed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.map = MasterMap()
        self.map.first_keys = 0
        self.map.forgotten = self.forgotten
        self.shown: dict[str, set[bytes]] = {}
        self.gathered: dict[str, set[bytes]] = {}
        self.lives = dict.fromkeys(STORES, 1)
        self.long = False  # a prefix longer than a tag may be under way: what it masks is counted until it is found
        for tag in (b"tag1", b"tag2"):
            self.map.watch(tag)

    def forgotten(self, store_id: str, keys: list[bytes]) -> None:
        assert keys and store_id in self.shown

    def say(self, store_id: str, seq: int, sealed: Any, removed: Any = (), **rest: Any) -> None:
        said = Announcement(store_id, self.lives[store_id], seq, tuple(sealed), tuple(removed), **rest)
        self.map.apply(said)

    @initialize()
    def begin(self) -> None:
        for store_id in STORES:
            self.batch(store_id, KEYS, [])

    @rule(store_id=store_ids, sealed=some_keys, removed=some_keys)
    def batch(self, store_id: str, sealed: list[bytes], removed: list[bytes]) -> None:
        if sealed or removed:
            self.say(store_id, self.map.seq(store_id) + 1, sealed, removed)
            self.gathered.pop(store_id, None)  # overtaken: its number is no later one
            self.shown[store_id] = self.shown.get(store_id, set()) - set(removed) | set(sealed)

    @rule(store_id=store_ids, keys=some_keys, more=st.booleans())
    def snapshot(self, store_id: str, keys: list[bytes], more: bool) -> None:
        part = 1 if store_id in self.gathered else 0
        self.say(store_id, self.map.seq(store_id) + 1, keys, snapshot=True, part=part, more=more and not part)
        content = self.gathered.pop(store_id, set()) | set(keys)
        if more and not part:
            self.gathered[store_id] = content
            self.shown.setdefault(store_id, set())
        else:
            self.shown[store_id] = content

    @rule(store_id=store_ids)
    def ends(self, store_id: str) -> None:
        self.map.drop(store_id)
        self.shown.pop(store_id, None)
        self.gathered.pop(store_id, None)

    @rule(key=st.sampled_from(KEYS), length=st.sampled_from([1, TAG_BYTES, TAG_BYTES + 1]))
    def forget_prefix(self, key: bytes, length: int) -> None:
        self.map.forget_prefix(key[:length])
        self.long = self.long or length > TAG_BYTES
        for held in (*self.shown.values(), *self.gathered.values()):
            held -= {each for each in held if each.startswith(key[:length])}

    @rule(keys=some_keys)
    def forget(self, keys: list[bytes]) -> None:
        self.map.forget(keys)
        for held in (*self.shown.values(), *self.gathered.values()):
            held -= set(keys)

    @rule(keys=st.sampled_from([1, 1, 2]))
    def sweep(self, keys: int) -> None:
        self.map.sweep(keys)
        self.long = self.long and self.map.sweeping

    @invariant()
    def answers_are_right(self) -> None:
        for key in KEYS:
            assert set(self.map.holders(key)) == {name for name, held in self.shown.items() if key in held}
        for store_id, held in self.shown.items():
            assert set(self.map.held(store_id, b"".join(KEYS))) == held
            assert self.map.page(store_id, b"tag1", b"", 9) == sorted(k for k in held if k.startswith(b"tag1"))
            masked = self.map.count(store_id) - len(held)
            assert masked == 0 or (self.long and masked > 0)
            for tag in (b"tag1", b"tag2"):
                at = self.map.tagged_at(store_id, tag)
                assert at == sum(key[:4] == tag for key in held) or (self.long and at <= self.map.count(store_id))
        if not self.long:
            assert self.map.replicas == sum(map(len, self.shown.values()))
            for tag in (b"tag1", b"tag2"):
                in_dram = [key for name, held in self.shown.items() if "#" not in name for key in held]
                assert self.map.tagged(tag) == sum(key[:4] == tag for key in in_dram)
        self.map.check_integrity()

    def teardown(self) -> None:
        for _ in range(1000):
            if not self.map.sweep(1):
                break
        self.answers_are_right()
        assert not self.map.sweeping
        for store_id, held in self.shown.items():
            assert self.map.count(store_id) == len(held)


MODEL = settings(max_examples=50, stateful_step_count=30, deadline=None, database=None)
TestSweep = Machine.TestCase
TestSweep.settings = MODEL


def nothing_is_spared(self: MasterMap, store: Any, keys: Any) -> None:
    pass


def nothing_is_swept(self: MasterMap, key: bytes, longest: int = 16) -> int:
    return 0


def nothing_is_masked(self: MasterMap, store: Any, prefix: bytes) -> None:
    pass


BROKEN = [("_spare", nothing_is_spared), ("_swept", nothing_is_swept), ("_mask", nothing_is_masked)]


@pytest.mark.parametrize(("name", "broken"), BROKEN)
def test_a_broken_sweep_is_found(monkeypatch: pytest.MonkeyPatch, name: str, broken: Any) -> None:
    monkeypatch.setattr(MasterMap, name, broken)
    quick = settings(MODEL, max_examples=100, derandomize=True, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=quick)


def test_steps_are_small_and_prefixes_that_wait_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_map, "SCAN_KEYS", 256)
    monkeypatch.setattr(block_map, "SCAN_COST", 64)
    known = MasterMap()
    told: list[bytes] = []
    known.forgotten = lambda store_id, keys: told.extend(keys)
    keys = [bytes([i % 200]) * 4 + i.to_bytes(12, "big") for i in range(4000)]
    known.apply(Announcement("a", 1, 1, tuple(keys), snapshot=True))
    known.first_keys = 0
    known.forget_prefix(keys[7][:4])
    assert known.count("a") == known.replicas == 3980 and not known.holders(keys[7]) and known.holders(keys[8])
    steps, counts = 1, [len(known._masks)]
    while known.sweep(100):
        steps += 1
        counts.append(len(known._masks))
    assert (counts[0], len(known._masks), known.count("a")) == (4000, 3980, 3980)
    assert steps >= 4000 // 256 // 2 and max(a - b for a, b in itertools.pairwise(counts)) <= 100
    assert sorted(told) == sorted(key for key in keys if key[:4] == keys[7][:4])
    for i in range(MAX_SWEEPS + 9):
        known.forget_prefix(bytes([100 + i]) * 4)
    assert len(known._sweeps) == MAX_SWEEPS
