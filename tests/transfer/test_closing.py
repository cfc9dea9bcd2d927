"""Nothing waits for ever when an engine or a path is closed in an unlucky moment."""

from __future__ import annotations

import threading

import pytest

from kvmesh.transfer import EngineConfig, TransferState, TransferStatus
from kvmesh.transfer.batch import AfterUnlock
from kvmesh.transfer.epochs import EndMark
from kvmesh.transfer.transports.base import FrameLimits
from kvmesh.transfer.transports.tcp.path import TcpPath
from kvmesh.transfer.transports.tcp.server import TcpAccepted
from kvmesh.transfer.transports.tcp.transport import TcpTransport
from tests.support.transfer.fakes import FakeTransport, World
from tests.transfer.conftest import Nest, over

MIB = 1 << 20


def test_an_end_mark_on_its_way_is_answered_when_the_engine_closes() -> None:
    """Its transport could not tell in time."""
    transport = FakeTransport("tcp", FrameLimits(MIB, MIB, 8, 4))
    world = World((transport,))
    link = world.open()
    answers: list[TransferStatus] = []
    after = AfterUnlock()
    with world.sender.lock:
        notice = EndMark(next(world.sender.serials), 1, b"end", answers.append, world.now + 30)
        world.sender.notify(link, notice, after)
    world.sender.conclude(after)
    (frame,) = transport.posted.values()
    world.sender.stop()
    assert [(a.state, a.cause) for a in answers] == [(TransferState.FAILED, "engine closed")]
    transport.done(frame)
    assert len(answers) == 1


class Unlucky(threading.Condition):
    """Closes its path as soon as a stream's thread, in `_gather`, has let it go."""

    def __init__(self, path: TcpPath) -> None:
        super().__init__()
        self.path = path
        self.armed = False

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[arg-type]
        stream = next((s for s in self.path.streams if s.thread is threading.current_thread()), None)
        if self.armed and stream is not None and stream.stranded and stream.sock is None:
            self.armed = False
            self.path.close("closed")


@over("tcp")
def test_a_path_closed_while_its_stream_looks_what_is_left_forgets_no_frame(
    nest: Nest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(transports=("tcp",), tcp_streams=1, request_timeout_s=20)
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    base = target.allocate(32 * MIB)
    writer.allocate(32 * MIB)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, 32 * MIB)])
    new_path = TcpTransport.new_path
    made: list[TcpPath] = []

    def unlucky(*args: object) -> TcpPath:
        path = new_path(*args)  # type: ignore[arg-type]
        path.changed = Unlucky(path)
        made.append(path)
        return path

    monkeypatch.setattr(TcpTransport, "new_path", unlucky)
    writer.transfer("write", segment, [(0, base, 100)], 1)  # connected
    (path,) = made
    holding, go_on = threading.Event(), threading.Event()
    land = TcpAccepted._land

    def stall(self: TcpAccepted, *args: object) -> None:
        holding.set()
        assert go_on.wait(20)
        land(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TcpAccepted, "_land", stall)
    batch = writer.start("write", segment, [(0, base, 32 * MIB)], 1)
    reading = writer.start("read", segment, [(0, base, 100)])
    assert holding.wait(10)
    assert isinstance(path.changed, Unlucky)
    path.changed.armed = True
    for connection in target.engine._transports[0]._server.connections():  # type: ignore[attr-defined]
        connection.interrupt()
    go_on.set()
    assert writer.engine.wait_sync(batch, 10), writer.engine.statuses(batch)
    assert writer.engine.wait_sync(reading, 10), writer.engine.statuses(reading)
    assert not path.changed.armed
    assert not path.queue
