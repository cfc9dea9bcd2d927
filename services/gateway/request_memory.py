"""The budget of memory that requests hold in this gateway, over REST and gRPC together.

One half is for what stays: a body from its first byte until it is parsed, then its prompts until the request ends.
The other half is for what parsing and tokenizing need for a moment on top, which is many times the size of a body;
those wait for one another. So neither many bodies, nor large ones, nor ones that swell when they are parsed, take more
than `max_request_memory` at any time. Everything here belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from kvmesh.errors import BodyTooLarge, Overloaded
from kvmesh.services.gateway.generation import Prompt
from kvmesh.services.gateway.text.chat import Chat
from kvmesh.telemetry import names

RETRY_AFTER_MS = 1000
WORK_TIMEOUT_S = 10.0
SMALL_BYTES = 64 << 10
# What a request costs whatever it says: its tasks, spans, messages and buffers.
REQUEST_BYTES = 16 << 10

# The cost of a parsed JSON document, measured with orjson 3.13 on CPython 3.11 over bodies of 8 MiB (peak over body):
# text 2.0, text with one emoji 5.0, token ids 10.5 to 13, {"":1} 36.6, [[[[[]]]]] 44.0. What the terms below say is
# never less than what was measured (tests/gateway/test_request_memory.py measures it again).
_COMMA_BYTES = 96  # a value: an entry of the parser's tape (24), a pointer (8), a short text (56)
_COLON_BYTES = 96  # a key and its place in the table
_LIST_BYTES = 96
_DICT_BYTES = 256
_WORST_FACTOR = 64
_ID_BYTES = 40
_MESSAGE_BYTES = 256
_CHARACTER_BYTES = 256
_STRUCTURE_BYTES = 64  # of a character of a schema or of arguments: see _WORST_FACTOR
_UNCOUNTED_BYTES = 128 << 10


def parse_cost(body: bytes) -> int:
    """Returns an upper bound of the bytes that parsing `body` as JSON takes, besides the body itself. Short bodies are
    not looked at: they cost little whatever they say."""
    if len(body) <= _UNCOUNTED_BYTES:
        return _WORST_FACTOR * len(body)
    wide = not body.isascii() or b"\\u" in body  # one wide character makes its whole text wide
    return (
        len(body) * (5 if wide else 2)
        + body.count(b",") * _COMMA_BYTES
        + body.count(b":") * _COLON_BYTES
        + body.count(b"[") * _LIST_BYTES
        + body.count(b"{") * _DICT_BYTES
    )


def prompts_bytes(prompts: Sequence[Prompt]) -> int:
    """Returns the bytes that parsed prompts take."""
    return sum(map(_prompt_bytes, prompts))


def tokenize_cost(prompts: Sequence[Prompt]) -> int:
    """Returns what rendering and tokenizing `prompts`, one after the other, takes on top of them: measured up to 250
    bytes for a character, whatever it is (tokenizers 0.22)."""
    return max((_prompt_characters(prompt) for prompt in prompts), default=0) * _CHARACTER_BYTES


def _prompt_bytes(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return sys.getsizeof(prompt)
    if isinstance(prompt, list):
        return len(prompt) * _ID_BYTES
    # A character takes up to four bytes; a tool's schema, and a call's arguments, are objects again for the template.
    parts = sum(1 + len(message.tool_calls) for message in prompt.messages) + len(prompt.tools)
    return parts * _MESSAGE_BYTES + sum(sys.getsizeof(message.content) for message in prompt.messages) + _more(prompt)


def _more(prompt: Chat) -> int:
    """What tools, calls and reasoning take."""
    contents = sum(len(message.content) for message in prompt.messages)
    return (prompt.characters - contents) * _STRUCTURE_BYTES


def _prompt_characters(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return 0 if isinstance(prompt, list) else prompt.characters


class Reservation:
    """Bytes that one request holds. Leaving its context, or `release`, gives them back, once."""

    __slots__ = ("_memory", "size")

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self.size = 0

    def resize(self, size: int) -> None:
        """The request holds `size` bytes from now on. Raises Overloaded when there is no room for more, BodyTooLarge
        when there never is; what was held stays held then. After `release` it does nothing."""
        self._memory._resize(self, size)

    def release(self) -> None:
        self._memory._release(self)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class RequestMemory:
    """Who may hold how many bytes. `limit_bytes` is for everything; `held_limit` of it for what requests hold,
    `work_limit` for what is worked on.

    Large requests (over 64 KiB) leave a quarter of `held_limit` to small ones: a few uploads cannot lock chats out.
    One that needs more than three quarters by itself may take all."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self.held_limit = limit_bytes // 2
        self.work_limit = limit_bytes - self.held_limit
        self.held = 0
        self.working = 0
        self._live: set[Reservation] = set()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait to be worked on."""
        return len(self._waiting)

    def reserve(self, size: int) -> Reservation:
        """Returns a reservation of `size` bytes. Raises Overloaded, with a Retry-After, when there is no room now, and
        BodyTooLarge when there never is."""
        reservation = Reservation(self)
        self._live.add(reservation)
        try:
            self._resize(reservation, size)
        except BaseException:
            self._live.discard(reservation)
            raise
        return reservation

    @contextlib.asynccontextmanager
    async def work(self, size: int, timeout_s: float) -> AsyncIterator[None]:
        """Holds `size` bytes of `work_limit` for the length of the context; first come, first served. Raises
        Overloaded when its turn has not come after `timeout_s`, BodyTooLarge when it never can."""
        if size > self.work_limit:
            names.GATEWAY_MEMORY_REFUSED.labels(reason="too_large").inc()
            raise BodyTooLarge(
                f"body: working on it takes up to {size} bytes, over the {self.work_limit} that max_request_memory "
                "leaves for that",
                field="body",
            )
        if self._waiting or self.working + size > self.work_limit:
            await self._turn(size, timeout_s)
        else:
            self.working += size
        try:
            yield
        finally:
            self.working -= size
            self._wake()

    async def _turn(self, size: int, timeout_s: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as err:
            if turn.done() and not turn.cancelled():  # its turn came while it was being given up
                self.working -= size
            elif entry in self._waiting:  # else `_wake` has passed it over, between its cancelling and this
                self._waiting.remove(entry)
            self._wake()
            if isinstance(err, TimeoutError):
                raise self._overloaded() from None
            raise

    def _wake(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if turn.done():  # given up, and not taken out yet
                self._waiting.popleft()
                continue
            if self.working + size > self.work_limit:
                return
            self._waiting.popleft()
            self.working += size
            turn.set_result(None)

    def _resize(self, reservation: Reservation, size: int) -> None:
        if reservation not in self._live:
            return
        more = size - reservation.size
        if more > 0:
            if size > self.held_limit:
                names.GATEWAY_MEMORY_REFUSED.labels(reason="too_large").inc()
                raise BodyTooLarge(
                    f"body: needs {size} bytes, over the {self.held_limit} that max_request_memory leaves for requests",
                    field="body",
                )
            for_large = self.held_limit - self.held_limit // 4
            ceiling = for_large if SMALL_BYTES < size <= for_large else self.held_limit
            if self.held + more > ceiling:
                raise self._overloaded()
        reservation.size = size
        self.held += more
        names.GATEWAY_REQUEST_MEMORY.set(self.held)

    def _release(self, reservation: Reservation) -> None:
        if reservation in self._live:
            self._live.discard(reservation)
            self.held -= reservation.size
            reservation.size = 0
            names.GATEWAY_REQUEST_MEMORY.set(self.held)

    def _overloaded(self) -> Overloaded:
        names.GATEWAY_MEMORY_REFUSED.labels(reason="full").inc()
        return Overloaded("the gateway's memory for requests is taken; try again", retry_after_ms=RETRY_AFTER_MS)
