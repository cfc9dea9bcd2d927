"""Gets under leases: find the holders ─▶ lease at the best one ─▶ READ one-sided ─▶ release; what one holder did not
give is asked of the next.

A block counts as read when all of its bytes are here, and either its checksum, where one was asked for, is right, or
the holder has confirmed that the lease was open until then.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import xxhash

from kvmesh.blockservice import reader_lease
from kvmesh.blockservice.peers import Peer, worth_forgetting
from kvmesh.blockservice.reader_lease import UNCONFIRMED, LeaseTerms, ReaderLease, Releases
from kvmesh.clock import lease_clock_ns
from kvmesh.errors import DeadlinePassed, InvalidRequest, KvmeshError
from kvmesh.kvcache.size_classes import BYTES
from kvmesh.kvcache.tiers import Tier
from kvmesh.storeclient.calls import ended, every, in_thread
from kvmesh.storeclient.context import ClientContext
from kvmesh.storeclient.memory import INLINE_COPY, Span, bytes_of
from kvmesh.storeclient.replicas import Holder, Replica, share_out
from kvmesh.telemetry.spans import ambient
from kvmesh.transfer import BatchId, Opcode, TransferEngine, TransferRequest, TransferState
from kvmesh.transfer.memory import copy_runs

log = logging.getLogger(__name__)

CALL_S = 5.0  # a holder that has not answered by then is passed over; it may have to read from SSD first
HERE_BYTES = 1 << 20  # so many bytes of mapped memory are copied sooner than two threads are woken
HERE_S = 0.002
LEASE_KEYS = 4096
REBUILDING = "the store master has not heard from all nodes yet"
REBUILD_S = 0.05  # between two calls to a master that does not know all nodes yet

# ── which READs bring some blocks here: pure ─────────────────────────────────────────────────────────

# Small blocks that lie side by side at their holder come in one READ into staging and are copied out from there: a
# READ of its own costs each block some microseconds, the copy moves its bytes once more. On the machine of
# benchmarks/results the two meet at 64 KiB a block, over shm and tcp alike (`benchmarks.store --only gather`).
GATHER_BELOW = 64 << 10  # bytes of a block
GATHER_LEAST = 4  # blocks; fewer are not worth a copy
GATHER_MOST = 8 << 20  # bytes in one gathered READ


@dataclass(frozen=True, slots=True)
class Shard:
    """Is one block at its holder."""

    position: int  # in the caller's list
    offset: int  # in the holder's segment
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReadRun:
    """Is one READ: [offset, offset + nbytes) of the holder's segment, in which these shards lie."""

    offset: int
    nbytes: int
    shards: tuple[Shard, ...]


def runs(shards: Sequence[Shard], most: int = GATHER_MOST) -> list[ReadRun]:
    """Returns READs that bring all shards, in order of their offsets. Neighbours come together, also across gaps that
    are small beside them (a block rarely fills its extent), up to `most` bytes each."""
    found: list[list[Shard]] = []
    end = 0
    for shard in sorted(shards, key=lambda one: one.offset):
        new_end = shard.offset + shard.nbytes
        last = found[-1] if found else None
        near = last is not None and 0 <= shard.offset - end <= last[-1].nbytes // 4
        if last is not None and near and new_end - last[0].offset <= most:
            last.append(shard)
        else:
            found.append([shard])
        end = new_end
    return [ReadRun(r[0].offset, r[-1].offset + r[-1].nbytes - r[0].offset, tuple(r)) for r in found]


def plan(shards: Sequence[Shard]) -> tuple[list[Shard], list[ReadRun]]:
    """Returns the shards to read straight to where they belong, and the runs to read through staging."""
    direct: list[Shard] = []
    gathered: list[ReadRun] = []
    for run in runs([one for one in shards if one.nbytes < GATHER_BELOW]):
        if len(run.shards) >= GATHER_LEAST:
            gathered.append(run)
        else:
            direct += run.shards
    direct += (one for one in shards if one.nbytes >= GATHER_BELOW)
    return direct, gathered


def portions(runs_: Sequence[ReadRun], most: int) -> list[list[ReadRun]]:
    """Groups READs into what is staged at a time: at most `most` bytes, and at least one READ."""
    groups: list[list[ReadRun]] = []
    room = 0
    for run in runs_:
        if not groups or run.nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(run)
        room -= run.nbytes
    return groups


# ── gets ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Got:
    """Is one block of a get. `tier` is the one that served it; None if it was not read. `data` is empty where the bytes
    went to memory of the caller. `cause` says why it was not read although some node was said to hold it; "" if no node
    has it."""

    key: bytes
    nbytes: int = 0
    tier: Tier | None = None
    store_id: str = ""
    data: bytes | None = None
    cause: str = ""

    @property
    def here(self) -> bool:
        return self.tier is not None


