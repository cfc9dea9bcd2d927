"""Answers POST /v1/chat/completions and /v1/completions, streamed or whole, on raw ASGI."""

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
from kvmesh.services.gateway.rest.frames import DONE, Frames, error_event
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
from kvmesh.services.gateway.rest.openai import ChatRequest, CompletionRequest
from kvmesh.services.gateway.text.completion import Delta

log = logging.getLogger(__name__)

Answering = Callable[[Request, Frames, bool, Send], Awaitable[None]]


class Reply(Response):
    """One call of an endpoint; reads the body itself. `kind` tells which endpoint."""

    def __init__(self, core: GatewayCore, kind: type[ChatRequest] | type[CompletionRequest]) -> None:
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
            asked = RequestHeaders(scope)
            self._own_headers = [(REQUEST_ID, asked.echoed_id.encode())]
            tenant = self._core.keys.tenant(asked.authorization, self._kind.route)  # before a stranger's body is read
            length = body_length(scope, core.config.max_body_bytes)
            held = core.memory.reserve(REQUEST_BYTES + length)
        except KvmeshError as err:
            await send_error(send, err, self._own_headers, unread=True)
            return
        with held:
            await self._with_body(asked, tenant, held, received_ns, receive, send)

    async def _with_body(
        self, asked: RequestHeaders, tenant: Tenant, held: Reservation, received_ns: int, receive: Receive, send: Send
    ) -> None:
        core, body = self._core, None
        try:
            body = await read_body(receive, core.config.body_bounds, held, REQUEST_BYTES)
            async with core.memory.work(parse_cost(body), WORK_TIMEOUT_S):
                read = self._kind.read(parse_json(body), core.config.limits)
                wanted = serving_headers.joined(read.generation(core.config.limits), asked.wishes)
            held.resize(REQUEST_BYTES + prompts_bytes(wanted.prompts))
        except ClientGone:
            return
        except KvmeshError as err:
            await send_error(send, err, self._own_headers, unread=body is None)
            return
        streaming, include_usage = bool(read.stream), read.include_usage
        del body, read
        if asked.timeout_s is not None:
            wanted = dataclasses.replace(wanted, timeout_s=asked.timeout_s)
        request = Request(
            self._core,
            wanted,
            request_id=asked.request_id,
            route=self._kind.route,
            stream=streaming,
            parent=asked.parent,
            received_ns=received_ns,
            tenant=tenant,
        )
        frames = Frames(
            chat=self._kind is ChatRequest,
            request_id=asked.request_id,
            created=int(time.time()),
            model=wanted.model,
            include_usage=include_usage,
            piece=request.piece,
        )
        answer = self._stream if streaming else self._whole
        await self._unless_gone(receive, self._guarded(answer, request, frames, asked.timings, send))

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

    async def _guarded(self, answer: Answering, request: Request, frames: Frames, timings: bool, send: Send) -> None:
        try:
            async with request.guard():
                await self._answer(answer, request, frames, timings, send)
        except TimeoutError:
            log.warning("request %s: the client takes nothing, given up after the deadline", request.request_id)

    async def _answer(self, answer: Answering, request: Request, frames: Frames, timings: bool, send: Send) -> None:
        try:
            async with request:
                await answer(request, frames, timings, send)
        except KvmeshError as err:
            await self._error(send, err)

    async def _error(self, send: Send, err: KvmeshError) -> None:
        if self._streaming:
            await send({"type": "http.response.body", "body": error_event(err)})
        else:
            await send_error(send, err, self._own_headers)

    async def _whole(self, request: Request, frames: Frames, timings: bool, send: Send) -> None:
        async for _ in request:
            raise AssertionError("a request that is not streamed has no steps")
        wanted, account = request.generation, request.account
        account.wrote()
        choices = [
            (
                (choice.prompt.text if wanted.echo else "") + "".join(choice.texts),
                choice.entries if wanted.logprobs >= 0 else None,
                choice.answer.finish,
            )
            for choice in request.choices
        ]
        tail = {"kvmesh": account.stages(request.choices)} if timings else {}
        body = frames.whole(choices, account.usage(request.choices), tail)
        await send_body(send, 200, [*JSON, *self._own_headers], body)

    async def _stream(self, request: Request, frames: Frames, timings: bool, send: Send) -> None:
        writer = _Writer(request, frames, timings)
        async for step in request:
            if not self._streaming:
                self._streaming = True
                await send({"type": "http.response.start", "status": 200, "headers": [*EVENTS, *self._own_headers]})
            body = b"".join([writer.frame(index, delta) for index, delta in step])
            await send({"type": "http.response.body", "body": body, "more_body": True})
            request.account.wrote()
        await send({"type": "http.response.body", "body": writer.end() + DONE})


class _Writer:
    """Turns the deltas of one request into frames."""

    def __init__(self, request: Request, frames: Frames, timings: bool) -> None:
        self._request = request
        self._frames = frames
        self._timings = timings
        self._wanted = request.generation
        self._begun: set[int] = set()
        self._unfinished = self._wanted.choices

    def frame(self, index: int, delta: Delta) -> bytes:
        frames = self._frames
        opening = b""
        if index not in self._begun:
            self._begun.add(index)
            opening = self._opening(index)
        if not delta.finish and not delta.logprobs:
            return opening + frames.text(index, delta.text)
        wants = self._wanted.logprobs >= 0
        text = b""
        if delta.text or delta.logprobs:
            text = frames.rich(index, delta.text, delta.logprobs, "", {}) if wants else frames.text(index, delta.text)
        if not delta.finish:
            return opening + text
        self._unfinished -= 1
        return opening + text + frames.rich(index, "", None, delta.finish, self._tail(last=not self._unfinished))

    def _opening(self, index: int) -> bytes:
        """Returns what comes before the first text: the role, or the echoed prompt."""
        if self._frames.chat:
            return self._frames.role(index)
        return self._frames.text(index, self._request.choices[index].prompt.text) if self._wanted.echo else b""

    def _tail(self, *, last: bool) -> dict[str, object]:
        """Timings go with the very last chunk."""
        if not (last and self._timings) or self._frames.include_usage:
            return {}
        return {"kvmesh": self._request.account.stages(self._request.choices)}

    def end(self) -> bytes:
        """Returns what follows the last choice's finish."""
        if not self._frames.include_usage:
            return b""
        account, choices = self._request.account, self._request.choices
        tail = {"kvmesh": account.stages(choices)} if self._timings else {}
        return self._frames.usage(account.usage(choices), tail)
