"""Who reads a tcp answer: the caller that waits for it, or the connection's own thread, which takes over anywhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvmesh.transfer import TransferState, TransferStatus
from kvmesh.transfer.api import BatchId
from kvmesh.transfer.transports import adaptive_spin as tcp_spin
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.adaptive_spin import AdaptiveSpin, Allowance
from kvmesh.transfer.transports.tcp.path import TcpPath
from tests.support.transfer.peer import Actor, pattern
from tests.support.transfer.raw import BASE, RawTarget
from tests.transfer.conftest import Nest, over, until

pytestmark = over("tcp")

KIB = 1 << 10


@pytest.fixture
def target() -> Iterator[RawTarget]:
    made = RawTarget("target#1", 1 << 20)
    yield made
    made.close()


class Caller(threading.Thread):
    """Waits for a batch, and says which thread its callback ran on."""

    def __init__(self, actor: Actor, batch: BatchId, timeout_s: float = 60.0) -> None:
        super().__init__(name="test-caller", daemon=True)
        self.actor, self.batch, self.timeout_s = actor, batch, timeout_s
        self.final = False
        self.called_on: list[str] = []
        actor.engine.on_done(batch, lambda: self.called_on.append(threading.current_thread().name))

    def run(self) -> None:
        self.final = self.actor.engine.wait_sync(self.batch, self.timeout_s)

    def status(self) -> TransferStatus:
        self.join(20)
        assert not self.is_alive()
        return self.actor.engine.status(self.batch, 0)


def reading(actor: Actor) -> bool:
    """Whether anybody reads from the engine's only connection."""
    (path,) = actor.engine._transports[0]._paths.values()  # type: ignore[attr-defined]
    assert isinstance(path, TcpPath)
    (stream,) = path.streams
    assert stream.answers is not None
    return stream.busy or stream.answers._turn.locked()


def opened(nest: Nest, target: RawTarget, monkeypatch: pytest.MonkeyPatch) -> tuple[Actor, str]:
    """An engine that is connected, and whose callers help for as long as they wait."""
    monkeypatch.setattr("kvmesh.transfer.sender.HELP_S", 20.0)
    reader = nest.actor("reader#1", transports=("tcp",), tcp_streams=1)
    reader.allocate(64 * KIB)
    segment = reader.open(target.descriptor.encode())
    batch, done = reader.start("read", segment, [(0, BASE, 8)]), threading.Event()
    reader.engine.on_done(batch, done.set)
    target.accept()
    target.sock.sendall(target.answer(target.asked().seq, b"8 bytes."))
    assert done.wait(20)
    until(lambda: not reading(reader), "the connection's threads have nothing to do")
    return reader, segment


def helping(actor: Actor, caller: Caller) -> None:
    caller.start()
    until(lambda: reading(actor), "the caller reads")


