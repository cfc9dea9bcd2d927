"""Copies by several threads: every byte, and nobody is told of the end before it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer import EngineConfig, SegmentDescriptor, TransferState
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.shm import copy as shm_copy
from kvmesh.transfer.transports.shm.copy import Copiers, CopyJob
from kvmesh.transfer.transports.shm.server import ShmAccepted
from tests.support.transfer.peer import Actor, pattern
from tests.support.transfer.raw import RawShm, write_rows
from tests.transfer.conftest import Nest, over, until

MIB = 1 << 20

pytestmark = over("shm")


class Gate:
    """Stands in for copy_runs: holds the helpers at the door, and the others until a helper is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self._copy: Callable[..., None] = vars(shm_copy)["copy_runs"]
        monkeypatch.setattr(shm_copy, "copy_runs", self)

    def __call__(self, *args: object) -> None:
        if threading.current_thread().name == "kvmesh-shm-copy":
            self.entered.set()
            assert self.go_on.wait(20)
        else:
            assert self.entered.wait(20)
        self._copy(*args)


def pair(nest: Nest, nbytes: int, threads: int) -> tuple[Actor, Actor, str, int]:
    config = EngineConfig(transports=("shm",), shm_copy_threads=threads)
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    base = target.allocate(nbytes, seed=2)
    writer.allocate(nbytes, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, nbytes)])
    return writer, target, segment, base


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_several_threads_copy_what_one_would(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_copy, "PIECE_BYTES", 5000)
    rng = random.Random(threads)
    source = np.frombuffer(pattern(1, 1 << 20), dtype=np.uint8)
    copiers = Copiers(threads)
    ended: list[BaseException | None] = []
    done = threading.Semaphore(0)

    def end(error: BaseException | None) -> None:
        ended.append(error)
        done.release()

    try:
        for even in [False, True] * 10:
            target = np.zeros(1 << 20, dtype=np.uint8)
            expected = target.copy()
            to, of, lengths, at = [], [], [], 0
            while at < 900_000:
                at += 8 if even else rng.choice([0, 3, 4096])
                length, start = rng.choice([1, 4999, 5000, 5001, 70_000]), rng.randrange(900_000)
                length = 1000 if even else length
                to.append(target.ctypes.data + at)
                of.append(source.ctypes.data + start)
                lengths.append(length)
                expected[at : at + length] = source[start : start + length]
                at += length
            job = CopyJob(to, of, lengths, end)
            assert len(job.pieces) >= sum(lengths) // 5000
            copiers.start(job)
            while job.work():
                pass
            assert done.acquire(timeout=20)
            assert (target == expected).all()
    finally:
        copiers.close(10)
    assert ended == [None] * 20
    assert not [t for t in threading.enumerate() if t.name == "kvmesh-shm-copy"]


