"""Answers a POST of any interface, streamed or whole, on raw ASGI."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.responses import Response

from kvmesh.errors import InternalError, KvmeshError
from kvmesh.services.gateway.api_keys import Tenant
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.request_memory import (
    REQUEST_BYTES,
    WORK_TIMEOUT_S,
    Reservation,
    parse_cost,
    prompts_bytes,
)
from kvmesh.services.gateway.requests import Request
from kvmesh.services.gateway.rest import serving_headers
from kvmesh.services.gateway.rest.http import (
    EVENTS,
    JSON,
    REQUEST_ID,
    ClientGone,
    Headers,
    Receive,
    RequestHeaders,
    Scope,
    Send,
    body_length,
    gone,
    parse_json,
    read_body,
    send_body,
    send_error,
)
from kvmesh.services.gateway.rest.interface import AnswerWriter, Asked

log = logging.getLogger(__name__)

Answering = Callable[[Request, Asked, AnswerWriter, Send], Awaitable[None]]


class Reply(Response):
    """One call of an interface, whose bodies are of `kind`; reads the body itself."""

    def __init__(self, core: GatewayCore, kind: type[Asked]) -> None:
        self.status_code = 200
        self.background = None
        self._core = core
        self._kind = kind
        self._own_headers: Headers = []
        self._streaming = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # type: ignore[override]
        """Answer, or stop everything when the client goes away."""
        try:
            await self._serve(scope, receive, send)
        except Exception as err:
            log.exception("a request to %s failed", self._kind.route)
            await self._error(send, InternalError(f"the gateway failed: {type(err).__name__}"))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        received_ns = time.monotonic_ns()
        core = self._core
        try:
            told = RequestHeaders(scope)
            self._own_headers = [(REQUEST_ID, told.echoed_id.encode())]
            tenant = self._core.keys.tenant(told.authorization, self._kind.route)  # before a stranger's body is read
            length = body_length(scope, core.config.max_body_bytes)
            held = core.memory.reserve(REQUEST_BYTES + length)
        except KvmeshError as err:
            await self._refuse(send, err, unread=True)
            return
        with held:
            await self._with_body(told, tenant, held, received_ns, receive, send)

    async def _with_body(
        self, told: RequestHeaders, tenant: Tenant, held: Reservation, received_ns: int, receive: Receive, send: Send
    ) -> None:
        core, body = self._core, None
        try:
            body = await read_body(receive, core.config.body_bounds, held, REQUEST_BYTES)
            async with core.memory.work(parse_cost(body), WORK_TIMEOUT_S):
                asked = self._kind.read(parse_json(body), core.config.limits)
            await asked.resolve(core, tenant)  # others may be parsed while it waits
            wanted = serving_headers.joined(asked.generation(core.config.limits), told.wishes)
            held.resize(REQUEST_BYTES + prompts_bytes(wanted.prompts))
        except ClientGone:
            return
        except KvmeshError as err:
            await self._refuse(send, err, unread=body is None)
            return
        del body
        if told.timeout_s is not None:
            wanted = dataclasses.replace(wanted, timeout_s=told.timeout_s)
        request = Request(
            self._core,
            wanted,
            request_id=told.request_id,
            route=self._kind.route,
            stream=asked.streams,
            parent=told.parent,
            received_ns=received_ns,
            tenant=tenant,
        )
        answer = self._stream if asked.streams else self._whole
        await self._unless_gone(receive, self._guarded(answer, request, asked, told.timings, send))

    async def _unless_gone(self, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in this task; cancel it when the client has gone."""
        working, watching = asyncio.current_task(), asyncio.create_task(gone(receive))
        assert working is not None, "a coroutine runs in a task"
        left = ended = False

        def cancel(_: asyncio.Task[None]) -> None:
            nonlocal left
            if not ended:  # else the watcher has seen the end of the answer
                left = True
                working.cancel()

        watching.add_done_callback(cancel)
        try:
            await work
        except asyncio.CancelledError:
            if not left or working.uncancel():
                raise
        finally:
            ended = True
            watching.cancel()

    async def _guarded(self, answer: Answering, request: Request, asked: Asked, timings: bool, send: Send) -> None:
        try:
            async with request.guard():
                await self._answer(answer, request, asked, timings, send)
        except TimeoutError:
            log.warning("request %s: the client takes nothing, given up after the deadline", request.request_id)

    async def _answer(self, answer: Answering, request: Request, asked: Asked, timings: bool, send: Send) -> None:
        writer = asked.writer(request, timings=timings)
        try:
            async with request:
                await answer(request, asked, writer, send)
        except Exception as err:
            named = err if isinstance(err, KvmeshError) else InternalError(f"the gateway failed: {type(err).__name__}")
            if named is not err:
                log.exception("request %s failed", request.request_id)
            await asked.ended(request, writer, named)
            words = asked.last_words(writer, named, begun=self._streaming)
            if words is None:
                await self._error(send, named)
            elif self._streaming:
                await send({"type": "http.response.body", "body": words})
            else:
                await send_body(send, 200, [*JSON, *self._own_headers], words)

    async def _error(self, send: Send, err: KvmeshError) -> None:
        if self._streaming:
            await send({"type": "http.response.body", "body": self._kind.error_event(err)})
        else:
            await self._refuse(send, err)

    async def _refuse(self, send: Send, err: KvmeshError, *, unread: bool = False) -> None:
        await send_error(send, err, self._own_headers, unread=unread, body=self._kind.error_body(err))

    async def _whole(self, request: Request, asked: Asked, writer: AnswerWriter, send: Send) -> None:
        async for _ in request:
            raise AssertionError("a request that is not streamed has no steps")
        request.account.wrote()
        body = writer.whole()
        await asked.ended(request, writer, None)
        await send_body(send, 200, [*JSON, *self._own_headers], body)

    async def _stream(self, request: Request, asked: Asked, writer: AnswerWriter, send: Send) -> None:
        async for step in request:
            if not self._streaming:
                self._streaming = True
                await send({"type": "http.response.start", "status": 200, "headers": [*EVENTS, *self._own_headers]})
            body = b"".join([writer.step(index, delta) for index, delta in step])
            await send({"type": "http.response.body", "body": body, "more_body": True})
            request.account.wrote()
        body = writer.end()
        await asked.ended(request, writer, None)
        await send({"type": "http.response.body", "body": body})