def test_a_caller_that_waits_reads_its_answer_itself(
    nest: Nest, target: RawTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, segment = opened(nest, target, monkeypatch)
    caller = Caller(reader, reader.start("read", segment, [(0, BASE, 16 * KIB)]))
    helping(reader, caller)
    target.sock.sendall(target.answer(target.asked().seq, pattern(1, 16 * KIB)))
    assert caller.status().state is TransferState.COMPLETED
    assert (caller.final, caller.called_on) == (True, ["test-caller"])
    assert reader.read(0, 16 * KIB) == pattern(1, 16 * KIB)


def test_without_a_caller_the_connection_s_thread_reads(
    nest: Nest, target: RawTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, segment = opened(nest, target, monkeypatch)
    called_on: list[str] = []
    done = threading.Event()
    batch = reader.start("read", segment, [(0, BASE, 8)])

    def callback() -> None:
        called_on.append(threading.current_thread().name)
        done.set()

    reader.engine.on_done(batch, callback)
    target.sock.sendall(target.answer(target.asked().seq, b"without."))
    assert done.wait(20)
    assert called_on == ["kvmesh-tcp-read"]
    assert reader.read(0, 8) == b"without."


@pytest.mark.parametrize("cut", [7, wire.HEAD_BYTES, wire.HEAD_BYTES + 1, wire.HEAD_BYTES + 9000])
def test_a_caller_that_leaves_in_the_middle_of_an_answer(
    nest: Nest, target: RawTarget, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """Its time is up: the connection's thread goes on at that very byte, and the next answers are whole too."""
    reader, segment = opened(nest, target, monkeypatch)
    copies = [(0, BASE, 10 * KIB), (20 * KIB, BASE, 6 * KIB + 1)]
    caller = Caller(reader, reader.start("read", segment, copies), timeout_s=0.05)
    helping(reader, caller)
    asked = target.asked()
    data = pattern(9, 16 * KIB + 1)
    whole = target.answer(asked.seq, data)
    target.sock.sendall(whole[:cut])
    assert caller.status().state is TransferState.PENDING
    assert not caller.final
    target.sock.sendall(whole[cut:])
    assert reader.engine.wait_sync(caller.batch, 20)
    assert [s.state for s in reader.engine.statuses(caller.batch)] == [TransferState.COMPLETED] * 2
    assert (reader.read(0, 10 * KIB), reader.read(20 * KIB, 6 * KIB + 1)) == (data[: 10 * KIB], data[10 * KIB :])
    batch = reader.start("write", segment, [(0, BASE, 100), (200, BASE, 50)], 1)
    target.sock.sendall(target.answer(target.asked().seq, refused=(1,), code=wire.OUTSIDE_WINDOW))
    assert [s.state for s in reader.finish(batch)] == [TransferState.COMPLETED, TransferState.FAILED]


def test_a_caller_whose_connection_breaks(nest: Nest, target: RawTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of its answer; the frame goes again over a new connection."""
    reader, segment = opened(nest, target, monkeypatch)
    caller = Caller(reader, reader.start("read", segment, [(0, BASE, 4 * KIB)]))
    helping(reader, caller)
    data = pattern(3, 4 * KIB)
    target.sock.sendall(target.answer(target.asked().seq, data)[: 2 * KIB])
    target.sock.close()
    target.accept()
    target.sock.sendall(target.answer(target.asked().seq, data))
    assert caller.status().state is TransferState.COMPLETED
    assert reader.read(0, 4 * KIB) == data


def test_an_answer_to_nothing_asked_breaks_the_connection(
    nest: Nest, target: RawTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, segment = opened(nest, target, monkeypatch)
    caller = Caller(reader, reader.start("read", segment, [(0, BASE, 8)]))
    helping(reader, caller)
    target.sock.sendall(target.answer(target.asked().seq + 1, b"foreign."))
    target.accept()
    target.sock.sendall(target.answer(target.asked().seq, b"8 again."))
    assert caller.status().state is TransferState.COMPLETED
    assert reader.read(0, 8) == b"8 again."


def test_closing_ends_a_caller_s_help(nest: Nest, target: RawTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, segment = opened(nest, target, monkeypatch)
    caller = Caller(reader, reader.start("read", segment, [(0, BASE, 8)]))
    helping(reader, caller)
    reader.engine.close_segment(segment)
    assert caller.status().state is TransferState.FAILED
    assert caller.final


def test_a_request_s_time_out_ends_a_caller_s_wait(nest: Nest, target: RawTarget) -> None:
    """It helps for a while only: nobody wakes it for what another thread finds out."""
    writer = nest.actor("writer#1", transports=("tcp",), tcp_streams=1, request_timeout_s=0.1, ack_timeout_s=60.0)
    writer.allocate(64 * KIB)
    segment = writer.open(target.descriptor.encode())
    batch = writer.start("write", segment, [(0, BASE, 8)], 1)
    target.accept()
    assert target.asked().nbytes == 8
    assert writer.engine.wait_sync(batch, 30)
    assert writer.engine.status(batch, 0).state is TransferState.TIMEOUT


# ── looking before sleeping ───────────────────────────────────────────────────────────────────────


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(tcp_spin, "time", made)
    monkeypatch.setattr(tcp_spin, "_CORES", 2)
    monkeypatch.setattr(tcp_spin, "ALLOWANCE", Allowance(at=made.now))
    return made


def looked(patience: AdaptiveSpin, clock: Clock, came_after: float, nbytes: int = 4096) -> bool:
    looks = patience.begin() > clock.now
    clock.now += came_after
    patience.met(nbytes)
    return looks


def test_looks_for_what_is_small_and_was_soon(clock: Clock) -> None:
    patience = AdaptiveSpin()
    assert not looked(patience, clock, 50e-6)
    assert looked(patience, clock, 50e-6)
    assert looked(patience, clock, 50e-6, nbytes=4 << 20)
    assert not looked(patience, clock, 50e-6)
    assert looked(patience, clock, 1.0)
    assert not looked(patience, clock, 1.0)


def test_one_core_is_left_to_the_other_end(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_spin, "_CORES", 1)
    patience = AdaptiveSpin()
    assert not any(looked(patience, clock, 50e-6) for _ in range(5))


def test_looking_in_vain_is_bounded(clock: Clock) -> None:
    """Something that always comes a little too late costs at most three hundredths of the time."""
    patience, began = AdaptiveSpin(), clock.now
    vain = sum(looked(patience, clock, 1.9 * tcp_spin.SPIN_S) for _ in range(20_000))
    assert 0 < vain * tcp_spin.SPIN_S < 0.03 * (clock.now - began) + 2 * Allowance().most


def test_looking_pays_for_itself(clock: Clock) -> None:
    """One look in five in vain is no reason to stop."""
    patience = AdaptiveSpin()
    took = [50e-6] * 4 + [2 * tcp_spin.SPIN_S - 20e-6]
    looks = [looked(patience, clock, took[i % 5]) for i in range(1, 2000)]
    assert all(looks[1:])
