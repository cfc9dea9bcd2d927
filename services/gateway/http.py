"""HTTP on raw ASGI: bodies read with a limit, headers checked, answers and errors written without wrappers."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from opentelemetry.context import Context

from kvmesh.rpc.errors import BodyTooLarge, DeadlinePassed, InvalidRequest, KvmeshError
from kvmesh.telemetry import spans
from services.gateway import wishes
from services.gateway.frames import error_headers, error_json
from services.gateway.generation import brief, refused

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

REQUEST_ID = b"x-request-id"
TIMEOUT = b"x-request-timeout-ms"
TIMINGS = b"x-kvmesh-timings"
TRACEPARENT = b"traceparent"
AUTHORIZATION = b"authorization"
MAX_TIMEOUT_MS = 24 * 3600 * 1000

JSON: Headers = [(b"content-type", b"application/json")]
EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]

_BODY_TIMEOUT_S = 60.0
_DRAIN_FACTOR = 4
_DRAIN_TIMEOUT_S = 5.0
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Gone(Exception):
    """The client has gone; nobody reads an answer."""


class Asked:
    """What a request's headers say. InvalidRequest names the header."""

    def __init__(self, scope: Scope) -> None:
        headers = {name: value for name, value in scope["headers"] if name in _KNOWN}
        self.request_id = uuid.uuid4().hex
        self.echoed_id = self.request_id
        given = headers.get(REQUEST_ID)
        if given is not None:
            text = given.decode("latin-1")
            if not _ID.fullmatch(text):
                raise refused("x-request-id", text, "must be 1 to 128 of A-Z a-z 0-9 . _ : / + = @ -")
            self.echoed_id = text
            # Clients may use an id twice; inside the mesh each request has a name of its own.
            self.request_id = f"{text}-{self.request_id[:8]}"
        self.wishes = wishes.read(headers)
        self.timeout_s = _milliseconds(headers.get(TIMEOUT))
        self.authorization = headers.get(AUTHORIZATION)
        self.timings = headers.get(TIMINGS, b"") == b"1"
        self.parent: Context = spans.context_from(headers.get(TRACEPARENT, b"").decode("latin-1"))


_KNOWN = frozenset((REQUEST_ID, TIMEOUT, TIMINGS, TRACEPARENT, AUTHORIZATION)) | wishes.HEADERS


def _milliseconds(value: bytes | None) -> float | None:
    if value is None:
        return None
    text = value.decode("latin-1")
    if not (text.isascii() and text.isdigit() and len(text) < 12 and 0 < int(text) <= MAX_TIMEOUT_MS):
        raise refused("x-request-timeout-ms", text, f"must be a whole number in 1..{MAX_TIMEOUT_MS}")
    return int(text) / 1000


async def read_json(scope: Scope, receive: Receive, limit: int) -> Any:
    """The parsed body. BodyTooLarge once it is longer than `limit` bytes (what follows is thrown away unread);
    InvalidRequest: not UTF-8, not JSON, lone surrogates, NaN; Gone."""
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            body = await _read(scope, receive, limit)
    except TimeoutError:
        raise DeadlinePassed(f"body: not received within {_BODY_TIMEOUT_S:g} s", field="body") from None
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as err:
        raise InvalidRequest(f"body: not valid JSON: {brief(str(err), 200)}", field="body") from None


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes:
    headers = dict(scope["headers"])
    too_large = BodyTooLarge(f"body: longer than {limit} bytes", field="body")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        if b"expect" not in headers:  # else the client waits for our word before it sends
            await _drain(receive, _DRAIN_FACTOR * limit)
        raise too_large
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            parts.clear()
            if message.get("more_body", False):
                await _drain(receive, _DRAIN_FACTOR * limit)
            raise too_large
        parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


async def _drain(receive: Receive, limit: int) -> None:
    """Take and forget, for a while: a client that is cut while it still writes never reads why."""
    size = 0
    try:
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            while size <= limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


async def gone(receive: Receive) -> None:
    """Returns when the client has gone. Only once the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_body(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """A whole response."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, err: KvmeshError, headers: Headers) -> None:
    """`err` as OpenAI writes it. After a body that was not read to its end the connection is closed."""
    more = [(b"connection", b"close")] if isinstance(err, BodyTooLarge) else []
    body = orjson.dumps(error_json(err))
    await send_body(send, err.http_status, [*JSON, *error_headers(err), *headers, *more], body)
