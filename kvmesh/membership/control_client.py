"""Calls of an instance to one control service: over gRPC, and over its fast path what is said often."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from kvmesh.errors import DeadlinePassed
from kvmesh.rpc import channels
from kvmesh.rpc.fastpath.caller import FastCaller
from kvmesh.rpc.fastpath.control import control_calls

GRPC_ONLY_S = 30.0  # after a call over the fast path that was not answered: something on the way may swallow them


class ControlClient:
    """Open from `dial` to `drop`, any number of times; what was learnt of fast paths stays. On one event loop."""

    def __init__(self, service: ServiceDescriptor, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._calls: FastCaller | None = None
        self._grpc_only_until = float("-inf")

    @property
    def address(self) -> str:
        """Where it was dialled; "": it is not open."""
        return self._address

    @property
    def channel(self) -> grpc.aio.Channel:
        """For what is said rarely. It must be open."""
        assert self._channel is not None, "the line is not open"
        return self._channel

    def dial(self, address: str) -> None:
        """It connects with the first call. It must not be open."""
        assert self._channel is None, "the line is open"
        self._address = address
        self._channel = channels.connect(address)
        self._calls = control_calls(address, self._channel, self._service)

    async def say(self, name: str, request: Message, timeout_s: float) -> Any:
        """The answer, over the fast path while there is one. It must be open. After a KvmeshError the caller drops
        the line, unless the service itself has refused."""
        assert self._calls is not None, "the line is not open"
        if self._clock() < self._grpc_only_until:
            return await self._calls.over_grpc(name, request, timeout_s)
        by_door = self._calls.by_door
        try:
            return await self._calls.call(name, request, timeout_s)
        except DeadlinePassed:
            if by_door:
                self._grpc_only_until = self._clock() + GRPC_ONLY_S
            raise

    async def drop(self) -> None:
        """The next `dial` begins afresh: gRPC's own reconnect back-off must not delay ours. Idempotent."""
        calls, self._calls = self._calls, None
        channel, self._channel = self._channel, None
        self._address = ""
        if calls is not None:
            await calls.close()
        if channel is not None:
            await channel.close(grace=None)
