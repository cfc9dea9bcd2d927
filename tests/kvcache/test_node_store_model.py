"""NodeStore against a model that keeps lists and counts everything afresh: the same extents have the same owners, the
same blocks are evicted in the same order, and in the end everything is free. Broken stores are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvmesh.kvcache.leases import Lease
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PoolExhausted
from tests.kvcache import test_node_store as alone
from tests.kvcache.test_node_store import chain

SETTINGS = settings(max_examples=200, stateful_step_count=50, deadline=None)
NS = st.sampled_from([0, 1, 5, 20])
PATHS = st.text("ab", min_size=1, max_size=5)
SOME_KEYS = st.builds(lambda path, start: chain(path)[start:], PATHS, st.integers(0, 2))
ANY_KEYS = st.lists(st.sampled_from([key for path in ("aaaa", "abab", "bbb") for key in chain(path)]), max_size=5)


@dataclass(eq=False)
class Holder:
    """Somebody with references: to raw extents, or to blocks (`keys`)."""

    extents: list[int]
    keys: list[bytes] | None = None
    lease_id: int = 0
    until: int = 0
    final: bool = False


class Model(RuleBasedStateMachine):
    """Real store and model side by side. `memory` is what lies in the extents: a key once a block is written, a number
    of its own for raw ones. Nothing may overwrite what somebody still holds."""

    make: type[NodeStore] = NodeStore

    @initialize(total=st.integers(1, 8), high=st.sampled_from([50, 80, 100]), low=st.sampled_from([0, 40]))
    def begin_life(self, total: int, high: int, low: int) -> None:
        self.total, self.high, self.low = total, high, low
        self.store = self.make(total, high_percent=high, low_percent=low)
        self.sealed: dict[bytes, int] = {}
        self.let_go: dict[bytes, int] = {}  # sealed key → when its last holder let go, or it was touched since
        self.writing: dict[bytes, int] = {}
        self.orphans: set[bytes] = set()
        self.holders: list[Holder] = []
        self.told: set[bytes] = set()
        self.memory: dict[int, object] = {}
        self.tick = self.now = self.evicted = 0

    # ── the model ────────────────────────────────────────────────────────────────────────────────────

    def refs(self, extent: int) -> int:
        return sum(holder.extents.count(extent) for holder in self.holders)

    def idle(self) -> list[bytes]:
        keys = [key for key, extent in self.sealed.items() if not self.refs(extent)]
        return sorted(keys, key=lambda key: self.let_go[key])

    def unheld(self) -> int:
        used = {extent for holder in self.holders for extent in holder.extents}
        return self.total - len(used | set(self.sealed.values()) | set(self.writing.values()))

    def evict(self, n: int) -> None:
        for key in self.idle()[: max(n, 0)]:
            del self.sealed[key]
            self.evicted += 1

    def trim(self) -> None:
        used = self.total - self.unheld()
        if used > self.total * self.high / 100:
            self.evict(used - self.total * self.low // 100)

    def used_now(self, key: bytes) -> None:
        self.tick += 1
        self.let_go[key] = self.tick

    def drop(self, holder: Holder) -> None:
        self.holders.remove(holder)
        last = Holder(list(holder.extents))
        self.holders.append(last)
        for extent in reversed(holder.extents):
            last.extents.reverse()
            last.extents.remove(extent)
            last.extents.reverse()
            for key in [k for k, e in self.sealed.items() if e == extent and not self.refs(extent)]:
                self.used_now(key)
        self.holders.remove(last)

    def scribble(self, extents: Sequence[int]) -> None:
        for extent in extents:
            assert not self.refs(extent), "an extent with two owners"
            assert extent not in self.sealed.values(), "an extent that is still a block"
            assert extent not in self.writing.values(), "an extent that is being written"
            self.tick += 1
            self.memory[extent] = self.tick

    def raws(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.keys is None]

    def leases(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.lease_id]

    # ── what its owner does ──────────────────────────────────────────────────────────────────────────

    @rule(n=st.integers(0, 5))
    def allocate(self, n: int) -> None:
        if n > self.unheld() + len(self.idle()):
            with pytest.raises(PoolExhausted):
                self.store.allocate(n)
            return
        self.evict(n - self.unheld())
        extents = self.store.allocate(n)
        assert len(set(extents)) == n
        self.scribble(extents)
        self.holders.append(Holder(extents))

    @precondition(lambda self: self.raws())
    @rule(data=st.data())
    def share_raw(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.raws()))
        self.store.share(holder.extents)
        self.holders.append(Holder(list(holder.extents)))

    @precondition(lambda self: any(not holder.lease_id for holder in self.holders))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from([holder for holder in self.holders if not holder.lease_id]))
        self.store.release(holder.extents)
        self.drop(holder)

    @rule(keys=SOME_KEYS | ANY_KEYS)
    def begin(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self.idle():
                self.used_now(key)
        missing = list(dict.fromkeys(key for key in keys if key not in self.sealed and key not in self.writing))
        others = [key for key in self.idle() if key not in keys]
        taken = missing[: self.unheld() + len(others)]
        self.evict(len(taken) - self.unheld())
        got = self.store.begin(keys)
        assert len(got) == len(keys)
        for index, (key, extent) in enumerate(zip(keys, got, strict=True)):
            assert (extent is not None) == (key in taken and key not in keys[:index])
        self.scribble([extent for extent in got if extent is not None])
        self.writing.update({key: extent for key, extent in zip(keys, got, strict=True) if extent is not None})

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), write=st.sampled_from([True, True, False]))
    def end_writing(self, data: st.DataObject, write: bool) -> None:
        self.written(data.draw(st.sampled_from(sorted(self.writing))), write)

    @rule(path=PATHS)
    def prefill(self, path: str) -> None:
        self.begin(chain(path))
        for key in chain(path):
            if key in self.writing:
                self.written(key, True)
        self.touch(chain(path))

    def written(self, key: bytes, complete: bool) -> None:
        extent = self.writing.pop(key)
        kept = complete and key not in self.orphans and key not in self.sealed
        self.orphans.discard(key)
        if not complete:
            return self.store.abandon(key)
        self.memory[extent] = key
        assert self.store.seal(key) == kept
        if kept:
            self.becomes(key, extent)
        return None

    def becomes(self, key: bytes, extent: int) -> None:
        self.sealed[key] = extent
        self.used_now(key)
        self.trim()

    @precondition(lambda self: any(holder.extents for holder in self.raws()))
    @rule(data=st.data(), path=PATHS)
    def adopt(self, data: st.DataObject, path: str) -> None:
        holder = data.draw(st.sampled_from([holder for holder in self.raws() if holder.extents]))
        extent, key = holder.extents[-1], chain(path)[-1]
        if extent in self.sealed.values():
            return
        self.memory[extent] = key
        assert self.store.adopt(key, extent) == (key not in self.sealed)
        holder.extents.pop()
        if key not in self.sealed:
            self.becomes(key, extent)

    @rule(keys=SOME_KEYS)
    def hold(self, keys: list[bytes]) -> None:
        leading = next((i for i, key in enumerate(keys) if key not in self.sealed), len(keys))
        assert self.store.peek(keys) == leading
        extents = self.store.hold(keys)
        assert [self.memory[extent] for extent in extents] == keys[:leading]
        self.holders.append(Holder(extents, keys[:leading]))

    @rule(keys=SOME_KEYS | ANY_KEYS)
    def touch(self, keys: list[bytes]) -> None:
        self.store.touch(keys)
        for key in reversed(keys):
            if key in self.idle():
                self.used_now(key)

    @rule(keys=SOME_KEYS | ANY_KEYS)
    def cool(self, keys: list[bytes]) -> None:
        self.store.cool(keys)
        for key in reversed(keys):
            if key in self.idle():
                self.tick += 1
                self.let_go[key] = -self.tick

    # ── what readers do ──────────────────────────────────────────────────────────────────────────────

    @rule(keys=SOME_KEYS | ANY_KEYS, ns=NS)
    def lease(self, keys: list[bytes], ns: int) -> None:
        lease = self.store.lease(keys, ns, self.now)
        found = [key for key in keys if key in self.sealed] if ns else []
        assert (lease.lease_id != 0) == bool(found)
        assert [self.memory[extent] for extent in lease.extents if extent is not None] == found
        assert not found or [extent is not None for extent in lease.extents] == [key in found for key in keys]
        if found:
            extents = [extent for extent in lease.extents if extent is not None]
            self.holders.append(Holder(extents, found, lease.lease_id, self.now + ns))

    @precondition(lambda self: self.leases())
    @rule(data=st.data(), ns=NS)
    def renew(self, data: st.DataObject, ns: int) -> None:
        holder = data.draw(st.sampled_from(self.leases()))
        until = self.store.renew(holder.lease_id, ns, self.now)
        if holder.final or holder.until <= self.now:
            assert until is None
        else:
            holder.until = max(holder.until, self.now + ns)
            assert until == holder.until

    @precondition(lambda self: self.leases())
    @rule(data=st.data())
    def unlease(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.leases()))
        assert self.store.unlease(holder.lease_id)
        self.drop(holder)
        assert not self.store.unlease(holder.lease_id)

    @rule(ns=NS, expire=st.booleans())
    def time_passes(self, ns: int, expire: bool) -> None:
        self.now += ns
        if not expire:
            return
        over = [holder for holder in self.leases() if holder.until <= self.now]
        # Those that end at one moment go in the order of their ids.
        for holder in sorted(over, key=lambda holder: (holder.until, holder.lease_id)):
            self.drop(holder)
        assert self.store.expire(self.now) == len(over)

    # ── what happens to the memory ───────────────────────────────────────────────────────────────────

    @rule()
    def trim_now(self) -> None:
        before = len(self.sealed)
        self.trim()
        assert self.store.trim() == before - len(self.sealed)

    @rule(n=st.integers(0, 2))
    def grow(self, n: int) -> None:
        if self.total < 10:
            self.total += n
            self.store.grow(n)

    @rule()
    def rank_dies(self) -> None:
        assert self.store.drop_all() == len(self.sealed)
        self.sealed.clear()
        self.orphans |= self.writing.keys()
        for holder in self.leases():
            holder.final = True

    @rule()
    def tell(self) -> None:
        changes = self.store.take_changes()
        assert not set(changes.sealed) & set(changes.removed)
        assert set(changes.removed) <= self.told
        assert not self.told & set(changes.sealed)
        self.told = self.told - set(changes.removed) | set(changes.sealed)
        assert self.told == set(self.sealed)

    # ── what is always true ──────────────────────────────────────────────────────────────────────────

    @invariant()
    def agrees(self) -> None:
        self.store.check_integrity()
        assert set(self.store.keys()) == set(self.sealed)
        assert self.store.coldest(99) == self.idle(), "not the order in which blocks were last used"
        assert self.store.free == self.unheld() + len(self.idle())
        assert self.store.next_expiry == min((holder.until for holder in self.leases()), default=None)
        stats = self.store.stats
        assert (stats.leases, stats.writing, stats.evicted) == (len(self.leases()), len(self.writing), self.evicted)
        for key, extent in self.sealed.items():
            assert self.memory[extent] == key, "a block with another block's bytes"
        for holder in self.holders:
            if holder.keys is not None:
                assert [self.memory[extent] for extent in holder.extents] == holder.keys, "bytes changed under a reader"

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for holder in self.holders:
            if not holder.lease_id:
                self.store.release(holder.extents)
        for key in self.writing:
            self.store.abandon(key)
        self.store.drop_all()
        self.store.expire(10**9)
        assert self.store.next_expiry is None
        assert self.store.free == self.total, "extents were lost"
        assert sorted(self.store.allocate(self.total)) == list(range(self.total))


def test_it_does_what_the_model_does() -> None:
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
            self._pool.unwatch(extent)
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

    def _remove(self, key: bytes) -> None:
        super()._remove(key)
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


BROKEN = [
    FreesLeased,
    SealsOrphans,
    FreesWrittenWithRank,
    HeadFirst,
    EatsItsOwnChain,
    ForgetsToTellRemovals,
    LosesAbandoned,
]


@pytest.mark.parametrize("broken", BROKEN)
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
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Model, settings=found)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (RenewsTheDead, alone.test_a_lease_runs_from_now_and_renewals_never_shorten_it),
        (FreesLeasedWithRank, alone.test_when_the_memory_is_gone_nothing_is_freed_under_a_reader_or_writer),
    ],
)
def test_what_chance_finds_late_is_found_by_a_single_test(
    broken: type[NodeStore], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "NodeStore", broken)
    with pytest.raises(AssertionError):
        test()
