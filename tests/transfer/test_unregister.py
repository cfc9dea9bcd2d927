"""Memory that goes while something may still use it: every refusal here stands for a byte that would have landed in, or
been read from, memory of somebody else."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer import EngineConfig, Opcode, Range, TransferRequest, TransferState
from kvmesh.transfer.segment import LocalRegion, LocalSegment
from kvmesh.transfer.transports.shm import server as shm_server
from kvmesh.transfer.windows import Windows
from tests.support.transfer.peer import Actor
from tests.transfer.conftest import Nest, over

KIB = 1 << 10


def linked(nest: Nest, config: EngineConfig) -> tuple[Actor, Actor, int, str]:
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    base = target.allocate(64 * KIB)
    writer.allocate(64 * KIB, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, 64 * KIB)])
    return target, writer, base, segment


@pytest.mark.parametrize("op", ["write", "checksum"])
def test_memory_of_an_overdue_request_is_kept_while_its_frame_is_on_its_way(
    nest: Nest, transport: str, op: str
) -> None:
    """A late answer to a CHECKSUM reads the source; a late WRITE sends it."""
    config = EngineConfig(transports=(transport,), fault="{}", request_timeout_s=0.2)
    target, writer, base, segment = linked(nest, config)
    writer.engine.fault.freeze(op=op)
    region = writer.region
    assert region is not None
    batch = writer.engine.allocate_batch(1)
    writer.engine.submit(batch, [TransferRequest(Opcode.WRITE, region.address, segment, base, 4096, 1, verify=True)])
    assert writer.engine.fault.wait_held(1, 10)
    (status,) = writer.finish(batch)
    assert status.state is TransferState.TIMEOUT
    with pytest.raises(TransferError, match="used by a transfer"):
        writer.engine.unregister_memory(region)
    assert writer.engine.fault.thaw() == 1
    target.engine.fence("writer#1", 1)
    assert writer.notify(segment, 1, b"").state is TransferState.FAILED  # behind it: it has been answered for
    deadline = threading.Event()
    for _ in range(200):
        try:
            writer.engine.unregister_memory(region)
            return
        except TransferError:
            deadline.wait(0.01)
    pytest.fail("never let go")


def test_a_window_is_not_opened_on_memory_that_is_being_unregistered(
    nest: Nest, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = nest.actor("target#1", transports=("tcp",))
    base = target.allocate(64 * KIB)
    opened: list[bool] = []
    overlapping = Windows.overlapping

    def invite() -> None:
        try:
            target.engine.open_window("writer#1", 1, [Range(base, 4096)])
            opened.append(True)
        except TransferError:
            opened.append(False)

    late = threading.Thread(target=invite)

    def between(self: Windows[object], offset: int, length: int) -> tuple[str, int] | None:
        found = overlapping(self, offset, length)
        late.start()
        late.join(0.5)  # it may have to wait for us
        return found

    monkeypatch.setattr(Windows, "overlapping", between)
    assert target.region is not None
    target.engine.unregister_memory(target.region)
    late.join(10)
    assert opened == [False]
    assert target.engine.windows.epochs("writer#1") == []


def test_a_request_is_not_taken_for_memory_that_is_being_unregistered(
    nest: Nest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(transports=("tcp",))
    _, writer, base, segment = linked(nest, config)
    remove = LocalSegment.remove
    refused: list[str] = []

    def between(self: LocalSegment, region: LocalRegion, timeout_s: float) -> None:
        try:
            writer.finish(writer.start("write", segment, [(0, base, 4096)], 1))
            refused.append("")
        except TransferError as err:
            refused.append(str(err))
        remove(self, region, timeout_s)

    monkeypatch.setattr(LocalSegment, "remove", between)
    assert writer.region is not None
    writer.engine.unregister_memory(writer.region)
    assert len(refused) == 1
    assert "in no registered region" in refused[0]


@over("shm")
def test_the_descriptor_of_a_region_is_not_closed_while_it_is_handed_over(
    nest: Nest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number could name another file by then, which the peer would get."""
    config = EngineConfig(transports=("shm",))
    holder, reader = nest.actor("holder#1", config), nest.actor("reader#1", config)
    base = holder.allocate(4096, seed=1)
    reader.allocate(4096)
    segment = reader.open(holder.descriptor())
    send_region: Callable[..., None] = shm_server.send_region
    valid: list[bool] = []
    going: list[threading.Thread] = []

    def go() -> None:
        assert holder.region is not None
        holder.engine.unregister_memory(holder.region)

    def handed_over(sock: object, at: int, length: int, fd: int) -> None:
        if fd >= 0 and not going:
            going.append(threading.Thread(target=go))
            going[0].start()
            going[0].join(0.5)  # it has to wait for us
            try:
                os.fstat(fd)
                valid.append(True)
            except OSError:
                valid.append(False)
        send_region(sock, at, length, fd)

    monkeypatch.setattr(shm_server, "send_region", handed_over)
    reader.transfer("read", segment, [(0, base, 4096)])
    going[0].join(10)
    assert valid == [True]


def test_registering_the_same_memory_again_and_again_keeps_nothing(nest: Nest) -> None:
    engine = nest.actor("engine#1", transports=("tcp",)).engine
    memory = bytearray(4096)
    region = engine.register_memory(memory, "cpu:0")
    for _ in range(100):
        assert engine.register_memory(memoryview(memory), "cpu:0") is region
        engine.unregister_memory(region)
    (known,) = engine.segment.regions

    def depth(keep: object) -> int:
        return 1 + max(map(depth, keep)) if isinstance(keep, tuple) else 0

    assert depth(known.keep) <= 1
