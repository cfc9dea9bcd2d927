"""A POST whose body is read within bounds: the key before the body, the body within its size and time, all of it in
the budget of memory. What generates tokens is a Reply; what only computes an answer is a QueryCall."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel
from starlette.responses import Response

from kvmesh.errors import DeadlinePassed, InternalError, KvmeshError
from kvmesh.services.gateway.api_keys import Tenant
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.request_memory import REQUEST_BYTES, WORK_TIMEOUT_S, Reservation, parse_cost
from kvmesh.services.gateway.rest.http import (
    JSON,
    ClientGone,
    Headers,
    Receive,
    RequestHeaders,
    Scope,
    Send,
    body_length,
    parse_json,
    read_body,
    send_body,
    send_error,
)
from kvmesh.services.gateway.rest.interface import ErrorStyle

log = logging.getLogger(__name__)

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Caller:
    """What is known of a call before its body is read."""

    told: RequestHeaders
    tenant: Tenant
    received_ns: int


class BoundedCall(Response, Generic[Read]):
    """One call of an endpoint named `route` (in metrics, and in the rights of keys), on raw ASGI. Subclasses tell what
    they read of the body, how many bytes that takes, and how they answer."""

    def __init__(self, core: GatewayCore, route: str, errors: type[ErrorStyle] = ErrorStyle) -> None:
        self.status_code = 200
        self.background = None
        self.core = core
        self.own_headers: Headers = []
        self.streaming = False  # a stream has begun: errors are told in it
        self._route = route
        self._errors = errors
        self._request_id = ""

    # ── what calls differ in ──────────────────────────────────────────────────────────────────────

    @abstractmethod
    async def read(self, body: Any, caller: Caller) -> Read:
        """Validates a parsed JSON body (which it may change). Raises KvmeshError."""

    @abstractmethod
    def kept_bytes(self, read: Read) -> int:
        """Returns how many bytes are kept of the body until the call ends."""

    @abstractmethod
    async def answer(self, read: Read, caller: Caller, receive: Receive, send: Send) -> None:
        """Answers. A KvmeshError that it raises is told to the client."""

    # ── ASGI ──────────────────────────────────────────────────────────────────────────────────────

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # type: ignore[override]
        """Answers, or stops everything when the client goes away."""
        try:
            await self._serve(scope, receive, send)
        except Exception as err:
            log.exception("a request to %s failed", self._route)
            await self.fail(send, InternalError(f"the gateway failed: {type(err).__name__}"))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        received_ns = time.monotonic_ns()
        core = self.core
        try:
            told = RequestHeaders(scope)
            self._request_id = told.echoed_id
            self.own_headers = [(name, told.echoed_id.encode()) for name in self._errors.id_headers]
            tenant = core.keys.tenant(told.authorization, self._route)  # before a stranger's body is read
            length = body_length(scope, core.config.max_body_bytes)
            held = core.memory.reserve(REQUEST_BYTES + length)
        except KvmeshError as err:
            await self._refuse(send, err, unread=True)
            return
        with held:
            await self._with_body(Caller(told, tenant, received_ns), held, receive, send)

    async def _with_body(self, caller: Caller, held: Reservation, receive: Receive, send: Send) -> None:
        core, body = self.core, None
        try:
            body = await read_body(receive, core.config.body_bounds, held, REQUEST_BYTES)
            async with core.memory.work(parse_cost(body), WORK_TIMEOUT_S):
                read = await self.read(parse_json(body), caller)
            held.resize(REQUEST_BYTES + self.kept_bytes(read))
        except ClientGone:
            return
        except KvmeshError as err:
            await self._refuse(send, err, unread=body is None)
            return
        del body
        try:
            await self.answer(read, caller, receive, send)
        except KvmeshError as err:
            await self.fail(send, err)

    async def fail(self, send: Send, err: KvmeshError) -> None:
        """Tells the client of an error, in the stream if one has begun."""
        if self.streaming:
            await send({"type": "http.response.body", "body": self._errors.error_event(err, self._request_id)})
        else:
            await self._refuse(send, err)

    async def _refuse(self, send: Send, err: KvmeshError, *, unread: bool = False) -> None:
        body = self._errors.error_body(err, self._request_id)
        await send_error(send, err, self.own_headers, unread=unread, body=body)


class QueryCall(BoundedCall[Read]):
    """A call that generates nothing: its answer is one JSON body. `body_model` documents the body, `errors` tells how
    errors are written."""

    route: ClassVar[str]
    body_model: ClassVar[type[BaseModel]]
    errors: ClassVar[type[ErrorStyle]] = ErrorStyle

    def __init__(self, core: GatewayCore) -> None:
        super().__init__(core, self.route, self.errors)

    @abstractmethod
    async def compute(self, read: Read, caller: Caller) -> bytes:
        """Returns the body of the answer. Raises KvmeshError. It has the time that a request has."""

    async def answer(self, read: Read, caller: Caller, receive: Receive, send: Send) -> None:
        """See BoundedCall."""
        timeout_s = min(self.core.config.timeout_s, caller.told.timeout_s or self.core.config.timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                body = await self.compute(read, caller)
        except TimeoutError:
            raise DeadlinePassed(f"the answer was not computed within {timeout_s:g} s") from None
        async with asyncio.timeout(timeout_s):
            await send_body(send, 200, [*JSON, *self.own_headers], body)
