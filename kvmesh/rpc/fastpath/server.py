"""The server's side: it listens on a Unix socket and a TCP port, and carries calls to a gRPC servicer."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import os
import resource
import secrets
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from types import coroutine
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from kvmesh.config import ControlConfig
from kvmesh.errors import BodyTooLarge, ConfigError, KvmeshError, Overloaded, ProtocolMismatch, RequestCancelled
from kvmesh.rpc import authorisation, security, status
from kvmesh.rpc.authorisation import RpcCaller
from kvmesh.rpc.call_queue import CallQueue, QueuedCall
from kvmesh.rpc.fastpath import frames
from kvmesh.rpc.fastpath.calls import ServedMethod, Sweep, served
from kvmesh.rpc.fastpath.tickets import CallerTickets
from kvmesh.rpc.server import check_port

log = logging.getLogger(__name__)

MAX_STRANGERS = 64  # connections that have not greeted yet; the oldest is ended when there are more
DESCRIPTOR_SHARE = 4  # connections take at most one of so many descriptors of this process
MAX_CALLS = 1024  # under way on one connection
GREETING_S = 5.0
CLOSE_S = 2.0
_BACKLOG = 128
_UCRED = struct.Struct("iII")  # pid, uid, gid
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))  # finds callers whose machine is gone


@dataclass(frozen=True, slots=True)
class FastPathLimits:
    """What callers may use of a process. `memory_bytes` bounds incomplete frames of all connections together; calls
    under way may use as much again, and so may answers that nobody reads, plus one answer."""

    connections: int = 512
    frame_s: float = 10.0
    memory_bytes: int = 16 << 20

    @classmethod
    def of(cls, config: ControlConfig) -> FastPathLimits:
        """Returns what a control service's settings say."""
        return cls(config.door_connections, config.door_frame_ms / 1000, config.door_memory_mb << 20)


class FastContext:
    """The call's context for a servicer. The call's bytes came at `arrived` (monotonic seconds) or later."""

    __slots__ = ("_deadline", "arrived", "caller")

    def __init__(self, deadline: float, arrived: float, caller: RpcCaller) -> None:
        self._deadline = deadline
        self.arrived = arrived
        self.caller = caller

    def time_remaining(self) -> float:
        """Returns the seconds for which the caller still waits, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns no metadata: a call's message holds all that it needs."""
        return ()


