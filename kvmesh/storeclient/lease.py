"""A lease as its reader sees it, and READs under it.

It is counted from before the request, less 10 %: by that count it is over before it is over at the holder. What was
read later than that is discarded. What was read in time counts when its checksum is right, or when the holder has
confirmed, as the lease is given back, that it was open until then: a reader whose clocks have all stood still cannot
know (docs/adr/0032-seals-are-confirmed.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.clock import lease_clock_ns
from kvmesh.errors import KvmeshError, TransferError, UnknownInstance
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.storeclient.choice import Holder
from kvmesh.storeclient.gather import Shard
from kvmesh.storeclient.memory import ended
from kvmesh.storeclient.peers import Peer, Peers
from kvmesh.transfer import BatchId, TransferEngine, TransferRequest, TransferState

LAYOUT = "bytes"  # of public blocks: any length, nothing known of what they hold
CALL_S = 5.0  # a holder that has not answered by then is passed over; from SSD the answer takes a read
RELEASE_S = 1.0
RELEASE_AFTER_S = 0.005
RELEASED = 1024  # leases of one call
MS = 1_000_000  # ns
HERE_BYTES = 1 << 20  # of mapped memory are copied sooner than two threads are woken
HERE_S = 0.002
UNCONFIRMED = "the lease ran out: its holder has not confirmed that it was open until the last byte was here"


@dataclass(eq=False, slots=True)
class Lease:
    """`shards`: of the keys that are held, positions among those asked for; `checksums` beside them, when asked for."""

    peer: Peer
    lease_id: int
    until_ns: int
    granted_ms: int
    segment: str
    shards: list[Shard]
    tiers: dict[int, Tier]
    checksums: dict[int, int]
    over: bool = False
    landed: list[Shard] = field(default_factory=list)  # read in time; they count when the lease is confirmed

    def holds_at(self, when_ns: int) -> bool:
        """Whether what was read until then counts."""
        return not self.over and when_ns <= self.until_ns


class Releases:
    """Leases that are done with. Those whose readers wait for the answer (`confirm`) go at once, together with whatever
    else is due at that node; while such a call is under way others gather for the next one. The rest are given back
    together a moment later: a lease that is not given back ends by itself. On the event loop; `close` it."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._due: dict[str, list[int]] = {}  # address → lease ids
        self._asked: dict[int, asyncio.Future[bool]] = {}  # lease id → whether it was open until now
        self._calling: set[str] = set()  # addresses that are to answer
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def give_back(self, lease: Lease) -> None:
        if lease.over:
            return
        self._due.setdefault(lease.peer.address, []).append(lease.lease_id)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(RELEASE_AFTER_S, self._send)

    async def confirm(self, lease: Lease) -> bool:
        """Give it back and hear whether it was open until now: what was read under it is right. Within RELEASE_S, or
        about twice that where many wait. A holder that does not answer, or does not say, has not confirmed."""
        if lease.over:
            return False
        address = lease.peer.address
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked[lease.lease_id] = answer
        lease.over = True  # given back
        self._due.setdefault(address, []).append(lease.lease_id)
        if address not in self._calling:
            self._send_to(address)
        return await answer

    def _send(self) -> None:
        self._timer = None
        for address in list(self._due):
            self._send_to(address)

    def _send_to(self, address: str) -> None:
        if not (ids := self._due.pop(address, [])):
            return
        if rest := ids[RELEASED:]:
            self._due[address] = rest
        self._calling.add(address)
        task = asyncio.get_running_loop().create_task(self._call(address, ids[:RELEASED]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, address: str, ids: list[int]) -> None:
        held = b""
        try:
            async with self._peers.use(address) as peer:
                with contextlib.suppress(KvmeshError):
                    request = pb.ReleaseBlocksRequest(lease_id=ids[0], also=ids[1:])
                    held = (await peer.call("ReleaseLease", request, RELEASE_S)).held
        finally:
            for at, lease_id in enumerate(ids):
                asked = self._asked.pop(lease_id, None)
                if asked is not None and not asked.done():
                    asked.set_result(len(held) == len(ids) and held[at] == 1)
            self._calling.discard(address)
            if not self._closed:
                self._send_to(address)

    async def close(self) -> None:
        """What is due is sent; ends within RELEASE_S."""
        if self._timer is not None:
            self._timer.cancel()
            self._send()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=RELEASE_S)
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(False)


