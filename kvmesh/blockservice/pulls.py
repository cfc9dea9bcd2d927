"""This module carries out pull jobs, on the reader's side.

    job ─▶ ranges, each for what is still missing and it covers ─▶ Lease ─▶ PullOpen at every rank ─▶ PullEnded
                 ▲                                                     └─ RenewLease at half its time
                 ├── ReleaseLease, whose answer says whether what was read counts
                 └── what a range did not bring goes to the next one that covers it

A block has arrived when every rank has all of its bytes and the holder, to whom the lease is given back then, confirms
that the lease was open until that moment.

What is fetched is an *item*: a block, or one object of it where the model has several cache groups. Each arrives, or
does not, by itself; the lease is one for all that a range brings, and so is its end.

Memory that a rank reads into is given back (the job ends) only after its PullEnded, or when the rank is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
from opentelemetry.trace import SpanContext

from kvmesh.blockservice import reader_lease
from kvmesh.blockservice.partitions import Partition
from kvmesh.blockservice.peer_segments import PeerSegments, SegmentRank
from kvmesh.blockservice.peers import Peer, PeerPool, worth_forgetting
from kvmesh.blockservice.reader_lease import UNCONFIRMED, LeaseTerms, ReaderLease, Releases
from kvmesh.blockservice.tiers.tiering import Tiering
from kvmesh.errors import KvmeshError, RequestCancelled
from kvmesh.kvcache.groups import GroupPlan
from kvmesh.kvcache.sources import Pulled, PullJob, PullRange
from kvmesh.kvcache.tiers import Tier
from kvmesh.ranks import protocol as m
from kvmesh.telemetry import names, spans

# Where the holder cuts blocks into shards otherwise than this node does, each rank here reads runs of bytes from
# several ranks there. Pure. A block has arrived when every run of it has, at every rank.


@dataclass(frozen=True, slots=True)
class CutRead:
    """The read of rank `reader` of this node from rank `writer` of the holder: `sizes[i]` bytes at `offsets[i]` go to
    `landing[i]`, and are part of the block at position `blocks[i]`."""

    reader: int
    writer: int
    offsets: tuple[int, ...]
    landing: tuple[int, ...]
    sizes: tuple[int, ...]
    blocks: tuple[int, ...]


def cut_reads(plan: GroupPlan, offsets: Sequence[Sequence[int]], landing: Sequence[Sequence[int]]) -> list[CutRead]:
    """Returns the reads of all ranks. `offsets[writer][i]` is where the i-th block's shard begins in the writer's
    segment, `landing[reader][i]` where it begins in the reader's."""
    found = []
    for reader, places in enumerate(landing):
        for writer in sorted(plan.marks(reader)):
            runs = [
                (offsets[writer][block] + source, place + target, size, block)
                for block, place in enumerate(places)
                for source, target, size in plan.runs(writer, reader, block)
            ]
            if runs:  # there are none where other pairs of ranks move these blocks
                found.append(CutRead(reader, writer, *zip(*runs, strict=True)))
    return found


def by_block(said: m.PullEnded | None, read: CutRead, blocks: int) -> m.PullEnded | None:
    """Returns a rank's PullEnded with positions of whole blocks in place of runs: `arrived` has the blocks of which no
    run is missing at this rank."""
    if said is None:
        return None
    missing = set(read.blocks) - _complete(said, read)
    return msgspec.structs.replace(said, arrived=tuple(at for at in range(blocks) if at not in missing))


def _complete(said: m.PullEnded, read: CutRead) -> set[int]:
    missing = set(range(len(read.blocks))) - set(said.arrived)
    return set(read.blocks) - {read.blocks[at] for at in missing}


log = logging.getLogger(__name__)

CALL_S = 1.0  # a holder that has not answered a lease by then is passed over
LOWER_CALL_S = 5.0  # the same for a holder that has to read from its disk first
CLOSE_S = 2.0
NS = 1_000_000_000


@dataclass
class PullStats:
    """Counts what was pulled since the start of this process."""

    blocks: int = 0
    nbytes: int = 0


class _Item(NamedTuple):
    """The object of group `group` of the job's block at `position`; of a model of one group, the block."""

    position: int
    group: int
    extent: int