class FastServer:
    """Serves one servicer over all fast paths of one incarnation. `life` is the incarnation that callers must name.
    `methods` can be called, by default all; those in `queued` go through `queue`, the others run as soon as their bytes
    are read. It lives on one event loop."""

    def __init__(
        self,
        service: ServiceDescriptor,
        servicer: object,
        life: int,
        *,
        methods: Collection[str] | None = None,
        limits: FastPathLimits | None = None,
        queue: CallQueue | None = None,
        queued: Collection[str] = (),
    ) -> None:
        self.methods = served(service, servicer, methods)
        self.life = life
        # Where gRPC asks for certificates, a connection must come with a ticket that was given over gRPC.
        self.tickets = CallerTickets() if security.current().asks_clients else None
        self.limits = limits or FastPathLimits()
        self.connections = min(self.limits.connections, _descriptors() // DESCRIPTOR_SHARE)
        self.queue = queue
        self.queued = frozenset(name.encode() for name in queued) if queue is not None else frozenset()
        self.held_bytes = 0  # of frames that are not complete, of all connections
        self.call_bytes = 0  # of calls under way
        self.on_call: Callable[[bytes], object] | None = None  # hears the name of each method that is called
        self.tasks: set[asyncio.Task[None]] = set()  # of calls that wait for something
        self._listening: list[asyncio.AbstractServer] = []
        self._closed = False
        # Connections that have greeted, by the time of their last bytes; others by arrival. The oldest is first.
        self._accepted: OrderedDict[_Accepted, None] = OrderedDict()
        self._strangers: OrderedDict[_Accepted, None] = OrderedDict()
        self._unfinished: dict[_Accepted, None] = {}  # whose frame is not complete, the oldest frame first
        self._unread: set[_Accepted] = set()  # who does not read its answers

    async def listen_unix(self) -> str:
        """Listens in the abstract namespace and returns the name, "@...", which is found in this network namespace
        alone and only by this user. Raises OSError where there are no such sockets."""
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

    async def open_tcp(self, host: str, port: int) -> int:
        """Listen where `door_port` says: 0 is any free port, -1 none. Returns the port, 0 where there is none. Raises
        ConfigError when a port that is named is in use.

        Where TLS is configured there is no fast path over TCP: nothing that gRPC would hide goes by it in the clear."""
        if port < 0 or security.current().server_credentials() is not None:
            return 0
        try:
            return await self.listen_tcp(host, port, "door_port")
        except ConfigError:
            if port:
                raise
            log.warning("no door over TCP: calls come over gRPC", exc_info=True)
            return 0

    async def listen_tcp(self, host: str, port: int, key: str) -> int:
        """Listens at `port` (0: any free one) and returns the port. Raises ConfigError, which names `key`, when it is
        not available."""
        check_port(host, port, key)
        try:
            server = await asyncio.get_running_loop().create_server(self._accept, sock=_bound(host, port))
        except OSError as err:
            raise ConfigError(f"{key}={port}: cannot be opened ({err.strerror or err}) on {host}", field=key) from None
        self._listening.append(server)
        found: int = server.sockets[0].getsockname()[1]
        return found

    async def close(self) -> None:
        """Breaks all connections and cancels and awaits what is under way, within a bound. It is idempotent."""
        self._closed = True
        listening, self._listening = self._listening, []
        for server in listening:
            server.close()
        for accepted in (*self._accepted, *self._strangers):
            accepted.end("")
        if self.tasks:
            await asyncio.wait(set(self.tasks), timeout=CLOSE_S)
        for server in listening:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.wait_closed(), CLOSE_S)

    def __len__(self) -> int:
        """Returns the number of connections."""
        return len(self._accepted) + len(self._strangers)

    def _accept(self) -> _Accepted:
        return _Accepted(self)

    def came(self, accepted: _Accepted) -> None:
        """Notes a connection that has not greeted yet. When there are too many, the oldest is ended. One that was taken
        just before the server was closed is ended at once."""
        if self._closed:
            return accepted.end("")
        self._strangers[accepted] = None
        if len(self._strangers) > MAX_STRANGERS:
            next(iter(self._strangers)).end("others came, and it has not greeted")
        return None

    def admits(self, accepted: _Accepted) -> bool:
        """Says whether there is room for a connection that has greeted. When there are too many, the one idle longest
        is ended; with no idle one the answer is False."""
        self._strangers.pop(accepted, None)
        if len(self._accepted) >= self.connections:
            idle = next((one for one in self._accepted if one.idle), None)
            if idle is None:
                return False
            idle.end(f"{self.connections} are open, and this one was idle longest")
        self._accepted[accepted] = None
        return True

    def mark_active(self, accepted: _Accepted) -> None:
        """Notes that something came on a connection."""
        if accepted in self._accepted:
            self._accepted.move_to_end(accepted)

    def forget(self, accepted: _Accepted) -> None:
        self._accepted.pop(accepted, None)
        self._strangers.pop(accepted, None)
        self._unfinished.pop(accepted, None)
        self._unread.discard(accepted)

    def hold(self, accepted: _Accepted, more: int, *, unfinished: bool, begun: bool) -> None:
        """Adds `more` bytes that a connection holds of an incomplete frame; `begun` says that it is another frame than
        before. While all hold too much, the connection that has been at one frame longest is ended."""
        self.held_bytes += more
        if begun or not unfinished:
            self._unfinished.pop(accepted, None)
        if unfinished:
            self._unfinished.setdefault(accepted)
        while self.held_bytes > self.limits.memory_bytes and self._unfinished:
            next(iter(self._unfinished)).end("a frame is not finished, and others need its room")

    def has_room(self, nbytes: int) -> bool:
        """Says whether a call of that size may begin."""
        return self.call_bytes + nbytes <= self.limits.memory_bytes

    def release(self, nbytes: int) -> None:
        """Notes the end of a call that held so many bytes."""
        self.call_bytes -= nbytes

    def unread(self, accepted: _Accepted, *, waits: bool) -> None:
        """Notes whether answers wait for a caller that does not read."""
        if waits:
            self._unread.add(accepted)
        else:
            self._unread.discard(accepted)

    def check_unread(self) -> None:
        """Ends the connection with the most unread answers while these take too much memory."""
        sizes = {one: one.unread_bytes for one in self._unread}
        while sum(sizes.values()) > self.limits.memory_bytes + frames.MAX_FRAME:
            most = max(sizes, key=lambda one: sizes[one])
            del sizes[most]
            most.end("it does not read its answers")


