"""HTTP on raw ASGI: bodies read with a limit, headers checked, answers and errors written without wrappers."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from opentelemetry.context import Context

from kvmesh.errors import BodyTooLarge, DeadlinePassed, InvalidRequest, KvmeshError
from kvmesh.services.gateway.generation import brief, refused
from kvmesh.services.gateway.request_memory import Reservation
from kvmesh.services.gateway.rest import serving_headers
from kvmesh.services.gateway.rest.frames import error_headers, error_json
from kvmesh.services.gateway.rest.http_limits import BodyBounds
from kvmesh.telemetry import spans

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

REQUEST_ID = b"x-request-id"
TIMEOUT = b"x-request-timeout-ms"
TIMINGS = b"x-kvmesh-timings"
TRACEPARENT = b"traceparent"
AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"
MAX_TIMEOUT_MS = 24 * 3600 * 1000

JSON: Headers = [(b"content-type", b"application/json")]
EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]

_LENGTH_DIGITS = 18
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class ClientGone(Exception):
    """The client has gone; nobody reads an answer."""


class RequestHeaders:
    """What a request's headers say. InvalidRequest names the header."""

    def __init__(self, scope: Scope) -> None:
        headers = {name: value for name, value in scope["headers"] if name in _KNOWN}
        self.request_id = uuid.uuid4().hex
        self.echoed_id = self.request_id
        self.given_id = ""  # "": the client has named none
        given = headers.get(REQUEST_ID)
        if given is not None:
            text = given.decode("latin-1")
            if not _ID.fullmatch(text):
                raise refused("x-request-id", text, "must be 1 to 128 of A-Z a-z 0-9 . _ : / + = @ -")
            self.echoed_id = self.given_id = text
            # Clients may use an id twice; inside the mesh each request has a name of its own.
            self.request_id = f"{text}-{self.request_id[:8]}"
        self.wishes = serving_headers.read(headers)
        self.timeout_s = _milliseconds(headers.get(TIMEOUT))
        self.authorization = authorization(headers)
        self.timings = headers.get(TIMINGS, b"") == b"1"
        self.parent: Context = spans.context_from(headers.get(TRACEPARENT, b"").decode("latin-1"))


_KNOWN = frozenset((REQUEST_ID, TIMEOUT, TIMINGS, TRACEPARENT, AUTHORIZATION, API_KEY)) | serving_headers.HEADERS


def authorization(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Returns what `headers` say of the caller's key, which Anthropic's clients tell by a header of their own."""
    if AUTHORIZATION not in headers and API_KEY in headers:
        return b"Bearer " + headers[API_KEY]
    return headers.get(AUTHORIZATION)


def _milliseconds(value: bytes | None) -> float | None:
    if value is None:
        return None
    text = value.decode("latin-1")
    if not (text.isascii() and text.isdigit() and len(text) < 12 and 0 < int(text) <= MAX_TIMEOUT_MS):
        raise refused("x-request-timeout-ms", text, f"must be a whole number in 1..{MAX_TIMEOUT_MS}")
    return int(text) / 1000


def body_length(scope: Scope, limit: int) -> int:
    """What a request's head says of its body: its length, or 0 when it says none. Raises BodyTooLarge when that is
    over `limit`."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            if len(value) > _LENGTH_DIGITS or int(value) > limit:
                raise too_large(limit)
            return int(value)
    return 0


def too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"body: longer than {limit} bytes", field="body")


async def read_body(receive: Receive, bounds: BodyBounds, held: Reservation, other_bytes: int) -> bytes:
    """Returns the whole body. `held` grows with it: it is the body's size and `other_bytes`. Raises BodyTooLarge once
    the body is longer than its limit, DeadlinePassed when it comes too slowly, Overloaded when there is no room for
    it, Gone when the client is."""
    parts: list[bytes] = []
    size, more = 0, True
    start = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(start + bounds.by_s(0)) as timeout:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                if size > bounds.limit:
                    raise too_large(bounds.limit)
                if size + other_bytes > held.size:  # its length was not told: room is taken in doubling steps
                    held.resize(min(2 * size, bounds.limit) + other_bytes)
                parts.append(part)
                more = message.get("more_body", False)
                timeout.reschedule(start + bounds.by_s(size))
    except TimeoutError:
        raise DeadlinePassed(
            f"body: {size} bytes in {bounds.by_s(size):.1f} s; it must come within {bounds.timeout_s:g} s or at "
            f"{bounds.rate} bytes a second",
            field="body",
        ) from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_json(body: bytes) -> Any:
    """Raises InvalidRequest: not UTF-8, not JSON, lone surrogates, NaN."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as err:
        raise InvalidRequest(f"body: not valid JSON: {brief(str(err), 200)}", field="body") from None


async def gone(receive: Receive) -> None:
    """Returns when the client has gone. Only once the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_body(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """A whole response."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_error(
    send: Send, err: KvmeshError, headers: Headers, *, body: bytes = b"", unread: bool = False, status: int = 0
) -> None:
    """`err` as `body` and `status` say it, else as OpenAI writes it. `unread`: the request's body was not read to its
    end, so the connection is closed."""
    more = [(b"connection", b"close")] if unread else []
    body = body or orjson.dumps(error_json(err))
    await send_body(send, status or err.http_status, [*JSON, *error_headers(err), *headers, *more], body)
