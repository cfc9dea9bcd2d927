"""The tcp transport at the opener: several streams a peer and rail, each a sending and an answering thread.

    post ─▶ queue ─┬─▶ stream 0: sender ══ frame ══▶ acceptor          (`server`)
                   │             reader ◀═ answer ══
                   └─▶ stream 1: ...

Streams take frames from one queue, so a slow one takes fewer; several frames are in flight on each. When a stream
breaks, its sender opens another connection whose greeting supersedes the broken one (see `wire`); only after the
Welcome are the frames without an answer reported lost and settled, to be sent again. Without a Welcome they are lost
and unsettled. The frames of a READ are always settled once the reader has ended: it is the only thread that lands them.

Where the peer has other rails, the greeting that supersedes may go over any of them: a stream whose NIC fell silent
greets there, reports its frames lost, settled and its rail down, and ends.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvmesh.transfer.segment import SegmentDescriptor, why_no_answer
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.base import Frame, FrameKind, Rail
from kvmesh.transfer.transports.dialing import begin, connect_patiently
from kvmesh.transfer.transports.tcp.answers import TcpAnswers, local_views
from kvmesh.transfer.transports.tcp.dial import (
    SILENCE,
    TcpRoute,
    at,
    forget_unsent,
    greet,
    prepared,
    secured,
    size_buffers,
)
from kvmesh.transfer.transports.tcp.zerocopy import ZeroCopy
from kvmesh.transfer.transports.tls import ByteStream, TlsSocket
from kvmesh.transfer.transports.wire import ConnectionRefused, Gone, Hello, ProtocolBroken

if TYPE_CHECKING:
    from kvmesh.transfer.transports.tcp.transport import TcpTransport


_SENT_BY_POSTER = 128 << 10  # bytes of a WRITE that its poster may copy into the socket itself
_LANDING = (FrameKind.WRITE, FrameKind.NOTIFY)  # what leaves traces at the target


class TcpPath:
    """All streams to one segment over one rail, and the frames that wait for one (a `dialing.Path`)."""

    def __init__(self, transport: TcpTransport, descriptor: SegmentDescriptor, rail: Rail) -> None:
        self.transport = transport
        self.descriptor = descriptor
        self.rail = rail
        self.changed = threading.Condition()
        self.queue: deque[Frame] = deque()
        self.waiting = 0  # streams that wait for a frame
        self.closed = ""
        self.streams: list[TcpStream] = []

    def take(self, frame: Frame) -> bool:
        fresh: TcpStream | None = None
        seq = 0
        with self.changed:
            if self.closed:
                return False
            stream = self._free_stream(frame)
            if stream is not None:
                seq = stream.board(frame)
                stream.lent = True
            else:
                self.queue.append(frame)
                if self.waiting < len(self.queue) and len(self.streams) < self.transport.config.tcp_streams:
                    fresh = TcpStream(self)
                    self.streams.append(fresh)
                self.changed.notify()
        if stream is not None:
            stream.send_now(_encoded(seq, frame))
        elif fresh is not None:
            try:
                self.transport.spawn(fresh.thread)
            except OSError as err:
                fresh.stillborn(str(err))
        return True

    def _free_stream(self, frame: Frame) -> TcpStream | None:
        """Returns the stream on which the poster itself may send this small frame, which spares waking a thread: the
        one with the least to wait for, once as many streams exist as the load wants. The caller holds `changed`."""
        if self.queue or (frame.kind is FrameKind.WRITE and frame.nbytes > _SENT_BY_POSTER):
            return None
        free = [s for s in self.streams if s.ready and not (s.broken or s.lent or s.busy or s.rest)]
        idle = next((s for s in free if not s.inflight), None)
        if idle is not None or len(self.streams) < self.transport.config.tcp_streams:
            return idle
        return min(free, key=lambda s: len(s.inflight), default=None)

    def recall(self, frame: Frame) -> bool:
        with self.changed:
            if frame in self.queue:
                self.queue.remove(frame)
                return True
        return False

    def expire(self, frame: Frame, idle_s: float) -> None:
        with self.changed:
            for stream in self.streams:
                if frame in stream.inflight.values() and time.monotonic() - stream.progress_at >= idle_s:
                    stream.shut(f"no answer from {self.descriptor.name} over {self.rail}", silent=True)

    def assist(self, frame: Frame, seconds: float) -> None:
        with self.changed:
            answers = next((s.answers for s in self.streams if frame in s.inflight.values()), None)
        if answers is not None:
            answers.help(frame, seconds)

    def cut(self, cause: str) -> None:
        """Breaks the connections over the local NIC, which is gone."""
        with self.changed:
            for stream in self.streams:
                if not stream.elsewhere:
                    stream.shut(cause, silent=True)

    def idle(self) -> bool:
        with self.changed:
            return not self.queue and not any(s.inflight or s.stranded for s in self.streams)

    def close(self, cause: str) -> None:
        with self.changed:
            self.closed = cause
            for stream in self.streams:
                stream.shut(cause)
            self.changed.notify_all()


class TcpStream:
    """One stream of a path: a thread that connects, sends and recovers, with at most one connection at a time."""

    def __init__(self, path: TcpPath) -> None:
        self.path = path
        self.config = path.transport.config
        self.host = path.transport.host
        self.thread = threading.Thread(target=self._run, name="kvmesh-tcp-send", daemon=True)
        self.sock: ByteStream | None = None
        self.answers: TcpAnswers | None = None  # of the connection that serves
        self.broken = ""  # why, once it is
        self.silent = False  # broken because the way, not the process at its end, fell silent
        self.elsewhere = False  # `sock` goes over another rail, to supersede what was here
        self.inflight: dict[int, Frame] = {}
        self.stranded: list[Frame] = []  # on a broken connection, not settled
        self.supersedes: tuple[int, ...] = ()
        self.progress_at = 0.0
        self.ready = False  # connected, and its thread serves
        self.busy = False  # the thread sends
        self.lent = False  # a poster sends on it; the thread neither sends nor closes the socket
        self.rest: list[memoryview] = []  # what a poster could not send without waiting
        self._seq = 0

    def shut(self, cause: str, *, silent: bool = False) -> None:
        """Breaks the connection; the caller holds `path.changed`."""
        if not self.broken:
            self.broken, self.silent = cause, silent
        if self.sock is not None:
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # not connected
        self.path.changed.notify_all()

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        many_nics = bool(self.path.rail.local)
        while True:
            sock, cause = self._connect()
            if sock is None:
                advice = "" if self.path.closed else why_no_answer(self.path.descriptor, "tcp")
                cause = f"{cause}: {advice}" if advice else cause
                break
            self._settled("the connection broke", down=False)
            answers: TcpAnswers | None = None
            try:
                self.answers = answers = TcpAnswers(
                    self, sock, self.config.tcp_user_timeout_s / 2 if many_nics else 0.0
                )
                reader = threading.Thread(target=answers.run, name="kvmesh-tcp-read", daemon=True)
                begin(reader)
            except OSError as err:  # out of descriptors or threads
                cause = str(err)
                self.answers = None
                if answers is not None:
                    answers.close()
                sock.close()
                break
            self._send(sock)
            reader.join()
            answers.close()  # no caller reads any more
            self.answers = None
            if self.inflight:
                forget_unsent(sock)
            sock.close()
            if not self._gather():
                return
        self.stillborn(cause)

    def stillborn(self, cause: str) -> None:
        """Removes the stream, whose thread could not start or is about to end."""
        with self.path.changed:
            self.path.streams.remove(self)
        self._lose(cause)

    def _connect(self) -> tuple[ByteStream | None, str]:
        """Returns a connection, or None and the cause. Without one, stranded frames may still be settled over another
        rail."""
        path, transport = self.path, self.path.transport
        others = transport.others(path.descriptor, path.rail)
        if not others:
            dial = partial(self._dial, path.rail)
            return connect_patiently(dial, self.config, lambda: path.closed, self._pause)
        cause, why = "closed", self.broken or f"{path.rail} broke"
        for attempt in range(self.config.max_attempts):
            if attempt:
                self._pause(self.config.backoff_s * 2 ** (attempt - 1))
            rails = [*others, path.rail] if self.silent else [path.rail, *others]
            for rail in rails if self.stranded else [path.rail]:
                if path.closed:
                    return None, path.closed
                sock, cause, final = self._attempt(rail)
                if sock is not None and rail == path.rail:
                    return sock, ""
                if sock is not None:
                    sock.close()  # its greeting was all
                    self._settled(why, down=True)
                    return None, why
                if final:
                    return None, cause
            if not self.stranded and transport.other_way(path.descriptor, path.rail):
                break
        return None, cause

    def _attempt(self, rail: Rail) -> tuple[ByteStream | None, str, bool]:
        """Returns a connection, or None, the cause, and whether trying on is useless."""
        path = self.path
        try:
            return self._dial(rail), "", False
        except ConnectionRefused as err:
            return None, str(err), not err.retry
        except (OSError, Gone, ProtocolBroken) as err:
            if not path.closed:
                path.transport.tried(path.descriptor.name, rail, connected=False)
            return None, f"{rail}: {str(err) or type(err).__name__}", False
        except Exception as err:  # as in connect_patiently
            return None, f"{rail}: cannot connect: {err!r}", True

    def _settled(self, cause: str, *, down: bool) -> None:
        frames, self.stranded = self.stranded, []
        for frame in frames:
            frame.lost(cause, settled=True, down=down)

    def _pause(self, seconds: float) -> None:
        with self.path.changed:
            self.path.changed.wait_for(lambda: bool(self.path.closed), seconds)

    def _dial(self, rail: Rail) -> ByteStream:
        """Greets over this rail; the Welcome settles the frames of the connection before."""
        path, error = self.path, OSError("no address of the peer's to connect to")
        for route in path.transport.ways(path.descriptor, rail):
            try:
                sock = self._dial_route(route, rail)
            except OSError as err:
                error = at(route, err)
                continue
            path.transport.tried(path.descriptor.name, rail, connected=True)
            self.progress_at = time.monotonic()
            self.host.count("tcp.connected")
            return sock
        raise error

    def _dial_route(self, route: TcpRoute, rail: Rail) -> ByteStream:
        path = self.path
        raw = prepared(route, self.config)
        sock: ByteStream = raw
        with path.changed:
            self.sock, self.broken, self.elsewhere = sock, path.closed, rail != path.rail
        try:
            if self.broken:
                raise Gone(self.broken)
            raw.connect(route.target)
            size_buffers(raw, self.config)
            endpoint = path.descriptor.endpoints.get("tcp", {})
            sock = secured(raw, path.transport.identity, endpoint, self.config.connect_timeout_s)
            conn_id = next(path.transport.conn_ids)
            descriptor, supersedes = path.descriptor, self.supersedes
            greet(
                sock, Hello(wire.WIRE_VERSION, self.host.name, descriptor.name, descriptor.token, conn_id, supersedes)
            )
        except BaseException:
            with path.changed:
                self.sock = None
            sock.close()
            raise
        with path.changed:
            self.sock, self.silent = sock, False
        self.supersedes = (conn_id,)
        return sock

    def board(self, frame: Frame) -> int:
        """Adds a frame to the connection and returns its number; the caller holds `path.changed`."""
        self._seq += 1
        if not self.inflight:
            self.progress_at = time.monotonic()
        self.inflight[self._seq] = frame
        return self._seq

    def send_now(self, views: list[memoryview]) -> None:
        """Sends without waiting, in the thread that the stream is lent to; the stream's thread sends what the socket
        did not take."""
        sock, rest, failed = self.sock, views, None
        try:
            assert sock is not None, "lent only while it serves"
            rest = wire.send_now(sock, views)
        except OSError as err:
            failed = err
        path = self.path
        with path.changed:
            if failed is not None:
                self.shut(f"send to {path.descriptor.name}: {failed}", silent=failed.errno in SILENCE)
            elif sock is not None:
                self._retire(sock)
            self.lent, self.rest = False, rest
            if rest or path.queue or self.broken:
                path.changed.notify_all()

    def _send(self, sock: ByteStream) -> None:
        path = self.path
        send_views: Callable[[Any, list[memoryview], int], None] = wire.send_views
        if self.config.tcp_zerocopy and isinstance(sock, socket.socket):
            send_views = ZeroCopy(sock).send_views
        with path.changed:
            self.ready, self.rest = True, []
        while True:
            with path.changed:
                self.busy = False
                while self.lent or not (path.queue or self.rest or self.broken):
                    path.waiting += 1
                    awaited = path.changed.wait(self.config.tcp_idle_s)
                    path.waiting -= 1
                    if not (awaited or path.queue or self.inflight or self.lent):
                        self.shut("idle")
                if self.broken:
                    self.ready = False
                    if path.queue:
                        path.changed.notify()  # the wake-up may have been meant for another stream
                    return
                views, self.rest = self.rest, []
                self.busy = True
                send = wire.send_rest if views else send_views
                if not views:
                    frame = path.queue.popleft()
                    views = _encoded(self.board(frame), frame)
            try:
                send(sock, views, sum(map(len, views)))
            except OSError as err:
                with path.changed:
                    self.shut(f"send to {path.descriptor.name}: {err}", silent=err.errno in SILENCE)
            with path.changed:
                self._retire(sock)

    def _retire(self, sock: ByteStream) -> None:
        """Ends a connection whose keys have carried as much as they may; what is on its way goes over the next one. The
        caller holds `path.changed`."""
        if isinstance(sock, TlsSocket) and sock.worn:
            self.host.count("tcp.keys_worn")
            self.shut("its keys have carried as much as they may")

    def ping(self) -> None:
        """Sends something that the peer's kernel must acknowledge, because nothing has come for a while."""
        with self.path.changed:
            if self.broken or self.lent or self.busy or self.rest or not self.inflight:
                return
            self.lent = True
        self.send_now([memoryview(wire.HEAD.pack(wire.PING, 0, 0, 0, 0, 0, 0))])

    def broke(self, err: Exception) -> None:
        """Handles an error that the reader of answers met."""
        with self.path.changed:
            silent = isinstance(err, OSError) and err.errno in SILENCE
            self.shut(f"connection to {self.path.descriptor.name}: {err}", silent=silent)

    # ── endings ───────────────────────────────────────────────────────────────────────────────────

    def _gather(self) -> bool:
        """Sorts the frames of a connection that ended; returns whether another is needed, to settle frames or to send
        waiting ones."""
        path = self.path
        with path.changed:
            cause, silent = self.broken, self.silent
            frames = list(self.inflight.values())
            self.inflight.clear()
            self.sock = None
            self.stranded = [f for f in frames if f.kind in _LANDING]
            more = bool(self.stranded) or (bool(path.queue) and len(path.streams) == 1)
            closed = path.closed
            if not more or closed:
                path.streams.remove(self)
        has_others = bool(frames) and bool(path.transport.others(path.descriptor, path.rail))
        for frame in frames:
            if frame.kind not in _LANDING:
                frame.lost(cause, settled=True, down=silent and has_others)
        if closed:
            self._lose(closed)
            return False
        return more

    def _lose(self, cause: str) -> None:
        """Loses this stream's frames, because the path is closed or the stream cannot connect. Waiting frames are lost
        too when no other stream serves them."""
        path = self.path
        with path.changed:
            waiting = [] if path.streams else list(path.queue)
            if not path.streams:
                path.queue.clear()
        stranded, self.stranded = self.stranded, []
        for frame in stranded:
            frame.lost(cause, settled=False, down=not path.closed)
        for frame in waiting:
            frame.lost(cause, settled=True, down=not path.closed)


def _encoded(seq: int, frame: Frame) -> list[memoryview]:
    """Returns the views that a frame is sent from."""
    asked = memoryview(wire.encode_question(seq, frame))
    return [asked, *local_views(frame)] if frame.kind is FrameKind.WRITE else [asked]