class _Accepted(asyncio.Protocol):
    """One connection of one caller."""

    def __init__(self, server: FastServer) -> None:
        self._server = server
        self._reader = frames.FrameReader(frames.MAX_REQUEST)
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, tuple[asyncio.Task[None], float]] = {}  # those that wait, and until when
        self._queued: dict[int, tuple[QueuedCall, float]] = {}  # those whose turn has not come
        self._held = 0  # bytes of a frame that is not complete, as the server counts them
        self._frame_ends = math.inf  # when it must be
        self._paused = False
        self._arrived = 0.0
        self._caller = RpcCaller("unix", frozenset())
        self._sweep = Sweep(self._due)
        self._out: list[bytes] | None = None  # what goes out together at the end of this turn
        self._stranger: asyncio.TimerHandle | None = None

    # ── the connection ───────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if self._server.tickets is None:
            self._caller = RpcCaller(_transport_name(transport), None)
        if not _same_user(transport):
            return self.end("another user's")
        _keep_alive(transport)
        self._stranger = asyncio.get_running_loop().call_later(GREETING_S, self.end, "no greeting")
        self._server.came(self)
        return None

    @property
    def idle(self) -> bool:
        """Whether nothing is under way on the connection."""
        return not (self._calls or self._queued or self._held)

    @property
    def unread_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def data_received(self, data: bytes) -> None:
        self._out = []
        now, queue = time.monotonic(), self._server.queue
        self._arrived = queue.turned_at if queue is not None and queue.turned_at > 0 else now
        try:
            complete = self._reader.feed(data)
            self._count(now, begun=bool(complete))
            for frame in complete:
                self._take(frame)
        except frames.BadFrame as err:
            self.end(f"not understood: {err}")
        out, self._out = self._out, None
        if self._transport is None:
            return
        if out:
            self._write(out[0] if len(out) == 1 else b"".join(out))
        self._server.mark_active(self)

    def _count(self, now: float, *, begun: bool) -> None:
        """Counts the bytes kept of an incomplete frame; `begun` says that it is another frame than before."""
        held = self._reader.held
        if not held and not self._held:
            return
        begun = begun or not self._held
        more, self._held = held - self._held, held
        if not held:
            self._frame_ends = math.inf
        elif begun:
            self._frame_ends = now + self._server.limits.frame_s
            self._sweep.by(self._frame_ends)
        self._server.hold(self, more, unfinished=held > 0, begun=begun)

    def pause_writing(self) -> None:
        """Takes nothing new from a caller that does not read its answers."""
        self._paused = True
        self._server.unread(self, waits=True)
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._server.unread(self, waits=False)
        if self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.end("")

    def end(self, why: str) -> None:
        """Breaks the connection and cancels what is under way. `why` is logged unless it is "". It is idempotent."""
        transport, self._transport = self._transport, None
        if transport is not None:
            if why:
                log.warning("a door's connection is closed: %s", why)
            transport.abort()
        if self._stranger is not None:
            self._stranger.cancel()
        self._sweep.close()
        self._server.forget(self)
        self._server.held_bytes -= self._held
        self._held = 0
        calls, self._calls = self._calls, {}
        for task, _ in calls.values():
            cancel_call(task)
        queued, self._queued = self._queued, {}
        for waiting, _ in queued.values():
            self._drop(waiting)

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    def _take(self, frame: frames.CallFrame) -> None:
        if self._transport is None:
            return
        if self._stranger is not None:
            self._greet(frame)
        elif frame.kind == frames.CALL:
            self._begin(frame)
        elif frame.kind == frames.CANCEL:
            if (under_way := self._calls.pop(frame.call, None)) is not None:
                cancel_call(under_way[0])
            elif (waiting := self._queued.pop(frame.call, None)) is not None:
                self._drop(waiting[0])
        else:
            raise frames.BadFrame(f"kind={frame.kind}: not said by callers")

    def _greet(self, frame: frames.CallFrame) -> None:
        life = frames.life_of(frame)
        if life != self._server.life:
            return self.end(f"it means another life ({life})")
        if self._server.tickets is not None:
            known = self._server.tickets.redeem(frames.ticket_of(frame))
            if known is None:
                return self.end("it has no ticket: no certificate was shown over gRPC")
            self._caller = RpcCaller(_transport_name(self._transport), known)
        assert self._stranger is not None
        self._stranger.cancel()
        self._stranger = None
        if not self._server.admits(self):
            return self.end(f"{self._server.connections} are open, and none is idle")
        self._send(frames.hello(life))
        return None

    def _begin(self, frame: frames.CallFrame) -> None:
        if frame.call in self._calls or frame.call in self._queued:
            raise frames.BadFrame(f"call={frame.call}: is under way already")
        method = self._server.methods.get(frame.name)
        if method is None:
            return self._fail(frame.call, ProtocolMismatch(f"method={frame.name!r}: not behind this door"))
        if len(self._calls) + len(self._queued) >= MAX_CALLS:
            return self._fail(frame.call, Overloaded(f"{MAX_CALLS} calls are under way here", retry_after_ms=10))
        if not self._server.has_room(len(frame.body)):
            most = self._server.limits.memory_bytes
            return self._fail(frame.call, Overloaded(f"calls under way hold {most} bytes here", retry_after_ms=100))
        if (on_call := self._server.on_call) is not None:
            on_call(frame.name)
        deadline = time.monotonic() + frame.ms / 1000
        context = FastContext(deadline, self._arrived, self._caller)
        if self._server.queue is None or frame.name not in self._server.queued:
            return self._start(method, frame.call, frame.body, context, deadline)
        try:
            work = partial(self._start_queued, method, frame.call, frame.body, context, deadline)
            queued = self._server.queue.submit(work, len(frame.body))
        except Overloaded as error:
            return self._fail(frame.call, error)
        if queued is not None:
            self._server.call_bytes += queued.nbytes
            self._queued[frame.call] = queued, deadline
            self._sweep.by(deadline)
        return None

    def _start_queued(
        self, method: ServedMethod, call: int, body: bytes, context: FastContext, deadline: float
    ) -> None:
        if (queued := self._queued.pop(call, None)) is not None:
            self._server.release(queued[0].nbytes)
        self._start(method, call, body, context, deadline)

    def _drop(self, queued: QueuedCall) -> None:
        self._server.release(queued.nbytes)
        queued.drop()

    def _start(self, method: ServedMethod, call: int, body: bytes, context: FastContext, deadline: float) -> None:
        task = start_call(self._run(method, call, body, context))
        if task is not None:
            self._calls[call] = task, deadline
            self._server.tasks.add(task)
            self._server.call_bytes += len(body)
            task.add_done_callback(partial(self._over, len(body)))
            self._sweep.by(deadline)

    def _over(self, nbytes: int, task: asyncio.Task[None]) -> None:
        self._server.tasks.discard(task)
        self._server.release(nbytes)

    async def _run(self, method: ServedMethod, call: int, body: bytes, context: FastContext) -> None:
        """Runs a call and sends its outcome. Raises nothing but CancelledError."""
        try:
            request = method.method.request.FromString(body)
            authorisation.check(context.caller, method.method.path, request)
            answer = await method.behave(request, context)
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
        else:
            self._write(frame)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
            if self._paused:
                self._server.check_unread()

    def _due(self, now: float) -> float:
        """Ends calls that nobody waits for any more, and the connection if its frame took too long. Returns the next
        deadline."""
        if self._frame_ends <= now:
            self.end(f"a frame was not finished within {self._server.limits.frame_s:g} s")
            return math.inf
        for call, (task, deadline) in list(self._calls.items()):
            if deadline <= now:
                del self._calls[call]
                cancel_call(task)
        for call, (queued, deadline) in list(self._queued.items()):
            if deadline <= now:
                del self._queued[call]
                self._drop(queued)
        ends = (deadline for under_way in (self._calls, self._queued) for _, deadline in under_way.values())
        return min(ends, default=math.inf) if self._frame_ends == math.inf else min((self._frame_ends, *ends))


