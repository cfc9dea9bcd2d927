"""`kvmesh doctor --peer` and `--listen`: every pair of NICs of two hosts over every transport, every byte checked."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from kvmesh.cli.console import console, wide_enough
from kvmesh.cli.doctor import wire as wire
from kvmesh.cli.doctor.matrix import Cell, Figure, Outcome, screen, summary
from kvmesh.cli.doctor.measure import Plan, Side, check_nics
from kvmesh.cli.doctor.network import interface_addresses
from kvmesh.errors import ConfigError, KvmeshError, TransferError, Unavailable
from kvmesh.transfer import Opcode, SegmentDescriptor
from kvmesh.transfer.host import look
from kvmesh.transfer.segment import machine_id, network_id
from kvmesh.transfer.transports import registry
from kvmesh.transfer.transports.base import Rail
from kvmesh.transfer.transports.registry import KNOWN_TRANSPORTS

# What `kvmesh doctor --peer` shows while it works: one changing line on a terminal, now and then a line elsewhere.

EVERY_S = 5.0  # a line in a pipe or a log


class Progress:
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

    def __enter__(self) -> Progress:
        if not self._quiet and self._out.is_terminal:
            self._status = self._stack.enter_context(self._out.status("..."))
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        self._status = None
        self._stack.close()

    def begin(self, transport: str, pairs: int, least_s: float) -> None:
        """All pairs of a transport are to be tried."""
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


__all__ = ["Plan", "call", "listen"]

MAX_SIZE = 1 << 30
_CONNECT_S = 5.0
_GREET_S = 5.0
_NOTICE_S = 0.5


def check(plan: Plan) -> None:
    """ConfigError: a transport that nobody knows, a NIC that is not here."""
    check_nics(plan.nics)
    for name in plan.transports:
        try:
            registry.find(name)
        except TransferError as err:
            raise ConfigError(err.message, field=err.field) from None


# ── the caller ────────────────────────────────────────────────────────────────────────────────────


def call(peer: str, token: str, plan: Plan, *, as_json: bool) -> int:
    """Tries everything and shows it; the exit status. KvmeshError in plain words when the peer is not to be had."""
    check(plan)
    host, port = parse_peer(peer)
    out = console()
    width = wide_enough(out)
    channel = connect(host, port, min(_CONNECT_S, plan.timeout_s))
    outcomes: list[Outcome] = []
    try:
        quiet_s = 4 * plan.timeout_s + 2 * plan.seconds
        wire.greet(channel, token, quiet_s, min(_GREET_S, plan.timeout_s))
        epochs = count(1)
        for name in plan.transports or KNOWN_TRANSPORTS:
            with Progress(out, console(stderr=True), quiet=as_json) as progress:
                outcomes.append(try_transport(channel, name, plan, epochs, progress))
            if not as_json:
                out.print(screen(outcomes[-1], width))
        channel.send(wire.Bye(), plan.timeout_s)
    finally:
        channel.close()
    failed = any(outcome.failed for outcome in outcomes) or not any(outcome.works for outcome in outcomes)
    if as_json:
        told = {"peer": f"{host}:{port}", "ok": not failed, "summary": summary(outcomes)}
        told |= {"transports": [dataclasses.asdict(outcome) for outcome in outcomes]}
        out.out(json.dumps(told, indent=2), highlight=False)
    else:
        out.print(f"{'[red]✗[/]' if failed else '[green]✓[/]'} {escape(summary(outcomes))}")
    return 1 if failed else 0


def parse_peer(text: str) -> tuple[str, int]:
    """ "host", "host:7040", "::1", "[::1]:7040". ConfigError for anything else."""
    host, port = text, str(wire.DEFAULT_PORT)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, port = text.split(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"peer={text!r}: must be HOST or HOST:PORT", field="peer")
    return host, int(port)


def connect(host: str, port: int, timeout_s: float) -> wire.Channel:
    """Unavailable in plain words."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return wire.Channel(socket.create_connection((host, port), timeout_s), where)
    except ConnectionRefusedError:
        todo = f"run `kvmesh doctor --listen {port}` there first"
        raise Unavailable(f"nothing listens at {where}: {todo}") from None
    except TimeoutError:
        raise Unavailable(f"no answer from {where} within {timeout_s:g} s: a firewall, or another address") from None
    except socket.gaierror:
        raise Unavailable(f"peer={host!r}: no such host") from None
    except (OSError, UnicodeError) as err:
        raise Unavailable(f"{where} cannot be reached: {getattr(err, 'strerror', None) or err}") from None


