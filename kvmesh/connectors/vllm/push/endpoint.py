"""The control channel of one vLLM worker: a small gRPC server that other workers ask to push, and calls to theirs.

Everything runs on an event loop in a thread of its own, as vLLM's workers have none. Messages and calls at once are
bounded, each call has a deadline, and TLS and permissions are those of every other listener of kvmesh.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import uvloop

from kvmesh.connectors.vllm.config import ConnectorConfig
from kvmesh.errors import KvmeshError
from kvmesh.rpc import channels
from kvmesh.rpc.call_limits import CallLimits
from kvmesh.rpc.pb import vllm_pb2 as pb
from kvmesh.rpc.pb import vllm_pb2_grpc
from kvmesh.rpc.server import Server, join
from kvmesh.rpc.status import called

log = logging.getLogger(__name__)

LIMITS = CallLimits(message_bytes=1 << 20, calls=512, streams=512, connections=4_096, idle_s=300.0, watchers=16)
MAX_CHANNELS = 64  # to other workers; the one that was used longest ago is closed
MAX_RELEASES = 256  # under way; another one is left to the holder's own time
RELEASE_S = 2.0
START_S, CLOSE_S = 30.0, 5.0
SERVICE = pb.DESCRIPTOR.services_by_name["PagePush"].full_name

T = TypeVar("T")


class PushHandler(Protocol):
    """Serves the two calls of PagePush."""

    async def push(self, request: pb.PushPagesRequest, deadline: float) -> None: ...

    def release(self, request: pb.ReleasePagesRequest) -> bool: ...


class PagePushServicer(vllm_pb2_grpc.PagePushServicer):
    """Passes calls to the handler, with the deadline that the caller has set."""

    def __init__(self, handler: PushHandler, longest_s: float) -> None:
        self._handler = handler
        self._longest_s = longest_s

    async def Push(self, request: pb.PushPagesRequest, context: Any) -> pb.PushPagesResponse:  # noqa: N802
        left_s = context.time_remaining()
        left_s = self._longest_s if left_s is None else min(left_s, self._longest_s)
        await self._handler.push(request, time.monotonic() + left_s)
        return pb.PushPagesResponse()

    async def Release(self, request: pb.ReleasePagesRequest, context: Any) -> pb.ReleasePagesResponse:  # noqa: N802
        return pb.ReleasePagesResponse(held=self._handler.release(request))


class PushEndpoint:
    """Listens for one rank and calls others. Its owner must `close` it."""

    def __init__(self, config: ConnectorConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvmesh-push-control", daemon=True)
        self._thread.start()
        self._server: Server | None = None
        self._channels: OrderedDict[str, Any] = OrderedDict()  # of the loop alone
        self._ending: set[asyncio.Task[None]] = set()
        self._releases: set[concurrent.futures.Future[None]] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def listen(self, handler: PushHandler) -> str:
        """Begins to listen and returns the address that others dial. Raises ConfigError when the port is in use."""
        return self._run(self._listen(handler)).result(START_S)

    async def _listen(self, handler: PushHandler) -> str:
        config = self._config
        host = config.client().host
        port = config.push_port + self._rank if config.push_port else 0
        server = Server(host, port, limits=LIMITS)
        servicer = PagePushServicer(handler, config.hold_ms / 1000)
        vllm_pb2_grpc.add_PagePushServicer_to_server(servicer, server.grpc)
        server.serves(SERVICE)
        await server.start()
        server.set_ready(True)
        self._server = server
        return join(config.advertise_host or host, server.port)

    def push(self, address: str, request: pb.PushPagesRequest, timeout_s: float) -> concurrent.futures.Future[None]:
        """Asks a worker to push. The result raises KvmeshError, by the deadline; it may be cancelled."""
        return self._run(self._push(address, request, timeout_s))

    async def _push(self, address: str, request: pb.PushPagesRequest, timeout_s: float) -> None:
        await called(self._stub(address).Push(request, timeout=timeout_s))

    def release(self, address: str, request: pb.ReleasePagesRequest) -> None:
        """Tells a worker that a prompt is not wanted any more, and does not wait. A message that does not arrive is
        made good by the time after which prompts are given back."""
        with self._lock:
            if len(self._releases) >= MAX_RELEASES or self._closed:
                return
            done = self._run(self._release(address, request))
            self._releases.add(done)
        done.add_done_callback(self._released)

    def _released(self, done: concurrent.futures.Future[None]) -> None:
        with self._lock:
            self._releases.discard(done)

    async def _release(self, address: str, request: pb.ReleasePagesRequest) -> None:
        try:
            await called(self._stub(address).Release(request, timeout=RELEASE_S))
        except KvmeshError as error:
            log.info("release of %s at %s: %s", request.prompt.request_id, address, error.message)

    def _stub(self, address: str) -> vllm_pb2_grpc.PagePushAsyncStub:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = channels.connect(address)
            if len(self._channels) > MAX_CHANNELS:
                _, oldest = self._channels.popitem(last=False)
                task = self._loop.create_task(oldest.close(self._config.push_timeout_ms / 1000), name="close channel")
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
        self._channels.move_to_end(address)
        return vllm_pb2_grpc.PagePushStub(channel)

    def _run(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Ends the server, the calls and the thread, within a bounded time."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._run(self._close()).result(2 * CLOSE_S)
        except TimeoutError:
            log.warning("the control channel of rank %d did not end within %.0f s", self._rank, 2 * CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _close(self) -> None:
        if self._server is not None:
            await self._server.stop(0.0)
        await asyncio.gather(*(channel.close() for channel in self._channels.values()), *self._ending)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=CLOSE_S)
