"""What only tcp has: its bytes for checksums, its idle streams."""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Sequence

from kvmesh.transfer import SegmentDescriptor, wire
from kvmesh.transfer.transport import Frame, Kind, Rail
from tests.transfer.conftest import Nest
from tests.transfer.peer import Actor, pattern
from tests.transfer.raw import RawTcp

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
    lane = engine._core.lanes[segment]
    transport = engine._transports[0]
    parts = [(i, actor.region.address, offset, length) for i, (offset, length) in enumerate(rows)]
    frame = Frame(1, owner, lane, Rail(transport), Kind.CHECKSUM, 0, parts, sum(n for _, n in rows))
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
