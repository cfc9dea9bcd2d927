"""HTTP/1.1 as uvicorn speaks it, with bounds on all that a stranger can send, hold or leave unread.

A request's head has a size, a number of headers and a time; bytes of it that come one by one cost as much as those that
come together. Connections are counted; where there are too many, the one that has been idle for longest goes. A client
that is answered before its body is read gets its answer: what it still sends is thrown away for a moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from kvmesh.services.gateway.rest.http_limits import HttpLimits
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

MAX_PIPELINED = 8
MAX_PIPELINED_BYTES = 64 << 10
_PIECE = 64 << 10
_WHOLE_LINES = 1 << 10  # beyond so many bytes of a head it is parsed line by line, or in pieces of _HELD
_HELD = 4 << 10
_WRITE_BUFFER = 256 << 10
_LINGER_S = 5.0

REFUSALS = {
    400: b"Invalid HTTP request received.",
    408: b"The request's head did not arrive in time.",
    431: b"The request's head is too large.",
    414: b"The request's URL is too long.",
}


class HttpConnections:
    """All connections of one listener: those without a request, the one that is so for longest first, and how many
    bytes of unfinished heads they hold."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.most = limits.connections
        self.count = 0
        self.heads_bytes = 0
        self._idle: OrderedDict[BoundedHttpProtocol, None] = OrderedDict()

    def opened(self, connection: BoundedHttpProtocol) -> None:
        self.count += 1
        self._idle[connection] = None
        if self.count > self.most:
            self.shed()
        names.GATEWAY_HTTP_CONNECTIONS.set(self.count)

    def closed(self, connection: BoundedHttpProtocol) -> None:
        self.count -= 1
        self._idle.pop(connection, None)
        names.GATEWAY_HTTP_CONNECTIONS.set(self.count)

    def busy(self, connection: BoundedHttpProtocol) -> None:
        self._idle.pop(connection, None)

    def idle(self, connection: BoundedHttpProtocol) -> None:
        self._idle[connection] = None

    def head_grew(self, size: int) -> None:
        """Bytes of unfinished heads have come (or gone: negative)."""
        self.heads_bytes += size
        if size > 0 and self.heads_bytes > self.limits.max_heads_bytes:
            self.shed()

    def shed(self) -> None:
        """Ends the connection that has been without a request for longest."""
        if self._idle:
            oldest, _ = self._idle.popitem(last=False)
            names.GATEWAY_HTTP_REFUSED.labels(reason="connections").inc()
            oldest.drop()