def _items_of(job: PullJob) -> tuple[_Item, ...]:
    if not job.groups:
        return tuple(_Item(at, 0, extent) for at, extent in enumerate(job.extents))
    return tuple(
        _Item(first + i, group, extent)
        for group, first, extents in job.places
        for i, extent in enumerate(extents)
        if extent >= 0 and job.groups[first + i] >> group & 1
    )


@dataclass(eq=False)
class _Running:
    job: PullJob
    parts: Mapping[int, Partition]  # by group
    deadline_ns: int
    items: tuple[_Item, ...]
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set when the job is cancelled
    nbytes: int = 0  # bytes that came from other nodes
    # Items, by their numbers:
    lower: set[int] = field(default_factory=set)  # that came from a lower tier of this node
    removed_seqs: dict[int, int] = field(default_factory=dict)  # which removals the item's holder had applied
    hung: set[int] = field(default_factory=set)  # whose memory a hanging tier may still write to
    causes: dict[str, None] = field(default_factory=dict)

    def blocks_of(self, items: set[int]) -> set[int]:
        """Returns the positions of the job's blocks of which something is among these items."""
        return {self.items[at].position for at in items} if self.job.groups else items

    def masks_of(self, items: set[int]) -> bytes:
        """Returns which objects are among these items, as one mask for each of `blocks_of`; b"" of a job without
        groups."""
        masks = dict.fromkeys(sorted(self.blocks_of(items)) if self.job.groups else (), 0)
        for at in items if self.job.groups else ():
            masks[self.items[at].position] |= 1 << self.items[at].group
        return bytes(masks.values())

    def nbytes_of(self, items: Sequence[int] | set[int]) -> int:
        """Returns the bytes of these items at one rank."""
        sizes, parts = self.job.sizes, self.parts
        return sum(sizes[at] if sizes else parts[self.items[at].group].shard_bytes for at in items)

    def left_ns(self) -> int:
        return 0 if self.stop.is_set() else max(0, self.deadline_ns - time.monotonic_ns())


