"""The canary: a writer is frozen, its window fenced, the memory used for something else, the writer woken. Not one late
byte may land. Each test has its counter-proof, with the fence or a part of it taken away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer import EngineConfig, TransferEngine, TransferState
from kvmesh.transfer.transports.serving import Accepted
from kvmesh.transfer.transports.shm.server import ShmAccepted
from kvmesh.transfer.transports.tcp.server import TcpAccepted
from kvmesh.transfer.windows import Windows
from tests.support.transfer.peer import Actor
from tests.support.transfer.raw import RawTcp
from tests.transfer.conftest import Nest, cannot_hold, over, until

MIB = 1 << 20
CANARY = b"\xca"


def paint(target: Actor, nbytes: int) -> None:
    assert target.region is not None
    assert target.region.memory is not None
    target.region.memory[:nbytes] = CANARY * nbytes


def no_fence(engine: TransferEngine, peer: str, epoch: int, timeout_s: float = 5.0) -> None:
    """A fence that promises and does nothing."""


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.slow
def test_stopped_process_woken_after_the_fence(
    nest: Nest, transport: str, fenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP in the middle of a flood of writes, fence, canary, SIGCONT. Without the fence the canary dies."""
    if not fenced:
        monkeypatch.setattr(TransferEngine, "fence", no_fence)
    nbytes = 8 * MIB
    config = EngineConfig(transports=(transport,), tcp_slice_bytes=1 << 20)
    target, writer = nest.actor("target#1", config), nest.peer("writer#1", config)
    base = target.allocate(nbytes)
    writer.allocate(nbytes, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 7, [(base, nbytes)])
    writer.flood("write", segment, [(i * MIB, base + i * MIB, MIB) for i in range(8)], 7)
    until(lambda: writer.counter(f"{transport}.write_bytes") > 3 * nbytes, "the flood")

    writer.freeze()
    target.engine.fence("writer#1", 7)
    paint(target, nbytes)
    writer.thaw()
    until(lambda: target.read(0, nbytes) != CANARY * nbytes or writer.flood_over(), "late bytes, or the writer's end")

    if fenced:
        assert target.read(0, nbytes) == CANARY * nbytes
        (status, *_) = writer.flood_result()
        assert status.state is TransferState.FAILED
        assert status.cause == "window closed"
    else:
        assert target.read(0, nbytes) != CANARY * nbytes
        monkeypatch.undo()
        target.fence("writer#1", 7)
        writer.flood_result()


