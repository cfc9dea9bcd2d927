"""The accepting side that shm and tcp share: a listener, a thread per connection, greetings and superseding.

A connection's thread is the only one that touches registered memory for it. `gone` is set, and the connection leaves
the table, after its last touch; the listener is closed after the last connection's thread has ended. So both
"superseded" and "nobody listens" tell an opener that nothing of its old connection can land any more.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.base import TransportHost
from kvmesh.transfer.transports.wire import WIRE_VERSION, Gone, Hello, ProtocolBroken, Welcome

log = logging.getLogger(__name__)

MAX_STRANGERS = 512  # a greeting takes a millisecond; a connection slower than 512 later ones is ended


class Accepted(ABC):
    """One accepted connection (a `windows.WindowHolder`). Subclasses speak the transport's protocol."""

    def __init__(self, server: AcceptingServer, sock: socket.socket) -> None:
        self.server = server
        self.host = server.host
        self.sock = sock
        self.peer = ""
        self.conn_id = 0
        self.dead = False  # set before the socket is shut down: take no further slice
        self.gone = threading.Event()  # the thread will never touch memory again
        self.thread = threading.Thread(target=self._run, name=f"kvmesh-{server.label}-serve", daemon=True)

    def interrupt(self) -> None:
        """Makes the connection's thread leave, without waiting for it."""
        self.dead = True
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more

    def _run(self) -> None:
        try:
            self.sock.settimeout(self.server.connect_timeout_s)
            hello = self.read_hello()
            welcome = self.server.greet(self, hello)
            self.send_welcome(welcome)
            if not welcome.cause:
                self.sock.settimeout(None)
                self.host.count(f"{self.server.label}.accepted")
                self.serve()
        except (Gone, OSError) as err:
            log.debug("%s connection of %r ended: %s", self.server.label, self.peer, err)
        except ProtocolBroken as err:
            log.warning("%s connection of %r closed: %s", self.server.label, self.peer, err)
        except Exception:
            log.exception("%s connection of %r closed by a defect", self.server.label, self.peer)
        finally:
            self.dead = True
            self.release()
            self.server.remove(self)
            self.gone.set()
            self.sock.close()

    @abstractmethod
    def read_hello(self) -> Hello: ...

    def why_refused(self, hello: Hello) -> str:
        """Returns why the peer may not be who it says; "" when it may."""
        return ""

    @abstractmethod
    def send_welcome(self, welcome: Welcome) -> None: ...

    @abstractmethod
    def serve(self) -> None:
        """Serves until it raises Gone, OSError or ProtocolBroken. The thread is outside every admission when it returns
        or raises."""

    def sums(self, offsets: Sequence[int], lengths: Sequence[int]) -> bytes | None:
        """Returns the payload of the answer to a CHECKSUM of these ranges, or None when one is in no registered
        region."""
        segment = self.host.segment
        sums: list[int] = []
        for offset, length in zip(offsets, lengths, strict=True):
            region = segment.use(offset, length) if length else None
            if region is None:
                return None
            try:
                sums.append(zlib.crc32(region.slice_at(offset, length)))
            finally:
                segment.unuse(region)
        return wire.pack_sums(sums)

    def release(self) -> None:
        """Frees what the connection held (maps)."""
        return


