"""Calls of one service at one address: over the fast path when there is one, else over gRPC."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from kvmesh.errors import InternalError, KvmeshError, ProtocolMismatch
from kvmesh.rpc import status
from kvmesh.rpc.fastpath.calls import unary
from kvmesh.rpc.fastpath.client import FastChannel, Way, dial
from kvmesh.rpc.fastpath.frames import MAX_REQUEST
from kvmesh.rpc.pb import doors_pb2 as pb
from kvmesh.rpc.pb import doors_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

DIAL_S = 2.0
PAUSE_S = 0.5  # after a connection that broke, or an address that does not answer; where none leads, doubled ...
MAX_PAUSE_S = 30.0  # ... up to this
_ROOM = 256  # of a frame, beside the message
FIND_S = 2.0


@dataclass(frozen=True, slots=True)
class FoundPaths:
    """The fast paths to the process that answers at an address now, the best first. `life` is its incarnation;
    `methods` are those that can be called there, None for all; `ticket` is what the process has given to greet with."""

    life: int
    ways: tuple[Way, ...]
    methods: frozenset[str] | None = None
    ticket: bytes = b""


class FastCaller:
    """Calls one service at one address over the fast path, else over gRPC. The first calls go over `channel` (which its
    owner closes) while a fast path is looked for in the background, and so do later ones whenever none is open. `find`
    asks over gRPC where the fast paths are, and raises KvmeshError. It lives on one event loop and must be closed."""

    def __init__(
        self, channel: grpc.aio.Channel, service: ServiceDescriptor, find: Callable[[FastCaller], Awaitable[FoundPaths]]
    ) -> None:
        self._channel = channel
        self._methods = unary(service)
        self._find = find
        self._stubs: dict[str, Any] = {}
        self._fast_path: FastChannel | None = None
        self._served: frozenset[str] | None = None  # over that fast path; None: all
        self._seeking: asyncio.Task[None] | None = None
        self._seek_at = 0.0
        self._pause_s = PAUSE_S
        self._closed = False

    @property
    def by_door(self) -> bool:
        """Whether a call made now would go over the fast path."""
        return self._fast_path is not None and self._fast_path.usable

    async def call(self, name: str, request: Message, timeout_s: float) -> Any:
        """Returns the answer, by whichever path. Raises KvmeshError: the service's own, Unavailable or
        DeadlinePassed."""
        door = self._fast_path
        if door is None or not door.usable:
            self.seek()
            return await self.over_grpc(name, request, timeout_s)
        method = self._methods[name]
        body = request.SerializeToString()
        if (self._served is not None and name not in self._served) or len(body) > MAX_REQUEST - _ROOM:
            return await self.over_grpc(name, request, timeout_s)
        told = await door.call(method.wire, body, timeout_s)
        try:
            return method.response.FromString(told)
        except DecodeError as error:
            raise InternalError(f"{name}: an answer that cannot be read: {error}") from None

    async def over_grpc(self, name: str, request: Message, timeout_s: float) -> Any:
        """Does what `call` does, over gRPC in any case."""
        stub = self._stubs.get(name)
        if stub is None:
            method = self._methods[name]
            stub = self._stubs[name] = self._channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
        try:
            return await stub(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise status.from_rpc_error(error) from None

    async def close(self) -> None:
        """Closes the fast path; calls that wait on it raise Unavailable. It is idempotent."""
        self._closed = True
        if self._seeking is not None:
            self._seeking.cancel()
            await asyncio.gather(self._seeking, return_exceptions=True)
        if self._fast_path is not None:
            self._fast_path.close()

    def seek(self) -> None:
        """Looks for a fast path, unless that is under way or failed a moment ago. `call` does it by itself."""
        if self._closed or (self._seeking is not None and not self._seeking.done()):
            return
        door, now = self._fast_path, time.monotonic()
        if door is not None:
            if door.open:
                return  # full, or silent for now
            self._fast_path = None
            self._rest(door.answered, now)
        if now >= self._seek_at:
            self._seeking = asyncio.get_running_loop().create_task(self._sought(), name="seek door")

    def _rest(self, good: bool, now: float) -> None:
        self._pause_s = PAUSE_S if good else min(2 * self._pause_s, MAX_PAUSE_S)
        self._seek_at = now + self._pause_s

    async def _sought(self) -> None:
        try:
            found = await self._find(self)
        except KvmeshError as error:
            self._rest(not isinstance(error, ProtocolMismatch), time.monotonic())
            return
        try:
            self._fast_path = await dial(found.ways, found.life, DIAL_S, found.ticket)
            self._served = found.methods
        except KvmeshError as error:
            log.debug("no door: %s", error.message)
            self._rest(False, time.monotonic())


def control_calls(address: str, channel: grpc.aio.Channel, service: ServiceDescriptor) -> FastCaller:
    """Returns a FastCaller of the control service whose gRPC is at `address` (HOST:PORT)."""

    async def find(caller: FastCaller) -> FoundPaths:
        request = pb.FindDoorRequest(service=service.full_name)
        try:
            told = await pb_grpc.DoorsStub(channel).FindDoor(request, timeout=FIND_S)
        except grpc.RpcError as error:
            raise status.from_rpc_error(error) from None
        if not told.port:
            return FoundPaths(told.life, ())
        host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        return FoundPaths(told.life, ((host, told.port),), frozenset(told.methods) or None)

    return FastCaller(channel, service, find)
