"""The HTTP server of a service's metrics port: `/metrics`, `/live` and `/ready`.

It is the liveness probe, so it answers whatever strangers do to it. One thread serves every connection with a
selector; a second one renders the metrics, so that a large scrape delays no probe. Connections, the length of a
request's head and the time that it may take are bounded; when all connections are taken, the one that has been idle
longest is closed."""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from prometheus_client import make_wsgi_app

from kvmesh.errors import ConfigError
from kvmesh.telemetry import readiness
from kvmesh.watched_files import WatchedFiles

log = logging.getLogger(__name__)

BACKLOG = 128
MAX_HEAD_BYTES = 8 << 10
_ACCEPTS = 16  # in one turn of the loop: those who have said something are heard in between
_LINGER_S = 1.0  # an answered client has so long to take the answer's end before the connection is closed
_PAUSE_S = 0.1  # without a free descriptor nothing is accepted for so long
_REST = 3.0  # rendering takes at most a quarter of the time: so many times its own length passes before the next one
_MOST_REST_S = 1.0
_CLOSE_S = 5.0
_TEXT = "text/plain; charset=utf-8"
_REASONS = {200: "OK", 400: "Bad Request", 405: "Method Not Allowed", 431: "Request Header Fields Too Large"}
_REASONS |= {500: "Internal Server Error", 503: "Service Unavailable"}


@dataclass(frozen=True)
class MetricsLimits:
    """The bounds of the metrics port: connections at once, and seconds for a request and again for its answer."""

    connections: int = 128
    timeout_s: float = 5.0


@dataclass(eq=False)
class _Connection:
    """One client: `head` is what came so far, `out` what is still to be sent."""

    sock: socket.socket
    deadline: float
    head: bytearray = field(default_factory=bytearray)
    out: memoryview = field(default_factory=lambda: memoryview(b""))
    shaken: bool = True  # False: the TLS handshake is not over
    state: str = "reading"  # then "rendering" (metrics only), "writing", "closing"


@dataclass(frozen=True)
class _Scrape:
    connection: _Connection
    accept: str
    encoding: str