class AcceptingServer:
    """Listens on `sock` and owns every accepted connection. `also` adds sockets; one table of connections serves them
    all, so that a greeting on one NIC can supersede what came over another."""

    def __init__(
        self,
        label: str,
        host: TransportHost,
        sock: socket.socket,
        accept: Callable[[AcceptingServer, socket.socket], Accepted],
        connect_timeout_s: float,
    ) -> None:
        self.label = label
        self.host = host
        self.connect_timeout_s = connect_timeout_s
        self._socks = [sock]
        self._accept = accept
        self._lock = threading.Lock()
        self._connections: set[Accepted] = set()
        self._strangers: dict[Accepted, None] = {}  # those that have not greeted yet, oldest first
        self._threads: set[threading.Thread] = set()  # also those whose connection is gone from the table
        self._by_id: dict[tuple[str, int], Accepted] = {}
        self._closing = False
        self._late = False  # closed before its last connection's thread had ended
        self._ended = threading.Event()
        self._acceptors: list[threading.Thread] = []

    def also(self, sock: socket.socket) -> None:
        """Adds a socket before `start`."""
        self._socks.append(sock)

    def start(self) -> None:
        """Listens. Raises OSError when a socket cannot; the caller then closes the sockets."""
        for sock in self._socks:
            sock.listen(128)
        for sock in self._socks:
            name = f"kvmesh-{self.label}-accept"
            self._acceptors.append(threading.Thread(target=self._run, args=(sock,), name=name, daemon=True))
        for thread in self._acceptors:
            thread.start()

    def greet(self, connection: Accepted, hello: Hello) -> Welcome:
        """Answers a greeting. When it returns, superseded connections of the peer can land nothing more."""
        if hello.version != WIRE_VERSION:
            return Welcome(WIRE_VERSION, f"wire version {hello.version} is not {WIRE_VERSION}")
        known = hmac.compare_digest(hello.token.encode(), self.host.token.encode())
        if hello.segment != self.host.name or not known:
            return Welcome(WIRE_VERSION, f"segment {hello.segment!r} is not here")
        if not hello.peer:
            return Welcome(WIRE_VERSION, "no name")
        if why := connection.why_refused(hello):
            log.warning("%s connection of %r refused: %s", self.label, hello.peer[:80], why)
            return Welcome(WIRE_VERSION, why)
        deadline = time.monotonic() + self.connect_timeout_s / 2
        for conn_id in hello.supersedes:
            with self._lock:
                old = self._by_id.get((hello.peer, conn_id))
            if old is not None:
                old.interrupt()
                if not old.gone.wait(max(0.0, deadline - time.monotonic())):
                    return Welcome(WIRE_VERSION, f"connection {conn_id} is still inside a slice", retry=True)
        with self._lock:
            if self._closing:
                return Welcome(WIRE_VERSION, "closing", retry=True)
            if (hello.peer, hello.conn_id) in self._by_id:
                return Welcome(WIRE_VERSION, f"connection {hello.conn_id} exists")
            connection.peer, connection.conn_id = hello.peer, hello.conn_id
            self._strangers.pop(connection, None)
            self._by_id[(hello.peer, hello.conn_id)] = connection
        return Welcome(WIRE_VERSION)

    def remove(self, connection: Accepted) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._strangers.pop(connection, None)
            key = (connection.peer, connection.conn_id)
            if self._by_id.get(key) is connection:
                del self._by_id[key]
            last = self._late and not self._connections
        if last:
            self._end(0.1)

    def connections(self) -> list[Accepted]:
        with self._lock:
            return list(self._connections)

    def _run(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as err:
                if self._closing:
                    break
                log.warning("%s listener: %s", self.label, err)
                self._ended.wait(0.05)  # out of descriptors: let some go
                continue
            try:
                self._begin(self._accept(self, sock))
            except OSError:
                sock.close()  # it has ended already
            except Exception as err:  # out of threads or memory: this one is lost, the next is not
                log.warning("%s connection not taken: %s", self.label, err)
                sock.close()

    def _begin(self, connection: Accepted) -> None:
        with self._lock:
            if self._closing:
                connection.sock.close()
                return
            try:
                connection.thread.start()  # it waits for the lock before it says anything
            except BaseException:
                connection.dead = True
                raise
            self._connections.add(connection)
            self._strangers[connection] = None
            if len(self._strangers) > MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.interrupt()
            self._threads = {t for t in self._threads if t.is_alive()} | {connection.thread}

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closing = True
            connections, threads = list(self._connections), list(self._threads)
        for connection in connections:
            connection.interrupt()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._late = bool(self._connections)
        if self._late:
            log.warning("%s: a connection's thread does not end; it will close the listener when it does", self.label)
        else:
            self._end(max(0.1, deadline - time.monotonic()))

    def _end(self, timeout_s: float) -> None:
        """Closes the listeners, once the last connection's thread has left the memory: to openers "nobody listens"
        means that."""
        self._ended.set()
        for listener in self._socks:
            try:
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            except OSError:
                pass
        for thread in self._acceptors:
            if thread is not threading.current_thread():
                thread.join(timeout_s)
        for listener in self._socks:
            listener.close()
