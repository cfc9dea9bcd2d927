"""Native copies, run by run, whichever way they are made; sealed memory; the registry of regions."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random

import numpy as np
import pytest
import torch

from kvmesh.errors import TransferError
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


@pytest.mark.parametrize(
    ("to", "of", "length"), [(300, 100, 100), (100, 0, 100), (-128, 512, 7), (300, -300, 300), (1, 1, 1)]
)
def test_rows_at_even_distances_are_copied_in_one_call(
    to: int, of: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = np.random.default_rng(1).integers(0, 256, 1 << 17, dtype=np.uint8)
    target = np.zeros(1 << 17, dtype=np.uint8)
    expected = target.copy()
    targets, sources = [[60_000 + distance * i for i in range(100)] for distance in (to, of)]
    for t, s in zip(targets, sources, strict=True):
        expected[t : t + length] = source[s : s + length]
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_one_by_one", failing)
        patch.setattr(memory, "_gather", failing)
        patch.setattr(memory, "merged", lambda *runs: runs)
        memory.copy_runs(
            [target.ctypes.data + t for t in targets], [source.ctypes.data + s for s in sources], [length] * 100
        )
    assert (target == expected).all()


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 1, 50, 99])
def test_rows_of_which_one_is_elsewhere_are_not_taken_for_even(odd: int, at: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, 1 << 17, dtype=np.uint8)
    target = np.zeros(1 << 17, dtype=np.uint8)
    runs = [[200 * i for i in range(100)], [300 * i for i in range(100)], [100] * 100]
    runs[odd][at] += 9
    expected = target.copy()
    for t, s, n in zip(*runs, strict=True):
        expected[t : t + n] = source[s : s + n]
    memory.copy_runs([target.ctypes.data + t for t in runs[0]], [source.ctypes.data + s for s in runs[1]], runs[2])
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


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("huge_pages", ["auto", "never", "hugetlb"])
@pytest.mark.parametrize("prefault", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("nbytes", [1, 5000, (4 << 20) + 1])
def test_allocated_memory_is_zero_and_aligned(huge_pages: str, prefault: bool, shared: bool, nbytes: int) -> None:
    mapping, fd = memory.allocate(nbytes, "test", shared=shared, huge_pages=huge_pages, prefault=prefault)
    assert mapping.length >= nbytes
    assert mapping.address % (memory.HUGE_PAGE if mapping.length >= memory.HUGE_PAGE else memory.PAGE) == 0
    array = np.frombuffer(mapping.view, dtype=np.uint8)
    assert not array.any()
    array[-1] = 7
    if shared:
        peer = memory.map_peer(fd, mapping.length)
        assert peer.address % (memory.HUGE_PAGE if mapping.length >= memory.HUGE_PAGE else memory.PAGE) == 0
        assert peer.view[mapping.length - 1] == 7
        os.close(fd)
    else:
        assert fd == -1


def resident(address: int) -> dict[str, int]:
    """Of the mapping at this address, in KiB by the kernel's names."""
    found: dict[str, int] = {}
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            name, _, rest = line.partition(":")
            if "-" in name.split(" ", 1)[0]:
                inside = int(name.split("-", 1)[0], 16) <= address < int(name.split("-", 1)[1].split(" ", 1)[0], 16)
            elif inside and rest.strip().endswith("kB"):
                found[name] = int(rest.split()[0])
    return found


def test_prefault_touches_every_page() -> None:
    later, fd = memory.allocate(4 << 20, "test", shared=True, huge_pages="never")
    os.close(fd)
    now, fd = memory.allocate(4 << 20, "test", shared=True, huge_pages="never", prefault=True)
    os.close(fd)
    assert (resident(later.address)["Rss"], resident(now.address)["Rss"]) == (0, 4096)


def test_prefaulted_memory_has_huge_pages_where_the_kernel_makes_them() -> None:
    mapping, fd = memory.allocate(8 << 20, "test", shared=True, prefault=True)
    os.close(fd)
    pages = resident(mapping.address)
    assert pages["Rss"] == 8192
    if pages["ShmemPmdMapped"] == 0:
        pytest.skip("this kernel makes no huge pages of shared memory (MADV_COLLAPSE)")
    assert pages["ShmemPmdMapped"] == 8192


