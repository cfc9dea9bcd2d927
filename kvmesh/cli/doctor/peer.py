"""`kvmesh doctor --peer`: every pair of NICs of two hosts over every transport, every byte checked."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, cast

import grpc
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from kvmesh.cli.console import console, wide_enough
from kvmesh.cli.doctor.listener import DEFAULT_PORT, proof
from kvmesh.cli.doctor.matrix import Cell, Figure, TransportOutcome, screen, summary
from kvmesh.cli.doctor.measure import Plan, Side, check
from kvmesh.errors import ConfigError, KvmeshError, TransferError, Unavailable
from kvmesh.rpc.channels import CHANNEL_OPTIONS
from kvmesh.rpc.pb import doctor_pb2 as pb
from kvmesh.rpc.pb import doctor_pb2_grpc
from kvmesh.rpc.protocol import PROTOCOL_VERSION
from kvmesh.rpc.server import join
from kvmesh.rpc.status import DETAIL_KEY, from_rpc_error
from kvmesh.transfer import Opcode, SegmentDescriptor
from kvmesh.transfer.segment import machine_id, network_id
from kvmesh.transfer.transports.base import Rail
from kvmesh.transfer.transports.registry import KNOWN_TRANSPORTS

# What `kvmesh doctor --peer` shows while it works: one changing line on a terminal, now and then a line elsewhere.

EVERY_S = 5.0  # a line in a pipe or a log


class PairProgress:
    """`out` is where results go, `err` where lines go when `out` is no terminal; `quiet`: neither. A context for the
    time that something is shown."""

    def __init__(self, out: Console, err: Console, *, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._err = err
        self._quiet = quiet
        self._clock = clock
        self._stack = ExitStack()
        self._status: Status | None = None
        self._told_at = 0.0

    def __enter__(self) -> PairProgress:
        if not self._quiet and self._out.is_terminal:
            self._status = self._stack.enter_context(self._out.status("..."))
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        self._status = None
        self._stack.close()

    def begin(self, transport: str, pairs: int, least_s: float) -> None:
        """Tells that all pairs of a transport are to be tried."""
        if pairs > 1:
            self._tell(f"{transport}: {pairs} pairs of NICs, {least_s:.0f} s and more", always=True)
        else:
            self._tell(f"{transport} ...", always=False)

    def step(self, transport: str, done: int, pairs: int, local: str, remote: str, what: str) -> None:
        """One direction of a pair begins."""
        names = f" {local} → {remote}" if local else ""
        self._tell(f"{transport}{names}: {what}{f', pair {done + 1} of {pairs}' if pairs > 1 else ''}", always=False)

    def _tell(self, text: str, *, always: bool) -> None:
        if self._status is not None:
            self._status.update(escape(text))
        elif not self._quiet and (always or self._clock() - self._told_at >= EVERY_S):
            if self._told_at or always:
                self._err.print(escape(text), soft_wrap=True)
            self._told_at = self._clock()


_CONNECT_S = 5.0
_GREET_S = 5.0


# ── the caller ────────────────────────────────────────────────────────────────────────────────────


def call(peer: str, token: str, plan: Plan, *, as_json: bool) -> int:
    """Tries everything and shows it; the exit status. KvmeshError in plain words when the peer is not to be had."""
    check(plan)
    host, port = parse_peer(peer)
    out = console()
    width = wide_enough(out)
    outcomes: list[TransportOutcome] = []
    with Remote(host, port, min(_CONNECT_S, plan.timeout_s)) as listener:
        quiet_s = 4 * plan.timeout_s + 2 * plan.seconds
        listener.greet(token, quiet_s, min(_GREET_S, plan.timeout_s))
        epochs = count(1)
        for name in plan.transports or KNOWN_TRANSPORTS:
            with PairProgress(out, console(stderr=True), quiet=as_json) as progress:
                outcomes.append(try_transport(listener, name, plan, epochs, progress))
            if not as_json:
                out.print(screen(outcomes[-1], width))
        listener.step(plan.timeout_s, bye=pb.StepRequest.Bye())
    failed = any(outcome.failed for outcome in outcomes) or not any(outcome.works for outcome in outcomes)
    if as_json:
        told = {"peer": join(host, port), "ok": not failed, "summary": summary(outcomes)}
        told |= {"transports": [dataclasses.asdict(outcome) for outcome in outcomes]}
        out.out(json.dumps(told, indent=2), highlight=False)
    else:
        out.print(f"{'[red]✗[/]' if failed else '[green]✓[/]'} {escape(summary(outcomes))}")
    return 1 if failed else 0


def parse_peer(text: str) -> tuple[str, int]:
    """ "host", "host:7040", "::1", "[::1]:7040". ConfigError for anything else."""
    host, port = text, str(DEFAULT_PORT)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, port = text.split(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"peer={text!r}: must be HOST or HOST:PORT", field="peer")
    return host, int(port)


class DoctorGone(KvmeshError):
    """The other doctor is gone, silent, or not one."""


class Remote:
    """The doctor that listens elsewhere, and serves this one until `close`."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        """Unavailable, in plain words: nothing listens there."""
        self.name = join(host, port)
        self.local_host, self._dialled = _ends(host, port, self.name, timeout_s)
        self._channel = grpc.insecure_channel(join(self._dialled, port), options=CHANNEL_OPTIONS)
        self._stub: Any = doctor_pb2_grpc.DoctorStub(self._channel)
        self._session = b""
        self._attending: Any = None  # ends where nobody refers to it

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def greet(self, token: str, quiet_s: float, timeout_s: float) -> None:
        """Each shows that it knows the token. KvmeshError as the listener refuses; DoctorGone when it is none."""
        mine = secrets.token_bytes(16)
        with self._failures(timeout_s):
            version = pb.GreetRequest(protocol_version=PROTOCOL_VERSION)
            theirs = self._stub.Greet(version, timeout=timeout_s).nonce
            self._attending = attending = self._stub.Attend(
                pb.AttendRequest(
                    nonce=mine,
                    listener_nonce=theirs,
                    proof=proof(token, "call", mine, theirs),
                    quiet_s=quiet_s,
                    host=self._dialled,
                )
            )
            late = threading.Timer(timeout_s, attending.cancel)  # the call itself lasts as long as the session
            late.start()
            try:
                answer = next(attending)
            finally:
                late.cancel()
        if not hmac.compare_digest(answer.proof, proof(token, "listen", mine, theirs)):
            raise Unavailable(f"{self.name}: it does not know the token")
        self._session = answer.session

    def step(self, timeout_s: float, **step: Any) -> pb.StepResponse:
        """One step there. Unavailable in its words when it cannot; DoctorGone when it does not answer."""
        with self._failures(timeout_s):
            response: pb.StepResponse = self._stub.Step(
                pb.StepRequest(session=self._session, **step), timeout=timeout_s
            )
            return response

    @contextlib.contextmanager
    def _failures(self, timeout_s: float) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as err:
            code, trailing = err.code(), cast(Any, err.trailing_metadata())
            if any(key == DETAIL_KEY for key, _ in trailing or ()):
                raise from_rpc_error(err) from None
            if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                raise DoctorGone(f"{self.name}: no answer within {timeout_s:g} s") from None
            if code is grpc.StatusCode.UNIMPLEMENTED or not self._session:
                raise DoctorGone(f"{self.name}: what answers there is no kvmesh doctor") from None
            raise DoctorGone(f"{self.name}: hung up") from None


def _ends(host: str, port: int, where: str, timeout_s: float) -> tuple[str, str]:
    """Addresses of this host and of the other on the way to it. Unavailable in plain words: there is none."""
    try:
        with socket.create_connection((host, port), timeout_s) as probe:
            return str(probe.getsockname()[0]), str(probe.getpeername()[0])
    except ConnectionRefusedError:
        todo = f"run `kvmesh doctor --listen {port}` there first"
        raise Unavailable(f"nothing listens at {where}: {todo}") from None
    except TimeoutError:
        raise Unavailable(f"no answer from {where} within {timeout_s:g} s: a firewall, or another address") from None
    except socket.gaierror:
        raise Unavailable(f"peer={host!r}: no such host") from None
    except (OSError, UnicodeError) as err:
        raise Unavailable(f"{where} cannot be reached: {getattr(err, 'strerror', None) or err}") from None


def try_transport(
    listener: Remote, name: str, plan: Plan, epochs: Iterator[int], progress: PairProgress
) -> TransportOutcome:
    """Every pair of NICs of one transport. DoctorGone when the other doctor goes away."""
    wanted = name in plan.transports
    try:
        side = Side(name, listener.local_host, plan.size, plan)
    except (KvmeshError, OSError) as err:
        return TransportOutcome(name, why_not=f"here: {plain(err).removeprefix(f'{name}: ')}", wanted=wanted)
    with side:
        try:
            wanted_there = pb.StepRequest.OpenTransport(transport=name, size=plan.size)
            opened = listener.step(plan.timeout_s, open=wanted_there)
            descriptor = SegmentDescriptor.decode(opened.descriptor)
            if why := apart(name, descriptor):
                return TransportOutcome(name, why_not=why, wanted=wanted)
            rails = side.engine.rails(side.engine.open_segment(descriptor))
            side.engine.close_segment(descriptor.name)
        except (Unavailable, TransferError) as err:
            why = f"there: {err.message.removeprefix(f'{name}: ')}" if isinstance(err, Unavailable) else err.message
            return TransportOutcome(name, why_not=why, wanted=wanted)
        try:
            progress.begin(name, len(rails), 2 * len(rails) * plan.seconds)
            cells = []
            for i, rail in enumerate(rails):
                step = partial(progress.step, name, i, len(rails), rail.local, rail.remote)
                cells.append(try_pair(listener, side, descriptor, opened.offset, rail, epochs, step))
        finally:
            with contextlib.suppress(KvmeshError):
                listener.step(plan.timeout_s, shut=pb.StepRequest.CloseTransport())
        local = tuple(nic.name for nic in side.engine.local_descriptor().nics)
        remote = tuple(nic.name for nic in descriptor.nics)
        missed = (*(f"{one} here" for one in side.left_out), *(f"{one} there" for one in opened.left_out))
        return TransportOutcome(name, tuple(cells), "", wanted, local, remote, missed if local or remote else ())


def apart(transport: str, descriptor: SegmentDescriptor) -> str:
    """Why the two cannot share memory; "" when they can, or need not."""
    if transport != "shm":
        return ""
    if descriptor.machine != machine_id():
        return "the two are on different hosts, or in different user namespaces: they cannot share memory"
    if descriptor.endpoints["shm"].get("network") != network_id():
        return "the two are on one host, in different network namespaces (containers?): they do not find each other"
    return ""


def try_pair(
    listener: Remote,
    side: Side,
    descriptor: SegmentDescriptor,
    offset: int,
    rail: Rail,
    epochs: Iterator[int],
    step: Callable[[str], None] = lambda what: None,
) -> Cell:
    """Writes and reads over one rail alone: once with every byte checked, then for the figure, then checked again.
    `step` hears what begins."""
    segment = side.engine.open_segment(descriptor, only=lambda one: one == rail)
    try:
        step("write")
        write = _figure(lambda: _write(listener, side, segment, offset, next(epochs)))
        step("read")
        gone = rail.detour and bool(write.error)  # the way back is no better
        read = write if gone else _figure(lambda: _read(listener, side, segment, offset, next(epochs)))
    finally:
        side.engine.close_segment(segment)
    return Cell(rail.local, rail.remote, rail.detour, write, read)


def _figure(measure: Callable[[], float]) -> Figure:
    try:
        return Figure(round(measure(), 4))
    except (TransferError, Unavailable) as err:
        return Figure(error=err.message)


def _write(listener: Remote, side: Side, segment: str, offset: int, epoch: int) -> float:
    timeout_s, me = side.plan.timeout_s, side.engine.name
    side.fill(epoch)
    listener.step(timeout_s, begin=pb.StepRequest.OpenWindow(writer=me, epoch=epoch))
    try:
        side.once(Opcode.WRITE, segment, offset, epoch)
        _judge(listener, epoch, timeout_s)
        rate = side.rate(Opcode.WRITE, segment, offset, epoch)
        _judge(listener, epoch, timeout_s)
    finally:
        listener.step(timeout_s, end=pb.StepRequest.CloseWindow(writer=me, epoch=epoch))
    return rate


def _judge(listener: Remote, seed: int, timeout_s: float) -> None:
    at = listener.step(timeout_s, check=pb.StepRequest.CheckMemory(seed=seed)).differs_at
    if at >= 0:
        raise TransferError(f"wrong bytes arrived there, the first at {at}")


def _read(listener: Remote, side: Side, segment: str, offset: int, seed: int) -> float:
    listener.step(side.plan.timeout_s, fill=pb.StepRequest.FillMemory(seed=seed))
    side.wipe()
    side.once(Opcode.READ, segment, offset, 0)
    rate = 0.0
    for last in (False, True):
        at = side.differs_at(seed)
        if at >= 0:
            raise TransferError(f"wrong bytes arrived here, the first at {at}")
        if not last:
            rate = side.rate(Opcode.READ, segment, offset, 0)
    return rate


def plain(err: Exception) -> str:
    return err.message if isinstance(err, KvmeshError) else str(err)