class Pulls:
    """Carries out all pulls of one process. It belongs to the event loop, and nothing here raises to its caller.
    `refuses(key, removed_seq)` is that of `RemovalApplier`. `tiering` has what this node keeps below DRAM, a source
    like any other."""

    def __init__(
        self,
        reader: str,
        ranks: Sequence[SegmentRank],
        segments: PeerSegments,
        peers: PeerPool,
        lease_ms: int,
        refuses: Callable[[bytes, int], bool],
        tiering: Tiering | None = None,
    ) -> None:
        self.stats = PullStats()
        self._reader = reader
        self._ranks = ranks
        self._segments = segments
        self._peers = peers
        self._releases = Releases(peers)
        self._lease_ms = lease_ms
        self._refuses = refuses
        self._tiering = tiering
        self._tickets = itertools.count(1)
        self._reads: dict[tuple[int, int], asyncio.Future[m.PullEnded | None]] = {}  # (rank, ticket)
        self._jobs: dict[int, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost = ""

    @property
    def active(self) -> int:
        """How many jobs are under way."""
        return len(self._jobs)

    # ── what callers do ──────────────────────────────────────────────────────────────────────────

    def start(
        self, job: PullJob, partition: Partition | Mapping[int, Partition], on_pulled: Callable[[Pulled], None]
    ) -> None:
        """Begins a job into a partition, or into those of several cache groups; `on_pulled` is called with its result
        once, in a later turn of the loop."""
        assert job.ticket not in self._jobs, f"ticket {job.ticket} names a pull already"
        deadline_ns = time.monotonic_ns() + job.timeout_ms * 1_000_000
        parts = {0: partition} if isinstance(partition, Partition) else partition
        record = self._jobs[job.ticket] = _Running(job, parts, deadline_ns, _items_of(job))

        async def run() -> None:
            try:
                pulled = await self._run(record)
            finally:
                del self._jobs[job.ticket]
            on_pulled(pulled)

        self._spawn(run(), f"pull {job.ticket}")

    def cancel(self, ticket: int) -> None:
        """Ends a job soon, with what has arrived. Unknown tickets are ignored."""
        record = self._jobs.get(ticket)
        if record is not None:
            record.stop.set()

    def read(self, rank: int, opened: m.PullOpen) -> asyncio.Future[m.PullEnded | None]:
        """Orders one READ by one rank, whose ticket is chosen here. The result is the rank's PullEnded; None when the
        rank is gone."""
        return self._say(rank, msgspec.structs.replace(opened, ticket=next(self._tickets)))

    def rank_said(self, rank: int, message: m.PullEnded) -> None:
        """Takes the end of a read from a rank."""
        waiting = self._reads.pop((rank, message.ticket), None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def ranks_lost(self, cause: str) -> None:
        """Ends every read: no rank will answer any more, and what they read into is gone."""
        self._lost = self._lost or cause
        for record in self._jobs.values():
            record.stop.set()
        reads, self._reads = self._reads, {}
        for waiting in reads.values():
            if not waiting.done():
                waiting.set_result(None)

    async def close(self) -> None:
        """Ends every job, within a bounded time; jobs that a rank keeps for too long end as if the rank were gone."""
        for record in self._jobs.values():
            record.stop.set()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CLOSE_S)
        self.ranks_lost("the instance is closing")
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CLOSE_S)
        await self._releases.close()

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())

    # ── one job ──────────────────────────────────────────────────────────────────────────────────

    async def _run(self, record: _Running) -> Pulled:
        job, start = record.job, time.monotonic_ns()
        arrived: set[int] = set()
        try:
            await self._ranges(record, arrived)
        except Exception as error:
            log.exception("pull %d failed", job.ticket)
            record.causes[f"{type(error).__name__}: {error}"] = None
        arrived -= self._removed(record)  # a block removed later is not sealed either: it counts as being written
        took = time.monotonic_ns() - start
        cause = ""
        blocks, lower = record.blocks_of(arrived), record.blocks_of(record.lower)
        if len(arrived) < len(record.items):
            stopped = "cancelled" if record.stop.is_set() else "" if record.left_ns() else "not within its time"
            cause = "; ".join(filter(None, (self._lost or stopped, *record.causes))) or "nobody to ask"
            wanted, who = len(job.keys), job.request_id or "-"
            log.info("pull of %d blocks for %s: %d came (%s)", wanted, who, len(blocks), cause)
        self.stats.blocks += len(blocks - lower)
        self.stats.nbytes += record.nbytes
        names.NODE_PULLS.labels(outcome="all" if not cause else "some" if arrived else "none").inc()
        names.NODE_PULL.observe(took / NS)
        names.NODE_PULLED_BYTES.inc(record.nbytes)
        names.NODE_PULLED_BLOCKS.inc(len(blocks - lower))
        came = tuple(sorted(blocks))
        return Pulled(job.ticket, came, record.nbytes, took, cause, tuple(sorted(lower)), record.masks_of(arrived))

    async def _ranges(self, record: _Running, arrived: set[int]) -> None:
        """Gives every missing item to the first range that covers it and was not tried for it yet, until none is left
        to give or the time is over. Ranges run beside one another: no item is with two of them."""
        job = record.job
        missing = set(range(len(record.items)))
        tried: list[set[int]] = [set() for _ in job.ranges]
        running: dict[asyncio.Task[set[int]], set[int]] = {}
        while True:
            for i, source in enumerate(job.ranges):
                mine = {at for at in missing - tried[i] if _covers(source, record, at)}
                if mine and record.left_ns():
                    tried[i] |= mine
                    missing -= mine
                    rest = zip(job.ranges, tried, strict=True)
                    spare = any(_covers(other, record, at) for other, had in rest for at in mine - had)
                    running[asyncio.ensure_future(self._guarded(record, source, sorted(mine), spare))] = mine
            if not running:
                return
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                mine = running.pop(task)
                if (error := task.exception()) is not None:
                    # The other ranges still read into this job's memory, so the job must not end before them.
                    log.error("pull %d", job.ticket, exc_info=error)
                    record.causes[f"{type(error).__name__}: {error}"] = None
                got = set() if error is not None else task.result()
                arrived |= got
                missing |= mine - got - record.hung

    async def _guarded(self, record: _Running, source: PullRange, items: list[int], spare: bool) -> set[int]:
        """Returns which of `items` came from this holder; never raises. `spare` says that another range could be
        tried afterwards, so this one gets only half of the time."""
        start = time.monotonic_ns()
        deadline_ns = start + record.left_ns() // (2 if spare else 1)
        got: set[int] = set()
        cause = ""
        reads: list[m.PullEnded] = []
        above = spans.context_from(record.job.traceparent)
        own = spans.reserve(above)  # the holder's spans come below this one
        if source.instance_id == self._reader:
            return await self._below(record, source, items, deadline_ns)
        try:
            async with self._peers.use(source.address) as peer:
                try:
                    got, cause = await self._from(
                        record, source, items, peer, deadline_ns, reads, spans.kept(own) if own else ""
                    )
                except KvmeshError as error:
                    if worth_forgetting(error):
                        self._peers.forget(peer)
                    raise
        except KvmeshError as error:
            cause = error.message
        except Exception as error:
            log.exception("pull from %s failed", source.instance_id)
            cause = f"{type(error).__name__}: {error}"
        if cause:
            record.causes[f"{source.instance_id}: {cause}"] = None
        nbytes = record.nbytes_of(got) * len(self._ranks)
        record.nbytes += nbytes
        self._trace(record.job, source, start, (len(items), len(got), nbytes), cause, reads, own)
        return got

    async def _below(self, record: _Running, source: PullRange, items: list[int], deadline_ns: int) -> set[int]:
        """Returns which of `items` a lower tier of this very node brought. It is neither cut short before its deadline
        nor cancelled: memory that was given to the tier comes back with the tier's answer."""
        start = time.monotonic_ns()
        got: set[int] = set()
        nbytes, cause = 0, "nothing is kept below DRAM here"
        if self._tiering is not None and source.tier is not Tier.DRAM:
            by_group: dict[int, list[int]] = {}
            for at in items:
                by_group.setdefault(record.items[at].group, []).append(at)
            reads = [self._read_below(record, source, mine, deadline_ns) for mine in by_group.values()]
            ends = await asyncio.gather(*reads)
            cause = next((why for *_, why in ends if why), "")
            got, nbytes = set().union(*(came for came, *_ in ends)), sum(size for _, size, _ in ends)
        if cause:
            record.causes[f"{source.instance_id}: {cause}"] = None
        record.lower |= got
        self._trace(record.job, source, start, (len(items), len(got), nbytes * len(self._ranks)), cause, ())
        return got

    async def _read_below(
        self, record: _Running, source: PullRange, items: list[int], deadline_ns: int
    ) -> tuple[set[int], int, str]:
        """Reads items of one group from a lower tier. Returns which came, their bytes at one rank, and why not all."""
        assert self._tiering is not None
        keys = [record.job.keys[record.items[at].position] for at in items]
        extents, partition = [record.items[at].extent for at in items], record.parts[record.items[items[0]].group]
        read = await self._tiering.read(partition, keys, extents, deadline_ns, source.tier)
        record.hung.update(items if read.hung else ())
        return {items[at] for at in read.arrived}, sum(read.arrived.values()), read.cause

    def _trace(
        self,
        job: PullJob,
        source: PullRange,
        start: int,
        counts: tuple[int, int, int],
        cause: str,
        reads: Sequence[m.PullEnded],
        own: SpanContext | None = None,
    ) -> None:
        if not job.traceparent:
            return
        wanted, got, nbytes = counts
        attributes: dict[str, spans.Value] = {
            names.REQUEST_ID: job.request_id,
            names.INSTANCE: self._reader,
            names.HOLDER: source.instance_id,
            names.TIER: source.tier.name.lower(),
            names.WANTED_BLOCKS: wanted,
            names.BLOCKS: got,
            names.PULL_BYTES: nbytes,
        }
        parent = spans.context_from(job.traceparent)
        fetch = spans.record(names.SPAN_FETCH, parent, start, time.monotonic_ns(), attributes, error=cause, own=own)
        for read in reads:
            carried = read.carried
            moved = names.transfer_attributes("read", read.bytes_done, carried.rails, carried.resent)
            spans.record(names.SPAN_TRANSFER, fetch, read.start_ns, read.end_ns, moved, error=read.cause)

    # ── one holder ───────────────────────────────────────────────────────────────────────────────

    async def _from(
        self,
        record: _Running,
        source: PullRange,
        items: list[int],
        peer: Peer,
        deadline_ns: int,
        reads: list[m.PullEnded],
        traceparent: str,
    ) -> tuple[set[int], str]:
        """Returns the items that arrived from one holder, and why not all did. The ranks' answers are appended to
        `reads`. `traceparent` is what the holder's spans come below; "" for none. Raises KvmeshError."""
        positions = sorted({record.items[at].position for at in items}) if record.job.groups else items
        masks = dict.fromkeys(positions, 0)
        for at in items if record.job.groups else ():
            masks[record.items[at].position] |= 1 << record.items[at].group
        keys = [record.job.keys[p] for p in positions]
        most_s = CALL_S if source.tier is Tier.DRAM else LOWER_CALL_S
        timeout_s = max(min(most_s, (deadline_ns - time.monotonic_ns()) / NS), 0.001)
        life = (source.instance_id, source.incarnation)
        asked = bytes(masks.values()) if record.job.groups else b""
        terms = replace(self._terms(record), traceparent=traceparent)
        asking = reader_lease.ask(terms, life, keys, peer, self._peers, self._releases, timeout_s, asked)
        lease = await self._lease(record, asking)
        if lease is None:
            return set(), "holds none of them"
        leased = [positions[i] for i in lease.held]
        if record.job.groups:
            number = {(record.items[at].position, record.items[at].group): at for at in items}
            leased = [number[positions[i], group] for group, part in lease.parts.items() for i in part.held]
        # The pull holds the segments itself too, as the peer may be forgotten while ranks read from them.
        for name in lease.segments:
            self._segments.share(name)
        try:
            ended = await self._read(record, lease, leased, deadline_ns)
            reads += [said for said in ended if said is not None]
            confirmed = await self._releases.confirm(lease)
        finally:
            for name in lease.segments:
                self._segments.release(name)
            self._releases.give_back(lease)
        if not record.stop.is_set() and any(said is None or said.cause for said in ended):
            # The holder's segment may be broken, so whoever comes next asks for descriptors again.
            self._peers.forget(peer)
        whole, cause = _judge(len(leased), ended, confirmed)
        seqs = {leased[i]: lease.removed_seq for i in whole}
        record.removed_seqs |= seqs
        if len(leased) < len(items):
            cause = cause or f"holds {len(leased)} of {len(items)}"
        return seqs.keys() - self._removed(record), cause

    def _terms(self, record: _Running) -> LeaseTerms:
        own = next(iter(record.parts.values()))
        if not record.job.groups:
            return LeaseTerms(self._reader, self._lease_ms, own.shown_layout, len(self._ranks), own.shards)
        cuts = {group: partition.shards for group, partition in record.parts.items()}
        return LeaseTerms(self._reader, self._lease_ms, own.family, len(self._ranks), groups=cuts)

    async def _lease(self, record: _Running, asking: Coroutine[None, None, ReaderLease | None]) -> ReaderLease | None:
        """Returns the holder's answer, unless the pull is stopped first. A lease that is granted after that is given
        back as it arrives, as the holder would else keep its blocks until the lease ran out. Raises KvmeshError."""
        answer = asyncio.get_running_loop().create_task(asking, name="ask for a lease")
        stopping = asyncio.ensure_future(record.stop.wait())
        try:
            waits: set[asyncio.Future[Any]] = {answer, stopping}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not answer.done():
                self._spawn(self._return_unused(answer), "give an unused lease back")
        if not answer.done():
            raise RequestCancelled("the pull was cancelled")
        return answer.result()

    async def _return_unused(self, answer: asyncio.Task[ReaderLease | None]) -> None:
        await asyncio.wait({answer})
        if not answer.cancelled() and answer.exception() is None:
            lease = answer.result()
            if lease is not None:
                self._releases.give_back(lease)

    def _removed(self, record: _Running) -> set[int]:
        """Returns the items that must not be sealed: of blocks removed here while their holder had yet to apply the
        removal."""
        keys, items = record.job.keys, record.items
        found = {at for at, seq in record.removed_seqs.items() if self._refuses(keys[items[at].position], seq)}
        if found:
            record.causes["removed, and the holder has yet to hear of it"] = None
        return found

    async def _read(
        self, record: _Running, lease: ReaderLease, leased: list[int], deadline_ns: int
    ) -> list[m.PullEnded | None]:
        """Returns every rank's PullEnded about the leased items, None for one that is gone. It returns only when
        nothing can land any more."""
        reads, cuts = self._open(record, lease, leased, deadline_ns)
        ended = asyncio.gather(*reads.values())
        stopping = asyncio.ensure_future(record.stop.wait())
        try:
            if not await reader_lease.wait_open(lease, ended, self._lease_ms, deadline_ns / NS, stopping):
                # The deadline has passed, the job is cancelled or the lease is over: what comes now is of no use.
                for rank, ticket in reads:
                    self._ranks[rank].send(m.PullCancel(ticket))
            said = await ended
            count = len(leased)
            return [by_block(one, cut, count) for one, cut in zip(said, cuts, strict=True)] if cuts else list(said)
        finally:
            stopping.cancel()

    def _open(
        self, record: _Running, lease: ReaderLease, leased: list[int], deadline_ns: int
    ) -> tuple[dict[tuple[int, int], asyncio.Future[m.PullEnded | None]], list[CutRead]]:
        """Orders the reads of all ranks. Returns them with, where shards are cut otherwise or are of several groups,
        one CutRead for each of them."""
        reads, job = {}, record.job
        ranks, klass = range(len(self._ranks)), job.traffic_class
        cuts: list[CutRead] = []
        if job.groups:
            cuts = self._group_reads(record, lease, leased)
        else:
            extents = [record.items[at].extent for at in leased]
            partition = record.parts[0]
            landing = [tuple(partition.offset(rank, extent) for extent in extents) for rank in ranks]
            cuts = cut_reads(lease.plan, lease.offsets, landing) if lease.plan is not None else []
        for cut in cuts:
            name, longest = lease.segments[cut.writer], max(cut.sizes)
            where = next(self._tickets), name, cut.offsets, cut.landing
            opened = m.PullOpen(*where, longest, deadline_ns, klass, cut.sizes)
            reads[cut.reader, opened.ticket] = self._say(cut.reader, opened)
        if job.groups or lease.plan is not None:
            return reads, cuts
        sizes = tuple(job.sizes[at] for at in leased) if job.sizes else ()
        for rank, (name, offsets) in enumerate(zip(lease.segments, lease.offsets, strict=True)):
            size, ticket = partition.shard_bytes, next(self._tickets)
            opened = m.PullOpen(ticket, name, offsets, landing[rank], size, deadline_ns, klass, sizes)
            reads[rank, ticket] = self._say(rank, opened)
        return reads, []

    def _group_reads(self, record: _Running, lease: ReaderLease, leased: list[int]) -> list[CutRead]:
        """Returns the reads of all groups of a lease. Their `blocks` are positions in `leased`, which has the items
        group by group; their writers are ranks of the holder."""
        found: list[CutRead] = []
        first = 0
        for group, part in lease.parts.items():
            partition = record.parts[group]
            extents = [record.items[at].extent for at in leased[first : first + len(part.held)]]
            landing = [tuple(partition.offset(rank, e) for e in extents) for rank in range(len(self._ranks))]
            for read in cut_reads(part.plan, part.offsets, landing):
                blocks = tuple(first + block for block in read.blocks)
                found.append(replace(read, writer=part.ranks[read.writer], blocks=blocks))
            first += len(part.held)
        return found

    def _say(self, rank: int, opened: m.PullOpen) -> asyncio.Future[m.PullEnded | None]:
        done: asyncio.Future[m.PullEnded | None] = asyncio.get_running_loop().create_future()
        if self._lost:
            done.set_result(None)
        else:
            self._reads[rank, opened.ticket] = done
            self._ranks[rank].send(opened)
        return done


def _judge(leased: int, ended: Sequence[m.PullEnded | None], confirmed: bool) -> tuple[set[int], str]:
    """Returns which of so many leased items count, and why not all: those that every rank has, if the holder has
    confirmed the lease."""
    whole, cause = set(range(leased)), ""
    for said in ended:
        if said is None:
            return set(), "the rank that read is gone"
        if said.arrived and not confirmed:
            names.NODE_PULL_LAPSED.inc()
            return set(), UNCONFIRMED
        whole &= set(said.arrived)
        cause = cause or said.cause
    return whole, cause


def _covers(source: PullRange, record: _Running, at: int) -> bool:
    position, group, _ = record.items[at]
    if source.groups and record.job.groups and not source.groups >> group & 1:
        return False
    return source.first_block <= record.job.blocks[position] < source.first_block + source.blocks