def test_the_end_comes_after_the_last_piece_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper is held inside its piece while the owner has done all the others."""
    monkeypatch.setattr(shm_copy, "PIECE_BYTES", 1000)
    gate = Gate(monkeypatch)
    source, target = np.ones(4000, dtype=np.uint8), np.zeros(4000, dtype=np.uint8)
    copiers = Copiers(2)
    ended = threading.Semaphore(0)
    job = CopyJob([target.ctypes.data], [source.ctypes.data], [4000], lambda error: ended.release())
    copiers.start(job)
    while job.work():
        pass
    assert not ended.acquire(timeout=0.05)
    assert target.sum() == 3000
    gate.go_on.set()
    assert ended.acquire(timeout=20)
    assert target.sum() == 4000
    copiers.close(10)
    assert not ended.acquire(blocking=False)


def test_a_piece_that_fails_is_told_of_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_copy, "PIECE_BYTES", 1000)
    copied: list[int] = []

    def failing(targets: list[int], sources: list[int], lengths: list[int]) -> None:
        if targets == [1000]:
            raise MemoryError("no")
        copied.append(targets[0])

    monkeypatch.setattr(shm_copy, "copy_runs", failing)
    ended: list[BaseException | None] = []
    job = CopyJob([0], [0], [4000], ended.append)
    while job.work():
        assert len(copied) == 3 or not ended
    assert copied == [0, 2000, 3000]
    assert isinstance(ended[0], MemoryError)


@pytest.mark.parametrize("opcode", ["write", "read"])
def test_large_transfers_with_helpers(nest: Nest, opcode: str) -> None:
    writer, target, segment, base = pair(nest, 40 * MIB, 3)
    epoch = 1 if opcode == "write" else 0
    (status,) = writer.transfer(opcode, segment, [(12345, base + 777, 39 * MIB)], epoch)
    assert status.state is TransferState.COMPLETED
    assert writer.read(12345, 39 * MIB) == target.read(777, 39 * MIB)
    busy = [a for a in (writer, target) if any(t.is_alive() for t in a.engine._transports[0].copiers._helpers)]  # type: ignore[attr-defined]
    assert busy == [target if opcode == "write" else writer]


# ── the target: inside until the last byte ────────────────────────────────────────────────────────


def test_a_fence_waits_for_pieces_in_helpers_hands(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    writer, target, segment, base = pair(nest, 4 * MIB, 2)
    batch = writer.start("write", segment, [(0, base, 4 * MIB)], 1)
    assert gate.entered.wait(20)
    with pytest.raises(TransferError, match="inside"):
        target.engine.fence("writer#1", 1, timeout_s=0.1)
    assert writer.engine.status(batch, 0).state is TransferState.PENDING
    gate.go_on.set()
    target.engine.fence("writer#1", 1)
    assert target.read(0, 4 * MIB) == writer.read(0, 4 * MIB)
    writer.finish(batch)


def test_a_superseded_connection_is_outside_before_the_new_one_is_welcome(
    nest: Nest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the pieces that helpers have of it: its frames go again on the new one."""
    gate = Gate(monkeypatch)
    writer, target, segment, base = pair(nest, 4 * MIB, 2)
    batch = writer.start("write", segment, [(0, base, 4 * MIB)], 1)
    assert gate.entered.wait(20)
    server = target.engine._transports[0]._server  # type: ignore[attr-defined]
    (old,) = server.connections()
    old.interrupt()
    assert not old.gone.wait(0.1)
    gate.go_on.set()
    assert old.gone.wait(20)
    (status,) = writer.finish(batch)
    assert status.state is TransferState.COMPLETED
    assert target.read(0, 4 * MIB) == writer.read(0, 4 * MIB)
    assert writer.counter("shm.frames_lost") == 1


def test_a_writer_that_takes_no_answers_is_cut_off(nest: Nest) -> None:
    """Helpers serve everybody: they do not wait until there is room for an answer."""
    target = nest.actor("target#1", transports=("shm",), shm_copy_threads=2)
    base = target.allocate(4 * MIB)
    target.window("deaf#1", 1, [(base, 4 * MIB)])
    source = nest.actor("source#1", transports=("shm",))
    source.allocate(4 * MIB, seed=1)
    raw = RawShm(SegmentDescriptor.decode(target.descriptor()), "deaf#1")
    assert source.region is not None
    (region,) = source.engine.segment.regions
    raw.send_with_fd(wire.HEAD.pack(wire.REGION, 0, 0, 1, 4096, 0, 4 * MIB), region.fd)
    packets = [write_rows(seq, 1, [(4096, base, 2 * MIB)]) for seq in range(1, 5000)]
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        raise AssertionError(f"{sum(map(raw.sock.send, packets))} bytes were taken")
    until(lambda: not target.engine._transports[0]._server.connections(), "its end")  # type: ignore[attr-defined]
    target.engine.fence("deaf#1", 1)
    raw.close()


def test_end_marks_and_checksums_wait_for_the_writes_before_them(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection answers in order, as if one thread did it all."""
    gate = Gate(monkeypatch)
    target = nest.actor("target#1", transports=("shm",), shm_copy_threads=2)
    base = target.allocate(4 * MIB)
    target.window("raw#1", 1, [(base, 4 * MIB)])
    source = nest.actor("source#1", transports=("shm",))
    source.allocate(4 * MIB, seed=1)
    raw = RawShm(SegmentDescriptor.decode(target.descriptor()), "raw#1")
    (region,) = source.engine.segment.regions
    raw.send_with_fd(wire.HEAD.pack(wire.REGION, 0, 0, 1, 4096, 0, 4 * MIB), region.fd)
    finished = threading.Event()
    finish = ShmAccepted._finish_jobs

    def noted(connection: ShmAccepted) -> None:
        gate.go_on.set()
        finish(connection)
        finished.set()

    monkeypatch.setattr(ShmAccepted, "_finish_jobs", noted)
    raw.sock.send(write_rows(1, 1, [(4096, base, 4 * MIB)]))
    raw.sock.send(wire.HEAD.pack(wire.NOTIFY, 0, 0, 0, 2, 1, 4) + (9).to_bytes(8, "little") + b"last")
    answers = [wire.Asked.parse(raw.sock.recv(4096)).seq for _ in range(2)]
    assert answers == [1, 2]
    assert finished.is_set()
    raw.close()
