"""NodeStore over gRPC: blocks that come here from elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvmesh.blockservice.block_rpcs import pin_in
from kvmesh.blockservice.copies import CopyRequest
from kvmesh.blockservice.puts import PutJob
from kvmesh.blockservice.rpc_checks import (
    MAX_TEXT,
    MAX_U63,
    MS,
    ServedNode,
    as_many,
    keys_in,
    layout_in,
    order_in,
    ranges_in,
    takes_more,
    within,
)
from kvmesh.errors import InvalidRequest, Overloaded
from kvmesh.rpc import status
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.transfer import TrafficClass

MAX_PULLS = 16  # at others' wish, at once
MAX_PUTS = 64
MAX_TIMEOUT_MS = 60_000
MAX_DESCRIPTOR = 1 << 20

T = TypeVar("T")


class CopyRpcs:
    """Part of NodeStoreServicer. What was begun goes on, and counts, though its caller has hung up."""

    _node: ServedNode
    _clock_ns: Callable[[], int] = time.monotonic_ns
    _pulls = 0
    _puts = 0

    async def Pull(self, request: pb.PullBlocksRequest, context: Any) -> pb.PullBlocksResponse:  # noqa: N802
        """Raises InvalidRequest, Overloaded, StaleTerm. Blocks that could not be had are simply not held afterwards."""
        node = self._node
        keys = keys_in(request.keys)
        layout = layout_in(request.layout, any_=True)
        within("timeout_ms", request.timeout_ms, 1, MAX_TIMEOUT_MS)
        ranges = ranges_in(request.holders, len(keys), node.ref.instance_id)
        order_in(node, request.term)
        takes_more(node)
        if self._pulls >= MAX_PULLS:
            raise Overloaded(f"{MAX_PULLS} pulls are running here", retry_after_ms=100)
        klass = TrafficClass.BACKGROUND if request.background else TrafficClass.PREFETCH
        if request.pins and layout:
            raise InvalidRequest.of("layout", layout, "must be empty with pins")
        wish = CopyRequest(
            tuple(keys), tuple(ranges), layout, request.shard_bytes, request.timeout_ms, klass, request.pins
        )
        self._pulls += 1
        return pb.PullBlocksResponse(held=await _outliving(node.copies.pull(wish), self._pull_ended))

    def _pull_ended(self) -> None:
        self._pulls -= 1

    async def Put(self, request: pb.PutBlocksRequest, context: Any) -> pb.PutBlocksResponse:  # noqa: N802
        """Raises InvalidRequest, UnknownInstance (segment_descriptor), Overloaded."""
        now = self._clock_ns()
        job = self._put_in(request, now)
        takes_more(self._node)
        if self._puts >= MAX_PUTS:
            raise Overloaded(f"{MAX_PUTS} puts are running here", retry_after_ms=50)
        self._puts += 1
        held, why_not = await _outliving(self._node.puts.put(job), self._put_ended)
        answer = pb.PutBlocksResponse(held=held)
        if why_not is not None:
            answer.why_not = why_not.message
            answer.reason.CopyFrom(status.to_detail(why_not))
        return answer

    def _put_ended(self) -> None:
        self._puts -= 1
        self._node.leases_changed()  # soft pins end, though nobody waits for this put any more

    def _put_in(self, request: pb.PutBlocksRequest, now: int) -> PutJob:
        keys = keys_in(request.keys)
        layout = layout_in(request.layout)
        if not 0 < len(request.segment) <= MAX_TEXT:
            raise InvalidRequest.of("segment", request.segment, f"must have 1..{MAX_TEXT} characters")
        if len(request.segment_descriptor) > MAX_DESCRIPTOR:
            size = len(request.segment_descriptor)
            raise InvalidRequest.of("segment_descriptor", size, f"must have at most {MAX_DESCRIPTOR} bytes")
        as_many("offset", request.offset, keys)
        as_many("nbytes", request.nbytes, keys)
        if request.checksum:
            as_many("checksum", request.checksum, keys)
        capacity = self._node.partitions.capacity_bytes
        for offset, nbytes in zip(request.offset, request.nbytes, strict=True):
            within("nbytes", nbytes, 1, capacity)
            within("offset", offset, 0, MAX_U63 - capacity)
        within("ticket_offset", request.ticket_offset, 0, MAX_U63)
        within("read_within_ms", request.read_within_ms, 1, MAX_TIMEOUT_MS)
        kind, pin_ns = pin_in("pin", request.pin, "pin_ttl_ms", request.pin_ttl_ms)
        return PutJob(
            keys=tuple(keys),
            layout=layout,
            segment=request.segment,
            descriptor=request.segment_descriptor,
            offsets=tuple(request.offset),
            sizes=tuple(request.nbytes),
            deadline_ns=now + request.read_within_ms * MS,
            pin=kind,
            pin_ns=pin_ns,
            checksums=tuple(request.checksum),
            ticket=request.ticket,
            ticket_offset=request.ticket_offset,
        )


async def _outliving(work: Coroutine[Any, Any, T], ended: Callable[[], None]) -> T:
    """What it returns; it goes on when its caller is cancelled. `ended` is called when it is over."""
    task = asyncio.ensure_future(work)

    def done(task: asyncio.Future[T]) -> None:
        ended()
        if not task.cancelled():
            task.exception()  # heard by the caller, if there still is one

    task.add_done_callback(done)
    return await asyncio.shield(task)
