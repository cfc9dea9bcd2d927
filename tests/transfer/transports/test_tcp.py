"""What only tcp has: its bytes for checksums, its idle streams."""

from __future__ import annotations

import socket
import struct
import threading
import zlib
from collections.abc import Sequence

from kvmesh.transfer import EngineConfig, SegmentDescriptor, TransferState
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.base import Frame, FrameKind, Rail
from kvmesh.transfer.transports.tcp.zerocopy import ZeroCopy
from tests.support.transfer.peer import Actor, pattern
from tests.support.transfer.raw import RawTcp
from tests.transfer.conftest import Nest, engine_threads, until

MIB = 1 << 20


class Ending:
    """Owner of one frame: hears how it ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.refused: tuple[int, ...] = ()
        self.cause = ""
        self.settled: bool | None = None

    def frame_done(self, frame: Frame, refused: Sequence[int], cause: str) -> None:
        self.refused, self.cause = tuple(refused), cause
        self.ended.set()

    def frame_lost(self, frame: Frame, cause: str, *, settled: bool, down: bool) -> None:
        self.cause, self.settled = cause, settled
        self.ended.set()


def checksum(actor: Actor, segment: str, rows: Sequence[tuple[int, int]]) -> tuple[Frame, Ending]:
    engine, owner = actor.engine, Ending()
    assert actor.region is not None
    link = engine._sender.links[segment]
    transport = engine._transports[0]
    parts = [(i, actor.region.address, offset, length) for i, (offset, length) in enumerate(rows)]
    frame = Frame(1, owner, link, Rail(transport), FrameKind.CHECKSUM, 0, parts, sum(n for _, n in rows))
    transport.post(frame)
    assert owner.ended.wait(10)
    return frame, owner


def test_checksum_of_a_peers_memory(nest: Nest) -> None:
    target, asker = nest.actor("target#1", transports=("tcp",)), nest.actor("asker#1", transports=("tcp",))
    base = target.allocate(2 * MIB, seed=1)
    asker.allocate(MIB)
    segment = asker.open(target.descriptor())
    data = pattern(1, 2 * MIB)
    rows = [(0, 1), (1, 4095), (77, MIB + 5), (MIB - 3, 6)]
    frame, owner = checksum(asker, segment, [(base + at, n) for at, n in rows])
    assert (owner.refused, owner.cause) == ((), "")
    assert frame.sums == tuple(zlib.crc32(data[at : at + n]) for at, n in rows)


def test_checksum_of_no_memory_is_refused(nest: Nest) -> None:
    target, asker = nest.actor("target#1", transports=("tcp",)), nest.actor("asker#1", transports=("tcp",))
    base = target.allocate(MIB, seed=1)
    asker.allocate(MIB)
    segment = asker.open(target.descriptor())
    frame, owner = checksum(asker, segment, [(base, 8), (base + MIB - 4, 8)])
    assert (owner.refused, owner.cause) == ((0, 1), wire.CAUSES[wire.NO_MEMORY])
    assert frame.sums == ()


def test_checksum_on_the_wire(nest: Nest) -> None:
    """One little-endian u32 a row."""
    target = nest.actor("target#1", transports=("tcp",))
    base = target.allocate(MIB, seed=1)
    raw = RawTcp(SegmentDescriptor.decode(target.descriptor()), "asker#1")
    raw.sock.sendall(wire.HEAD.pack(wire.CHECKSUM, 0, 0, 2, 5, 0, 12) + struct.pack("<4Q", base, 4, base + 9, 8))
    answer = wire.Asked.parse(raw.receive(wire.HEAD_BYTES))
    assert (answer.kind, answer.flags, answer.count, answer.seq, answer.nbytes) == (wire.ANSWER, 0, 0, 5, 8)
    data = pattern(1, 17)
    assert struct.unpack("<2I", raw.receive(8)) == (zlib.crc32(data[:4]), zlib.crc32(data[9:]))
    raw.close()


def test_idle_streams_end_and_come_back(nest: Nest) -> None:
    """Nothing of a peer that is left alone stays: no thread here, no connection there."""
    config = EngineConfig(transports=("tcp",), tcp_idle_s=0.05)
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    base = target.allocate(16 * MIB)
    writer.allocate(16 * MIB, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, 16 * MIB)])

    def serving() -> int:
        names = ("kvmesh-tcp-send", "kvmesh-tcp-read", "kvmesh-tcp-serve")
        return sum(name in names for name in engine_threads())

    for turn in range(3):
        before = writer.engine.counters().get("tcp.connected", 0)
        (status,) = writer.transfer("write", segment, [(0, base, 16 * MIB)], 1)
        assert status.state is TransferState.COMPLETED, status
        assert target.read(0, 16 * MIB) == pattern(1, 16 * MIB)
        assert writer.engine.counters()["tcp.connected"] > before, turn
        until(lambda: serving() == 0, "all streams ended")
        assert target.engine._transports[0]._server.connections() == []  # type: ignore[attr-defined]


def test_zero_copy_moves_the_same_bytes(nest: Nest) -> None:
    config = EngineConfig(transports=("tcp",), tcp_zerocopy=True)
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    nbytes = 32 * MIB
    base = target.allocate(nbytes)
    writer.allocate(nbytes, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, nbytes)])
    for _ in range(3):
        statuses = writer.transfer("write", segment, [(at, base + at, 4 * MIB) for at in range(0, nbytes, 4 * MIB)], 1)
        assert {s.state for s in statuses} == {TransferState.COMPLETED}
        assert target.read(0, nbytes) == pattern(1, nbytes)
        assert target.region is not None
        assert target.region.memory is not None
        target.region.memory[:] = bytes(nbytes)


def told(zero: ZeroCopy, sock: socket.socket) -> bool:
    zero.reap(sock)
    return not zero.useful


def test_zero_copy_is_given_up_where_the_kernel_copies() -> None:
    """On loopback it always does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        zero = ZeroCopy(sender)
        assert zero.useful
        payload = memoryview(pattern(2, MIB))
        got = bytearray()
        reader = threading.Thread(target=lambda: got.extend(wire.recv_exact(receiver, 3 * (MIB + 4))))
        reader.start()
        for i in range(3):
            zero.send_views(sender, [memoryview(b"head"), payload[: MIB // 2], payload[MIB // 2 :]], MIB + 4)
            if i == 1:
                until(lambda: told(zero, sender), "a completion that says copied")
        reader.join(10)
        assert got == (b"head" + payload) * 3


def test_small_frames_of_many_posters_survive_broken_connections(nest: Nest) -> None:
    """Small frames are sent by their posters, in turn with the stream's thread, which sends what a full socket did not
    take (its buffer is small here): no byte may get between another's."""
    config = EngineConfig(
        transports=("tcp",),
        tcp_socket_bytes=48 << 10,
        backoff_s=0.001,
        max_attempts=50,
        max_sendings=1000,
        trip_errors=1000,
        rest_s=0.001,
    )
    target, writer = nest.actor("target#1", config), nest.actor("writer#1", config)
    piece, posters = 120 << 10, 4
    nbytes = posters * 8 * piece
    base = target.allocate(nbytes)
    writer.allocate(nbytes, seed=1)
    segment = writer.open(target.descriptor())
    target.window("writer#1", 1, [(base, nbytes)])
    states: list[TransferState] = []

    def post(poster: int) -> None:
        for i in range(poster * 8, poster * 8 + 8):
            for opcode, epoch, length in (("write", 1, piece), ("read", 0, piece), ("write", 1, 100)):
                (status,) = writer.transfer(opcode, segment, [(i * piece, base + i * piece, length)], epoch)
                states.append(status.state)

    for turn in range(3):
        threads = [threading.Thread(target=post, args=(poster,)) for poster in range(posters)]
        for thread in threads:
            thread.start()
        breaks = 0
        while any(thread.is_alive() for thread in threads):
            for connection in target.engine._transports[0]._server.connections() if breaks < 12 else []:  # type: ignore[attr-defined]
                connection.interrupt()
                breaks += 1
            threads[0].join(0.005)
        assert set(states) == {TransferState.COMPLETED}, turn
        assert target.read(0, nbytes) == pattern(1, nbytes)
        assert target.region is not None
        assert target.region.memory is not None
        target.region.memory[:] = bytes(nbytes)
    assert writer.engine.counters().get("tcp.connected", 0) > 2
