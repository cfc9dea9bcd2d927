"""NodeStore against its model (`node_store_model`): the same extents have the same owners, the same blocks are evicted
in the same order under each policy, and in the end everything is free. Broken stores are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvmesh.kvcache import node_store
from kvmesh.kvcache.eviction import POLICIES
from kvmesh.kvcache.leases import Lease
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PoolExhausted
from tests.kvcache import test_node_store as alone
from tests.kvcache import test_node_store_stays as stays
from tests.support.node_store_model import Model
from tests.support.node_store_reference import TRIM_STEP

SETTINGS = settings(max_examples=50, stateful_step_count=50, deadline=None)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_store, "TRIM_STEP", TRIM_STEP)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.slow
def test_it_does_what_the_model_does(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "policies", (policy,))
    run_state_machine_as_test(Model, settings=SETTINGS)


class FreesLeased(NodeStore):
    """A leased block is evicted like any other."""

    def lease(self, keys: Sequence[bytes], duration_ns: int, now: int) -> Lease:
        lease = super().lease(keys, duration_ns, now)
        self.release([extent for extent in lease.extents if extent is not None])
        return lease


class FreesLeasedWithRank(NodeStore):
    """When the rank dies, its readers' leases end too."""

    def drop_all(self) -> int:
        dropped = super().drop_all()
        self.expire(10**9)
        return dropped


class SealsOrphans(NodeStore):
    """What was begun before the memory was lost is sealed after it."""

    def drop_all(self) -> int:
        dropped = super().drop_all()
        self._orphans.clear()
        return dropped


class FreesWrittenWithRank(NodeStore):
    """When the rank dies, extents are taken from those who still write them."""

    def drop_all(self) -> int:
        dropped = super().drop_all()
        for extent in self._writing.values():
            self._pool.unwatch((extent,))
            self._pool.release([extent])
        return dropped


class HeadFirst(NodeStore):
    """The head of a chain is older than its tail."""

    def touch(self, keys: Sequence[bytes], *, use: bool = True) -> None:
        super().touch(list(reversed(keys)), use=use)


class EatsItsOwnChain(NodeStore):
    """Room for a chain's tail comes from anywhere."""

    def begin(self, keys: Sequence[bytes]) -> list[int | None]:
        missing = [key for key in keys if key not in self._sealed and key not in self._writing]
        self._evict(len(missing) - self._pool.free)
        return super().begin(keys)


class ForgetsToTellRemovals(NodeStore):
    """Evicted blocks stay on the master's map."""

    def _erase(self, keys: Sequence[bytes]) -> None:
        super()._erase(keys)
        for key in keys:
            self._gone.pop(key, None)


class RenewsTheDead(NodeStore):
    """A lease that is over, but not yet swept away, comes back to life."""

    def renew(self, lease_id: int, duration_ns: int, now: int) -> int | None:
        return super().renew(lease_id, now + duration_ns, -(10**9))


class LosesAbandoned(NodeStore):
    """An abandoned block's extent is nobody's."""

    def abandon(self, key: bytes) -> None:
        self._pool.share([self._writing[key]])
        super().abandon(key)


class EvictsPinned(NodeStore):
    """A hard pin is a soft one."""

    def pin_hard(self, keys: Sequence[bytes]) -> list[bool]:
        pinned = super().pin_hard(keys)
        self.release([self._sealed[key] for key in dict.fromkeys(keys) if key in self._sealed])
        return pinned


class PinsForEver(NodeStore):
    """A soft pin does not end."""

    def expire(self, now: int, most: int | None = None) -> int:
        self._order.protect = lambda key, protected: None  # type: ignore[method-assign]
        return super().expire(now, most)


class TrimsPinned(NodeStore):
    """The watermark does not know soft pins."""

    def _evict(self, n: int, *, protected: bool = True) -> int:
        return super()._evict(n, protected=True)


class GuardsPinned(NodeStore):
    """Soft pins hold even when nothing else is left."""

    def _evict(self, n: int, *, protected: bool = True) -> int:
        return super()._evict(n, protected=False)


