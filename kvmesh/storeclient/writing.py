"""In a put a node reads the blocks out of the client's registered memory and seals them; when it does not, the next one
is asked.

Nobody writes into another's memory, so a put needs no remote allocation, and a client that dies corrupts nothing.
"""

from __future__ import annotations

import enum
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import xxhash

from kvmesh.blockservice.peers import Peer
from kvmesh.errors import (
    DeadlinePassed,
    InvalidRequest,
    KvmeshError,
    Overloaded,
    PinLimit,
    RequestCancelled,
    Unavailable,
    UnknownInstance,
)
from kvmesh.kvcache.size_classes import BYTES
from kvmesh.rpc import status
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.storeclient.calls import every, in_thread
from kvmesh.storeclient.context import ClientContext
from kvmesh.storeclient.memory import INLINE_COPY, Data, Span, Staged, copy
from kvmesh.storeclient.placement import PoolCandidate, order, takes
from kvmesh.storeclient.replicas import Holder, Replica
from kvmesh.telemetry.spans import ambient

log = logging.getLogger(__name__)

PUT_BLOCKS = 1024  # blocks in one call
PUT_BYTES = 256 << 20
ANSWER_S = 1.0  # a node's answer may come so long after the last byte
NEXT_ANSWER_S = 0.5  # the same for a node that is not the last one to ask
SLOW_BYTES_PER_S = 32 << 20  # a node that reads more slowly is passed over, too
CLOCKS_S = 0.05  # by its own clock a node may find so much earlier that the time is over
STALLED_S = 5.0  # how long a node that has not answered is asked after all others
CHECK_BYTES = 1 << 20  # from this size on it is checked that some node takes a value before the value is hashed


class Pin(enum.IntEnum):
    """Says how a block is pinned. The numbers are those of `kvmesh.v1.PinKind`."""

    NONE = 1
    SOFT = 2  # evicted after all others, for a time
    HARD = 3  # never evicted


@dataclass(frozen=True, slots=True)
class Block:
    """Is what is to be sealed, in registered memory."""

    key: bytes
    span: Span


@dataclass(slots=True)
class Put:
    """Is one block of a put. `store_id` is the node that has sealed it; "" if none has: then `cause` says why, and
    `error` is what `put` would raise."""

    key: bytes
    nbytes: int
    store_id: str = ""
    cause: str = ""
    error: KvmeshError | None = field(default=None, compare=False)

    @property
    def held(self) -> bool:
        return bool(self.store_id)