def try_transport(channel: wire.Channel, name: str, plan: Plan, epochs: Iterator[int], progress: Progress) -> Outcome:
    """Every pair of NICs of one transport. Hung when the other doctor goes away."""
    wanted = name in plan.transports
    try:
        side = Side(name, channel.local_host, plan.size, plan)
    except (KvmeshError, OSError) as err:
        return Outcome(name, why_not=f"here: {plain(err).removeprefix(f'{name}: ')}", wanted=wanted)
    with side:
        try:
            opened = channel.ask(wire.Open(name, plan.size), plan.timeout_s)
            assert isinstance(opened, wire.Opened), "any other answer is Sorry"
            descriptor = SegmentDescriptor.decode(opened.descriptor)
            if why := apart(name, descriptor):
                return Outcome(name, why_not=why, wanted=wanted)
            rails = side.engine.rails(side.engine.open_segment(descriptor))
            side.engine.close_segment(descriptor.name)
        except (Unavailable, TransferError) as err:
            why = f"there: {err.message.removeprefix(f'{name}: ')}" if isinstance(err, Unavailable) else err.message
            return Outcome(name, why_not=why, wanted=wanted)
        try:
            progress.begin(name, len(rails), 2 * len(rails) * plan.seconds)
            cells = []
            for i, rail in enumerate(rails):
                step = partial(progress.step, name, i, len(rails), rail.local, rail.remote)
                cells.append(try_pair(channel, side, descriptor, opened.offset, rail, epochs, step))
        finally:
            with contextlib.suppress(KvmeshError):
                channel.ask(wire.Shut(), plan.timeout_s)
        local = tuple(nic.name for nic in side.engine.local_descriptor().nics)
        remote = tuple(nic.name for nic in descriptor.nics)
        missed = (*(f"{one} here" for one in side.left_out), *(f"{one} there" for one in opened.left_out))
        return Outcome(name, tuple(cells), "", wanted, local, remote, missed if local or remote else ())


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
    channel: wire.Channel,
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
        write = _figure(lambda: _write(channel, side, segment, offset, next(epochs)))
        step("read")
        gone = rail.detour and bool(write.error)  # the way back is no better
        read = write if gone else _figure(lambda: _read(channel, side, segment, offset, next(epochs)))
    finally:
        side.engine.close_segment(segment)
    return Cell(rail.local, rail.remote, rail.detour, write, read)


def _figure(measure: Callable[[], float]) -> Figure:
    try:
        return Figure(round(measure(), 4))
    except (TransferError, Unavailable) as err:
        return Figure(error=err.message)


def _write(channel: wire.Channel, side: Side, segment: str, offset: int, epoch: int) -> float:
    timeout_s, me = side.plan.timeout_s, side.engine.name
    side.fill(epoch)
    channel.ask(wire.Begin(me, epoch), timeout_s)
    try:
        side.once(Opcode.WRITE, segment, offset, epoch)
        _judge(channel.ask(wire.Check(epoch), timeout_s))
        rate = side.rate(Opcode.WRITE, segment, offset, epoch)
        _judge(channel.ask(wire.Check(epoch), timeout_s))
    finally:
        channel.ask(wire.End(me, epoch), timeout_s)
    return rate


def _judge(answer: object) -> None:
    at = answer.differs_at if isinstance(answer, wire.Done) else -1
    if at >= 0:
        raise TransferError(f"wrong bytes arrived there, the first at {at}")


def _read(channel: wire.Channel, side: Side, segment: str, offset: int, seed: int) -> float:
    channel.ask(wire.Fill(seed), side.plan.timeout_s)
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


# ── the listener ──────────────────────────────────────────────────────────────────────────────────


def listen(host: str, port: int | None, token: str, plan: Plan) -> int:
    """Serves callers, one at a time, until Ctrl-C."""
    check(plan)
    token = token or secrets.token_hex(8)
    port = wire.DEFAULT_PORT if port is None else port
    out = console()
    with _bound(host, port) as sock:
        port = sock.getsockname()[1]
        out.print(
            f"listening on {host or 'all addresses'}, port {port}; on the other host run\n\n"
            f"    kvmesh doctor --peer {host or socket.gethostname()}:{port} --token {escape(token)}\n\n"
            f"{_others(host)}Ctrl-C ends it.",
            soft_wrap=True,
        )
        listener = _Listener(out, token, plan)
        try:
            # A signal may be taken by another thread, which does not wake this one out of accept().
            sock.settimeout(_NOTICE_S)
            while True:
                with contextlib.suppress(TimeoutError):
                    listener.take(*sock.accept())
        except KeyboardInterrupt:
            pass
        finally:
            listener.close()
        out.print("\nstopped")
        return 0


