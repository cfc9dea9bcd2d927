"""Many clients of one gateway in one thread, cheap enough to share the machine with what they measure: bodies are
written before the clock starts, answers are read by uvicorn's own parser (httptools), connections are kept.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httptools
import orjson

from kvmesh.cli.load.load import LoadOutcome

Hopeless = Callable[["Seen", float | None], bool]
CUT = "cut"  # `LoadOutcome.code` of a request that was given up


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as it is sent. `at_s`: when, from the start of the load."""

    index: int
    at_s: float
    prompt_tokens: int
    max_tokens: int
    body: bytes


@dataclass(slots=True)
class Seen(LoadOutcome):
    """What became of it, and what a refusal told; `attempts`: how often it was sent."""

    retry_after_s: float = 0.0
    has_retry_after: bool = False  # the header that every HTTP client knows was there, too
    attempts: int = 1
    sent_at: float = 0.0  # on this machine's clock; of the last attempt
    asked_at: float = 0.0  # of the first one

    @property
    def refused(self) -> bool:
        """429, before a single token."""
        return self.status == 429


class _Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        self._seen: Seen | None = None
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._body = b""
        self._arrivals: list[float] = []
        self._now = 0.0
        self._whole = False
        self.open = False

    async def ask(self, request: bytes, seen: Seen) -> None:
        """Returns when the answer is complete or the connection has gone."""
        assert self._transport is not None, "connected"
        self._seen, self._arrivals, self._body, self._whole = seen, [], b"", False
        self._done = asyncio.get_running_loop().create_future()
        seen.sent_at = time.monotonic()
        self._transport.write(request)
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            seen.code = CUT
            raise
        finally:
            self._settle(seen)
        if self.open:
            self._idle.append(self)

    def _settle(self, seen: Seen) -> None:
        self._seen = None
        if self._arrivals:
            seen.ttft_s = self._arrivals[0] - seen.sent_at
            seen.gaps = [b - a for a, b in itertools.pairwise(self._arrivals)]
        if not seen.code and not self._whole:
            seen.code, seen.message = "broken_off", "the answer ended in the middle"
        seen.total_s = time.monotonic() - seen.sent_at

    def close(self) -> None:
        """At once; an exchange under way ends."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def first_token_at(self) -> float | None:
        """Of the exchange under way."""
        return self._arrivals[0] if self._arrivals else None

    # ── what asyncio calls ────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.open = transport, True

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._end()

    # ── what the parser calls ─────────────────────────────────────────────────────────────────────

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._seen is None:
            return
        if name == b"retry-after-ms":
            self._seen.retry_after_s = int(value) / 1000
        elif name == b"retry-after":
            self._seen.has_retry_after = int(value) >= 1

    def on_body(self, body: bytes) -> None:
        if self._seen is None:
            return
        self._seen.status = self._parser.get_status_code()
        if self._seen.status != 200:
            self._body += body
            return
        *events, self._body = (self._body + body).split(b"\n\n")
        for event in events:
            self._event(event[6:], self._seen)

    def on_message_complete(self) -> None:
        if self._seen is not None and self._seen.status != 200:
            error = orjson.loads(self._body)["error"]
            self._seen.code, self._seen.message = str(error["code"]), str(error["message"])
        self._parser = httptools.HttpResponseParser(self)
        self._end()

    def _event(self, data: bytes, seen: Seen) -> None:
        if data == b"[DONE]":
            self._whole = True
            return
        told: dict[str, Any] = orjson.loads(data)
        if "error" in told:
            seen.code, seen.message = str(told["error"]["code"]), str(told["error"]["message"])
            return
        seen.request_id = told["id"]
        if usage := told.get("usage"):
            seen.prompt_tokens, seen.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            seen.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        for choice in told["choices"]:
            if choice["logprobs"] and choice["logprobs"]["tokens"]:
                self._arrivals.append(self._now)

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


@dataclass(slots=True)
class Clients:
    """Sends requests to one gateway. `retries`: whether those that were refused come again, as late as they were
    told and a little later (up to a tenth, so that they do not come all at once)."""

    url: str
    retries: bool = False
    patience_s: float = 60.0  # of one that comes again, in all
    _idle: list[_Connection] = field(default_factory=list)
    _busy: dict[int, tuple[_Connection, Seen]] = field(default_factory=dict)

    async def run(
        self, asks: Sequence[Ask], hopeless: Callable[[Seen, float | None], bool] | None = None
    ) -> list[Seen]:
        """Every one at its time. When the last has been sent, those of which `hopeless` (what is known, when its first
        token came) says so are cut, again and again until all have ended. None: nobody is cut."""
        start = time.monotonic()
        found: list[Seen] = []
        tasks: dict[int, asyncio.Task[None]] = {}
        for ask in asks:
            if (left := start + ask.at_s - time.monotonic()) > 0:
                await asyncio.sleep(left)
            seen = Seen(ask.index, ask.at_s, prompt_tokens=ask.prompt_tokens)
            seen.asked_at = time.monotonic()
            seen.late_s = max(0.0, seen.asked_at - start - ask.at_s)
            found.append(seen)
            tasks[ask.index] = asyncio.create_task(self._one(ask, seen))
        while left_over := {task for task in tasks.values() if not task.done()}:
            await asyncio.wait(left_over, timeout=0.05)
            for index, (connection, seen) in list(self._busy.items()):
                if hopeless is not None and hopeless(seen, connection.first_token_at):
                    tasks[index].cancel()
        for task in tasks.values():
            if not task.cancelled() and (err := task.exception()) is not None:
                raise err
        return found

    async def send(self, ask: Ask) -> Seen:
        """Sends one request now, once, and returns what became of it."""
        seen = Seen(ask.index, ask.at_s, prompt_tokens=ask.prompt_tokens, asked_at=time.monotonic())
        await self._send(ask, seen)
        return seen

    async def close(self) -> None:
        """All connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)

    async def _one(self, ask: Ask, seen: Seen) -> None:
        give_up = seen.asked_at + self.patience_s
        while True:
            await self._send(ask, seen)
            wait_s = seen.retry_after_s * (1 + 0.1 * (ask.index % 8) / 8)
            if not self.retries or not seen.refused or time.monotonic() + wait_s > give_up:
                return
            await asyncio.sleep(wait_s)
            seen.attempts += 1
            seen.status, seen.code, seen.message = 0, "", ""

    async def _send(self, ask: Ask, seen: Seen) -> None:
        connection = await self._connection()
        self._busy[ask.index] = connection, seen
        try:
            await connection.ask(self._head(len(ask.body)) + ask.body, seen)
        finally:
            del self._busy[ask.index]

    async def _connection(self) -> _Connection:
        while self._idle:
            if (kept := self._idle.pop()).open:
                return kept
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        made = _Connection(self._idle)
        await asyncio.get_running_loop().create_connection(lambda: made, host, int(port))
        return made

    def _head(self, length: int) -> bytes:
        host = self.url.removeprefix("http://")
        return (
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {length}\r\n\r\n"
        ).encode()


def waited_s(seen: Seen) -> float:
    """First sent → last token, all attempts and waits between them; inf: never answered."""
    return seen.sent_at + seen.total_s - seen.asked_at if seen.ok else math.inf