def serve(
    host: str,
    port: int,
    registry: Any,
    limits: MetricsLimits | None = None,
    tls: WatchedFiles[ssl.SSLContext] | None = None,
) -> tuple[int, Callable[[], None]]:
    """Listens; returns the bound port and a function that closes it. Every path that is no probe's shows `registry`.

    Raises ConfigError, which names the port, when it is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as err:
        listener.close()
        why = "the port is in use" if err.errno == errno.EADDRINUSE else (err.strerror or str(err))
        raise ConfigError(f"metrics_port={port}: {why} on {host}", field="metrics_port") from None
    server = _MetricsServer(listener, registry, limits or MetricsLimits(), tls)
    return int(listener.getsockname()[1]), server.close


class _MetricsServer:
    """Owns the listener, every connection and both threads."""

    def __init__(
        self, listener: socket.socket, registry: Any, limits: MetricsLimits, tls: WatchedFiles[ssl.SSLContext] | None
    ) -> None:
        self._listener = listener
        self._limits = limits
        self._tls = tls
        self._app = make_wsgi_app(registry)
        self._selector = selectors.DefaultSelector()
        self._open: dict[_Connection, None] = {}  # in the order of their coming
        self._scrapes: queue.SimpleQueue[_Scrape | None] = queue.SimpleQueue()
        self._rendered: queue.SimpleQueue[tuple[_Connection, bytes]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._accept_again = 0.0  # 0: the listener is watched
        self._ear, self._mouth = socket.socketpair()
        for sock in (listener, self._ear, self._mouth):
            sock.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._ear, selectors.EVENT_READ, None)
        self._threads = [
            threading.Thread(target=self._serve, name="metrics", daemon=True),
            threading.Thread(target=self._render, name="metrics-render", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Closes every connection and ends both threads. It blocks."""
        self._stop.set()
        self._scrapes.put(None)
        self._wake()
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: it has ended
            self._mouth.send(b"\0")

    # ── the thread that serves ────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        try:
            while not self._stop.is_set():
                # Who has said something is heard before newcomers are let in, who might close him.
                ready = self._selector.select(self._pause(time.monotonic()))
                for key, _ in ready:
                    if key.data is not None and key.data in self._open:
                        self._step(key.data)
                self._take_rendered()
                if any(key.fileobj is self._listener for key, _ in ready):
                    self._accept()
                self._expire(time.monotonic())
        except Exception:
            log.exception("the metrics port failed")
        finally:
            for connection in list(self._open):
                self._drop(connection)
            self._selector.close()
            for sock in (self._listener, self._ear, self._mouth):
                sock.close()

    def _pause(self, now: float) -> float | None:
        times = [one.deadline for one in self._open if one.state != "rendering"]
        if self._accept_again:
            times.append(self._accept_again)
        return max(0.0, min(times) - now) if times else None

    def _expire(self, now: float) -> None:
        for one in [one for one in self._open if one.state != "rendering" and one.deadline <= now]:
            self._drop(one)
        if self._accept_again and now >= self._accept_again:
            self._accept_again = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, None)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, _peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as err:
                if err.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    continue  # that client has gone again
                self._make_room()
                self._selector.unregister(self._listener)
                self._accept_again = time.monotonic() + _PAUSE_S
                return
            if len(self._open) >= self._limits.connections:
                self._make_room()
            self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if self._tls is not None:
            sock = self._tls.value().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        connection = _Connection(sock, time.monotonic() + self._limits.timeout_s, shaken=self._tls is None)
        self._open[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._step(connection)  # its request is often there already

    def _make_room(self) -> None:
        """Closes the connection that has been idle longest, or the oldest when none is idle."""
        if self._open:
            idle = (one for one in self._open if one.state in ("reading", "closing"))
            self._drop(next(idle, next(iter(self._open))))

    def _drop(self, connection: _Connection) -> None:
        if connection in self._open:
            del self._open[connection]
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection.sock)
            connection.sock.close()

    def _step(self, connection: _Connection) -> None:
        """Continues with a connection as far as possible without waiting."""
        events = selectors.EVENT_READ
        try:
            if not connection.shaken:
                cast(ssl.SSLSocket, connection.sock).do_handshake()
                connection.shaken = True
            if connection.state == "reading":
                self._read(connection)
            if connection.state == "writing":
                self._write(connection)
                events = selectors.EVENT_WRITE
            if connection.state in ("closing", "rendering"):
                events = selectors.EVENT_READ
                while piece := connection.sock.recv(4096):  # what comes after the request is not looked at
                    del piece
                self._drop(connection)
        except (BlockingIOError, ssl.SSLWantReadError):
            if connection.state == "writing":
                events = selectors.EVENT_WRITE
        except ssl.SSLWantWriteError:
            events = selectors.EVENT_WRITE
        except (OSError, ValueError):  # it has gone, or speaks no TLS
            self._drop(connection)
        if connection in self._open and self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _read(self, connection: _Connection) -> None:
        while True:
            piece = connection.sock.recv(4096)
            if not piece:
                raise ConnectionResetError
            connection.head += piece
            if not connection.head[:1].isalpha():  # a TLS greeting to a plain port, or noise
                self._say(connection, _answer(400, b"not HTTP/1.1\n"))
                return
            end = connection.head.find(b"\r\n\r\n")
            if end < 0 and len(connection.head) <= MAX_HEAD_BYTES:
                continue
            if end < 0 or end > MAX_HEAD_BYTES:
                self._say(connection, _answer(431, b"the head is longer than 8 KiB\n"))
            else:
                self._take(connection, bytes(connection.head[:end]))
            connection.head.clear()
            return

    def _take(self, connection: _Connection, head: bytes) -> None:
        request, *lines = head.decode("latin-1").split("\r\n")
        words = request.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            self._say(connection, _answer(400, b"not HTTP/1.1\n"))
            return
        if words[0] != "GET":
            self._say(connection, _answer(405, b"only GET\n", (("Allow", "GET"),)))
            return
        probed = readiness.PROCESS.answer(words[1].partition("?")[0], time.monotonic())
        if probed is not None:
            self._say(connection, _answer(probed[0], probed[1].encode() + b"\n"))
            return
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        connection.state = "rendering"
        self._scrapes.put(_Scrape(connection, headers.get("accept", ""), headers.get("accept-encoding", "")))

    def _say(self, connection: _Connection, answer: bytes) -> None:
        connection.out = memoryview(answer)
        connection.state = "writing"
        connection.deadline = time.monotonic() + self._limits.timeout_s

    def _write(self, connection: _Connection) -> None:
        while connection.out:
            connection.out = connection.out[connection.sock.send(connection.out) :]
        connection.state = "closing"
        connection.deadline = time.monotonic() + _LINGER_S
        if isinstance(connection.sock, ssl.SSLSocket):
            with contextlib.suppress(OSError, ValueError):
                connection.sock.unwrap()  # says goodbye; nobody waits for the client's
        connection.sock.shutdown(socket.SHUT_WR)

    def _take_rendered(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._ear.recv(4096):
                pass
        with contextlib.suppress(queue.Empty):
            while True:
                connection, answer = self._rendered.get_nowait()
                if connection in self._open:
                    self._say(connection, answer)
                    self._step(connection)

    # ── the thread that renders ───────────────────────────────────────────────────────────────────

    def _render(self) -> None:
        while not self._stop.is_set():
            asked = [self._scrapes.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    asked.append(self._scrapes.get_nowait())
            begun = time.monotonic()
            made: dict[tuple[str, str], bytes] = {}  # those who ask at once get the same bytes
            for one in asked:
                if one is None or self._stop.is_set():
                    return
                if one.connection in self._open:
                    form = (one.accept, one.encoding)
                    if form not in made:
                        made[form] = self._metrics(*form)
                    self._rendered.put((one.connection, made[form]))
            self._wake()
            self._stop.wait(min(_MOST_REST_S, _REST * (time.monotonic() - begun)))

    def _metrics(self, accept: str, encoding: str) -> bytes:
        told: list[tuple[str, str]] = []

        def start(_status: str, headers: list[tuple[str, str]]) -> None:
            told.extend(headers)

        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "QUERY_STRING": ""}
        environ |= {"HTTP_ACCEPT": accept, "HTTP_ACCEPT_ENCODING": encoding}
        try:
            body = b"".join(cast(Iterable[bytes], self._app(environ, start)))
        except Exception:
            log.exception("metrics cannot be rendered")
            return _answer(500, b"metrics cannot be rendered\n")
        return _answer(200, body, told)


def _answer(status: int, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> bytes:
    told = {"Content-Type": _TEXT, **dict(headers), "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", *(f"{name}: {value}" for name, value in told.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