class LosesPinnedExtents(NodeStore):
    """What was pinned hard and is removed is given back by nobody."""

    def remove(self, keys: Iterable[bytes]) -> list[bool]:
        keys = list(keys)
        self._pool.share([self._sealed[key] for key in dict.fromkeys(keys) if key in self._pins.hard])
        return super().remove(keys)


class FreesRemoved(NodeStore):
    """A removed block's extent goes at once, whoever reads it."""

    def _remove(self, key: bytes) -> None:
        extent = self._sealed[key]
        super()._remove(key)
        while self._pool.refcount(extent):
            self._pool.release([extent])


class Resurrects(NodeStore):
    """What was being written when it was removed is sealed afterwards."""

    def remove(self, keys: Iterable[bytes]) -> list[bool]:
        orphans = set(self._orphans)
        removed = super().remove(keys)
        self._orphans = orphans
        return removed


class KeepsTombs(NodeStore):
    """Tombstones are counted after the last reader has gone."""

    def release(self, extents: Iterable[int]) -> None:
        tombs = set(self._tombs)
        super().release(extents)
        self._tombs = tombs


class LeasesAreNoUse(NodeStore):
    """Reading by others does not count."""

    def lease(self, keys: Sequence[bytes], duration_ns: int, now: int) -> Lease:
        self._order.use = lambda key, length=1: None  # type: ignore[method-assign]
        try:
            return super().lease(keys, duration_ns, now)
        finally:
            del self._order.use


class TrimsAtOnce(NodeStore):
    """No step of `trim` has an end."""

    def trim(self) -> int:
        went = 0
        while step := super().trim():
            went += step
        return went


class AddsAllThoughSomeAreHere(NodeStore):
    """A run of blocks is sealed at once although somebody else has sealed one of them meanwhile."""

    def _can_add_all(self, blocks: Mapping[bytes, int]) -> bool:
        return not self._is_high


class WithdrawsUnderReaders(NodeStore):
    """Extents go although somebody reads them."""

    def withdraw(self, extents: Sequence[int], *, spared: bool = False) -> bool:
        for extent in extents:
            key = self._key_of.get(extent)
            if key in self._order:
                self._pins.soft.drop(key)
                self._order.forget(key)
            if key is not None:
                self._erase((key,))
        self._pool.withdraw([extent for extent in extents if not self._pool.refcount(extent)])
        return True


BROKEN = [
    FreesLeased,
    SealsOrphans,
    FreesWrittenWithRank,
    HeadFirst,
    EatsItsOwnChain,
    ForgetsToTellRemovals,
    LosesAbandoned,
    EvictsPinned,
    PinsForEver,
    LosesPinnedExtents,
    FreesRemoved,
    Resurrects,
    TrimsAtOnce,
    WithdrawsUnderReaders,
]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.slow
def test_a_broken_store_is_found(broken: type[NodeStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "make", broken)
    found = settings(
        SETTINGS,
        max_examples=3_000,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
    )
    with pytest.raises((AssertionError, KeyError)):  # told by the model, or tripping over itself
        run_state_machine_as_test(Model, settings=found)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (RenewsTheDead, alone.test_a_lease_runs_from_now_and_renewals_never_shorten_it),
        (FreesLeasedWithRank, alone.test_when_the_memory_is_gone_nothing_is_freed_under_a_reader_or_writer),
        (TrimsPinned, stays.test_a_soft_pin_lasts_until_its_end_or_until_nothing_else_is_left),
        (GuardsPinned, stays.test_a_soft_pin_lasts_until_its_end_or_until_nothing_else_is_left),
        (LeasesAreNoUse, alone.test_the_policy_is_chosen_by_name),
        (AddsAllThoughSomeAreHere, alone.test_a_run_leaves_out_a_block_that_somebody_else_sealed_meanwhile),
        (KeepsTombs, stays.test_a_removed_block_is_a_tombstone_until_its_last_reader_is_done),
    ],
)
def test_what_chance_finds_late_is_found_by_a_single_test(
    broken: type[NodeStore], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "NodeStore", broken)
    with pytest.raises((AssertionError, PoolExhausted)):
        test()
