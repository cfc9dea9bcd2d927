"""In a put this node READs blocks out of a caller's memory and seals them.

    room for each (waiting a little) ─▶ READ by the rank, all under one guard ─▶ checksums ─▶ seal, pin

Only a pool node takes puts: it has one rank, and memory for blocks of any length (layout "bytes").
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.blockservice.checksums import ChecksumClient
from kvmesh.blockservice.partitions import Partition, Partitions
from kvmesh.blockservice.peer_segments import PeerSegments
from kvmesh.blockservice.pulls import Pulls
from kvmesh.blockservice.removal_applier import RemovalApplier
from kvmesh.blockservice.removals import Watch
from kvmesh.blockservice.tiers.tiering import Tiering
from kvmesh.clock import lease_clock_ns
from kvmesh.errors import InvalidRequest, KvmeshError, Overloaded, TransferError, Unavailable, UnknownInstance
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.size_classes import BYTES, size_class
from kvmesh.kvcache.store_stats import StoreExhausted
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.transfer import SegmentDescriptor, TrafficClass

log = logging.getLogger(__name__)

NS = 1_000_000_000
MAX_CALLERS = 64  # callers whose segments are open here
IDLE_S = 60.0  # a caller's segment is closed after so long
ROOM_S = 1.0  # the longest wait for leases to end; and at most half of the caller's time
LOOK_S = 0.1  # how often is looked meanwhile, even when nothing has been reported as freed
BELOW_S = 0.25
SUM_S = 10.0
RETRY_MS = (10, 5_000)


@dataclass(frozen=True)
class PutJob:
    """Describes one call. `offsets` and `sizes` are those of each block in the caller's segment, in bytes; `checksums`
    are xxh3_64, or empty."""

    keys: tuple[bytes, ...]
    layout: str
    segment: str
    descriptor: bytes
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    deadline_ns: int
    pin: int = pb.PIN_KIND_UNSPECIFIED
    pin_ns: int = 0
    checksums: tuple[int, ...] = ()
    ticket: int = 0
    ticket_offset: int = 0
    removed_seq: int = 0  # the last removal that the caller knows of; 0: none
    removed_ns: int = 0  # by when it was over, by the clock of leases


@dataclass
class _Putting:
    """Keeps what one call has begun: position → where the block goes."""

    job: PutJob
    watch: Watch
    begun: dict[int, tuple[Partition, int]] = field(default_factory=dict)
    why: dict[str, KvmeshError] = field(default_factory=dict)  # why blocks are not held, by the error's text
    read: set[int] = field(default_factory=set)  # positions that had their turn, sealed or not
    exhausted: Overloaded | None = None
    retry_ns: int = 0


class Puts:
    """Carries out all puts of one process, on its event loop."""

    def __init__(
        self,
        ranks: int,
        partitions: Partitions,
        segments: PeerSegments,
        pulls: Pulls,
        sums: ChecksumClient,
        removals: RemovalApplier,
        tiering: Tiering | None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        lease_clock_ns: Callable[[], int] = lease_clock_ns,
    ) -> None:
        self._ranks = ranks
        self._partitions = partitions
        self._segments = segments
        self._pulls = pulls
        self._sums = sums
        self._removals = removals
        self._tiering = tiering
        self._clock_ns = clock_ns
        self._lease_clock_ns = lease_clock_ns
        self._callers: OrderedDict[str, int] = OrderedDict()  # segment → last used, monotonic ns
        self._freed = asyncio.Event()

    def freed(self) -> None:
        """Tells those who wait for memory that some may be free."""
        self._freed.set()
        self._freed = asyncio.Event()

    def tidy(self) -> None:
        """Closes the segments of callers that have not called for IDLE_S (a dead one's memory stays mapped until
        then)."""
        before = self._clock_ns() - int(IDLE_S * NS)
        while self._callers and next(iter(self._callers.values())) < before:
            self._segments.release(self._callers.popitem(last=False)[0])

    async def put(self, job: PutJob) -> tuple[bytes, KvmeshError | None]:
        """Returns one byte for each key (1: sealed here now), and why the others are not: one error, with the text
        of all reasons. A block that another call puts or pulls at the same time counts as held. Raises
        InvalidRequest, UnknownInstance (the segment is unknown: send its descriptor), and Overloaded when there is
        room for no block."""
        if self._ranks != 1:
            raise InvalidRequest.of("layout", job.layout, f"a block has shards of {self._ranks} ranks here")
        if job.removed_seq and not await self._heard_of_removals(job):
            why = f"removed_seq={job.removed_seq}: this node has yet to hear of removals up to this one"
            return bytes(len(job.keys)), Unavailable(why, field="removed_seq")
        name = self._caller(job)
        self._segments.share(name)
        putting = _Putting(job, self._removals.watch())
        try:
            await self._written_below(putting)
            while True:
                others_write = await self._begin(putting)
                if putting.begun:
                    await self._read(putting)
                if not others_write or self._clock_ns() >= job.deadline_ns:
                    break
            held = self._pinned(putting)
            if putting.exhausted and not any(held):
                wait_ms = (putting.retry_ns - self._lease_clock_ns()) // 1_000_000 if putting.retry_ns else RETRY_MS[1]
                retry_ms = max(RETRY_MS[0], min(wait_ms, RETRY_MS[1]))
                full = putting.exhausted
                raise type(full)(full.message, field=full.field, retry_after_ms=retry_ms)
        finally:
            self._removals.unwatch(putting.watch)
            for at, (partition, _) in putting.begun.items():
                partition.store.abandon(job.keys[at])
            self._segments.release(name)
            self._partitions.settle()
            self.freed()
        if all(held):
            return held, None
        reasons = list(putting.why.values()) or [Unavailable("removed or evicted again at once")]
        told = next((one for one in reasons if one.retryable), reasons[0])
        return held, type(told)("; ".join(one.message for one in reasons), field=told.field)

    # ── inner ────────────────────────────────────────────────────────────────────────────────────

    async def _heard_of_removals(self, job: PutJob) -> bool:
        """Waits a little until this node has heard of what the caller knows to be removed. Else a node that could not
        be asked, as it was frozen, would call a block held that it is about to remove, or remove the one that it is
        put now."""
        left_s = (job.deadline_ns - self._clock_ns()) / NS
        return await self._removals.wait_heard(job.removed_seq, job.removed_ns, max(0.0, min(ROOM_S, left_s / 2)))

    def _caller(self, job: PutJob) -> str:
        """Opens the caller's segment at the rank, and returns its name."""
        if job.descriptor:
            try:
                named = SegmentDescriptor.decode(job.descriptor).name
            except TransferError as error:
                raise InvalidRequest(f"segment_descriptor: {error.message}", field="segment_descriptor") from None
            if named != job.segment:
                raise InvalidRequest.of("segment", job.segment, f"the descriptor is of {named!r}")
            self._segments.open(job.descriptor)
            if job.segment in self._callers:
                self._segments.release(job.segment)
        elif job.segment not in self._callers:
            raise UnknownInstance(
                f"segment_descriptor: none is known here of segment {job.segment!r}", field="segment_descriptor"
            )
        self._callers[job.segment] = self._clock_ns()
        self._callers.move_to_end(job.segment)
        if len(self._callers) > MAX_CALLERS:
            self._segments.release(self._callers.popitem(last=False)[0])
        return job.segment

    async def _written_below(self, putting: _Putting) -> None:
        """Waits a little for the tier below to take blocks that would have to be evicted."""
        if self._tiering is None:
            return
        waits = []
        for nbytes, positions in self._wanted(putting)[1].items():
            with contextlib.suppress(Overloaded):
                partition = self._partitions.room(putting.job.layout, nbytes, len(positions))
                self._tiering.follow(partition)
                waits.append(self._tiering.room(partition, len(positions), BELOW_S))
        await asyncio.gather(*waits)

    async def _begin(self, putting: _Putting) -> bool:
        """Begins an extent for each block that is not here yet, as far as there is room in time. When there is
        nothing else to do, it waits for blocks that other calls write at this moment. Returns whether there are more
        of those."""
        job = putting.job
        start = self._clock_ns()
        until = start + min(int(ROOM_S * NS), (job.deadline_ns - start) // 2)
        while True:
            freed = self._freed
            lacking = self._try(putting)
            left_s = ((until if putting.exhausted else job.deadline_ns) - self._clock_ns()) / NS
            if not lacking or left_s <= 0 or (putting.begun and not putting.exhausted):
                break
            try:
                await asyncio.wait_for(freed.wait(), min(left_s, LOOK_S))
            except TimeoutError:
                continue
        if lacking:
            _note(putting, putting.exhausted or Unavailable("another call writes it"))
        return bool(lacking) and not putting.exhausted

    def _wanted(self, putting: _Putting) -> tuple[list[int], dict[int, list[int]]]:
        """Returns the positions of blocks that are neither begun nor here, and, by bytes of an extent, those of them
        that nobody writes and that may be pinned as the caller wishes. So nothing is evicted for a block that must not
        be pinned."""
        job, stores = putting.job, [one.store for one in self._partitions.family(putting.job.layout)]
        hard = job.pin == pb.PIN_KIND_HARD
        extents = {size: size_class(size) if job.layout == BYTES else size for size in set(job.sizes)}
        putting.exhausted = None
        groups: dict[int, list[int]] = {}
        lacking = []
        pinning = [0, 0]  # blocks that this call will pin, and their bytes
        for at, (key, size) in enumerate(zip(job.keys, job.sizes, strict=True)):
            found = _holding(stores, key)
            if at in putting.begun or found is not None:
                if hard and (found is None or not found.pinned_hard([key])[0]):
                    pinning = [pinning[0] + 1, pinning[1] + extents[size]]
            elif at not in putting.read and not putting.watch.gone(key):
                lacking.append(at)
                if not any(store.writing(key) for store in stores):
                    groups.setdefault(extents[size], []).append(at)
        for nbytes, positions in list(groups.items()) if hard else ():
            more = [pinning[0] + len(positions), pinning[1] + nbytes * len(positions)]
            try:
                self._partitions.may_pin(*more)
                pinning = more
            except Overloaded as error:
                putting.exhausted = error
                del groups[nbytes]
        return lacking, groups

    def _try(self, putting: _Putting) -> list[int]:
        """Begins what can be begun; returns the positions of blocks that are neither begun nor here."""
        job = putting.job
        lacking, groups = self._wanted(putting)
        for nbytes, positions in groups.items():
            try:
                partition = self._partitions.room(job.layout, nbytes, len(positions))
            except Overloaded as error:
                putting.exhausted = error
                continue
            store = partition.store
            begun = store.begin([job.keys[at] for at in positions])
            for at, extent in zip(positions, begun, strict=True):
                if extent is not None:
                    putting.begun[at] = (partition, extent)
            missing = sum(extent is None for extent in begun)
            if missing:
                full = StoreExhausted(missing, store.usage, store.next_expiry)
                putting.exhausted = Overloaded(f"{partition.shard_bytes} bytes a block: {full}")
                putting.retry_ns = store.next_expiry or 0
        return [at for at in lacking if at not in putting.begun]

    async def _read(self, putting: _Putting) -> None:
        """READs what was begun, verifies and seals it: nothing is `begun` afterwards."""
        job = putting.job
        order = sorted(putting.begun)
        places = [putting.begun[at] for at in order]
        sizes = tuple(job.sizes[at] for at in order)
        landing = tuple(partition.offset(0, extent) for partition, extent in places)
        opened = m.PullOpen(
            0,
            job.segment,
            tuple(job.offsets[at] for at in order),
            landing,
            max(sizes),
            job.deadline_ns,
            TrafficClass.PREFETCH,
            sizes,
            job.ticket,
            job.ticket_offset,
        )
        # The rank writes into these extents until it has answered, or is gone: this must not be cancelled.
        said = await self._pulls.read(0, opened)
        if said is None or said.cause:
            _note(putting, Unavailable(said.cause if said is not None else "the memory of this node is gone"))
            self._forget(job.segment)
        arrived = list(said.arrived) if said is not None else []
        wrong = await self._wrong(putting, order, arrived, landing, sizes) if job.checksums and arrived else set()
        good = {order[i] for i in arrived if i not in wrong}
        putting.read.update(order)
        for at, (partition, _) in list(putting.begun.items()):
            del putting.begun[at]
            if at in good and not putting.watch.gone(job.keys[at]):
                partition.store.seal(job.keys[at], job.sizes[at])
            else:
                partition.store.abandon(job.keys[at])
        self.freed()  # those who wait for these keys look again

    async def _wrong(
        self, putting: _Putting, order: Sequence[int], arrived: list[int], landing: Sequence[int], sizes: Sequence[int]
    ) -> set[int]:
        """Returns the positions whose bytes here do not have the checksum that the caller gave."""
        try:
            sums = await self._sums.sums(0, [(landing[i], sizes[i]) for i in arrived], SUM_S)
        except KvmeshError as error:
            _note(putting, error)
            return set(arrived)
        told = putting.job.checksums
        wrong = {i for i, found in zip(arrived, sums, strict=True) if found != told[order[i]]}
        if wrong:
            why = f"checksum: the bytes of {len(wrong)} blocks are not those that were promised"
            _note(putting, Unavailable(why, field="checksum"))
        return wrong

    def _forget(self, segment: str) -> None:
        """Forgets a caller's segment, whose descriptor may be out of date: the next call brings another one."""
        if self._callers.pop(segment, None) is not None:
            self._segments.release(segment)

    def _pinned(self, putting: _Putting) -> bytes:
        """Returns which blocks are held now, pinned as the caller wishes."""
        job, held = putting.job, bytearray(len(putting.job.keys))
        family = self._partitions.family(job.layout)
        stores = [one.store for one in family]
        places: dict[NodeStore, list[int]] = {}
        for at, key in enumerate(job.keys):
            found = _holding(stores, key)
            if found is not None and not putting.watch.gone(key):
                held[at] = 1
                places.setdefault(found, []).append(at)
        for partition in family:
            positions = places.get(partition.store)
            if positions is None:
                continue
            keys = [job.keys[at] for at in positions]
            try:
                pin(self._partitions, partition, keys, job.pin, job.pin_ns, self._lease_clock_ns())
            except Overloaded as error:
                _note(putting, error)
                for at in positions:
                    held[at] = 0
        return bytes(held)


def _note(putting: _Putting, why: KvmeshError) -> None:
    putting.why.setdefault(why.message, why)


def _holding(stores: Sequence[NodeStore], key: bytes) -> NodeStore | None:
    """Returns the store in which the key is sealed. It is a plain loop, as it runs for each key of each put."""
    for store in stores:
        if store.holds(key):
            return store
    return None


def pin(
    partitions: Partitions, partition: Partition, keys: Sequence[bytes], kind: int, duration_ns: int, now: int
) -> list[bool]:
    """Pins or unpins as `PinKind` says; returns whether each block is. Raises Overloaded, and pins none, when too much
    would be pinned hard."""
    store = partition.store
    if kind == pb.PIN_KIND_SOFT:
        return store.pin(keys, duration_ns, now)
    if kind == pb.PIN_KIND_HARD:
        pinned = store.pinned_hard(keys)
        new = sum(store.holds(key) and not yes for key, yes in zip(keys, pinned, strict=True))
        partitions.may_pin(new, new * partition.shard_bytes)
        return store.pin_hard(keys)
    if kind == pb.PIN_KIND_NONE:
        store.unpin(keys)
    return [store.holds(key) for key in keys]


def check_pins(partitions: Partitions, wanted: Sequence[tuple[Partition, Sequence[bytes]]]) -> None:
    """Raises Overloaded when these blocks, of several partitions, must not all be pinned hard."""
    blocks = nbytes = 0
    for partition, keys in wanted:
        new = partition.store.check_pins(keys)
        blocks += len(new)
        nbytes += len(new) * partition.shard_bytes
    partitions.may_pin(blocks, nbytes)