class _Writer:
    """What a request's cycle has of the transport: closing is the protocol's affair."""

    __slots__ = ("_protocol", "_transport", "write")

    def __init__(self, protocol: BoundedHttpProtocol) -> None:
        self._protocol = protocol
        self._transport = protocol.transport
        self.write = protocol.transport.write

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._protocol.finish()


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    parser: httptools.HttpRequestParser | None  # type: ignore[assignment]  # None when the connection is lost

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        bounds: HttpConnections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.bounds = bounds
        self.limits = bounds.limits
        self._in_head = True  # or between two requests
        self._begun = False
        self._head_bytes = 0  # of the head that is being received
        self._pending = bytearray()
        self._since_body = 0  # bytes of a body that were none of its content: chunk headers, extensions, trailers
        self._refusal = 0
        self._lingering = -1  # bytes that may still be thrown away; negative: not lingering
        self._head_timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # ── the connection ────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        self._expect_head()
        self.bounds.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        self.bounds.closed(self)
        self._forget_head()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.pipeline.clear()

    def drop(self) -> None:
        """Ends the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def finish(self) -> None:
        """Ends the connection once what was written has been sent. While the client still sends, it is listened to for
        a moment: a connection that is reset under a client takes the answer with it."""
        if self.transport.is_closing() or self._lingering >= 0:
            return
        unread = self.cycle is not None and self.cycle.more_body
        if unread:
            self._linger()
        else:
            self._close()

    def _linger(self) -> None:
        self._forget_head()
        self._lingering = self.limits.linger_bytes
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._close_timer = self.loop.call_later(_LINGER_S, self.drop)

    def shutdown(self) -> None:
        if self._lingering >= 0:
            self.drop()
        else:
            super().shutdown()

    def _close(self) -> None:
        self.transport.close()
        if self._close_timer is None:
            self._close_timer = self.loop.call_later(self.limits.write_timeout_s, self.drop)

    def _cancel_timers(self) -> None:
        for timer in (self._head_timer, self._close_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._close_timer = self._write_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self._unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _unread(self) -> None:
        names.GATEWAY_HTTP_REFUSED.labels(reason="unread").inc()
        self.drop()

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._close()

    # ── bytes ─────────────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        if self._lingering >= 0:
            self._lingering -= len(data)
            if self._lingering < 0:
                self.drop()
            return
        self._unset_keepalive_if_required()
        if self._in_head and not self._head_bytes and len(data) <= _WHOLE_LINES:
            before = self.cycle
            self._feed(data)  # nearly always a whole head
            if self._begun or self.cycle is before:  # empty lines before a head, too, are part of it
                self._hold_head(len(data))
            return
        for start in range(0, len(data), _PIECE):
            if self.parser is None or self.transport.is_closing() or self._lingering >= 0:
                return
            piece = data if len(data) <= _PIECE else data[start : start + _PIECE]
            if self._in_head:
                self._take_head(piece)
            else:
                self._since_body += len(piece)
                self._feed(piece)
                if self._begun:  # the next one's
                    self._hold_head(len(piece))
                if not self._in_head and self._since_body > self.limits.max_head_bytes + _PIECE:
                    self._refuse(431)

    def _hold_head(self, size: int) -> None:
        """An unfinished head has grown by up to `size` bytes."""
        if self.parser is None or self.transport.is_closing() or self._lingering >= 0:
            return
        self._head_bytes += size
        self.bounds.head_grew(size)
        if self._head_timer is None:
            self._expect_head()

    def _take_head(self, piece: bytes) -> None:
        self._hold_head(len(piece))
        if self.transport.is_closing():
            return
        # The parser joins the parts of an unfinished line: many small parts would cost the square of their number.
        if self._head_bytes > _WHOLE_LINES and b"\n" not in piece:
            self._pending += piece
            if len(self._pending) < _HELD:
                return
            piece = b""
        if self._pending:
            piece = bytes(self._pending) + piece
            self._pending.clear()
        room = self.limits.max_head_bytes - (self._head_bytes - len(piece))
        if len(piece) <= room:
            self._feed(piece)
        else:
            before = self.cycle
            self._feed(piece[:room])
            if self.cycle is before:
                self._refuse(431)
            elif not self.transport.is_closing() and self._lingering < 0:
                self._feed(piece[room:])
        if self._begun and not self._head_bytes:  # the next one's
            self._hold_head(len(piece))

    def _feed(self, piece: bytes) -> None:
        if self.parser is None:
            return
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._unsupported_upgrade_warning()
        except httptools.HttpParserError:
            self._refuse(self._refusal or 400)

    def _refuse(self, status: int) -> None:
        """Answers with `status` and ends the connection; where a request is still being answered, it only ends it."""
        if self.transport.is_closing() or self._lingering >= 0:
            return
        names.GATEWAY_HTTP_REFUSED.labels(reason=str(status)).inc()
        if self.cycle is not None and not self.cycle.response_complete:
            self.drop()
            return
        text = REFUSALS[status]
        head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(text)
        self.transport.write(STATUS_LINE[status] + head + text)
        self._linger()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_head()  # it may wait as long as the request before it
        elif not self.transport.is_closing() and self._lingering < 0:
            if self._head_bytes:
                self._refuse(408)
            else:
                self._close()

    def _forget_head(self) -> None:
        if self._head_bytes:
            self.bounds.head_grew(-self._head_bytes)
        self._head_bytes = 0
        self._pending.clear()

    # ── what the parser says ──────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._begun = True

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > self.limits.max_url_bytes:
            self._refusal = 414
            raise ValueError("url")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # trailers say nothing here
        if len(self.headers) >= self.limits.max_headers:
            self._refusal = 431
            raise ValueError("headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = self._begun = False
        self._forget_head()
        self._since_body = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = 400
            raise ValueError("pipeline")
        self.bounds.busy(self)
        super().on_headers_complete()
        self.cycle.transport = _Writer(self)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._since_body = 0
        super().on_body(body)
        if self.pipeline and len(self.cycle.body) > MAX_PIPELINED_BYTES:
            self._refusal = 400
            raise ValueError("pipeline")

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.cycle.more_body = False  # also of one that was answered before
        self._in_head = True

    def on_response_complete(self) -> None:
        if self.cycle.more_body and not self.pipeline:
            self.finish()  # the rest of its body is of no use to anybody
        super().on_response_complete()
        if self._lingering >= 0:
            self._unset_keepalive_if_required()
            return
        if not self.pipeline and not self.transport.is_closing() and self.cycle.response_complete:
            self.bounds.idle(self)
