"""Native copies, run by run, whichever way they are made; sealed memory; the registry of regions."""

from __future__ import annotations

import ctypes
import gc
import random

import numpy as np
import pytest

from kvmesh.rpc.errors import TransferError
from kvmesh.transfer import EngineConfig, TransferEngine, memory
from kvmesh.transfer.segment import LocalSegment


def failing(*args: object) -> int:
    return -1


@pytest.mark.parametrize("gather", ["as it is", None, failing])
@pytest.mark.parametrize("runs", [1, 3, 7, 2500])
def test_copies_equal_slice_assignment(runs: int, gather: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if gather != "as it is":
        monkeypatch.setattr(memory, "_gather", gather)
    rng = random.Random(runs)
    nbytes = 1 << 20
    source = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    target = np.zeros(nbytes, dtype=np.uint8)
    expected = target.copy()
    to, of, lengths = [], [], []
    at = 0
    for _ in range(runs):
        at += rng.choice([0, 0, 1, 64])
        length = rng.choice([1, 5, 64, 300])
        start = of[-1] + lengths[-1] if of and rng.random() < 0.5 else rng.randrange(nbytes - length)
        if at + length > nbytes or start + length > nbytes:
            break
        to.append(at)
        of.append(start)
        lengths.append(length)
        expected[at : at + length] = source[start : start + length]
        at += length
    memory.copy_runs([target.ctypes.data + t for t in to], [source.ctypes.data + s for s in of], lengths)
    assert (target == expected).all()


def test_a_map_lives_as_long_as_its_views() -> None:
    mapping, fd = memory.allocate(10_000, "test", shared=False)
    assert fd == -1
    assert mapping.length == 12288
    view = np.frombuffer(mapping.view, dtype=np.uint8)
    del mapping
    gc.collect()
    view[:] = 7
    assert int(view.sum()) == 7 * 12288


def test_without_memfd_memory_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(memory.os, "memfd_create")
    mapping, fd = memory.allocate(1, "test", shared=True)
    assert fd == -1
    mapping.view[:3] = b"abc"
    assert ctypes.string_at(mapping.address, 3) == b"abc"


def test_writable_memory_of_the_caller() -> None:
    array = np.zeros(100, dtype=np.uint16)

    class Tensor:
        nbytes = 200
        contiguous = True

        def data_ptr(self) -> int:
            return int(array.ctypes.data)

        def is_contiguous(self) -> bool:
            return self.contiguous

    tensor = Tensor()
    for buffer in (array, (array.ctypes.data, 200), tensor):
        address, length, view = memory.writable(buffer)
        assert (address, length, len(view)) == (array.ctypes.data, 200, 200)
    tensor.contiguous = False
    for bad in (b"read-only", array[::2], bytearray(), (0, 10), tensor, object()):
        with pytest.raises(TransferError, match="buffer"):
            memory.writable(bad)


def test_regions_are_found_by_offset_and_address_and_never_run_together() -> None:
    segment = LocalSegment()
    block = np.zeros(100_000, dtype=np.uint8)
    first = segment.add(block.ctypes.data, 5000, "cpu:0", memoryview(block)[:5000], block, -1)
    second = segment.add(block.ctypes.data + 5000, 5000, "cpu:0", memoryview(block)[5000:10000], block, -1)
    assert second.base >= first.base + 5000 + memory.PAGE  # neighbours in memory, not in the segment
    assert segment.by_offset(first.base, 5000) is first
    assert segment.by_offset(first.base, 5001) is None
    assert segment.by_offset(second.base - 1, 1) is None
    assert segment.by_address(second.address, 5000) is second
    assert segment.by_address(first.address, 5001) is None
    with pytest.raises(TransferError, match="overlaps"):
        segment.add(block.ctypes.data + 4999, 10, "cpu:0", memoryview(block)[:10], block, -1)
    segment.remove(first, 0)
    assert segment.by_offset(first.base, 1) is None
    third = segment.add(block.ctypes.data, 5000, "cpu:0", memoryview(block)[:5000], block, -1)
    assert third.base > second.base  # an offset is never used again


def test_a_region_that_is_read_stays() -> None:
    segment = LocalSegment()
    block = bytearray(4096)
    region = segment.add(np.frombuffer(block, np.uint8).ctypes.data, 4096, "cpu:0", memoryview(block), block, -1)
    assert segment.use(region.base, 10) is region
    with pytest.raises(TransferError, match="still being read"):
        segment.remove(region, 0)
    segment.unuse(region)
    segment.remove(region, 0)


def test_device_memory_is_refused() -> None:
    with (
        TransferEngine("x#1", EngineConfig(transports=("tcp",))) as engine,
        pytest.raises(TransferError, match="location='cuda:0'"),
    ):
        engine.register_memory((4096, 4096), "cuda:0")