async def ask(
    peer: Peer,
    peers: Peers,
    holder: Holder,
    keys: Sequence[bytes],
    releases: Releases,
    *,
    reader: str,
    lease_ms: int,
    checksums: bool,
    timeout_s: float,
) -> Lease | None:
    """None: it holds none of them. KvmeshError: it does not answer, or what it says makes no sense."""
    known = peer.segments.get(holder.incarnation)
    asked_ns = lease_clock_ns()
    request = pb.LeaseRequest(
        reader=reader,
        holder_incarnation=holder.incarnation,
        keys=b"".join(keys),
        lease_ms=lease_ms,
        layout=LAYOUT,
        want_descriptors=known is None,
        want_checksums=checksums,
    )
    answer: pb.LeaseResponse = await peer.call("Lease", request, min(CALL_S, timeout_s))
    if not answer.lease_id:
        return None
    lease = Lease(peer, answer.lease_id, _until(asked_ns, answer.lease_ms), answer.lease_ms, "", [], {}, {})
    try:
        _fill(lease, answer, len(keys), checksums)
        rank = answer.ranks[0]
        lease.segment = known or peers.learn(peer, holder.incarnation, rank.segment_descriptor)
        if rank.segment != lease.segment:
            raise TransferError(f"{holder.store_id} names a segment that its descriptor does not")
    except TransferError:
        releases.give_back(lease)
        raise
    return lease


def _fill(lease: Lease, answer: pb.LeaseResponse, keys: int, checksums: bool) -> None:
    """Raises TransferError when the holder's answer makes no sense."""
    held = [i for i, here in enumerate(answer.held) if here]
    if len(answer.held) != keys or not held:
        raise TransferError(f"a lease that speaks of {len(answer.held)} keys ({len(held)} held), not of {keys}")
    if len(answer.ranks) != 1 or len(answer.ranks[0].offset) != len(held):
        raise TransferError("a lease whose offsets do not match its blocks")
    if len(answer.nbytes) != len(held) or not all(answer.nbytes):
        raise TransferError("a lease of blocks whose sizes are not told")
    rank = answer.ranks[0]
    lease.shards = [Shard(i, at, n) for i, at, n in zip(held, rank.offset, answer.nbytes, strict=True)]
    tiers = answer.tiers if len(answer.tiers) == keys else bytes([Tier.DRAM]) * keys
    lease.tiers = {i: Tier(tiers[i] or Tier.DRAM) for i in held}
    if checksums:
        if len(rank.checksum) != len(held):
            raise TransferError("a lease without the checksums that were asked for")
        lease.checksums = dict(zip(held, rank.checksum, strict=True))


async def read(
    engine: TransferEngine, lease: Lease, requests: Sequence[TransferRequest], deadline: float, lease_ms: int
) -> list[str]:
    """What went wrong with each READ, "" for those that are here and whose lease held. Returns (also when cancelled, by
    raising) only when nothing of them can land any more."""
    left_s = deadline - time.monotonic()
    if left_s <= 0 or not requests:
        return ["not in time"] * len(requests)
    batch = engine.allocate_batch(len(requests))
    try:
        here = sum(request.length for request in requests) <= HERE_BYTES and _mapped(engine, lease.segment)
        engine.submit(batch, requests, left_s)
        if here:
            engine.wait_sync(batch, HERE_S)  # copies it here and now
        await _landed(engine, batch, lease, deadline, lease_ms)
        lapsed = "" if lease.holds_at(lease_clock_ns()) else "the lease ran out before the last byte was here"
        return [lapsed or _wrong(one.state, one.cause) for one in engine.statuses(batch)]
    finally:
        engine.free_batch(batch)


def _mapped(engine: TransferEngine, segment: str) -> bool:
    """Whether this process itself reads its memory, as a rule."""
    return engine.rails(segment)[0].transport.name == "shm"


def _wrong(state: TransferState, cause: str) -> str:
    return "" if state is TransferState.COMPLETED else cause or state.value


async def _landed(engine: TransferEngine, batch: BatchId, lease: Lease, deadline: float, lease_ms: int) -> None:
    """Until all of the batch is final; renews the lease at half its time, gives up when it or the time is over."""
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
        while not final.done():
            now = time.monotonic()
            half_s = max((lease.until_ns - lease_clock_ns()) * 1e-9 / 2, 0.001)
            done, _ = await asyncio.wait({final}, timeout=min(half_s, max(deadline - now, 0.001)))
            if done:
                return
            if time.monotonic() >= deadline or not await _renewed(lease, lease_ms):
                return
    finally:
        if not final.done():
            engine.cancel(batch)
            await ended(final)  # the engine answers in bounded time, and until then bytes may still land


async def _renewed(lease: Lease, lease_ms: int) -> bool:
    """False: it is over. A holder that does not answer is asked again as long as there is time."""
    asked_ns = lease_clock_ns()
    if asked_ns >= lease.until_ns:
        return False
    request = pb.RenewBlocksRequest(lease_id=lease.lease_id, lease_ms=lease_ms)
    try:
        answer = await lease.peer.call("RenewLease", request, (lease.until_ns - asked_ns) * 1e-9)
    except KvmeshError as error:
        lease.over = isinstance(error, UnknownInstance)
        return not lease.over
    lease.granted_ms = answer.lease_ms
    lease.until_ns = max(lease.until_ns, _until(asked_ns, answer.lease_ms))
    return True


def _until(asked_ns: int, lease_ms: int) -> int:
    return asked_ns + lease_ms * MS * 9 // 10


def worth_forgetting(error: KvmeshError) -> bool:
    """Whether the peer must be dialled afresh after it."""
    return error.retryable or isinstance(error, UnknownInstance)
