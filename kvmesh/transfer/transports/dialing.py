"""The opening side that shm and tcp share: one path a rail, made on demand; patience in connecting; reading answers."""

from __future__ import annotations

import errno
import secrets
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import count
from typing import Protocol, TypeVar

from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.segment import SegmentDescriptor
from kvmesh.transfer.transports.adaptive_spin import AdaptiveSpin
from kvmesh.transfer.transports.base import Frame, Rail, Transport, TransportHost
from kvmesh.transfer.transports.serving import AcceptingServer
from kvmesh.transfer.transports.tls import ByteStream
from kvmesh.transfer.transports.wire import ConnectionRefused, Gone, ProtocolBroken

SockT = TypeVar("SockT")


class Path(Protocol):
    """The connections to one segment. Methods are thread-safe and do not block; only `_run` threads report frames."""

    descriptor: SegmentDescriptor

    def take(self, frame: Frame) -> bool:
        """Takes a frame. Returns False when the path is closed."""
        ...

    def recall(self, frame: Frame) -> bool: ...

    def assist(self, frame: Frame, seconds: float) -> None: ...

    def expire(self, frame: Frame, idle_s: float) -> None:
        """Breaks the connection that carries the frame. A frame that waits for a connection goes on waiting, because
        connecting has limits of its own and reports when they are reached."""
        ...

    def idle(self) -> bool: ...

    def close(self, cause: str) -> None:
        """Closes the path: its threads report every frame that it holds as lost, and end."""
        ...


class DialingTransport(Transport):
    """A transport over sockets: `_paths` lead to peers, one `AcceptingServer` serves peers."""

    def __init__(self, host: TransportHost, config: EngineConfig) -> None:
        self.host = host
        self.config = config
        self.conn_ids = conn_ids()
        self._server: AcceptingServer | None = None
        self._lock = threading.Lock()
        self._paths: dict[tuple[str, Rail], Path] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False

    @abstractmethod
    def new_path(self, descriptor: SegmentDescriptor, rail: Rail) -> Path: ...

    def post(self, frame: Frame) -> None:
        key = (frame.link.name, frame.rail)
        with self._lock:
            # A closed link's name may be open again, as that of another process: its frames must not get there.
            path = None if frame.link.closed else self._paths.get(key)
            if path is None and not self._closed and not frame.link.closed:
                path = self._paths[key] = self.new_path(frame.link.descriptor, frame.rail)
            elif path is not None and self.name in frame.link.descriptor.endpoints:
                path.descriptor = frame.link.descriptor  # a newer one of the same process: to dial by
        if path is None or not path.take(frame):
            frame.lost(frame.link.closed or "closed", settled=True)

    def recall(self, frame: Frame) -> bool:
        path = self._paths.get((frame.link.name, frame.rail))
        return path is not None and path.recall(frame)

    def expire(self, frame: Frame, idle_s: float) -> None:
        path = self._paths.get((frame.link.name, frame.rail))
        if path is not None:
            path.expire(frame, idle_s)

    def assist(self, frame: Frame, seconds: float) -> None:
        path = self._paths.get((frame.link.name, frame.rail))
        if path is not None:
            path.assist(frame, seconds)

    def forget(self, segment: str, cause: str, rail: Rail | None = None) -> None:
        with self._lock:
            keys = [key for key in self._paths if key[0] == segment and rail in (None, key[1])]
            paths = [self._paths.pop(key) for key in keys]
        for path in paths:
            path.close(cause)

    def idle(self, segment: str, rail: Rail) -> bool:
        path = self._paths.get((segment, rail))
        return path is None or path.idle()

    def spawn(self, thread: threading.Thread) -> None:
        """Starts a thread that `close` waits for. Raises OSError when the system allows no more threads."""
        with self._lock:
            begin(thread)
            self._threads = {t for t in self._threads if t.is_alive()} | {thread}

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            paths, self._paths = list(self._paths.values()), {}
        for path in paths:
            path.close("engine closed")
        if self._server is not None:
            self._server.close(timeout_s)
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


_ARMED = select.EPOLLIN | select.EPOLLONESHOT