@pytest.mark.parametrize("fenced", [True, False])
def test_writes_stuck_in_the_network(nest: Nest, transport: str, fenced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames posted after the window was opened arrive after the fence."""
    if not fenced:
        monkeypatch.setattr(TransferEngine, "fence", no_fence)
    config = EngineConfig(transports=(transport,), fault="{}")
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    base = target.allocate(MIB)
    writer.allocate(MIB, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 7, [(base, MIB)])
    writer.engine.fault.freeze()
    batch = writer.start("write", segment, [(0, base, MIB)], 7)
    assert writer.engine.fault.wait_held(1, 10)

    target.engine.fence("writer#1", 7)
    paint(target, MIB)
    assert writer.engine.fault.thaw() >= 1

    (status,) = writer.finish(batch)
    if fenced:
        assert (status.state, status.cause) == (TransferState.FAILED, "window closed")
        assert target.read(0, MIB) == CANARY * MIB
    else:
        assert status.state is TransferState.COMPLETED
        assert target.read(0, MIB) == writer.read(0, MIB)


def half_received(nest: Nest) -> tuple[Actor, RawTcp, int]:
    """A writer that stopped in the middle of a slice: half of its bytes have landed."""
    target = nest.actor("target#1", transports=("tcp",))
    base = target.allocate(MIB)
    target.window("writer#1", 7, [(base, MIB)])
    raw = RawTcp(target.engine.local_descriptor(), "writer#1")
    raw.start_write(1, 7, base, MIB)
    raw.sock.sendall(b"w" * (MIB // 2))
    until(lambda: target.read(MIB // 2 - 1, 1) == b"w", "half a slice")
    return target, raw, base


def send_rest(raw: RawTcp) -> None:
    try:
        raw.sock.sendall(b"w" * (MIB // 2))
    except OSError:
        pass  # cut by the fence


@over("tcp")
def test_half_received_slice_is_cut_by_the_fence(nest: Nest) -> None:
    target, raw, _ = half_received(nest)
    target.engine.fence("writer#1", 7)
    paint(target, MIB)
    send_rest(raw)
    until(lambda: not target.engine._transports[0]._server.connections(), "its thread ends")  # type: ignore[attr-defined]
    raw.close()
    assert target.read(0, MIB) == CANARY * MIB
    assert target.engine.landed_bytes("writer#1", 7) == 0


@over("tcp")
def test_half_received_slice_without_the_fence_kills_the_canary(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransferEngine, "fence", no_fence)
    target, raw, _ = half_received(nest)
    target.engine.fence("writer#1", 7)
    paint(target, MIB)
    send_rest(raw)
    assert raw.answer() == (1, "", 0)
    raw.close()
    assert target.read(0, MIB) == CANARY * (MIB // 2) + b"w" * (MIB // 2)


@over("tcp")
def test_half_received_slice_without_the_cut_makes_the_fence_fail(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window check alone is not enough: the receiver is inside already. The fence must not claim success."""
    target, raw, _ = half_received(nest)
    with monkeypatch.context() as patch:
        patch.setattr(Accepted, "interrupt", lambda connection: None)
        with pytest.raises(TransferError, match="inside"):
            target.engine.fence("writer#1", 7, timeout_s=0.2)
    target.engine.fence("writer#1", 7)
    raw.close()


@over("shm")
def test_copier_in_the_middle_of_a_slice_is_waited_for(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    """shm: the copier runs in the target; a fence that comes while it copies returns only after its last byte."""
    from kvmesh.transfer.transports.shm import server as shm_server

    inside, go_on = threading.Event(), threading.Event()
    copy_runs: Callable[..., None] = shm_server.copy_runs

    def slow(*args: object) -> None:
        inside.set()
        assert go_on.wait(20)
        copy_runs(*args)

    monkeypatch.setattr(shm_server, "copy_runs", slow)
    config = EngineConfig(transports=("shm",))
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    base = target.allocate(4096)
    writer.allocate(4096, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 7, [(base, 4096)])
    batch = writer.start("write", segment, [(0, base, 4096)], 7)
    assert inside.wait(10)
    with pytest.raises(TransferError, match="inside"):
        target.engine.fence("writer#1", 7, timeout_s=0.05)
    go_on.set()
    target.engine.fence("writer#1", 7)
    landed = target.read(0, 4096)
    assert landed == writer.read(0, 4096)
    writer.finish(batch)


def test_other_epochs_of_a_cut_connection_are_sent_again(
    nest: Nest, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread stuck in epoch 1 is cut out by the fence; epoch 2, queued behind it, still arrives, whole and once
    acknowledged; epoch 1 does not."""
    cannot_hold(transport, "rdma", "no thread of the target lands bytes, so none can be stuck in it")
    stuck = threading.Event()
    cls, name = (ShmAccepted, "_write") if transport == "shm" else (TcpAccepted, "_land")
    original = getattr(cls, name)

    def stick(self: Accepted, *args: object) -> None:
        if transport == "tcp" and not stuck.is_set():
            stuck.set()
            until(lambda: self.dead, "the fence cuts")
        original(self, *args)

    monkeypatch.setattr(cls, name, stick)
    if transport == "shm":
        admit = Windows.admit

        def slow_admit(self: Windows[object], peer: str, epoch: int, *args: object) -> object:
            admission = admit(self, peer, epoch, *args)  # type: ignore[arg-type]
            if epoch == 1 and not stuck.is_set():
                stuck.set()
                until(lambda: args[2].dead, "the fence cuts")  # type: ignore[attr-defined]
            return admission

        monkeypatch.setattr(Windows, "admit", slow_admit)

    config = EngineConfig(transports=(transport,), tcp_streams=1)
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    base = target.allocate(2 * MIB)
    writer.allocate(2 * MIB, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, MIB)])
    target.window("writer#1", 2, [(base + MIB, MIB)])
    first = writer.start("write", segment, [(0, base, MIB)], 1)
    second = writer.start("write", segment, [(MIB, base + MIB, MIB)], 2)
    assert stuck.wait(10)
    target.engine.fence("writer#1", 1)
    paint(target, MIB)
    (status,) = writer.finish(first)
    assert (status.state, status.cause, status.drained) == (TransferState.FAILED, "window closed", True)
    (status,) = writer.finish(second)
    assert status.state is TransferState.COMPLETED
    assert target.read(0, MIB) == CANARY * MIB
    assert target.read(MIB, MIB) == writer.read(MIB, MIB)
    assert writer.engine.counters()["frames_resent"] >= 1


def test_fence_peer_closes_all_its_epochs_and_nobody_elses(nest: Nest, transport: str) -> None:
    config = EngineConfig(transports=(transport,))
    target = nest.actor("target#1", config)
    base = target.allocate(MIB)
    writers = [nest.actor(f"writer#{i}", config) for i in range(2)]
    for writer in writers:
        writer.allocate(MIB, seed=1)
        segment = writer.open(target.descriptor())
        for epoch in (1, 2):
            target.window(writer.engine.name, epoch, [(base, MIB)])
    target.engine.fence_peer("writer#0")
    target.engine.fence_peer("writer#0")
    states = [writer.transfer("write", segment, [(0, base, 100)], e)[0].state for writer in writers for e in (1, 2)]
    assert states == [TransferState.FAILED] * 2 + [TransferState.COMPLETED] * 2


@over("tcp")
def test_superseded_connection_is_outside_before_the_new_one_is_welcome(nest: Nest) -> None:
    """The late packet of a re-sent slice: bytes still under way on the old connection never land once the new one may
    speak."""
    target, old, base = half_received(nest)
    new = RawTcp(target.engine.local_descriptor(), "writer#1", conn_id=2, supersedes=(1,))
    assert new.welcome == ""
    new.start_write(1, 7, base, MIB)
    new.sock.sendall(b"n" * MIB)
    assert new.answer() == (1, "", 0)
    send_rest(old)
    until(lambda: len(target.engine._transports[0]._server.connections()) == 1, "the old one ends")  # type: ignore[attr-defined]
    assert target.read(0, MIB) == b"n" * MIB
    old.close()
    new.close()


@over("tcp")
def test_a_stuck_superseded_connection_keeps_the_new_one_out(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(transports=("tcp",), connect_timeout_s=0.4)
    target = nest.actor("target#1", config)
    base = target.allocate(MIB)
    target.window("writer#1", 7, [(base, MIB)])
    descriptor = target.engine.local_descriptor()
    old = RawTcp(descriptor, "writer#1")
    old.start_write(1, 7, base, MIB)
    until(lambda: bool(target.engine.windows._windows["writer#1", 7].inside), "inside")
    with monkeypatch.context() as patch:
        patch.setattr(Accepted, "interrupt", lambda connection: None)
        new = RawTcp(descriptor, "writer#1", conn_id=2, supersedes=(1,))
        assert "still inside" in new.welcome
        new.close()
    old.close()


@over("tcp")
def test_fence_is_quick_beside_a_frozen_writer(nest: Nest) -> None:
    """Not a timing claim: it must not wait for any time-out of seconds."""
    target, raw, _ = half_received(nest)
    started = time.monotonic()
    target.engine.fence("writer#1", 7, timeout_s=60)
    assert time.monotonic() - started < 30
    raw.close()