@dataclass(frozen=True, slots=True)
class PutOptions:
    """Has what a caller wants of a put beside the blocks. `deadline` is in monotonic seconds."""

    deadline: float
    verify: bool = False
    pin: Pin | None = None  # None: a block that is held already keeps its pin
    pin_ttl_ms: int = 0

    def left_s(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(slots=True)
class WriteStats:
    blocks: int = 0
    nbytes: int = 0
    refused: int = 0  # calls that a node refused or gave no answer to


class BlockWriter:
    """Carries out all puts of one client. It belongs to the event loop."""

    def __init__(self, context: ClientContext) -> None:
        self.stats = WriteStats()
        self._config = context.config
        self._engine = context.engine
        self._memory = context.memory
        self._peers = context.peers
        self._directory = context.directory
        self._hints = context.hints
        self._rng = random.Random()
        # (store, incarnation) of a node that did not answer → until when it is asked last
        self._stalled: dict[tuple[str, int], float] = {}

    async def check(self, nbytes: int, deadline: float) -> None:
        """Checks the size of a value before its bytes are touched. Raises InvalidRequest when it is larger than what
        any node takes, Unavailable when there is no node."""
        if nbytes >= CHECK_BYTES:
            await self._pools(nbytes, deadline)

    async def put_data(self, items: Sequence[tuple[bytes, Data]], wish: PutOptions) -> list[Put]:
        """Puts blocks through staging, portion by portion, while nodes read the portion before. Raises KvmeshError when
        no master can be asked or the time is over; what is wrong with one block is in its `Put`."""
        portions = _portions([len(data) for _, data in items], self._memory.staging_bytes // 4)
        puts = await every(self._staged(items[a:b], wish) for a, b in portions)
        return [one for some in puts for one in some]

    async def _staged(self, items: Sequence[tuple[bytes, Data]], wish: PutOptions) -> list[Put]:
        places = []
        at = 0
        for _, data in items:
            places.append(at)
            at += -(-len(data) // 64) * 64
        staged = await self._memory.stage(at, wish.deadline)
        try:
            return await self._from_staging(items, places, staged, wish)
        finally:
            self._memory.give_back(staged)

    async def _from_staging(
        self, items: Sequence[tuple[bytes, Data]], places: Sequence[int], staged: Staged, wish: PutOptions
    ) -> list[Put]:
        blocks = []
        for (key, data), at in zip(items, places, strict=True):
            span = staged.span.part(at, len(data))
            await copy(span.memory, data)
            blocks.append(Block(key, span))
        return await self._put(blocks, wish)

    async def put_spans(self, blocks: Sequence[Block], wish: PutOptions) -> list[Put]:
        """Puts blocks out of registered memory, which must not change until this returns or raises; from then on no
        node can seal anything of it. Raises as `put_data` does."""
        portions = _portions([block.span.nbytes for block in blocks], PUT_BYTES)
        puts = [await self._put(blocks[a:b], wish) for a, b in portions]
        return [one for some in puts for one in some]

    # ── one portion ──────────────────────────────────────────────────────────────────────────────

    async def _put(self, blocks: Sequence[Block], wish: PutOptions) -> list[Put]:
        """Asks node after node until each block is held, no node is left, or the time is over."""
        puts = [Put(block.key, block.span.nbytes) for block in blocks]
        total, largest = sum(put.nbytes for put in puts), max(put.nbytes for put in puts)
        pools = await self._pools(largest, wish.deadline)
        nodes = order(pools, self._config.placement, total, largest, self._config.node_id, self._rng)
        if self._stalled:
            nodes.sort(key=self._is_stalled)
        for node in nodes:
            open_ = [i for i, put in enumerate(puts) if not put.held]
            if not open_:
                break
            if wish.left_s() <= 0:
                raise DeadlinePassed(f"{len(open_)} of {len(puts)} blocks were not put in time: {puts[open_[0]].cause}")
            await self._at(node, [blocks[i] for i in open_], [puts[i] for i in open_], wish, node is nodes[-1])
        return puts

    async def _pools(self, largest: int, deadline: float) -> list[PoolCandidate]:
        """Returns all nodes, if at least one takes such a block; a master that does not know all nodes is asked
        again."""

        def able(nodes: Sequence[PoolCandidate]) -> bool:
            return any(takes(node, largest) for node in nodes)

        pools = await self._directory.pools(max(deadline - time.monotonic(), 0.001), able)
        if able(pools):
            return pools
        self._directory.forget_pools()
        start = f"`kvmesh serve pool --store {self._config.store}"
        if not pools:
            raise Unavailable(f"there is no pool node: start one with {start}`")
        most = max((node.capacity_bytes for node in pools if not node.draining), default=0)
        if not most:
            raise Unavailable(f"all of {len(pools)} pool nodes drain; start another one with {start}`")
        why = f"none of {len(pools)} pool nodes takes so much in one, the largest has {most:,} bytes in all"
        raise InvalidRequest(f"data: {largest:,} bytes: {why}; start one with {start} --memory-mb N`", field="data")

    def _is_stalled(self, node: PoolCandidate) -> bool:
        return self._stalled.get((node.store_id, node.incarnation), 0.0) > time.monotonic()

    def _note_stalled(self, node: PoolCandidate) -> None:
        now = time.monotonic()
        self._stalled = {life: until for life, until in self._stalled.items() if until > now}
        self._stalled[node.store_id, node.incarnation] = now + STALLED_S

    async def _at(
        self, node: PoolCandidate, blocks: Sequence[Block], puts: Sequence[Put], wish: PutOptions, last: bool
    ) -> None:
        """Puts blocks at one node; `puts` get what it takes, and why not the rest. With `last` no other node is asked
        after it, so it has all the time. Raises nothing but InvalidRequest."""
        within_s = self._within_s(sum(put.nbytes for put in puts), wish, last)
        asked = time.monotonic()
        try:
            async with self._peers.use(node.address) as peer:
                try:
                    answer = await self._ask(peer, node, blocks, wish, within_s, last)
                except Unavailable:
                    self._peers.forget(peer)
                    raise
        except InvalidRequest:
            raise
        except KvmeshError as raised:
            error = raised
            if isinstance(error, DeadlinePassed | RequestCancelled):  # which one depends on whose clock was first
                self._note_stalled(node)
                text = f"it has not answered within {time.monotonic() - asked:.1f} s"
                error = Unavailable(text) if wish.left_s() > CLOCKS_S else DeadlinePassed(text)
            self.stats.refused += 1
            if not isinstance(error, Overloaded):
                self._directory.forget_pools()
            log.info("put at %s: %s", node.store_id, error.message)
            for put in puts:
                _refuse(put, node, error)
            return
        now = time.monotonic()
        if now - asked >= within_s and not any(answer.held):
            self._note_stalled(node)  # what reads for it stands still
        why = status.from_detail(answer.reason) if answer.reason.code else Unavailable(answer.why_not or "not held")
        holder = Holder(node.store_id, node.address, node.incarnation, node.node_id)
        for put, held in zip(puts, answer.held, strict=True):
            if held:
                put.store_id, put.cause, put.error = node.store_id, "", None
                self.stats.blocks += 1
                self.stats.nbytes += put.nbytes
                self._hints.learn(put.key, [Replica(holder)], now)
            else:
                _refuse(put, node, why)

    def _within_s(self, nbytes: int, wish: PutOptions, last: bool) -> float:
        """Returns in how many seconds a node must have read so many bytes."""
        within_s = min(self._config.read_within_ms / 1000, wish.left_s())
        return within_s if last else min(within_s, self._config.put_stall_ms / 1000 + nbytes / SLOW_BYTES_PER_S)

    async def _ask(
        self, peer: Peer, node: PoolCandidate, blocks: Sequence[Block], wish: PutOptions, within_s: float, last: bool
    ) -> pb.PutBlocksResponse:
        """Makes one Put, again with the client's descriptor when the node needs it."""
        until = time.monotonic() + within_s
        state = self._memory.state
        try:
            if peer.shown.get(node.incarnation, 0) >= state:
                return await self._call(peer, blocks, wish, b"", until, last)
        except UnknownInstance:  # another incarnation, or it has forgotten this client's segment
            pass
        answer = await self._call(peer, blocks, wish, self._memory.descriptor, until, last)
        peer.shown[node.incarnation] = state
        return answer

    async def _call(
        self, peer: Peer, blocks: Sequence[Block], wish: PutOptions, descriptor: bytes, until: float, last: bool
    ) -> pb.PutBlocksResponse:
        within_ms = int((until - time.monotonic()) * 1000)
        if within_ms < 1:
            raise DeadlinePassed("no time is left for it")
        request = pb.PutBlocksRequest(
            keys=b"".join(block.key for block in blocks),
            layout=BYTES,
            segment=self._engine.name,
            segment_descriptor=descriptor,
            offset=[block.span.offset for block in blocks],
            nbytes=[block.span.nbytes for block in blocks],
            read_within_ms=within_ms,
            pin=pb.PinKind.ValueType(wish.pin or 0),
            pin_ttl_ms=wish.pin_ttl_ms,
            checksum=await _checksums(blocks) if wish.verify else (),
            traceparent=ambient(),
        )
        request.removed_seq, request.removed_ago_ms = self._directory.removed
        with self._memory.ticket() as ticket:
            request.ticket, request.ticket_offset = ticket.value, ticket.offset
            wait_s = min(within_ms / 1000 + (ANSWER_S if last else NEXT_ANSWER_S), max(wish.left_s(), 0.001))
            answer: pb.PutBlocksResponse = await peer.call("Put", request, wait_s)
        if len(answer.held) != len(blocks):
            raise Unavailable(f"a Put that speaks of {len(answer.held)} blocks, not of {len(blocks)}")
        return answer


def _refuse(put: Put, node: PoolCandidate, error: KvmeshError) -> None:
    """Records a refusal. Of several the one counts that tells most of what to do: that a node is full, then that one
    could not be asked, then that too much is pinned at one."""
    if put.error is not None and _rank(error) < _rank(put.error):
        return
    put.cause = f"{node.store_id}: {error.message}"
    put.error = error


def _rank(error: KvmeshError) -> int:
    return 0 if isinstance(error, PinLimit) else 2 if isinstance(error, Overloaded) else 1


async def _checksums(blocks: Sequence[Block]) -> list[int]:
    """Returns the checksums of blocks; those of much data are made in a thread."""
    work = partial(_summed, [block.span.memory for block in blocks])
    return await in_thread(work) if sum(block.span.nbytes for block in blocks) > INLINE_COPY else work()


def _summed(memories: Sequence[memoryview]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(memory) for memory in memories]


def _portions(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Returns [first, end) of parts of at most PUT_BLOCKS blocks and `most` bytes, each of at least one block."""
    found: list[tuple[int, int]] = []
    first = nbytes = 0
    for i, size in enumerate(sizes):
        if i > first and (i - first >= PUT_BLOCKS or nbytes + size > most):
            found.append((first, i))
            first, nbytes = i, 0
        nbytes += size
    return [*found, (first, len(sizes))] if sizes else []
