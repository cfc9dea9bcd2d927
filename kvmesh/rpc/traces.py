"""Traces of requests that failed or were slow: the process that saw it names them to the others that had a part.

A trace that is not sampled is held by each process for a while (`kvmesh.telemetry.sampling`). The gateway knows how a
request ended and who served it, so it is the one that names them, a moment later and many in one call. Nobody waits for
that: what cannot be told is not told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from kvmesh.errors import InvalidRequest
from kvmesh.rpc import channels
from kvmesh.rpc.pb import traces_pb2 as pb
from kvmesh.rpc.pb import traces_pb2_grpc as pb_grpc
from kvmesh.telemetry import spans

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Traces"].full_name
ID_BYTES = 16
MOST = 1024  # traces in one call, and that wait for one process
MAX_PROCESSES = 256
AFTER_S = 0.2
CALL_S = 1.0


class TracesServicer(pb_grpc.TracesServicer):
    """Serves Traces for one process."""

    async def Keep(self, request: pb.KeepRequest, context: Any) -> pb.KeepResponse:  # noqa: N802
        """Keeps what this process holds of these traces. Raises InvalidRequest."""
        packed = request.trace_ids
        if not packed or len(packed) % ID_BYTES or len(packed) > MOST * ID_BYTES:
            raise InvalidRequest.of("trace_ids", len(packed), f"must be 1 to {MOST} times {ID_BYTES} bytes")
        ids = (int.from_bytes(packed[at : at + ID_BYTES], "big") for at in range(0, len(packed), ID_BYTES))
        return pb.KeepResponse(known=sum(map(spans.keep, ids)))


class TraceKeeper:
    """Names traces to other processes. It belongs to the event loop; its owner must `close` it."""

    def __init__(self) -> None:
        self._due: dict[str, dict[int, None]] = {}  # address → trace ids
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def keep(self, trace_id: int, addresses: Iterable[str]) -> None:
        """Keeps a trace here and, soon, at these processes. It returns at once."""
        spans.keep(trace_id)
        if self._closed:
            return
        for address in addresses:
            if address in self._due or len(self._due) < MAX_PROCESSES:
                ids = self._due.setdefault(address, {})
                if len(ids) < MOST:
                    ids[trace_id] = None
        if self._due and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(AFTER_S, self._send)

    def _send(self) -> None:
        self._timer = None
        due, self._due = self._due, {}
        for address, ids in due.items():
            task = asyncio.get_running_loop().create_task(self._tell(address, list(ids)), name="keep traces")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tell(self, address: str, ids: list[int]) -> None:
        packed = b"".join(trace_id.to_bytes(ID_BYTES, "big") for trace_id in ids)
        try:
            async with channels.connect(address) as channel:
                await pb_grpc.TracesStub(channel).Keep(pb.KeepRequest(trace_ids=packed), timeout=CALL_S)
        except Exception as error:  # a trace is never worth more than a line
            log.info("%d traces of failed requests are not kept at %s: %s", len(ids), address, error)

    async def close(self) -> None:
        """Tells what is due, within CALL_S."""
        if self._timer is not None:
            self._timer.cancel()
            self._send()
        self._closed = True
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CALL_S)
        for task in self._tasks:
            task.cancel()