@dataclass(eq=False, slots=True)
class _Job:
    """Keeps one call of `LeasedReader.read`."""

    got: list[Got]
    targets: Sequence[Span] | None
    deadline: float
    verify: bool
    known: dict[int, Sequence[Replica]] = field(default_factory=dict)
    failed: dict[Holder, set[int]] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # positions that the master was asked about
    # Until when a master that does not know all nodes is asked again, and the keys that it did not know the holders of.
    look_until: float = math.inf
    untold: set[bytes] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Read:
    """What is read under one lease. `checksums` are by position, when asked for; `landed` was read in time, and counts
    when the lease is confirmed."""

    lease: ReaderLease
    checksums: dict[int, int]
    landed: list[Shard] = field(default_factory=list)


@dataclass(slots=True)
class ReadStats:
    blocks: int = 0
    nbytes: int = 0
    misses: int = 0
    failed_replicas: int = 0  # replicas that did not answer, whose lease lapsed, or that gave wrong bytes
    gathered: int = 0  # blocks that came with others in one READ


class LeasedReader:
    """Carries out all gets of one client that ask holders. It belongs to the event loop."""

    def __init__(self, context: ClientContext, met: Callable[[str], None]) -> None:
        """`met` is called with the address of each node that gave a block."""
        self.stats = ReadStats()
        self._config = context.config
        self._engine = context.engine
        self._memory = context.memory
        self._peers = context.peers
        self._directory = context.directory
        self._hints = context.hints
        self._here = context.here
        self._met = met
        self._rng = random.Random()
        self._releases = Releases(context.peers)

    async def read(
        self,
        keys: Sequence[bytes],
        targets: Sequence[Span] | None,
        deadline: float,
        verify: bool,
        *,
        look_until: float = math.inf,
        untold: set[bytes] | None = None,
    ) -> list[Got]:
        """Reads each key's block, into its target or as bytes. Until `look_until` a master that does not know all nodes
        is asked again; keys whose holders it did not know are added to `untold`. Raises KvmeshError when no master can
        be asked, and InvalidRequest for a target that is too small; what is wrong with one holder or block is in its
        `Got`."""
        job = _Job([Got(key) for key in keys], targets, deadline, verify, look_until=look_until)
        if untold is not None:
            job.untold = untold
        now = time.monotonic()
        for position, key in enumerate(keys):
            hinted = self._hints.of(key, now)
            if hinted:
                job.known[position] = hinted
        open_ = set(range(len(keys)))
        while open_:
            await self._find(job, open_)
            plan_ = share_out({p: job.known.get(p, ()) for p in open_}, job.failed, self._here, self._rng)
            if not plan_:
                break  # nobody has them, or those who should have failed
            if time.monotonic() >= deadline:
                raise DeadlinePassed(f"{len(open_)} of {len(keys)} blocks were not read in time")
            await every(self._from(job, holder, positions) for holder, positions in plan_.items())
            open_ = {p for p in open_ if not job.got[p].here}
        self.stats.misses += len(open_)
        return job.got

    async def _find(self, job: _Job, open_: Collection[int]) -> None:
        """Asks the master about the blocks for which no holder is left to ask: once when it knows all nodes; until then
        again, also when all holders that it knew have been asked in vain."""
        while True:
            lost = [p for p in open_ if p not in job.asked and not self._askable(job, p)]
            if not lost:
                return
            keys = [job.got[p].key for p in lost]
            found, complete = await self._directory.find(keys, max(job.deadline - time.monotonic(), 0.001))
            now = time.monotonic()
            for position, key, replicas in zip(lost, keys, found, strict=True):
                one = job.got[position]
                if replicas or complete:
                    one.cause = one.cause if replicas and one.cause != REBUILDING else ""
                    job.known[position] = replicas
                    self._hints.learn(key, replicas, now)
                if complete:
                    job.asked.add(position)
                elif not self._askable(job, position):
                    one.cause = one.cause or REBUILDING
            if complete or any(self._askable(job, p) for p in lost):
                return
            if now + REBUILD_S >= min(job.deadline, job.look_until):
                job.untold.update(keys)
                return
            await asyncio.sleep(REBUILD_S)

    def _askable(self, job: _Job, position: int) -> bool:
        return any(position not in job.failed.get(r.holder, ()) for r in job.known.get(position, ()))

    # ── one holder ───────────────────────────────────────────────────────────────────────────────

    async def _from(self, job: _Job, holder: Holder, positions: list[int]) -> None:
        """Reads blocks from one holder. What it gives goes to `job.got`, all else to `job.failed`. Raises nothing but
        InvalidRequest."""
        for at in range(0, len(positions), LEASE_KEYS):
            some = positions[at : at + LEASE_KEYS]
            cause = ""
            try:
                async with self._peers.use(holder.address) as peer:
                    try:
                        cause = await self._leased(job, holder, some, peer)
                    except KvmeshError as error:
                        if worth_forgetting(error):
                            self._peers.forget(peer)
                        raise
            except InvalidRequest as error:
                if error.field == "target":
                    raise
                cause = error.message
            except KvmeshError as error:
                cause = error.message
            missing = [p for p in some if not job.got[p].here]
            if len(missing) < len(some):
                self._met(holder.address)
            job.failed.setdefault(holder, set()).update(missing)
            for position in missing:
                one = job.got[position]
                one.cause = f"{holder.store_id}: {cause}" if cause else one.cause
                self._hints.forget_holder(one.key, (holder.store_id,))
            if cause and missing:
                self.stats.failed_replicas += 1
                log.info("%d blocks not read from %s: %s", len(missing), holder.store_id, cause)

    async def _leased(self, job: _Job, holder: Holder, positions: list[int], peer: Peer) -> str:
        """Reads blocks under one lease. Returns why not all of `positions` came; "" if the holder has no more of them.
        Raises KvmeshError."""
        keys = [job.got[p].key for p in positions]
        terms = LeaseTerms(self._engine.name, self._config.lease_ms, BYTES, checksums=job.verify, traceparent=ambient())
        life = (holder.store_id, holder.incarnation)
        timeout_s = min(CALL_S, max(job.deadline - time.monotonic(), 0.001))
        lease = await reader_lease.ask(terms, life, keys, peer, self._peers, self._releases, timeout_s)
        if lease is None:
            return ""
        try:
            held = [positions[i] for i in lease.held]
            read = _Read(lease, dict(zip(held, lease.checksums, strict=False)))
            shards = list(map(Shard, held, lease.offsets[0], lease.sizes))
            if job.targets is None:
                cause = await self._to_bytes(job, read, shards)
            else:
                cause = await self._into(job, read, shards, job.targets)
            # Checksums say themselves whether the bytes are right.
            confirmed = not read.landed or job.verify or await self._releases.confirm(lease)
            tiers = dict(zip(positions, lease.tiers, strict=False))
            for shard in read.landed:
                if confirmed:
                    self._arrived(job, holder, Tier(tiers.get(shard.position) or Tier.DRAM), shard)
                else:
                    job.got[shard.position].data = None
            return cause if confirmed else UNCONFIRMED
        finally:
            self._releases.give_back(lease)

    async def _into(self, job: _Job, read: _Read, shards: Sequence[Shard], targets: Sequence[Span]) -> str:
        for shard in shards:
            if targets[shard.position].nbytes < shard.nbytes:
                room = targets[shard.position].nbytes
                raise InvalidRequest(f"target: {room} bytes for a block of {shard.nbytes}", field="target")
        direct, gathered = plan(shards)
        cause = ""
        if direct:
            landing = [(shard.offset, shard.nbytes, targets[shard.position].address) for shard in direct]
            wrong = await self._reads(job, read, landing)
            for shard, bad in zip(direct, wrong, strict=True):
                if not bad and read.checksums:
                    check = partial(self._check, read, shard, targets[shard.position].memory)
                    bad = await in_thread(check) if shard.nbytes > INLINE_COPY else check()
                cause = bad or cause
                if not bad:
                    read.landed.append(shard)
        for group in portions(gathered, GATHER_MOST):
            cause = await self._staged(job, read, group, targets) or cause
        return cause

    async def _to_bytes(self, job: _Job, read: _Read, shards: Sequence[Shard]) -> str:
        most = min(GATHER_MOST, self._memory.staging_bytes // 4)
        causes = await every(self._staged(job, read, group, None) for group in portions(runs(shards, most), most))
        return next(filter(None, causes), "")

    async def _staged(self, job: _Job, read: _Read, group: Sequence[ReadRun], targets: Sequence[Span] | None) -> str:
        """Reads these runs into staging and takes the blocks out of it."""
        staged = await self._memory.stage(sum(run.nbytes for run in group), job.deadline)
        cause = ""
        try:
            landing, at = [], 0
            for run in group:
                landing.append((run.offset, run.nbytes, staged.span.address + at))
                at += run.nbytes
            wrong = await self._reads(job, read, landing)
            start = 0
            for run, bad in zip(group, wrong, strict=True):
                cause = bad or cause
                if not bad:
                    span = staged.span.part(start, run.nbytes)
                    work = partial(self._take_out, job, read, run, span, targets)
                    bad, good = await in_thread(work) if run.nbytes > INLINE_COPY else work()
                    cause = bad or cause
                    read.landed += good
                    self.stats.gathered += len(good) if len(run.shards) > 1 else 0
                start += run.nbytes
        finally:
            self._memory.give_back(staged)
        return cause

    def _take_out(
        self, job: _Job, read: _Read, run: ReadRun, span: Span, targets: Sequence[Span] | None
    ) -> tuple[str, list[Shard]]:
        """Takes the blocks of one run out of staging. Returns what is wrong with some, and the blocks that are good and
        are where they belong now. It may run in any thread, once for each run."""
        cause, good = "", []
        for shard in run.shards:
            memory = span.part(shard.offset - run.offset, shard.nbytes).memory
            bad = self._check(read, shard, memory)
            cause = bad or cause
            if bad:
                continue
            good.append(shard)
            if targets is None:
                job.got[shard.position].data = bytes_of(memory)
        if targets is not None:
            sources = [span.address + shard.offset - run.offset for shard in good]
            copy_runs([targets[s.position].address for s in good], sources, [s.nbytes for s in good])
        return cause, good

    def _arrived(self, job: _Job, holder: Holder, tier: Tier, shard: Shard) -> None:
        one = job.got[shard.position]
        one.nbytes, one.tier, one.store_id, one.cause = shard.nbytes, tier, holder.store_id, ""
        self.stats.blocks += 1
        self.stats.nbytes += shard.nbytes

    def _check(self, read: _Read, shard: Shard, memory: memoryview) -> str:
        want = read.checksums.get(shard.position)
        if want is None or xxhash.xxh3_64_intdigest(memory[: shard.nbytes]) == want:
            return ""
        return "wrong bytes: the checksum differs"

    async def _reads(self, job: _Job, read: _Read, landing: Sequence[tuple[int, int, int]]) -> list[str]:
        """Reads (offset at the holder, bytes, address here), and returns the error of each, or ""."""
        segment = read.lease.segments[0]
        requests = [TransferRequest(Opcode.READ, to, segment, at, n) for at, n, to in landing]
        return await read_under(self._engine, read.lease, requests, job.deadline, self._config.lease_ms)

    async def close(self) -> None:
        """Ends what was begun in the background (releases), within a second."""
        await self._releases.close()


# ── READs of this process's own engine ───────────────────────────────────────────────────────────────


async def read_under(
    engine: TransferEngine, lease: ReaderLease, requests: Sequence[TransferRequest], deadline: float, lease_ms: int
) -> list[str]:
    """Returns what went wrong with each READ; "" for those whose bytes are here and whose lease held. It returns (or
    raises when cancelled) only when nothing of them can land any more."""
    left_s = deadline - time.monotonic()
    if left_s <= 0 or not requests:
        return ["not in time"] * len(requests)
    batch = engine.allocate_batch(len(requests))
    try:
        here = sum(request.length for request in requests) <= HERE_BYTES and _mapped(engine, lease.segments[0])
        engine.submit(batch, requests, left_s)
        if here:
            engine.wait_sync(batch, HERE_S)  # this thread copies it
        await _landed(engine, batch, lease, deadline, lease_ms)
        lapsed = "" if lease.holds_at(lease_clock_ns()) else "the lease ran out before the last byte was here"
        return [lapsed or _wrong(one.state, one.cause) for one in engine.statuses(batch)]
    finally:
        engine.free_batch(batch)


def _mapped(engine: TransferEngine, segment: str) -> bool:
    """Whether this process itself copies out of the segment's memory, as a rule."""
    return engine.rails(segment)[0].transport.name == "shm"


def _wrong(state: TransferState, cause: str) -> str:
    return "" if state is TransferState.COMPLETED else cause or state.value


async def _landed(engine: TransferEngine, batch: BatchId, lease: ReaderLease, deadline: float, lease_ms: int) -> None:
    """Waits until all requests of the batch are final; cancels them when the lease or the time is over."""
    loop, here = asyncio.get_running_loop(), threading.get_ident()
    final: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not final.done():
            final.set_result(None)

    def from_engine() -> None:
        if threading.get_ident() == here:
            finish()
        else:
            loop.call_soon_threadsafe(finish)

    engine.on_done(batch, from_engine)
    try:
        if not final.done():
            await reader_lease.wait_open(lease, final, lease_ms, deadline)
    finally:
        if not final.done():
            engine.cancel(batch)
            await ended(final)  # the engine answers in bounded time, and until then bytes may still land
