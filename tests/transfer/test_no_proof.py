"""What is no proof that a writer's old path is dead must not be taken for one: the slice goes again, is acknowledged,
the memory is used for something else, and then the old copy lands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvmesh.transfer import EngineConfig, TransferState
from kvmesh.transfer.transports.base import Frame
from kvmesh.transfer.transports.dialing import DialingTransport
from kvmesh.transfer.windows import Windows
from tests.support.transfer.peer import Actor
from tests.transfer.conftest import Nest, over, until

KIB = 1 << 10
CANARY = b"\xca"


@contextmanager
def stuck_copier(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The first copier that was admitted to a window stays there: (it is inside, go on)."""
    inside, go_on = threading.Event(), threading.Event()
    admit: Callable[..., object] = Windows.admit

    def slow(*args: object) -> object:
        admission = admit(*args)
        if not inside.is_set():
            inside.set()
            assert go_on.wait(20)
            args[5].dead = False  # type: ignore[attr-defined]  # as if it had looked before it was told
        return admission

    with monkeypatch.context() as patch:
        patch.setattr(Windows, "admit", slow)
        try:
            yield inside, go_on
        finally:
            go_on.set()


def linked(nest: Nest, config: EngineConfig) -> tuple[Actor, Actor, int, str]:
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    base = target.allocate(4 * KIB)
    writer.allocate(4 * KIB, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, 4 * KIB)])
    return target, writer, base, segment


@over("shm")
def test_a_socket_file_that_vanished_says_nothing_of_the_process(
    nest: Nest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Somebody cleans the folder while a copier is frozen in the middle of a slice."""
    config = EngineConfig(
        transports=("shm", "tcp"), shm_dir=str(tmp_path), ack_timeout_s=0.1, connect_timeout_s=0.3, max_attempts=2
    )
    target, writer, base, segment = linked(nest, config)
    with stuck_copier(monkeypatch) as (inside, go_on):
        batch = writer.start("write", segment, [(0, base, 4 * KIB)], 1)
        assert inside.wait(10)
        for file in tmp_path.iterdir():
            file.unlink()
        (status,) = writer.finish(batch)
        if status.state is TransferState.COMPLETED:  # nothing may land from now on
            assert target.region is not None
            assert target.region.memory is not None
            target.region.memory[:] = CANARY * (4 * KIB)
            go_on.set()
            until(lambda: target.read(0, 1) != CANARY, "the late copy", 2)
            pytest.fail("a late copy killed the canary")
    assert (status.state, status.drained) == (TransferState.FAILED, False)


@over("shm")
def test_an_engine_that_could_not_end_its_copier_does_not_look_dead(
    nest: Nest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        transports=("shm",), close_timeout_s=0.05, connect_timeout_s=0.3, max_attempts=2, backoff_s=0.5
    )
    target, writer, base, segment = linked(nest, config)
    with stuck_copier(monkeypatch) as (inside, go_on):
        batch = writer.start("write", segment, [(0, base, 4 * KIB)], 1)
        assert inside.wait(10)
        target.engine.close()
        (status,) = writer.finish(batch)
        assert (status.state, status.drained) == (TransferState.FAILED, False)
        go_on.set()
        listener = target.engine._transports[0]._server._socks[0]  # type: ignore[attr-defined]
        until(lambda: listener.fileno() < 0, "the copier closes the listener")
        (status,) = writer.transfer("write", segment, [(0, base, 4 * KIB)], 1)
        assert status.state is TransferState.FAILED


def test_a_frame_for_a_process_that_was_restarted_does_not_reach_the_new_one(
    nest: Nest, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have one name. The frame was cut for the old one, and is posted when the new one is open and connected."""
    config = EngineConfig(transports=(transport,))
    old, writer, base, segment = linked(nest, config)
    new = nest.actor("target#1", config)
    assert new.allocate(4 * KIB) == base
    new.window("writer#1", 1, [(base, 4 * KIB)])
    held, go_on = threading.Event(), threading.Event()
    post = DialingTransport.post

    def slow(self: DialingTransport, frame: Frame) -> None:
        if not held.is_set():
            held.set()
            assert go_on.wait(20)
        post(self, frame)

    monkeypatch.setattr(DialingTransport, "post", slow)
    batches: list[object] = []
    late = threading.Thread(target=lambda: batches.append(writer.start("write", segment, [(0, base, 4 * KIB)], 1)))
    late.start()
    assert held.wait(10)
    old.close()
    writer.open(new.descriptor())
    (status,) = writer.transfer("read", segment, [(0, base, 100)])  # connected
    assert status.state is TransferState.COMPLETED
    assert writer.region is not None
    assert writer.region.memory is not None
    writer.region.memory[:] = b"\x01" * (4 * KIB)
    go_on.set()
    late.join(10)
    (status,) = writer.finish(batches[0])  # type: ignore[arg-type]
    assert status.state is TransferState.FAILED
    assert new.read(0, 4 * KIB) == bytes(4 * KIB)


def test_a_notification_of_epoch_0_is_delivered_once(nest: Nest, transport: str) -> None:
    config = EngineConfig(transports=(transport,), fault='{"rules": [{"kind": "duplicate", "op": "notify"}]}')
    target, writer, _, segment = linked(nest, config)
    for payload in (b"a", b"b"):
        assert writer.notify(segment, 0, payload).state is TransferState.COMPLETED
    assert [note.payload for note in target.notified] == [b"a", b"b"]
