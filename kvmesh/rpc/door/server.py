"""The side that answers: listens on a Unix socket and a TCP port, and carries calls to a gRPC servicer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Collection

from google.protobuf.descriptor import ServiceDescriptor

from kvmesh.rpc import status
from kvmesh.rpc.door import frames, starting
from kvmesh.rpc.door.methods import Served, served
from kvmesh.rpc.door.sweep import Sweep
from kvmesh.rpc.errors import BodyTooLarge, ConfigError, KvmeshError, Overloaded, ProtocolMismatch, RequestCancelled
from kvmesh.rpc.server import check_port

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
MAX_CALLS = 1024  # under way on one connection
GREETING_S = 5.0
CLOSE_S = 2.0
_BACKLOG = 128
_UCRED = struct.Struct("iII")  # pid, uid, gid
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))  # finds callers whose machine is gone


class DoorContext:
    """What a servicer may ask of a call."""

    __slots__ = ("_deadline",)

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def time_remaining(self) -> float:
        """Seconds that the caller still waits; never negative."""
        return max(0.0, self._deadline - time.monotonic())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """None: what a call must bring along is in its message."""
        return ()


class DoorServer:
    """All doors of one life to one servicer. `life`: what callers must mean when they come; `methods`: those that can
    be called, by default all; `connections`: at most (MAX_CONNECTIONS unless told). On the
    event loop."""

    def __init__(
        self,
        service: ServiceDescriptor,
        servicer: object,
        life: int,
        *,
        methods: Collection[str] | None = None,
        connections: int | None = None,
    ) -> None:
        self.methods = served(service, servicer, methods)
        self.life = life
        self.connections = MAX_CONNECTIONS if connections is None else connections
        self.on_call: Callable[[bytes], object] | None = None  # hears the name of each method that is called
        self.tasks: set[asyncio.Task[None]] = set()  # of calls that wait for something
        self._listening: list[asyncio.AbstractServer] = []
        self._accepted: set[_Accepted] = set()

    async def listen_unix(self) -> str:
        """A name in the abstract namespace, "@...": found in this network namespace alone, and by this user. OSError:
        there are no such sockets here."""
        name = f"@kvmesh-door-{os.getpid()}-{secrets.token_hex(8)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind("\0" + name[1:])
            server = await asyncio.get_running_loop().create_unix_server(self._accept, sock=sock, backlog=_BACKLOG)
        except BaseException:
            sock.close()
            raise
        self._listening.append(server)
        return name

    async def listen_tcp(self, host: str, port: int, key: str) -> int:
        """The port, 0: any free one. ConfigError naming `key` when it cannot be had."""
        check_port(host, port, key)
        try:
            server = await asyncio.get_running_loop().create_server(self._accept, sock=_bound(host, port))
        except OSError as err:
            raise ConfigError(f"{key}={port}: cannot be opened ({err.strerror or err}) on {host}", field=key) from None
        self._listening.append(server)
        found: int = server.sockets[0].getsockname()[1]
        return found

    async def close(self) -> None:
        """Connections break, what is under way is cancelled and has ended; bounded. Idempotent."""
        listening, self._listening = self._listening, []
        for server in listening:
            server.close()
        for accepted in list(self._accepted):
            accepted.end("")
        if self.tasks:
            await asyncio.wait(set(self.tasks), timeout=CLOSE_S)
        for server in listening:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.wait_closed(), CLOSE_S)

    def __len__(self) -> int:
        """Connections."""
        return len(self._accepted)

    def _accept(self) -> _Accepted:
        return _Accepted(self)

    def admits(self, accepted: _Accepted) -> bool:
        if len(self._accepted) >= self.connections:
            return False
        self._accepted.add(accepted)
        return True

    def forget(self, accepted: _Accepted) -> None:
        self._accepted.discard(accepted)


class _Accepted(asyncio.Protocol):
    """One connection of one caller."""

    def __init__(self, server: DoorServer) -> None:
        self._server = server
        self._reader = frames.Reader()
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, tuple[asyncio.Task[None], float]] = {}  # those that wait, and until when
        self._sweep = Sweep(self._due)
        self._out: list[bytes] | None = None  # what goes out together at the end of this turn
        self._stranger: asyncio.TimerHandle | None = None

    # ── the connection ───────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if not _same_user(transport):
            return self.end("another user's")
        if not self._server.admits(self):
            return self.end(f"{self._server.connections} are open")
        _keep_alive(transport)
        self._stranger = asyncio.get_running_loop().call_later(GREETING_S, self.end, "no greeting")
        return None

    def data_received(self, data: bytes) -> None:
        self._out = []
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
        except frames.BadFrame as err:
            self.end(f"not understood: {err}")
        out, self._out = self._out, None
        if out and self._transport is not None:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def pause_writing(self) -> None:
        """The caller does not read its answers: nothing new is taken from it."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.end("")

    def end(self, why: str) -> None:
        """It breaks, and what is under way is cancelled. `why`: for the log, "": nothing is wrong. Idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            if why:
                log.warning("a door's connection is closed: %s", why)
            transport.abort()
        if self._stranger is not None:
            self._stranger.cancel()
        self._sweep.close()
        self._server.forget(self)
        calls, self._calls = self._calls, {}
        for task, _ in calls.values():
            starting.cancel(task)

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    def _take(self, frame: frames.Frame) -> None:
        if self._transport is None:
            return
        if self._stranger is not None:
            self._greet(frame)
        elif frame.kind == frames.CALL:
            self._begin(frame)
        elif frame.kind == frames.CANCEL:
            if (waiting := self._calls.pop(frame.call, None)) is not None:
                starting.cancel(waiting[0])
        else:
            raise frames.BadFrame(f"kind={frame.kind}: not said by callers")

    def _greet(self, frame: frames.Frame) -> None:
        life = frames.life_of(frame)
        if life != self._server.life:
            return self.end(f"it means another life ({life})")
        assert self._stranger is not None
        self._stranger.cancel()
        self._stranger = None
        self._send(frames.hello(life))
        return None

    def _begin(self, frame: frames.Frame) -> None:
        if frame.call in self._calls:
            raise frames.BadFrame(f"call={frame.call}: is under way already")
        method = self._server.methods.get(frame.name)
        if method is None:
            return self._fail(frame.call, ProtocolMismatch(f"method={frame.name!r}: not behind this door"))
        if len(self._calls) >= MAX_CALLS:
            return self._fail(frame.call, Overloaded(f"{MAX_CALLS} calls are under way here", retry_after_ms=10))
        if (on_call := self._server.on_call) is not None:
            on_call(frame.name)
        deadline = time.monotonic() + frame.ms / 1000
        task = starting.start(self._run(method, frame.call, frame.body, DoorContext(deadline)))
        if task is not None:
            self._calls[frame.call] = task, deadline
            self._server.tasks.add(task)
            task.add_done_callback(self._server.tasks.discard)
            self._sweep.by(deadline)
        return None

    async def _run(self, method: Served, call: int, body: bytes, context: DoorContext) -> None:
        """Raises CancelledError alone."""
        try:
            answer = await method.behave(method.method.request.FromString(body), context)
            told = answer.SerializeToString()
            if len(told) > frames.MAX_FRAME:
                raise BodyTooLarge(f"{method.method.name}: an answer of {len(told)} bytes, at most {frames.MAX_FRAME}")
        except asyncio.CancelledError:
            self._ended(call)
            self._fail(call, RequestCancelled(f"{method.method.name} was cancelled"))
            raise
        except Exception as error:
            self._ended(call)
            self._fail(call, status.named(method.method.name, error))
        else:
            self._ended(call)
            self._send(frames.encode(frames.ANSWER, call, told))

    def _ended(self, call: int) -> None:
        self._calls.pop(call, None)

    def _fail(self, call: int, error: KvmeshError) -> None:
        self._send(frames.encode(frames.ERROR, call, status.to_detail(error).SerializeToString()))

    def _send(self, frame: bytes) -> None:
        if self._out is not None:
            self._out.append(frame)
        elif self._transport is not None:
            self._transport.write(frame)

    def _due(self, now: float) -> float:
        """Ends the calls for which nobody waits any more."""
        for call, (task, deadline) in list(self._calls.items()):
            if deadline <= now:
                del self._calls[call]
                starting.cancel(task)
        return min((deadline for _, deadline in self._calls.values()), default=math.inf)


def _bound(host: str, port: int) -> socket.socket:
    """Where the first address of `host` says; all of them for "::". OSError."""
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = infos[0]
    both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def _same_user(transport: asyncio.Transport) -> bool:
    """Always over TCP, as for gRPC."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return True
    uid: int = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1]
    return uid == os.geteuid()


def _keep_alive(transport: asyncio.Transport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
