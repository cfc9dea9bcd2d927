"""Callers that wait over shm read answers, and copy, themselves; what they leave, the path's own threads do."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvmesh.transfer import TransferState
from kvmesh.transfer.transports.shm import server as shm_server
from kvmesh.transfer.transports.shm.path import ShmAnswers, ShmPath
from tests.support.transfer.peer import Actor
from tests.transfer.conftest import Nest, over

MIB = 1 << 20

pytestmark = over("shm")


def pair(nest: Nest, nbytes: int) -> tuple[Actor, Actor, str, int]:
    target, writer = nest.actor("target#1", transports=("shm",)), nest.actor("writer#1", transports=("shm",))
    base = target.allocate(nbytes, seed=2)
    writer.allocate(nbytes, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, nbytes)])
    for opcode, epoch in (("write", 1), ("read", 0)):  # connects, and maps
        writer.transfer(opcode, segment, [(0, base, 1)], epoch)
    return writer, target, segment, base


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The target copies once it is set."""
    go_on = threading.Event()
    copy_runs: Callable[..., None] = vars(shm_server)["copy_runs"]

    def held(*runs: object) -> None:
        assert go_on.wait(20)
        copy_runs(*runs)

    go_on.set()
    monkeypatch.setattr(shm_server, "copy_runs", held)
    return go_on


def test_a_caller_that_waits_reads_the_answer(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each one: the path's own thread may still be at it when the caller comes."""
    writer, target, segment, base = pair(nest, MIB)
    copying = threading.Event()
    copy_runs: Callable[..., None] = vars(shm_server)["copy_runs"]

    def held(*runs: object) -> None:
        copying.wait(0.5)
        copy_runs(*runs)

    monkeypatch.setattr(shm_server, "copy_runs", held)
    readers: list[threading.Thread] = []
    answer, read_until = ShmPath._answer, ShmAnswers._read_until

    def noted(*words: object) -> None:
        readers.append(threading.current_thread())
        answer(*words)  # type: ignore[arg-type]

    def reading(*words: object) -> None:
        copying.set()
        read_until(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(ShmPath, "_answer", noted)
    monkeypatch.setattr(ShmAnswers, "_read_until", reading)
    for i in range(10):
        copying.clear()
        assert writer.transfer("write", segment, [(i, base, MIB - i)], 1)[0].state is TransferState.COMPLETED
        assert target.read(0, MIB - i) == writer.read(i, MIB - i)
    assert threading.current_thread() in readers


def test_what_a_caller_does_not_wait_for_is_read_all_the_same(nest: Nest, copying: threading.Event) -> None:
    """It gave up before the answer came, or never waited."""
    writer, _, segment, base = pair(nest, MIB)
    for patience_s in (0.05, 0.0, None):
        copying.clear()
        batch = writer.start("write", segment, [(0, base, MIB)], 1)
        if patience_s is not None:
            assert not writer.engine.wait_sync(batch, patience_s)
        done = threading.Event()
        writer.engine.on_done(batch, done.set)
        copying.set()
        assert done.wait(20)


def test_a_caller_that_waits_sees_the_connection_end(nest: Nest, copying: threading.Event) -> None:
    """Its frame goes again over the next one."""
    writer, target, segment, base = pair(nest, MIB)
    copying.clear()
    batch = writer.start("write", segment, [(0, base, MIB)], 1)
    (connection,) = target.engine._transports[0]._server.connections()  # type: ignore[attr-defined]

    def end() -> None:
        connection.interrupt()
        copying.set()

    cut = threading.Timer(0.02, end)
    cut.start()
    assert writer.finish(batch)[0].state is TransferState.COMPLETED
    cut.join()
    assert target.read(0, MIB) == writer.read(0, MIB)


@pytest.mark.parametrize("nbytes", [MIB, 9 * MIB])
def test_a_caller_that_waits_reads_in_the_place_of_the_thread(nest: Nest, nbytes: int) -> None:
    writer, target, segment, base = pair(nest, nbytes)
    (path,) = writer.engine._transports[0]._paths.values()  # type: ignore[attr-defined]
    path._reader.close()
    path._reader._thread.join(20)
    assert writer.transfer("read", segment, [(0, base, nbytes)])[0].state is TransferState.COMPLETED
    assert writer.read(0, nbytes) == target.read(0, nbytes)


def test_reads_that_nobody_waits_for_go_on_beside_one_that_somebody_does(nest: Nest) -> None:
    writer, target, segment, base = pair(nest, 40 * MIB)
    done = threading.Semaphore(0)
    for round_ in range(4):
        near = [(i * 5 * MIB + round_, base + i * 5 * MIB, 4 * MIB) for i in range(8)]
        first, others = near[round_ * 2], near[: round_ * 2] + near[round_ * 2 + 1 :]
        batches = [writer.start("read", segment, [copy]) for copy in (others[0], first, *others[1:])]
        for batch in batches[:1] + batches[2:]:
            writer.engine.on_done(batch, done.release)
        assert writer.finish(batches[1])[0].state is TransferState.COMPLETED
        for _ in others:
            assert done.acquire(timeout=20)
        for at, of, length in near:
            assert writer.read(at, length) == target.read(of - base, length)
