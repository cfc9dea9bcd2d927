"""Pulls and copies of blocks at a prefill instance, whatever a block is made of: who waits for which, and until when.
Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace

from kvmesh.kvcache.sources import LowerTiers, Pulled, PullJob, PullRange
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.handoff import PrefillHandoff
from kvmesh.services.prefill.rates import Rates
from kvmesh.transfer import TrafficClass

NS_PER_MS = 1_000_000


@dataclass(slots=True)
class BlockPull:
    """Has blocks that are being pulled; the extents of the job are WRITING in the store."""

    job: PullJob
    owner: int  # handle of the request that began it
    from_ns: int
    until_ns: int  # no request waits for the pull longer than this
    waiters: dict[int, PrefillHandoff] = field(default_factory=dict)
    cancelled: bool = False
    masks: dict[bytes, int] = field(init=False)  # which objects of each key, where the model has several cache groups

    def __post_init__(self) -> None:
        self.masks = dict(zip(self.job.keys, self.job.groups, strict=False))


@dataclass(slots=True, kw_only=True)
class LoadUnderWay:
    """Is a copy of sealed extents into pages of one handoff, which holds those pages. `end` is how many blocks of its
    prompt are whole in pages once it is done, `waiting` the ranks that have not carried it out."""

    handoff: PrefillHandoff
    end: int
    waiting: set[int]
    from_ns: int = 0
    until_ns: int = 0

    def carried_out(self, rank: int, copied: m.LoadCopied) -> bool:
        """Notes a rank's answer; says whether it was the last one."""
        if rank not in self.waiting:
            return False
        self.waiting.discard(rank)
        self.from_ns = min(self.from_ns or copied.start_ns, copied.start_ns)
        self.until_ns = max(self.until_ns, copied.end_ns)
        return not self.waiting


