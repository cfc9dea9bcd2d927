"""Peers that die or freeze, connections that break, requests that are cancelled or overdue, and what is left after."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import threading
from collections.abc import Sequence

import pytest

from kvmesh.transfer import EngineConfig, TransferState
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.shm.path import ShmPath
from kvmesh.transfer.transports.shm.server import ShmAccepted
from tests.support.transfer.peer import Actor
from tests.support.transfer.raw import RawShm, RawTcp
from tests.transfer.conftest import Nest, cannot_hold, engine_threads, over, until

MIB = 1 << 20


def quick(transport: str, **options: object) -> EngineConfig:
    """Gives up soon, so that tests of silence end."""
    base: dict[str, object] = {"connect_timeout_s": 0.3, "backoff_s": 0.01, "max_attempts": 2, "rest_s": 0.01}
    return EngineConfig(transports=(transport,), **(base | options))  # type: ignore[arg-type]


def connections(actor: Actor) -> list[object]:
    return [c for t in actor.engine._transports for c in t._server.connections()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("opcode", ["write", "read"])
@pytest.mark.slow
def test_target_killed_in_mid_transfer(nest: Nest, transport: str, opcode: str) -> None:
    nbytes = 16 * MIB
    config = quick(transport)
    here, there = nest.actor("here#1", config), nest.peer("there#1", config)
    here.allocate(nbytes, seed=1)
    base = there.allocate(nbytes, seed=2)
    segment = here.open(there.descriptor())
    there.window("here#1", 3, [(base, nbytes)])
    here.flood(opcode, segment, [(0, base, nbytes)], 3 if opcode == "write" else 0)
    counter = f"{transport}.{opcode}_bytes"
    until(lambda: here.engine.counters().get(counter, 0) > 2 * nbytes, "the flood")
    there.kill()
    (status, *_) = here.flood_result()
    assert status.state is TransferState.FAILED
    assert "there#1" in status.cause or "refused" in status.cause
    if transport == "shm":
        assert status.drained  # nobody listens any more: the kernel says that it is dead
    rails = here.engine._sender.links[segment].rails
    until(lambda: all(rail.transport.idle(segment, rail) for rail in rails), "nothing on the way")
    for path in here.engine._transports[0]._paths.values():  # type: ignore[attr-defined]
        if isinstance(path, ShmPath):
            assert path._maps._maps == []


def test_writer_killed_in_mid_transfer(nest: Nest, transport: str) -> None:
    nbytes = 16 * MIB
    config = quick(transport)
    target, writer = nest.actor("target#1", config), nest.peer("writer#1", config)
    base = target.allocate(nbytes)
    writer.allocate(nbytes, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 3, [(base, nbytes)])
    writer.flood("write", segment, [(0, base, nbytes)], 3)
    until(lambda: writer.counter(f"{transport}.write_bytes") > nbytes, "the flood")
    writer.kill()
    until(lambda: not connections(target), "its connections end, and its maps with them")
    target.engine.fence("writer#1", 3)


@pytest.mark.slow
def test_connections_break_again_and_again(nest: Nest, transport: str) -> None:
    """Every slice arrives, whatever breaks under it, and the requests complete."""
    nbytes = 32 * MIB
    config = EngineConfig(transports=(transport,), backoff_s=0.001, max_attempts=50, max_sendings=1000)
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    base = target.allocate(nbytes)
    writer.allocate(nbytes, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, nbytes)])
    done = threading.Event()
    resent = 0
    for _ in range(20):
        batch = writer.start("write", segment, [(i * MIB, base + i * MIB, MIB) for i in range(32)], 1)
        done.clear()
        writer.engine.on_done(batch, done.set)
        breaks = 0
        while not done.wait(0.001):
            for connection in connections(target) if breaks < 8 else []:
                connection.interrupt()  # type: ignore[attr-defined]
                breaks += 1
        assert {s.state for s in writer.finish(batch)} == {TransferState.COMPLETED}
        assert target.read(0, nbytes) == writer.read(0, nbytes)
        target.region.memory[:] = bytes(nbytes)  # type: ignore[union-attr, index]
        resent = writer.engine.counters().get("frames_resent", 0)
        if resent > 20:
            break
    assert resent > 0


@over("tcp")
def test_reads_survive_broken_connections(nest: Nest) -> None:
    nbytes = 32 * MIB
    config = EngineConfig(transports=("tcp",), backoff_s=0.001, max_attempts=50, max_sendings=1000)
    holder, reader = nest.actor("holder#1", config), nest.actor("reader#1", config)
    base = holder.allocate(nbytes, seed=1)
    reader.allocate(nbytes)
    segment = reader.open(holder.descriptor())
    done = threading.Event()
    batch = reader.start("read", segment, [(0, base, nbytes)])
    reader.engine.on_done(batch, done.set)
    breaks = 0
    while not done.wait(0.001):
        for connection in connections(holder) if breaks < 6 else []:
            connection.interrupt()  # type: ignore[attr-defined]
            breaks += 1
    (status,) = reader.finish(batch)
    assert status.state is TransferState.COMPLETED
    assert reader.read(0, nbytes) == holder.read(0, nbytes)


def test_cancel_is_final_only_when_nothing_is_on_the_way(nest: Nest, transport: str) -> None:
    config = EngineConfig(transports=(transport,), fault="{}", rdma_slice_bytes=256 << 10)  # and frames of 4 MiB
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    nbytes = 64 * MIB  # more than may be on its way at once
    base = target.allocate(nbytes)
    writer.allocate(nbytes)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, nbytes)])
    writer.engine.fault.freeze()
    most = nbytes // 8 * 7
    batch = writer.start("write", segment, [(0, base, most), (0, base + most, nbytes - most)], 1)
    assert writer.engine.fault.wait_held(3, 10)
    writer.engine.cancel(batch)
    first, second = writer.engine.statuses(batch)
    assert first.state is TransferState.PENDING  # its frames are under way
    assert second.state is TransferState.CANCELLED
    assert not writer.engine.wait_sync(batch, 0.01)
    writer.engine.fault.thaw()
    first, second = writer.finish(batch)
    assert first.state is TransferState.CANCELLED
    assert first.drained
    assert 0 < first.bytes_done < most
    assert second.bytes_done == 0
    assert writer.notify(segment, 1, b"end").state is TransferState.FAILED


def test_cancel_takes_back_what_waits_for_a_connection(nest: Nest, transport: str) -> None:
    config = quick(transport, connect_timeout_s=20)
    writer, target = nest.actor("writer#1", config), nest.peer("target#1", config)
    writer.allocate(MIB)
    base = target.allocate(MIB)
    segment = writer.open(target.descriptor())
    target.freeze()
    batch = writer.start("write", segment, [(0, base, MIB)], 1)
    writer.engine.cancel(batch)
    (status,) = writer.finish(batch)
    assert (status.state, status.drained) == (TransferState.CANCELLED, True)
    writer.close()
    target.thaw()


@pytest.mark.parametrize("opcode", ["write", "read"])
@pytest.mark.slow
def test_silent_target(nest: Nest, transport: str, opcode: str) -> None:
    """A frozen target: the request ends by its time-out. Writes say that they may still land; reads cannot."""
    cannot_hold(transport, "rdma", "the NIC of a stopped process goes on reading and writing its memory")
    config = quick(transport, ack_timeout_s=0.3)
    here, there = nest.actor("here#1", config), nest.peer("there#1", config)
    nbytes = 32 * MIB
    here.allocate(nbytes, seed=1)
    base = there.allocate(nbytes)
    segment = here.open(there.descriptor())
    there.window("here#1", 1, [(base, nbytes)])
    epoch = 1 if opcode == "write" else 0
    assert here.transfer("write", segment, [(0, base, 4096)], 1)[0].state is TransferState.COMPLETED
    there.freeze()
    (status,) = here.transfer(opcode, segment, [(0, base, nbytes)], epoch)
    if (transport, opcode) == ("shm", "write") or opcode == "write":
        assert (status.state, status.drained) == (TransferState.FAILED, False)
    else:
        assert status.state in (TransferState.FAILED, TransferState.TIMEOUT)
        assert status.drained
    here.close()
    there.thaw()


def test_request_timeout(nest: Nest, transport: str) -> None:
    config = EngineConfig(transports=(transport,), fault="{}", request_timeout_s=0.2)
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    base = target.allocate(64 * MIB)
    writer.allocate(64 * MIB)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, 64 * MIB)])
    writer.engine.fault.freeze()
    copies = [(0, base, 56 * MIB), (0, base + 56 * MIB, 8 * MIB)]  # the first is more than may be on its way at once
    first, second = writer.transfer("write", segment, copies, 1)
    assert (first.state, first.drained) == (TransferState.TIMEOUT, False)
    assert (second.state, second.drained) == (TransferState.TIMEOUT, True)  # never posted
    assert writer.notify(segment, 1, b"end").state is TransferState.FAILED


@pytest.mark.slow
def test_close_beside_frozen_peers(nest: Nest, transport: str) -> None:
    """Both directions in mid-flood with a stopped process: close returns, and leaves no thread and no descriptor (the
    nest checks)."""
    nbytes = 16 * MIB
    config = EngineConfig(transports=(transport,), close_timeout_s=20)
    here, there = nest.actor("here#1", config), nest.peer("there#1", config)
    mine, its = here.allocate(nbytes), there.allocate(nbytes)
    to_there, to_here = here.open(there.descriptor()), there.open(here.descriptor())
    here.window("there#1", 1, [(mine, nbytes)])
    there.window("here#1", 1, [(its, nbytes)])
    there.flood("write", to_here, [(0, mine, nbytes)], 1)
    here.flood("write", to_there, [(0, its, nbytes)], 1)
    until(lambda: there.counter(f"{transport}.write_bytes") > nbytes, "its flood")
    until(lambda: here.engine.counters().get(f"{transport}.write_bytes", 0) > nbytes, "my flood")
    there.freeze()
    here.close()
    (status, *_) = here.flood_result()
    assert status.state is TransferState.FAILED
    assert engine_threads() == []
    here.close()
    there.thaw()
    (status, *_) = there.flood_result()
    assert status.state is TransferState.FAILED


@over("shm")
def test_peers_may_not_write_into_handed_out_memory(nest: Nest) -> None:
    """What SCM_RIGHTS hands out can be mapped read-only, and in no way written."""
    target = nest.actor("target#1")
    base = target.allocate(MIB)
    raw = RawShm(target.engine.local_descriptor(), "thief#1")
    length, fd = raw.want(base)
    assert length == MIB
    with mmap.mmap(fd, length, prot=mmap.PROT_READ) as view:
        target.region.memory[:3] = b"abc"  # type: ignore[union-attr, index]
        assert view[:3] == b"abc"
    with pytest.raises(PermissionError):
        mmap.mmap(fd, length, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError):
        os.ftruncate(fd, 0)
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # root may
    except PermissionError:
        pass
    else:
        with pytest.raises(PermissionError):
            mmap.mmap(again, length, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(again, 0)
        os.close(again)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)
    raw.close()


@over("shm")
def test_a_writer_whose_memory_could_shrink_is_refused(nest: Nest) -> None:
    """An unsealed file could be truncated under the copier, which would die of SIGBUS."""
    target = nest.actor("target#1")
    raw = RawShm(target.engine.local_descriptor(), "writer#1")
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    raw.send_with_fd(wire.HEAD.pack(wire.REGION, 0, 0, 1, 4096, 0, MIB), fd)
    os.close(fd)
    ended = False
    while not ended:
        try:
            raw.sock.send(wire.HEAD.pack(wire.WANT, 0, 0, 0, 4096, 0, 0))
            ended = raw.sock.recv(4096) == b""
        except (BrokenPipeError, ConnectionResetError):
            ended = True
    raw.close()


@over("tcp")
@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 64,
        wire.HEAD.pack(wire.WRITE, 0, 0, 513, 1, 1, 10),
        wire.HEAD.pack(wire.WRITE, 0, 0, 1, 1, 1, 1 << 40),
        wire.HEAD.pack(wire.WRITE, 0, 0, 1, 1, 1, 10) + struct.pack("<2Q", 4096, 11),
        wire.HEAD.pack(wire.WRITE, 0, 0, 1, 1, 1, 0) + struct.pack("<2Q", 4096, 0),
        wire.HEAD.pack(wire.NOTIFY, 0, 0, 0, 1, 1, 1 << 20),
        wire.HEAD.pack(99, 0, 0, 0, 1, 1, 0),
        wire.HEAD.pack(wire.ANSWER, 0, 0, 0, 1, 1, 0),
    ],
)
def test_garbage_closes_its_connection_and_nothing_else(nest: Nest, garbage: bytes) -> None:
    target, writer = nest.actor("target#1", transports=("tcp",)), nest.actor("writer#1", transports=("tcp",))
    base = target.allocate(4096)
    target.window("writer#1", 1, [(base, 4096)])
    writer.allocate(4096, seed=1)
    raw = RawTcp(target.engine.local_descriptor(), "writer#1", conn_id=77)
    raw.sock.sendall(garbage)
    try:
        assert raw.sock.recv(1) == b""
    except ConnectionResetError:
        pass
    raw.close()
    segment = writer.open(target.descriptor())
    assert writer.transfer("write", segment, [(0, base, 4096)], 1)[0].state is TransferState.COMPLETED


@over("tcp")
def test_strangers_that_say_nothing_are_dropped(nest: Nest) -> None:
    target = nest.actor("target#1", quick("tcp", connect_timeout_s=0.1))
    endpoint = target.engine.local_descriptor().endpoints["tcp"]
    with socket.create_connection((endpoint["host"], int(endpoint["port"])), 10) as stranger:
        assert stranger.recv(1) == b""
    until(lambda: not connections(target), "dropped")


def test_idle_connections_make_room_for_others(nest: Nest, transport: str) -> None:
    config = EngineConfig(transports=(transport,), max_endpoints=2)
    writer = nest.actor("writer#1", config)
    writer.allocate(4096, seed=1)
    targets = [nest.actor(f"target#{i}", config) for i in range(4)]
    segments = []
    for target in targets:
        base = target.allocate(4096)
        target.window("writer#1", 1, [(base, 4096)])
        segments.append((writer.open(target.descriptor()), base))
    for _ in range(3):
        for segment, base in segments:
            assert writer.transfer("write", segment, [(0, base, 4096)], 1)[0].state is TransferState.COMPLETED
        until(lambda: sum(bool(connections(t)) for t in targets) <= 2, "at most two targets are connected")
    assert writer.engine.counters()["endpoints_evicted"] >= 4


@over("shm")
def test_room_is_made_for_a_peer_that_another_transport_reaches(nest: Nest) -> None:
    """The connection that goes belongs to a link with other transports than the one that needs the room."""
    writer = nest.actor("writer#1", EngineConfig(max_endpoints=1))
    writer.allocate(4096, seed=1)
    for i, transports in enumerate((("shm",), ("tcp",), ("shm", "tcp"))):
        target = nest.actor(f"target#{i}", EngineConfig(transports=transports))
        base = target.allocate(4096)
        target.window("writer#1", 1, [(base, 4096)])
        segment = writer.open(target.descriptor())
        assert writer.transfer("write", segment, [(0, base, 4096)], 1)[0].state is TransferState.COMPLETED
    assert writer.engine.counters()["endpoints_evicted"] == 2


@over("shm")
def test_an_answer_that_cannot_be_read_loses_no_frame(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that brought it ends; what it was about goes out again over another one."""
    target, writer = nest.actor("target#1", quick("shm")), nest.actor("writer#1", quick("shm"))
    base = target.allocate(4096)
    writer.allocate(4096, seed=1)
    target.window("writer#1", 1, [(base, 4096)])
    segment = writer.open(target.descriptor())
    honest, lies = ShmAccepted._answer, [1, 1]

    def answer(self: ShmAccepted, seq: int, refused: Sequence[int], code: int) -> None:
        if lies:
            self.sock.send(wire.HEAD.pack(wire.ANSWER, 0, 0, lies.pop(), seq, 0, 0))
        else:
            honest(self, seq, refused, code)

    monkeypatch.setattr(ShmAccepted, "_answer", answer)
    assert writer.transfer("write", segment, [(0, base, 4096)], 1)[0].state is TransferState.COMPLETED
    lies.append(1)
    writer.engine.notify(segment, 1, b"end")
    until(lambda: writer.engine.counters().get("shm.connected", 0) >= 4, "connected again after each lie")
    until(lambda: len(target.notified) == 1, "told once")
