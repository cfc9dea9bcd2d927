"""Copies of what is mapped, without a transfer: the bytes, the figures, and when there is nothing to copy from."""

from __future__ import annotations

import threading

import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer import (
    Carried,
    Region,
    TrafficClass,
    TransferEngine,
    TransferState,
    copy_mapped,
    peek,
)
from kvmesh.transfer.transports.shm.copy import LARGE_BYTES
from tests.support.transfer.peer import Actor
from tests.transfer.conftest import Nest, over, until

MIB = 1 << 20

pytestmark = over("shm")


class Ends:
    """What `done` was told, and how often."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Carried]] = []
        self._over = threading.Event()

    def __call__(self, cause: str, carried: Carried) -> None:
        self.told.append((cause, carried))
        self._over.set()

    def wait(self) -> tuple[str, Carried]:
        assert self._over.wait(20)
        (told,) = self.told
        return told


def pair(nest: Nest, nbytes: int, fault: str = "") -> tuple[Actor, Actor, str, int, Region]:
    """(reader, owner, the owner's segment, its base, the reader's region)."""
    owner, reader = nest.actor("owner#1"), nest.actor("reader#1", fault=fault)
    base = owner.allocate(nbytes, seed=2)
    reader.allocate(nbytes, seed=1)
    segment = reader.open(owner.descriptor())
    assert reader.region is not None
    return reader, owner, segment, base, reader.region


def copy(engine: TransferEngine, segment: str, local: Region, rows: list[tuple[int, int, int]], done: Ends) -> bool:
    """`rows`: (start in our region, offset in theirs, bytes)."""
    addresses = [local.address + start for start, _, _ in rows]
    offsets, lengths = [row[1] for row in rows], [row[2] for row in rows]
    return copy_mapped(engine, segment, local, addresses, offsets, lengths, TrafficClass.PREFETCH, done)


@pytest.mark.parametrize("length", [1, 5000, LARGE_BYTES + 12_345])
def test_what_is_mapped_is_copied_and_counted(nest: Nest, length: int) -> None:
    reader, owner, segment, base, local = pair(nest, 4 * LARGE_BYTES)
    rows = [(7, base + LARGE_BYTES + 3, length), (LARGE_BYTES * 2, base + 1, length)]
    done = Ends()
    assert not copy(reader.engine, segment, local, rows, done), "nothing was read there yet"
    assert peek(reader.engine, segment, base, 8) is None and done.told == []
    assert reader.transfer("read", segment, [(0, base, 100)])[0].state is TransferState.COMPLETED
    assert copy(reader.engine, segment, local, rows, done)
    assert done.wait() == ("", Carried((("shm", 2 * length),)))
    assert local.memory is not None and owner.region is not None and owner.region.memory is not None
    theirs = bytes(owner.region.memory)
    for start, offset, nbytes in rows:
        assert bytes(local.memory[start : start + nbytes]) == theirs[offset - base : offset - base + nbytes]
    assert peek(reader.engine, segment, base + 9, 8) == theirs[9:17]
    stats = reader.engine.stats()
    assert stats.requests[TrafficClass.PREFETCH, TransferState.COMPLETED] == 2
    assert stats.counters["shm.read_bytes"] == 100 + 2 * length
    assert sum(row.class_bytes[TrafficClass.PREFETCH] for row in stats.rails) == 2 * length
    reader.engine.unregister_memory(local)  # nothing holds it any more


def test_what_cannot_be_is_refused_and_touches_nothing(nest: Nest) -> None:
    reader, owner, segment, base, local = pair(nest, MIB)
    assert reader.transfer("read", segment, [(0, base, 100)])[0].state is TransferState.COMPLETED
    assert local.memory is not None
    before, done, engine = bytes(local.memory), Ends(), reader.engine
    assert not copy(engine, segment, local, [(0, base + MIB - 10, 11)], done), "over the end of their region"
    far = owner.engine.allocate(MIB)
    assert not copy(engine, segment, local, [(0, far.base_offset, 8)], done), "a region that nobody told of"
    for rows in ([(0, base, 0)], [], [(local.length - 3, base, 4)], [(-1, base, 4)]):
        with pytest.raises(TransferError):
            copy(engine, segment, local, rows, done)
    with pytest.raises(TransferError, match="nobody"):
        copy(engine, "nobody", local, [(0, base, 8)], done)
    with pytest.raises(TransferError, match="nbytes=5000"):
        peek(engine, segment, base, 5000)
    owner.engine.close()
    until(lambda: peek(engine, segment, base, 8) is None, "the end of its owner is seen")
    assert not copy(engine, segment, local, [(0, base, 8)], done), "its owner has gone"
    assert bytes(local.memory) == before and done.told == []


def test_faults_are_not_passed_by(nest: Nest) -> None:
    """A way that is made to fail is taken as a transfer: the fault decides."""
    rules = '{"rules": [{"kind": "delay", "op": "write", "delay_ms": 1}]}'
    reader, _, segment, base, local = pair(nest, MIB, fault=rules)
    done = Ends()
    for _ in range(2):
        assert not copy(reader.engine, segment, local, [(0, base, 8)], done)
        assert reader.transfer("read", segment, [(0, base, 100)])[0].state is TransferState.COMPLETED
    assert done.told == []