class AnswerReader(ABC):
    """Reads the answers on one connection: one thread at a time, the one that holds `turn`.

        nothing to read     the owner thread sleeps in epoll, without the turn
        an answer comes     the owner wakes, takes the turn and reads
        a caller waits      for a frame of its own: it takes the turn before the answer comes and reads it itself,
                            which wakes one thread less; the owner sleeps on, as epoll is armed only while nobody reads

    How far an answer has been read is kept here, so the next thread goes on from there. `broke(err)` is called, by any
    reader, when the connection ends. Raises OSError when no descriptors are left.
    """

    def __init__(self, sock: ByteStream, broke: Callable[[Exception], None], quiet_s: float = 0.0) -> None:
        """`quiet_s` is how long nothing may come before `quiet` is called; 0 means for ever."""
        self.sock = sock
        self._broke = broke
        self._quiet_s = quiet_s or None
        self._fd = sock.fileno()
        self._turn = threading.Lock()
        self._epoll = select.epoll()
        self._epoll.register(self._fd, _ARMED)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._patience = AdaptiveSpin()  # of callers

    @abstractmethod
    def advance(self) -> bool:
        """Reads without waiting until one answer is whole, and reports it. Returns False when nothing more has come.
        Raises Gone, OSError or ProtocolBroken at the end of the connection. The caller holds the turn."""

    def drain(self) -> None:
        """Reads all answers that have come; the owner thread holds the turn."""
        while self.advance():
            pass

    def leave_nothing(self) -> None:
        """Reads whatever the socket's readiness does not show, before the turn is given back; it does not wait."""
        return

    def quiet(self) -> None:
        """Is called when nothing has come for `quiet_s`; subclasses may ping the peer."""
        return

    def run(self) -> None:
        """Reads answers until the connection ends; it is the body of the owner thread."""
        try:
            while True:
                if not self._epoll.poll(self._quiet_s):
                    self.quiet()
                    continue
                with self._turn:
                    self.drain()
                    self._epoll.modify(self._fd, _ARMED)
        except (Gone, OSError, ProtocolBroken) as err:
            self._broke(err)

    def help(self, frame: Frame, seconds: float) -> None:
        """Reads in the caller's thread until this frame is answered. It returns earlier when another thread reads,
        after `seconds`, or when the connection ends."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            self._epoll.modify(self._fd, 0)
            try:
                self._read_until(frame, seconds)
                self.leave_nothing()
            finally:
                self._epoll.modify(self._fd, _ARMED)
        except (Gone, OSError, ProtocolBroken) as err:
            self._broke(err)
        finally:
            self._turn.release()

    def _read_until(self, frame: Frame, seconds: float) -> None:
        spin_until = self._patience.begin()
        deadline = time.monotonic() + seconds
        while not frame.answered:
            if self.advance():
                continue
            now = time.monotonic()
            if now >= spin_until and (now >= deadline or not self._poll.poll((deadline - now) * 1000)):
                return
        self._patience.met(frame.nbytes)

    def close(self) -> None:
        """Returns when no caller reads any more. It follows the end of `run` and the socket's shutdown."""
        self._turn.acquire()  # for ever
        self._epoll.close()


def conn_ids() -> count[int]:
    """Returns connection numbers that no other engine of the same name uses, before or after."""
    return count(1 + secrets.randbits(60))


def begin(thread: threading.Thread) -> None:
    """Starts a thread. Raises OSError when the system allows no more, so that whoever counts on the thread can
    say so."""
    try:
        thread.start()
    except RuntimeError as err:
        raise OSError(errno.ENOMEM, str(err)) from err


def connect_patiently(
    dial: Callable[[], SockT], config: EngineConfig, closed: Callable[[], str], pause: Callable[[float], None]
) -> tuple[SockT | None, str]:
    """Returns (what `dial` returns, ""), or (None, the cause). It gives up after `max_attempts` with growing pauses,
    after a final refusal, or once `closed()` returns a cause."""
    cause = "closed"
    for attempt in range(config.max_attempts):
        if attempt:
            pause(config.backoff_s * 2 ** (attempt - 1))
        if closed():
            return None, closed()
        try:
            return dial(), ""
        except ConnectionRefused as err:
            cause = str(err)
            if not err.retry:
                break
        except (OSError, Gone, ProtocolBroken) as err:
            cause = str(err) or type(err).__name__
        except Exception as err:  # whatever the descriptor holds: who dials has to report what waits
            cause = f"cannot connect: {err!r}"
            break
    return None, cause
