"""Tells the conductor which placed requests are over: many in one call, a moment later. Nobody waits for that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from kvmesh.errors import KvmeshError
from kvmesh.rpc.pb import conductor_pb2
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

AFTER_S = 0.05
CALL_S = 5.0
MOST = 512  # in one call
MAX_WAITING = 65_536

Tell = Callable[[Sequence[conductor_pb2.ReleasedRequest]], Awaitable[None]]


class RequestReleases:
    """What is to be told. It belongs to the event loop; its owner must `close` it. What cannot be told is not told
    again: the conductor forgets a request by itself when its time is over."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._due: list[conductor_pb2.ReleasedRequest] = []
        self._later: dict[str, asyncio.TimerHandle] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def add(
        self, request_id: str, served_by: str, outcome: conductor_pb2.Outcome.ValueType, after_s: float = 0.0
    ) -> None:
        """The request is over, or will be taken for over in `after_s`."""
        told = conductor_pb2.ReleasedRequest(request_id=request_id, served_by=served_by, outcome=outcome)
        if after_s > 0 and len(self._later) < MAX_WAITING and not self._closed:
            loop = asyncio.get_running_loop()
            self._later[request_id] = loop.call_later(after_s, self._now, request_id, told)
            return
        self._put(told)

    def _now(self, request_id: str, told: conductor_pb2.ReleasedRequest) -> None:
        self._later.pop(request_id, None)
        self._put(told)

    def _put(self, told: conductor_pb2.ReleasedRequest) -> None:
        if len(self._due) >= MAX_WAITING:
            names.PICKER_RELEASES.labels(outcome="lost").inc()
            return
        self._due.append(told)
        if self._task is None and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._send(), name="tell of requests that are over")

    async def _send(self) -> None:
        try:
            while self._due:
                await asyncio.sleep(0 if len(self._due) >= MOST else AFTER_S)
                await self._flush()
        finally:
            self._task = None

    async def _flush(self) -> None:
        some, self._due = self._due[:MOST], self._due[MOST:]
        try:
            async with asyncio.timeout(CALL_S):
                await self._tell(some)
        except (KvmeshError, TimeoutError) as error:
            log.warning(
                "the conductor was not told of %d requests that are over: %s",
                len(some),
                error or f"no answer within {CALL_S:g} s",
            )
            names.PICKER_RELEASES.labels(outcome="lost").inc(len(some))
        else:
            names.PICKER_RELEASES.labels(outcome="told").inc(len(some))

    async def close(self) -> None:
        """Tells what is due, once, within CALL_S a call."""
        self._closed = True
        for timer in self._later.values():
            timer.cancel()
        self._later.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self._due:
            await self._flush()
