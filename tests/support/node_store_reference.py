"""What a NodeStore should hold, kept in lists and counted afresh for every question. `node_store_model` drives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from kvmesh.kvcache.eviction import POLICIES
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.store_stats import StoreUsage
from tests.support.naive_order import NaiveOrder

BLOCK_BYTES = 100
TRIM_STEP = 3  # what `node_store.TRIM_STEP` is to be set to


@dataclass(eq=False)
class Holder:
    """Somebody with references: to raw extents, or to blocks (`keys`)."""

    extents: list[int]
    keys: list[bytes] | None = None
    lease_id: int = 0
    until: int = 0
    final: bool = False


@dataclass
class Pin:
    until: int
    serial: int


class Reference(RuleBasedStateMachine):
    """What there is, and what follows from it. `memory` is what lies in the extents: a key once a block is written, a
    number of its own for raw ones. Nothing may overwrite what somebody still holds."""

    make: type[NodeStore] = NodeStore
    policies: tuple[str, ...] = POLICIES

    @initialize(
        data=st.data(), total=st.integers(1, 8), high=st.sampled_from([50, 80, 100]), low=st.sampled_from([0, 40])
    )
    def begin_life(self, data: st.DataObject, total: int, high: int, low: int) -> None:
        policy = data.draw(st.sampled_from(self.policies))
        self.total, self.high, self.low = total, high, low
        self.store = self.make(
            total, high_percent=high, low_percent=low, eviction=policy, block_bytes=BLOCK_BYTES, block_tokens=8192
        )
        self.sealed: dict[bytes, int] = {}
        self.order = NaiveOrder(policy, 8192)
        self.sizes: dict[bytes, int] = {}
        self.hard: set[bytes] = set()
        self.soft: dict[bytes, Pin] = {}
        self.tombs: set[int] = set()
        self.out: set[int] = set()  # withdrawn
        self.writing: dict[bytes, int] = {}
        self.lengths: dict[bytes, int] = {}
        self.orphans: set[bytes] = set()
        self.holders: list[Holder] = []
        self.told: set[bytes] = set()
        self.memory: dict[int, object] = {}
        self.tick = self.now = self.evicted = 0
        self.trimming = False

    def refs(self, extent: int) -> int:
        return sum(holder.extents.count(extent) for holder in self.holders)

    def sync(self) -> None:
        """What is idle now and was not is so as of now; at most one block, where the order matters."""
        for key, extent in self.sealed.items():
            idle = not self.refs(extent) and key not in self.hard
            if not idle:
                self.order.mark_busy(key)
            elif not self.order.entries[key].idle:
                self.order.mark_idle(key)

    def idle(self, spared: bool = True) -> list[bytes]:
        self.sync()
        return [key for key in self.order.order(spared) if isinstance(key, bytes)]

    def used(self) -> set[int]:
        held = {extent for holder in self.holders for extent in holder.extents}
        return held | set(self.sealed.values()) | set(self.writing.values())

    def unheld(self) -> int:
        return self.total - len(self.used())

    def leases(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.lease_id]

    def raws(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.keys is None]

    def usage(self) -> StoreUsage:
        """Of each extent the first that is true of it."""
        writing = set(self.writing.values())
        pinned = {self.sealed[key] for key in self.hard}
        leased = {extent for holder in self.leases() for extent in holder.extents} - pinned
        idle, rest = self.idle(), self.used()
        held = rest - writing - pinned - leased - {self.sealed[key] for key in idle}
        spared = len(idle) - len(self.idle(spared=False))
        return StoreUsage(
            self.total, self.unheld(), len(idle), spared, len(writing), len(pinned), len(leased), len(held)
        )

    def next_expiry(self) -> int | None:
        return min([*(h.until for h in self.leases()), *(p.until for p in self.soft.values())], default=None)

    def evict(self, n: int, spared: bool = True) -> int:
        self.sync()
        gone = self.order.evict(n, spared)
        for key in gone:
            assert isinstance(key, bytes)
            del self.sealed[key], self.sizes[key]
            self.soft.pop(key, None)
        self.evicted += len(gone)
        return len(gone)

    def trim(self) -> int:
        used = self.total - self.unheld()
        if not self.trimming and used <= self.total * self.high / 100:
            return 0
        excess = used - self.total * self.low // 100
        went = self.evict(min(excess, TRIM_STEP), spared=False)
        self.trimming = went == TRIM_STEP and excess > TRIM_STEP
        return went

    def lose(self, key: bytes) -> None:
        """Removed or lost with its memory."""
        extent = self.sealed.pop(key)
        del self.sizes[key]
        self.hard.discard(key)
        self.soft.pop(key, None)
        self.order.forget(key)
        if self.refs(extent):
            self.tombs.add(extent)

    def drop(self, holder: Holder) -> None:
        """Its references go, from the last to the first."""
        self.holders.remove(holder)
        last = Holder(list(holder.extents))
        self.holders.append(last)
        while last.extents:
            last.extents.pop()
            self.sync()
        self.holders.remove(last)
        self.tombs = {extent for extent in self.tombs if self.refs(extent)}

    def scribble(self, extents: Sequence[int]) -> None:
        for extent in extents:
            assert not self.refs(extent), "an extent with two owners"
            assert extent not in self.sealed.values(), "an extent that is still a block"
            assert extent not in self.writing.values(), "an extent that is being written"
            assert extent not in self.out, "an extent whose memory is somebody else's"
            self.tick += 1
            self.memory[extent] = self.tick

    def becomes(self, key: bytes, extent: int, length: int, nbytes: int | None) -> None:
        self.sealed[key] = extent
        self.sizes[key] = BLOCK_BYTES if nbytes is None else nbytes
        self.tombs.discard(extent)
        self.order.admit(key, length)
        self.sync()
        self.trim()

    # ── what is always true ──────────────────────────────────────────────────────────────────────────

    @invariant()
    def agrees(self) -> None:
        self.store.check_integrity()
        assert set(self.store.keys()) == set(self.sealed)
        assert self.store.coldest(99) == self.idle(), "not the order of the policy"
        assert self.store.free == self.unheld() + len(self.idle())
        assert self.store.next_expiry == self.next_expiry()
        assert self.store.usage == self.usage()
        usage = self.usage()
        parts = (usage.unheld, usage.idle, usage.writing, usage.pinned, usage.leased, usage.held)
        assert sum(parts) == usage.total == self.total
        stats = self.store.stats
        assert (stats.leases, stats.writing, stats.evicted) == (len(self.leases()), len(self.writing), self.evicted)
        assert (stats.hard_pinned, stats.soft_pinned, stats.tombstones) == (
            len(self.hard),
            len(self.soft),
            len(self.tombs),
        )
        assert stats.sealed_bytes == sum(self.sizes.values())
        under_lease = {extent for holder in self.leases() for extent in holder.extents}
        assert self.store.leased(list(self.sealed)) == [extent in under_lease for extent in self.sealed.values()]
        assert self.store.sizes(list(self.sealed)) == [self.sizes[key] for key in self.sealed]
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
        numbers = self.total + len(self.out)
        assert sorted(self.store.allocate(self.total)) == sorted(set(range(numbers)) - self.out)
