"""`kvmesh doctor --listen`: a gRPC server that lends one caller at a time an engine and memory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import secrets
import signal
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Literal
from urllib.parse import unquote

from rich.console import Console
from rich.markup import escape

from kvmesh.cli.doctor.measure import Plan, Side, check
from kvmesh.cli.doctor.network import interface_addresses
from kvmesh.cli.up.advertising import address_towards
from kvmesh.errors import ConfigError, KvmeshError, Overloaded, Unauthorized, Unavailable
from kvmesh.rpc import protocol
from kvmesh.rpc.call_limits import CallLimits
from kvmesh.rpc.pb import doctor_pb2 as pb
from kvmesh.rpc.pb import doctor_pb2_grpc
from kvmesh.rpc.security import PLAINTEXT
from kvmesh.rpc.server import Server
from kvmesh.transfer.host import look
from kvmesh.transfer.transports.registry import KNOWN_TRANSPORTS

DEFAULT_PORT = 7040
MAX_SIZE = 1 << 30
MAX_QUIET_S = 900.0
# Strangers may call before they show that they know the token; what a caller sends is a few KB.
LIMITS = CallLimits(message_bytes=1 << 20, calls=64, streams=16, connections=64)
_NONCES = 64  # that wait for their proof, at most
_STOP_S = 10.0


def proof(token: str, who: Literal["call", "listen"], caller: bytes, listener: bytes) -> bytes:
    """What only one that knows the token can make of both nonces."""
    return hmac.digest(token.encode(), who.encode() + caller + listener, hashlib.sha256)


def listen(host: str, port: int, token: str, plan: Plan, out: Console) -> int:
    """Serves callers, one at a time, until Ctrl-C; the exit status. ConfigError: what cannot be listened on."""
    check(plan)
    _check_port(host, port)
    asyncio.run(_listen(host, port, token or secrets.token_hex(8), plan, out))
    return 0


async def _listen(host: str, port: int, token: str, plan: Plan, out: Console) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = Server(host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0"), port, tls=PLAINTEXT, limits=LIMITS)
    servicer = DoctorServicer(out, token, plan)
    doctor_pb2_grpc.add_DoctorServicer_to_server(servicer, server.grpc)
    server.serves(pb.DESCRIPTOR.services_by_name["Doctor"].full_name)
    port = await server.start()
    server.set_ready(True)
    out.print(
        f"listening on {host or 'all addresses'}, port {port}; on the other host run\n\n"
        f"    kvmesh doctor --peer {host or socket.gethostname()}:{port} --token {escape(token)}\n\n"
        f"{_others(host)}Ctrl-C ends it.",
        soft_wrap=True,
    )
    await stop.wait()
    servicer.stop()
    await server.stop(_STOP_S)
    await servicer.stopped()
    out.print("\nstopped")


def _others(host: str) -> str:
    """By which addresses this host may be reached, where its name says nothing to the other one."""
    if host:
        return ""
    addresses = [one for one in _own_addresses() if not one.startswith(("fe80:", "127.")) and one != "::1"]
    return f"(or by address: {', '.join(addresses[:8])})\n\n" if addresses else ""


def _own_addresses() -> list[str]:
    return [address for net in look().nets if net.up for address in interface_addresses(net.name)]


def _check_port(host: str, port: int) -> None:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except (OSError, UnicodeError) as err:
        number = getattr(err, "errno", None) or 0
        why = os.strerror(number) if number > 0 else getattr(err, "strerror", None) or str(err)
        if number == errno.EADDRINUSE:
            why += "; kvmesh doctor --listen PORT takes another"
        raise ConfigError(f"port={port}: cannot listen on {host or 'any address'}: {why}", field="port") from None


def caller_of(peer: str) -> str:
    """The address in what gRPC calls a peer: "ipv4:10.0.0.1:53422", "ipv6:%5B::ffff:10.0.0.1%5D:53422"."""
    host = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


class DoctorServicer(doctor_pb2_grpc.DoctorServicer):
    """Serves at most one caller at a time; others hear that it is busy."""

    def __init__(self, out: Console, token: str, plan: Plan) -> None:
        self._stopping = False
        self._out, self._token, self._plan = out, token, plan
        self._nonces: deque[bytes] = deque(maxlen=_NONCES)
        self._session: _Session | None = None
        self._ending: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Lets the caller go; what it has opened is closed, see `stopped`."""
        self._stopping = True
        if self._session is not None:
            self._session.spoke.set()

    async def stopped(self) -> None:
        """Waits, for a time, until what a caller had opened is closed."""
        if self._ending is not None:
            await asyncio.wait({self._ending}, timeout=_STOP_S)

    async def Greet(self, request: pb.GreetRequest, context: Any) -> pb.GreetResponse:  # noqa: N802
        """Raises ProtocolMismatch."""
        protocol.check(request.protocol_version, f"the doctor at {caller_of(context.peer())}")
        self._nonces.append(secrets.token_bytes(16))
        return pb.GreetResponse(nonce=self._nonces[-1])

    async def Attend(self, request: pb.AttendRequest, context: Any) -> AsyncIterator[pb.AttendResponse]:  # noqa: N802
        """Raises Unauthorized, Overloaded."""
        name, both = caller_of(context.peer()), (request.nonce, request.listener_nonce)
        fresh = request.listener_nonce in self._nonces
        if fresh:
            self._nonces.remove(request.listener_nonce)
        if not fresh or not hmac.compare_digest(request.proof, proof(self._token, "call", *both)):
            self._out.print(f"{escape(name)}: came with a wrong token")
            raise Unauthorized("the token is wrong: use the one that `kvmesh doctor --listen` shows")
        if self._session is not None or self._ending is not None:
            raise Overloaded("busy with another caller: try again in a moment")
        host = request.host if request.host in _own_addresses() else address_towards([(name, 9)], "peer", 0)
        session = self._session = _Session(host, self._plan)
        said = f"{name}: hung up"
        try:
            self._out.print(f"{escape(name)} is connected")
            yield pb.AttendResponse(proof=proof(self._token, "listen", *both), session=session.name)
            said = await self._attend(session, name, min(max(request.quiet_s, self._plan.timeout_s), MAX_QUIET_S), said)
        finally:
            self._ending = asyncio.create_task(self._end(session, said), name="doctor-end")

    async def _attend(self, session: _Session, name: str, quiet_s: float, gone: str) -> str:
        """How it ended: the caller is through or silent, or it is cancelled because the caller is gone."""
        with contextlib.suppress(TimeoutError):
            while not (session.through or self._stopping):
                async with asyncio.timeout(quiet_s):
                    await session.spoke.wait()
                session.spoke.clear()
            return f"{name} is done"
        return f"{name}: no answer within {quiet_s:g} s"

    async def _end(self, session: _Session, said: str) -> None:
        await asyncio.to_thread(session.close)
        self._session = self._ending = None  # before it is said: who reads it may call at once
        if not self._stopping:
            self._out.print(escape(said))

    async def Step(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:  # noqa: N802
        """Raises Unauthorized, Unavailable."""
        session = self._session
        if session is None or not hmac.compare_digest(request.session, session.name):
            raise Unauthorized("another caller is served")
        if request.WhichOneof("step") == "open":
            self._out.print(f"{escape(caller_of(context.peer()))}: {escape(request.open.transport)}")
        try:
            return await asyncio.to_thread(session.step, request)
        except (KvmeshError, OSError, MemoryError, ValueError, OverflowError) as err:
            why = err.message if isinstance(err, KvmeshError) else str(err)
            raise Unavailable(why or type(err).__name__) from None
        finally:
            session.through = session.through or request.WhichOneof("step") == "bye"
            session.spoke.set()


class _Session:
    """What one caller has opened here. Steps come from threads, one at a time."""

    def __init__(self, host: str, plan: Plan) -> None:
        self.name = secrets.token_bytes(16)
        self.through = False
        self.spoke = asyncio.Event()
        self._host, self._plan = host, plan
        self._lock = threading.Lock()
        self._side: Side | None = None

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        side, self._side = self._side, None
        if side is not None:
            side.close()

    def step(self, request: pb.StepRequest) -> pb.StepResponse:
        """Raises whatever an engine raises; Unavailable: the step makes no sense now."""
        with self._lock:
            step = request.WhichOneof("step")
            if step == "open":
                return self._open(request.open)
            if step in ("shut", "bye"):
                self._close()
                return pb.StepResponse()
            side = self._side
            if side is None or step is None:
                raise Unavailable("open a transport first")
            if step == "begin":
                side.begin(request.begin.writer, request.begin.epoch)
            elif step == "end":
                side.end(request.end.writer, request.end.epoch)
            elif step == "fill":
                side.fill(request.fill.seed)
            else:
                return pb.StepResponse(differs_at=side.differs_at(request.check.seed))
            return pb.StepResponse()

    def _open(self, wanted: pb.StepRequest.OpenTransport) -> pb.StepResponse:
        self._close()
        allowed = self._plan.transports or KNOWN_TRANSPORTS
        if wanted.transport not in allowed:
            raise Unavailable(f"{wanted.transport!r} is not among its transports: {', '.join(allowed)}")
        if not 0 < wanted.size <= MAX_SIZE:
            raise Unavailable(f"size={wanted.size}: not in 1..{MAX_SIZE}")
        side = self._side = Side(wanted.transport, self._host, wanted.size, self._plan)
        return pb.StepResponse(
            descriptor=side.engine.local_descriptor().encode(), offset=side.region.base_offset, left_out=side.left_out
        )
