"""The way of a put: a node reads the blocks out of our registered memory and seals them; when it does not, the next.

Nobody writes into another's memory, so a put needs no remote allocation and a client that dies poisons nothing.
"""

from __future__ import annotations

import enum
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvmesh.kvcache.client.calls import every
from kvmesh.kvcache.client.choice import Holder, Replica
from kvmesh.kvcache.client.context import ClientContext
from kvmesh.kvcache.client.lease import LAYOUT
from kvmesh.kvcache.client.memory import Data, Span, Staged, copy
from kvmesh.kvcache.client.peers import Peer
from kvmesh.kvcache.client.placement import Candidate, order
from kvmesh.rpc.errors import DeadlinePassed, InvalidRequest, KvmeshError, Overloaded, Unavailable, UnknownInstance
from kvmesh.rpc.pb import blocks_pb2 as pb

log = logging.getLogger(__name__)

PUT_BLOCKS = 1024  # of one call
PUT_BYTES = 256 << 20
ANSWER_S = 1.0  # a node's answer may come so long after the last byte
RETRY_S = 0.05


class Pin(enum.IntEnum):
    """Numbers as in `kvmesh.v1.PinKind`."""

    NONE = 1
    SOFT = 2  # goes after all others, for a time
    HARD = 3  # never evicted


@dataclass(frozen=True, slots=True)
class Block:
    """What is to be sealed, in registered memory."""

    key: bytes
    span: Span