class BlockTraffic(ABC):
    """Keeps the pulls of one instance. `emit` takes the actions, in order.

    The brain sets `now` (monotonic ns) at every event. `lower` is what this node keeps below its host segment: a source
    of pulls whether or not a request's hints name it.
    """

    def __init__(self, config: BrainConfig, emit: Callable[[ev.Action], None]) -> None:
        self.now = 0
        self.lower: LowerTiers | None = None
        self.rates = Rates()
        self._world = config.world
        self._block = config.plan.block_tokens
        self._timeout_ms = config.pull_timeout_ms
        self._emit = emit
        self._next_ticket = 1
        self._pulls: dict[int, BlockPull] = {}
        self._pulling: dict[bytes, BlockPull] = {}  # key → the pull that writes it

    @property
    def pulls(self) -> int:
        """The number of pulls under way, cancelled ones included."""
        return len(self._pulls)

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket - 1

    def _to_ranks(self, message: m.ToRank) -> None:
        for rank in range(self._world):
            self._emit(m.TellRank(rank, message))

    def arrive(self, h: PrefillHandoff, usable: Sequence[bytes], promised: Container[bytes], *, next_up: bool) -> int:
        """Takes a request that joins the queue: begins its pull (see `fetch`, also for what is returned), or plans the
        pull if the conductor asked for a later begin."""
        if self.lower is not None:
            self.lower.note(h.start.block_keys)
        if h.start.pulls and h.start.pull_at_ns > self.now:
            h.pull_at_ns = h.start.pull_at_ns
            h.planned_to = self._reach(h, usable, promised)
            h.patient_until_ns = self.now + self._timeout_ms * NS_PER_MS
            return 0
        return self.fetch(h, usable, promised, next_up=next_up)

    def fetch(self, h: PrefillHandoff, usable: Sequence[bytes], promised: Container[bytes], *, next_up: bool) -> int:
        """Lets a request wait for the pulls of its missing blocks, and begins one for the blocks that its hints cover
        without a gap and that nobody fetches yet. It is called once for each request. A request that is `next_up` pulls
        with the most urgent traffic class, as nothing is computed before its pull ends. Returns the time (monotonic ns)
        until which the request waits for its own pull; 0 if it began none."""
        h.pull_at_ns = 0
        h.patient_until_ns = self.now + self._timeout_ms * NS_PER_MS
        job = self._begin(h, usable, promised, TrafficClass.HANDOFF if next_up else TrafficClass.PREFETCH)
        if job is None:
            return 0
        pull = BlockPull(job, h.handle, self.now, h.patient_until_ns)
        self._pulls[job.ticket] = pull
        self._pulling.update(dict.fromkeys(job.keys, pull))
        self._join(h, pull)
        self._emit(ev.FetchBlocks(job))
        return pull.until_ns

    @abstractmethod
    def _begin(
        self, h: PrefillHandoff, usable: Sequence[bytes], promised: Container[bytes], traffic_class: int
    ) -> PullJob | None:
        """Joins the pulls of a request's missing blocks, and takes extents for those that can be fetched and that
        nobody fetches yet. Returns their pull; None if there are none."""

    @abstractmethod
    def _reach(self, h: PrefillHandoff, usable: Sequence[bytes], promised: Container[bytes]) -> int:
        """Returns how many leading blocks the request's prefix will have when everything comes that is on its way or
        would be asked for now."""

    def _join(self, h: PrefillHandoff, pull: BlockPull) -> None:
        pull.waiters[h.handle] = h
        h.pulls.add(pull.job.ticket)
        if not h.found.pull_from_ns:
            h.found = replace(h.found, pull_from_ns=self.now)

    def _runs(self, pull: BlockPull) -> bool:
        """Whether it is worth waiting for the pull."""
        return not pull.cancelled and self.now < pull.until_ns

    def waits(self, h: PrefillHandoff, key: bytes | None = None) -> bool:
        """Whether a queued request should wait for a pull: one that it has joined or, if `key` is its next missing
        block, the pull that fetches that block (which the request then joins)."""
        if self.now >= h.patient_until_ns:
            return False  # the bound is for all pulls of a request together, also where one follows another
        if key is None:
            return any(self._runs(self._pulls[ticket]) for ticket in h.pulls)
        pull = self._pulling.get(key)
        if pull is None or not self._runs(pull):
            return False
        self._join(h, pull)
        return True

    def leave(self, h: PrefillHandoff, *, cancel: bool) -> None:
        """Ends a request's waiting for pulls. `cancel` says that the request no longer wants the blocks: a pull that
        only this request waited for is cancelled then."""
        for ticket in h.pulls:
            pull = self._pulls[ticket]
            del pull.waiters[h.handle]
            if cancel and not pull.waiters and not pull.cancelled:
                pull.cancelled = True
                self._emit(ev.CancelPull(ticket))
        h.pulls.clear()
        self._unpin(h)
        h.pull_at_ns = 0

    @abstractmethod
    def _unpin(self, h: PrefillHandoff) -> None:
        """Releases the extents of blocks that have arrived for a request."""

    def pulled(self, result: Pulled) -> None:
        """Seals the blocks that arrived and pins them for the requests that waited. The tail of the chain is sealed
        first, so that its head is the most recently used and is evicted last."""
        pull = self._pulls.pop(result.ticket, None)
        assert pull is not None, "a pull is answered once"
        job = pull.job
        self.rates.pulled(len(result.arrived), self.now - pull.from_ns)
        for key in job.keys:
            del self._pulling[key]
        self._take(pull, result)
        for h in pull.waiters.values():
            h.pulls.discard(job.ticket)
            nbytes = result.bytes_done if h.handle == pull.owner else 0
            h.found = replace(h.found, pull_until_ns=self.now, pull_bytes=h.found.pull_bytes + nbytes)

    @abstractmethod
    def _take(self, pull: BlockPull, result: Pulled) -> None:
        """Seals or abandons what was to be pulled, and pins what arrived for those that wait."""

    @property
    @abstractmethod
    def seals(self) -> bool:
        """Whether blocks are being copied out of pages."""

    @abstractmethod
    def lost(self) -> None:
        """Drops every block and every copy because the ranks are gone. Pulls are still to be answered."""

    def _check_waiters(self, handoffs: dict[int, PrefillHandoff]) -> None:
        """Raises AssertionError unless pulls and those that wait for them know each other."""
        for ticket, pull in self._pulls.items():
            for handle, h in pull.waiters.items():
                assert handoffs.get(handle) is h and ticket in h.pulls, f"{handle} waits and is gone"
        for h in handoffs.values():
            assert h.pulls <= set(self._pulls)
            assert not h.pull_at_ns or h.handle not in {pull.owner for pull in self._pulls.values()}, "planned, begun"


def covered_blocks(ranges: Sequence[PullRange], blocks: int) -> bytearray:
    """Returns one byte for each block: 1 where a range names it."""
    covered = bytearray(blocks)
    for r in ranges:
        first, end = min(r.first_block, blocks), min(r.first_block + r.blocks, blocks)
        covered[first:end] = b"\1" * (end - first)
    return covered
