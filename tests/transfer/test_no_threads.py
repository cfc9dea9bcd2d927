"""No thread can be started for a while: the process is at its limit, as when everybody dials everybody. What needs one
fails and says so; nothing waits for ever, and afterwards all is as before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvmesh.transfer import EngineConfig, TransferState
from tests.support.transfer.peer import Actor
from tests.transfer.conftest import Nest, cannot_hold, over, until

MIB = 1 << 20


@contextmanager
def no_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[Callable[[], int]]:
    """Threads of this name cannot be started; how often it was tried."""
    start, tried = threading.Thread.start, 0

    def refused(self: threading.Thread) -> None:
        nonlocal tried
        if self.name == name:
            tried += 1
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        yield lambda: tried


def linked(nest: Nest, transport: str) -> tuple[Actor, Actor, int, str]:
    config = EngineConfig(transports=(transport,), backoff_s=0.01, rest_s=0.01, connect_timeout_s=0.5)
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    base = target.allocate(2 * MIB, seed=1)
    writer.allocate(2 * MIB, seed=2)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, 2 * MIB)])
    return target, writer, base, segment


@pytest.mark.parametrize(
    ("transport", "name"),
    [
        pytest.param(where, name, marks=over(where))
        for where, name in [
            ("shm", "kvmesh-shm"),
            ("shm", "kvmesh-shm-read"),
            ("tcp", "kvmesh-tcp-send"),
            ("tcp", "kvmesh-tcp-read"),
        ]
    ],
)
@pytest.mark.parametrize("opcode", ["write", "read"])
def test_an_opener_without_a_thread_fails_its_requests(
    nest: Nest, monkeypatch: pytest.MonkeyPatch, transport: str, name: str, opcode: str
) -> None:
    target, writer, base, segment = linked(nest, transport)
    epoch = 1 if opcode == "write" else 0
    with no_threads(monkeypatch, name) as tried:
        (status,) = writer.finish(writer.start(opcode, segment, [(0, base, 2 * MIB)], epoch), 10)
        if (name, opcode) != ("kvmesh-shm-read", "write"):
            assert tried()
            assert status.state is TransferState.FAILED
            assert status.drained
            assert "thread" in status.cause

    def works() -> bool:
        (status,) = writer.transfer(opcode, segment, [(0, base, 2 * MIB)], epoch)
        return status.state is TransferState.COMPLETED

    until(works, "the rail is back")
    assert writer.read(0, 2 * MIB) == target.read(0, 2 * MIB)


def test_a_target_without_a_thread_takes_the_next_connection(
    nest: Nest, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cannot_hold(transport, "rdma", "the same server")
    target, writer, base, segment = linked(nest, transport)
    with no_threads(monkeypatch, f"kvmesh-{transport}-serve") as tried:
        (status,) = writer.transfer("write", segment, [(0, base, MIB)], 1)
        assert tried()
        assert status.state is TransferState.FAILED

    def works() -> bool:
        (status,) = writer.transfer("write", segment, [(0, base, MIB)], 1)
        return status.state is TransferState.COMPLETED

    until(works, "the target accepts again")
    assert target.read(0, MIB) == writer.read(0, MIB)