@dataclass(slots=True)
class Put:
    """One block of a put. `store_id`: the node that has sealed it, "": none; then `cause` says why."""

    key: bytes
    nbytes: int
    store_id: str = ""
    cause: str = ""

    @property
    def held(self) -> bool:
        return bool(self.store_id)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a caller wants of a put beside the blocks. `deadline`: monotonic seconds."""

    deadline: float
    verify: bool = False
    pin: Pin | None = None  # None: as it is
    pin_ttl_ms: int = 0

    def left_s(self) -> float:
        return self.deadline - time.monotonic()


@dataclass(slots=True)
class WriteStats:
    blocks: int = 0
    nbytes: int = 0
    refused: int = 0  # calls that a node refused or gave no answer to


class Writer:
    """All puts of one client. On the event loop."""

    def __init__(self, context: ClientContext) -> None:
        self.stats = WriteStats()
        self._config = context.config
        self._engine = context.engine
        self._memory = context.memory
        self._peers = context.peers
        self._directory = context.directory
        self._hints = context.hints
        self._rng = random.Random()

    async def put_data(self, items: Sequence[tuple[bytes, Data]], wish: Wish) -> list[Put]:
        """Through staging, portion by portion, while nodes read the one before. Raises KvmeshError when no master can
        be asked or the time is over; what is wrong with one block is in its `Put`."""
        portions = _portions([len(data) for _, data in items], self._memory.staging_bytes // 4)
        puts = await every(self._staged(items[a:b], wish) for a, b in portions)
        return [one for some in puts for one in some]

    async def _staged(self, items: Sequence[tuple[bytes, Data]], wish: Wish) -> list[Put]:
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
        self, items: Sequence[tuple[bytes, Data]], places: Sequence[int], staged: Staged, wish: Wish
    ) -> list[Put]:
        blocks = []
        for (key, data), at in zip(items, places, strict=True):
            span = staged.span.part(at, len(data))
            await copy(span.memory, data)
            blocks.append(Block(key, span))
        return await self._put(blocks, wish)

    async def put_spans(self, blocks: Sequence[Block], wish: Wish) -> list[Put]:
        """Out of memory that is registered. The memory must stay as it is until this returns or raises; then no node
        can seal anything of it any more. Raises as `put_data`."""
        portions = _portions([block.span.nbytes for block in blocks], PUT_BYTES)
        puts = [await self._put(blocks[a:b], wish) for a, b in portions]
        return [one for some in puts for one in some]

    # ── one portion ──────────────────────────────────────────────────────────────────────────────

    async def _put(self, blocks: Sequence[Block], wish: Wish) -> list[Put]:
        """Ask node after node until each block is held, or nobody is left or the time is over."""
        puts = [Put(block.key, block.span.nbytes) for block in blocks]
        total, largest = sum(put.nbytes for put in puts), max(put.nbytes for put in puts)
        pools = await self._directory.pools(max(wish.left_s(), 0.001))
        nodes = order(pools, self._config.placement, total, largest, self._config.node_id, self._rng)
        if not nodes:
            self._directory.forget_pools()
            start = f"`kvmesh serve pool --store {self._config.store}"
            if not pools:
                raise Unavailable(f"there is no pool node: start one with {start}`")
            most = max((node.capacity_bytes for node in pools if not node.draining), default=0)
            why = f"the largest has {most:,} in all" if most else "all of them drain"
            text = f"none of {len(pools)} pool nodes takes {largest:,} bytes in one: {why}"
            raise Unavailable(f"{text}; start one that does with {start} --memory-mb N`")
        for node in nodes:
            open_ = [i for i, put in enumerate(puts) if not put.held]
            if not open_:
                break
            if wish.left_s() <= 0:
                raise DeadlinePassed(f"{len(open_)} of {len(puts)} blocks were not put in time: {puts[open_[0]].cause}")
            await self._at(node, [blocks[i] for i in open_], [puts[i] for i in open_], wish)
        return puts

    async def _at(self, node: Candidate, blocks: Sequence[Block], puts: Sequence[Put], wish: Wish) -> None:
        """What it takes and why not the rest goes to `puts`. Raises InvalidRequest alone."""
        try:
            async with self._peers.use(node.address) as peer:
                try:
                    answer = await self._ask(peer, node, blocks, wish)
                except Unavailable:
                    self._peers.forget(peer)
                    raise
        except InvalidRequest:
            raise
        except KvmeshError as error:
            self.stats.refused += 1
            if not isinstance(error, Overloaded):
                self._directory.forget_pools()
            log.info("put at %s: %s", node.store_id, error.message)
            for put in puts:
                put.cause = f"{node.store_id}: {error.message}"
            return
        now = time.monotonic()
        holder = Holder(node.store_id, node.address, node.incarnation, node.node_id)
        for put, held in zip(puts, answer.held, strict=True):
            if held:
                put.store_id, put.cause = node.store_id, ""
                self.stats.blocks += 1
                self.stats.nbytes += put.nbytes
                self._hints.learn(put.key, [Replica(holder)], now)
            else:
                put.cause = f"{node.store_id}: {answer.why_not or 'not held'}"

    async def _ask(self, peer: Peer, node: Candidate, blocks: Sequence[Block], wish: Wish) -> pb.PutBlocksResponse:
        """One Put, again with our descriptor when the node wants it."""
        state = self._memory.state
        try:
            if peer.shown.get(node.incarnation, 0) >= state:
                return await self._call(peer, blocks, wish, b"")
        except UnknownInstance:  # another life, or it has forgotten us
            pass
        answer = await self._call(peer, blocks, wish, self._memory.descriptor)
        peer.shown[node.incarnation] = state
        return answer

    async def _call(self, peer: Peer, blocks: Sequence[Block], wish: Wish, descriptor: bytes) -> pb.PutBlocksResponse:
        left_s = wish.left_s()
        within_ms = int(min(self._config.read_within_ms, left_s * 1000))
        if within_ms < 1:
            raise DeadlinePassed("no time is left for it")
        request = pb.PutBlocksRequest(
            keys=b"".join(block.key for block in blocks),
            layout=LAYOUT,
            segment=self._engine.name,
            segment_descriptor=descriptor,
            offset=[block.span.offset for block in blocks],
            nbytes=[block.span.nbytes for block in blocks],
            read_within_ms=within_ms,
            pin=pb.PinKind.ValueType(wish.pin or 0),
            pin_ttl_ms=wish.pin_ttl_ms,
            checksum=[xxhash.xxh3_64_intdigest(block.span.memory) for block in blocks] if wish.verify else (),
        )
        with self._memory.ticket() as ticket:
            request.ticket, request.ticket_offset = ticket.value, ticket.offset
            answer: pb.PutBlocksResponse = await peer.call("Put", request, within_ms / 1000 + ANSWER_S)
        if len(answer.held) != len(blocks):
            raise Unavailable(f"a Put that speaks of {len(answer.held)} blocks, not of {len(blocks)}")
        return answer


def _portions(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """[first, end) of parts of at most PUT_BLOCKS blocks and `most` bytes, each of at least one block."""
    found: list[tuple[int, int]] = []
    first = nbytes = 0
    for i, size in enumerate(sizes):
        if i > first and (i - first >= PUT_BLOCKS or nbytes + size > most):
            found.append((first, i))
            first, nbytes = i, 0
        nbytes += size
    return [*found, (first, len(sizes))] if sizes else []
