"""Readers, and a holder whose clock jumps and stands still: what the holder confirms was read right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule

from kvmesh.blockservice.leasing import Leasing
from kvmesh.blockservice.partitions import Partition, Partitions
from kvmesh.kvcache.node_store import NodeStore
from tests.support.nodes import keys_of

EXTENTS = 3
KEYS = keys_of(*range(8))
SOME = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)


class Reads(RuleBasedStateMachine):
    """A reader's own clock appears nowhere: it may read and ask at any time. Two stores, so that leases have parts: two
    sizes of blocks, or two cache groups."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.stores = [NodeStore(EXTENTS, lease_seed=seed) for seed in (1, 2)]
        self.parts = parts = [SimpleNamespace(store=store, family="") for store in self.stores]
        both = SimpleNamespace(all=lambda: parts, family=lambda _: parts)
        self.leasing = Leasing(cast(Partitions, both))
        self.memory: list[list[bytes]] = [[b""] * EXTENTS for _ in self.stores]
        self.now = 0  # the holder's, which may stand still, but does not go back

    @rule(ns=st.integers(0, 30))
    def time_passes(self, ns: int) -> None:
        self.now += ns

    @rule(most=st.sampled_from([None, 1]), at=st.integers(0, 1))
    def timer(self, most: int | None, at: int) -> None:
        self.stores[at].expire(self.now, most)

    @rule(at=st.integers(0, 1), keys=SOME)
    def put(self, at: int, keys: list[bytes]) -> None:
        missing = [key for key in keys if not any(store.holds(key) for store in self.stores)]
        for key, extent in zip(missing, self.stores[at].begin(missing), strict=True):
            if extent is not None:
                self.memory[at][extent] = key
                self.stores[at].seal(key)

    @rule(at=st.integers(0, 1), keys=SOME)
    def put_objects(self, at: int, keys: list[bytes]) -> None:
        """Of one group, whatever the other has."""
        for key, extent in zip(keys, self.stores[at].begin(keys), strict=True):
            if extent is not None:
                self.memory[at][extent] = key
                self.stores[at].seal(key)

    @rule(keys=SOME)
    def remove(self, keys: list[bytes]) -> None:
        for store in self.stores:
            store.remove(keys)

    @rule(at=st.integers(0, 1))
    def memory_gone(self, at: int) -> None:
        self.stores[at].drop_all()

    @rule(target=leases, keys=SOME, ns=st.integers(1, 40))
    def lease(self, keys: list[bytes], ns: int) -> Any:
        leased = self.leasing.lease("", keys, ns, self.now)
        places = [(key, *place) for key, place in zip(keys, leased.places, strict=True) if place is not None]
        where = [(key, part.store, extent) for key, part, extent in places]
        return (leased.lease_id, where, []) if leased.lease_id else multiple()

    @rule(target=leases, keys=SOME, masks=st.lists(st.integers(0, 3), min_size=4, max_size=4), ns=st.integers(1, 40))
    def lease_objects(self, keys: list[bytes], masks: list[int], ns: int) -> Any:
        parts = cast(dict[int, Partition], dict(enumerate(self.parts)))
        leased = self.leasing.lease_objects(parts, keys, masks[: len(keys)], ns, self.now)
        where = [
            (keys[at], self.stores[g], extent) for g, mine in leased.extents.items() for at, extent in mine.items()
        ]
        wanted = bytes(
            sum(1 << g for g in parts if mask >> g & 1 and self.stores[g].holds(key))
            for key, mask in zip(keys, masks, strict=False)
        )
        assert leased.masks(len(keys)) == wanted and bool(leased.lease_id) == any(wanted)
        return (leased.lease_id, where, []) if leased.lease_id else multiple()

    @rule(lease=leases, ns=st.integers(1, 40))
    def renew(self, lease: Any, ns: int) -> None:
        self.leasing.renew(lease[0], ns, self.now)

    @rule(lease=leases)
    def read(self, lease: Any) -> None:
        _, where, got = lease
        got[:] = [(key, self.memory[self.stores.index(store)][extent]) for key, store, extent in where]

    @rule(lease=consumes(leases))
    def give_back(self, lease: Any) -> None:
        lease_id, _, got = lease
        if self.leasing.release(lease_id):
            assert all(found == key for key, found in got), "another block's bytes were confirmed"
        assert not self.leasing.release(lease_id), "a second answer confirms nothing"


TestReads = Reads.TestCase


def test_a_lease_of_two_parts_is_not_confirmed_by_the_part_that_is_left() -> None:
    reads = Reads()
    reads.put(0, KEYS[:1])
    reads.put(1, KEYS[1:2])
    lease_id, *_ = reads.lease(KEYS[:2], 10)
    reads.now = 20
    reads.stores[1].expire(20)  # the other one's timer has yet to come
    assert not reads.leasing.release(lease_id)


def test_memory_that_has_gone_is_not_confirmed() -> None:
    store = NodeStore(2)
    store.begin(KEYS[:1])
    store.seal(KEYS[0])
    lease = store.lease(KEYS[:1], 10, 0)
    store.drop_all()
    assert not store.unlease(lease.lease_id)