def _descriptors() -> int:
    """Returns how many descriptors this process may have."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket bound to the first address of `host`, to all addresses for "::". Raises OSError."""
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = infos[0]
    both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def _transport_name(transport: asyncio.Transport | None) -> str:
    sock = None if transport is None else transport.get_extra_info("socket")
    return "unix" if sock is not None and sock.family == socket.AF_UNIX else "tcp"


def _same_user(transport: asyncio.Transport) -> bool:
    """Says whether the caller runs as this process's user. Over TCP that is unknown, and all are accepted, as
    by gRPC."""
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


# ── a call begun at once; a task only for one that has to wait ──────────────────────────────────────
#
# Most calls of a fast path never wait, and a task with its turns of the loop costs more than they do. Up to its first
# wait such a coroutine belongs to no task: `asyncio.timeout` and `asyncio.current_task` cannot be used there.


def start_call(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Runs `work` to its end or to its first wait, in a context of its own. Returns the task of the rest, None when it
    has ended. Only `cancel_call` may cancel the task. What `work` raises before its first wait, except CancelledError,
    is raised here."""
    context = contextvars.copy_context()
    try:
        waits_for = context.run(work.send, None)
    except (StopIteration, asyncio.CancelledError):
        return None
    return asyncio.get_running_loop().create_task(_rest(work, waits_for), context=context)


def cancel_call(task: asyncio.Task[None]) -> None:
    """Cancels the task in the next turn of the loop, because a task cancelled before its first step would never tell
    its coroutine."""
    asyncio.get_running_loop().call_soon(task.cancel)


async def _rest(work: Coroutine[Any, Any, None], waits_for: Any) -> None:
    await _driven(work, waits_for)


@coroutine
def _driven(work: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Passes on what `work` waits for, and what it is sent. The first step only yields; it must have been reached
    before a cancellation, see `cancel_call`."""
    while True:
        try:
            told = yield waits_for
        except BaseException as error:
            step = partial(work.throw, error)
        else:
            step = partial(work.send, told)
        try:
            waits_for = step()
        except StopIteration:
            return
