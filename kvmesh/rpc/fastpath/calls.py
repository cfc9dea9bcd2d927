"""What both sides of a fast path share: which methods can be called over it, and one timer for the deadlines of many
calls.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass


@dataclass(frozen=True, slots=True)
class Method:
    """One unary method. `wire` is its name in frames, `path` its gRPC path."""

    name: str
    wire: bytes
    path: str
    request: type[Message]
    response: type[Message]


@cache
def unary(service: ServiceDescriptor) -> dict[str, Method]:
    """Returns the unary methods of a service by name."""
    return {
        one.name: Method(
            one.name,
            one.name.encode(),
            f"/{service.full_name}/{one.name}",
            GetMessageClass(one.input_type),
            GetMessageClass(one.output_type),
        )
        for one in service.methods
        if not (one.client_streaming or one.server_streaming)
    }


@dataclass(frozen=True, slots=True)
class ServedMethod:
    """A method and its implementation: `behave(request, context)`, as in a gRPC servicer."""

    method: Method
    behave: Callable[[Any, Any], Awaitable[Message]]


def served(
    service: ServiceDescriptor, servicer: object, only: Collection[str] | None = None
) -> dict[bytes, ServedMethod]:
    """Returns the methods of a servicer, all or `only` these, by their names in frames. Raises KeyError when one is
    missing."""
    methods = unary(service)
    chosen = methods.values() if only is None else [methods[name] for name in only]
    return {one.wire: ServedMethod(one, getattr(servicer, one.name)) for one in chosen}


MIN_S = 0.001  # what is due a moment from now is not looked for in every turn


class Sweep:
    """A timer for the earliest of many deadlines, which calls that end in time never trigger. `due(now)` ends what is
    over and returns the next deadline, infinity when there is none. Times are monotonic seconds."""

    def __init__(self, due: Callable[[float], float]) -> None:
        self._due = due
        self._at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def by(self, deadline: float) -> None:
        if deadline >= self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at = deadline
        delay_s = max(deadline - time.monotonic(), MIN_S)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._at, self._timer = math.inf, None
        self.by(self._due(time.monotonic()))

    def close(self) -> None:
        self._at = -math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