def _others(host: str) -> str:
    """By which addresses this host may be reached, where its name says nothing to the other one."""
    if host:
        return ""
    addresses = [
        address
        for net in look().nets
        if net.up and not net.loopback
        for address in interface_addresses(net.name)
        if not address.startswith("fe80:")
    ]
    return f"(or by address: {', '.join(addresses[:8])})\n\n" if addresses else ""


def _bound(host: str, port: int) -> socket.socket:
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as err:
        number = getattr(err, "errno", None) or 0
        why = os.strerror(number) if number > 0 else getattr(err, "strerror", None) or str(err)
        if number == errno.EADDRINUSE:
            why += "; kvmesh doctor --listen PORT takes another"
        raise ConfigError(f"port={port}: cannot listen on {host or 'any address'}: {why}", field="port") from None


class _Listener:
    """At most one caller is served; others hear that it is busy."""

    def __init__(self, out: Console, token: str, plan: Plan) -> None:
        self._out = out
        self._token = token
        self._plan = plan
        self._thread: threading.Thread | None = None
        self._channel: wire.Channel | None = None
        self._busy = False
        self._closing = False

    def take(self, sock: socket.socket, address: tuple[str, int]) -> None:
        """On the accepting thread."""
        channel = wire.Channel(sock, wire.plain(address[0]))
        if self._busy:
            with contextlib.suppress(KvmeshError):
                channel.send(wire.Sorry("busy with another caller: try again in a moment"), 1.0)
            channel.close()
            return
        self._channel, self._busy = channel, True
        self._thread = threading.Thread(target=self._serve, args=(channel,), name="kvmesh-doctor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        if self._channel is not None:
            self._channel.close()
        if self._thread is not None:
            self._thread.join(10.0)

    def _serve(self, channel: wire.Channel) -> None:
        session = _Session(channel, self._plan)
        said = f"{channel.name} is done"
        try:
            quiet_s = wire.receive(channel, self._token, _GREET_S)
            self._out.print(f"{escape(channel.name)} is connected")
            while not isinstance(message := channel.take(quiet_s), wire.Bye):
                if isinstance(message, wire.Open):
                    self._out.print(f"{escape(channel.name)}: {escape(message.transport)}")
                channel.send(session.answer(message), self._plan.timeout_s)
        except wire.DoctorGone as err:
            said = err.message
        finally:
            session.close()
            channel.close()
            self._busy = False  # before it is said: who reads it may call at once
        if not self._closing:
            self._out.print(escape(said))


class _Session:
    """What one caller has opened here."""

    def __init__(self, channel: wire.Channel, plan: Plan) -> None:
        self._channel = channel
        self._plan = plan
        self._side: Side | None = None

    def close(self) -> None:
        side, self._side = self._side, None
        if side is not None:
            side.close()

    def answer(self, message: wire.Any_) -> wire.Message:
        try:
            return self._do(message)
        except (KvmeshError, OSError, MemoryError, ValueError, OverflowError) as err:
            return wire.Sorry(plain(err) or type(err).__name__)

    def _do(self, message: wire.Any_) -> wire.Message:
        if isinstance(message, wire.Open):
            return self._open(message)
        if isinstance(message, wire.Shut):
            self.close()
            return wire.Done()
        side = self._side
        if side is None:
            return wire.Sorry("open a transport first")
        match message:
            case wire.Begin(writer, epoch):
                side.begin(writer, epoch)
            case wire.End(writer, epoch):
                side.end(writer, epoch)
            case wire.Fill(seed):
                side.fill(seed)
            case wire.Check(seed):
                return wire.Done(side.differs_at(seed))
            case _:
                return wire.Sorry(f"{type(message).__name__} makes no sense here")
        return wire.Done()

    def _open(self, message: wire.Open) -> wire.Message:
        self.close()
        allowed = self._plan.transports or KNOWN_TRANSPORTS
        if message.transport not in allowed:
            return wire.Sorry(f"{message.transport!r} is not among its transports: {', '.join(allowed)}")
        if not 0 < message.size <= MAX_SIZE:
            return wire.Sorry(f"size={message.size}: not in 1..{MAX_SIZE}")
        side = self._side = Side(message.transport, self._channel.local_host, message.size, self._plan)
        return wire.Opened(side.engine.local_descriptor().encode(), side.region.base_offset, side.left_out)
