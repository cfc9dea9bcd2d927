"""The methods of a service that can be called over the fast path: those of one request and one answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass


@dataclass(frozen=True, slots=True)
class Method:
    """`wire`: its name in frames; `path`: over gRPC."""

    name: str
    wire: bytes
    path: str
    request: type[Message]
    response: type[Message]


@cache
def unary(service: ServiceDescriptor) -> dict[str, Method]:
    """By name."""
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
    """A method and what carries it out: `behave(request, context)`, as a gRPC servicer's."""

    method: Method
    behave: Callable[[Any, Any], Awaitable[Message]]


def served(
    service: ServiceDescriptor, servicer: object, only: Collection[str] | None = None
) -> dict[bytes, ServedMethod]:
    """All of a servicer's, or `only` these of them, by their names in frames. KeyError: one that it has not."""
    methods = unary(service)
    chosen = methods.values() if only is None else [methods[name] for name in only]
    return {one.wire: ServedMethod(one, getattr(servicer, one.name)) for one in chosen}
