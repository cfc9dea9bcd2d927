"""Answers a POST of any interface, streamed or whole, on raw ASGI."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from kvmesh.errors import InternalError, KvmeshError
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.generation import Generation
from kvmesh.services.gateway.request_memory import prompts_bytes
from kvmesh.services.gateway.requests import Request
from kvmesh.services.gateway.rest import serving_headers
from kvmesh.services.gateway.rest.bounded_call import BoundedCall, Caller
from kvmesh.services.gateway.rest.http import EVENTS, JSON, Receive, Send, gone, send_body
from kvmesh.services.gateway.rest.interface import AnswerWriter, InterfaceBody
from kvmesh.services.gateway.text.completion import Delta

log = logging.getLogger(__name__)

Answering = Callable[[Request, InterfaceBody, AnswerWriter, Send], Awaitable[None]]


SCORE_BYTES = 512  # what a log-probability of a prompt's token takes while it is written
# That take longer to write than a step of tokens: about 1 µs each.
MANY_SCORES = 1024


class Reply(BoundedCall[tuple[InterfaceBody, Generation]]):
    """One call of an interface, whose bodies are of `kind`."""

    def __init__(self, core: GatewayCore, kind: type[InterfaceBody]) -> None:
        super().__init__(core, kind.route, kind)
        self._kind = kind

    async def read(self, body: Any, caller: Caller) -> tuple[InterfaceBody, Generation]:
        """See BoundedCall."""
        limits = self.core.config.limits
        asked = self._kind.read(body, limits)
        await asked.resolve(self.core, caller.tenant)
        return asked, serving_headers.joined(asked.generation(limits), caller.told.wishes)

    def kept_bytes(self, read: tuple[InterfaceBody, Generation]) -> int:
        """See BoundedCall."""
        return prompts_bytes(read[1].prompts)

    async def answer(
        self, read: tuple[InterfaceBody, Generation], caller: Caller, receive: Receive, send: Send
    ) -> None:
        """See BoundedCall."""
        (asked, wanted), told = read, caller.told
        if told.timeout_s is not None:
            wanted = dataclasses.replace(wanted, timeout_s=told.timeout_s)
        request = Request(
            self.core,
            wanted,
            request_id=told.request_id,
            given_id=told.given_id,
            route=self._kind.route,
            stream=asked.streams,
            parent=told.parent,
            received_ns=caller.received_ns,
            tenant=caller.tenant,
            token_ids=asked.tells_token_ids,
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

    async def _guarded(
        self, answer: Answering, request: Request, asked: InterfaceBody, timings: bool, send: Send
    ) -> None:
        try:
            async with request.guard():
                await self._answer(answer, request, asked, timings, send)
        except TimeoutError:
            log.warning("request %s: the client takes nothing, given up after the deadline", request.request_id)

    async def _answer(
        self, answer: Answering, request: Request, asked: InterfaceBody, timings: bool, send: Send
    ) -> None:
        writer = asked.writer(request, timings=timings)
        try:
            async with request:
                await answer(request, asked, writer, send)
        except Exception as err:
            if not self.streaming:
                self._tell_quota(request)
            named = err if isinstance(err, KvmeshError) else InternalError(f"the gateway failed: {type(err).__name__}")
            if named is not err:
                log.exception("request %s failed", request.request_id)
            await asked.ended(request, writer, named)
            words = asked.last_words(writer, named, begun=self.streaming)
            if words is None:
                await self.fail(send, named)
            elif self.streaming:
                await send({"type": "http.response.body", "body": words})
            else:
                await send_body(send, 200, [*JSON, *self.own_headers], words)

    async def _written(self, request: Request, write: Callable[[], bytes]) -> bytes:
        """Returns what `write` does, which is done off the event loop where it tells much of the prompts."""
        if request.scores < MANY_SCORES:
            return write()
        return await self.core.in_thread(SCORE_BYTES * request.scores, write)

    def _tell_quota(self, request: Request) -> None:
        """Adds to the headers of the answer where the caller's key stands."""
        if request.quota is not None:
            self.own_headers += self._kind.quota_headers(request.quota)

    async def _whole(self, request: Request, asked: InterfaceBody, writer: AnswerWriter, send: Send) -> None:
        async for _ in request:
            raise AssertionError("a request that is not streamed has no steps")
        request.account.wrote()
        body = await self._written(request, writer.whole)
        await asked.ended(request, writer, None)
        self._tell_quota(request)
        await send_body(send, 200, [*JSON, *self.own_headers], body)

    async def _stream(self, request: Request, asked: InterfaceBody, writer: AnswerWriter, send: Send) -> None:
        opened: set[int] = set()
        async for step in request:
            if not self.streaming:
                self.streaming = True
                self._tell_quota(request)
                await send({"type": "http.response.start", "status": 200, "headers": [*EVENTS, *self.own_headers]})
            write = functools.partial(_write, writer, step)
            opens = not opened.issuperset(index for index, _ in step)
            opened.update(index for index, _ in step)
            body = await self._written(request, write) if opens else write()
            await send({"type": "http.response.body", "body": body, "more_body": True})
            request.account.wrote()
        body = writer.end()
        await asked.ended(request, writer, None)
        await send({"type": "http.response.body", "body": body})


def _write(writer: AnswerWriter, step: Sequence[tuple[int, Delta]]) -> bytes:
    return b"".join([writer.step(index, delta) for index, delta in step])