def test_without_enough_reserved_huge_pages_there_are_small_ones_and_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with open("/proc/meminfo") as meminfo:
        free = next((int(line.split()[1]) for line in meminfo if line.startswith("HugePages_Free:")), 0)
    nbytes = (free + 1) * memory.HUGE_PAGE
    with caplog.at_level(logging.WARNING):
        mapping, fd = memory.allocate(nbytes, "test", shared=True, huge_pages="hugetlb")
    os.close(fd)
    assert mapping.length == nbytes
    assert "huge_pages='hugetlb'" in caplog.text


def test_a_busy_gil_is_noticed_and_the_rest_goes_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 64 KiB: memmoves while the GIL comes back at once, one system call for a second after it did not."""
    calls: list[int] = []
    gathered = memory._gathered

    def counted(targets: object, sources: object, lengths: list[int]) -> bool:
        calls.append(len(lengths))
        return gathered(targets, sources, lengths)  # type: ignore[arg-type]

    clock = [100.0]
    stalls = [0.0, 0.0, 0.0]

    def monotonic() -> float:
        clock[0] += stalls.pop(0) if stalls else 0.0
        return clock[0]

    monkeypatch.setattr(memory, "_gathered", counted)
    monkeypatch.setattr(memory._Gil, "busy_until", 0.0)
    monkeypatch.setattr(memory, "_clock", monotonic)
    run, count = 64 << 10, 8
    source = np.frombuffer(np.random.default_rng(1).bytes(2 * run * count), dtype=np.uint8)

    def copy() -> None:
        target = np.zeros(2 * run * count, dtype=np.uint8)
        at = [2 * run * i + i % 3 for i in range(count)]  # at uneven distances
        memory.copy_runs([target.ctypes.data + a for a in at], [source.ctypes.data + a for a in at], [run] * count)
        for a in at:
            assert (target[a : a + run] == source[a : a + run]).all()

    copy()
    assert calls == []
    stalls[:] = [0.0, 0.0, 0.0, 0.0, 0.005]  # the third run waits for the GIL
    copy()
    assert calls == [count - 3]
    copy()
    assert calls == [count - 3, count]
    clock[0] += 2.0
    copy()
    assert calls == [count - 3, count]


# ── registering the caller's memory ───────────────────────────────────────────────────────────────


def test_the_same_memory_registered_again_is_one_region() -> None:
    with TransferEngine("x#1", EngineConfig(transports=("tcp",))) as engine:
        array = np.zeros(100_000, dtype=np.float32)
        first = engine.register_memory(array, "cpu:0")
        again = engine.register_memory((array.ctypes.data, array.nbytes), "cpu:0")
        assert again is first
        assert len(engine.local_descriptor().regions) == 1
        for overlapping in (array[1:], array[:10], (array.ctypes.data - 1, 2)):
            with pytest.raises(TransferError, match="overlaps"):
                engine.register_memory(overlapping, "cpu:0")
        with pytest.raises(TransferError, match="registered already"):
            engine.register_memory(array, "cpu:1")
        allocated = engine.allocate(4096, "cpu:0")
        with pytest.raises(TransferError, match="overlaps"):
            engine.register_memory(allocated.memory, "cpu:0")
        engine.unregister_memory(first)
        assert len(engine.local_descriptor().regions) == 2
        engine.unregister_memory(again)
        assert len(engine.local_descriptor().regions) == 1
        with pytest.raises(TransferError, match="not registered"):
            engine.unregister_memory(first)
        assert engine.register_memory(array, "cpu:0").base_offset > first.base_offset


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_torch_tensors_aligned_or_not(dtype: torch.dtype) -> None:
    with TransferEngine("x#1", EngineConfig(transports=("tcp",))) as engine:
        whole = torch.arange(1000).to(dtype)
        tensor = whole[3:]  # begins in the middle of a page
        region = engine.register_memory(tensor, "cpu:0")
        assert (region.address, region.length) == (tensor.data_ptr(), 997 * whole.element_size())
        assert region.memory is not None
        assert bytes(region.memory) == bytes(tensor.view(torch.uint8).numpy())
        with pytest.raises(TransferError, match="contiguous"):
            engine.register_memory(torch.zeros(10, 10).t(), "cpu:0")
        with pytest.raises(TransferError, match="meta device"):
            engine.register_memory(torch.zeros(10, device="meta"), "cpu:0")
