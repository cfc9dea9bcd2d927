"""Copies beside the steps: in order with them, without the host waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvmesh.errors import ConfigError
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks.worker.device import CopiesDone, CopyPieces, byte_view
from kvmesh.transfer import EngineConfig, TransferEngine
from tests.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU
LAYOUT = ShardLayout(layers=8, kv_heads=8, block_tokens=64, head_dim=128, itemsize=2)
BLOCKS = 64


@pytest.fixture
def memory() -> Iterator[Any]:
    from kvmesh.ranks.worker.device_cuda import CudaMemory

    configure: Any = type("Configure", (), {"dtype": "bfloat16"})
    with TransferEngine("gpu@1", EngineConfig(transports=("shm",))) as engine:
        made = CudaMemory(configure, LAYOUT, torch.device("cuda", 0), BLOCKS, engine, "cpu:0")
        made.open_extents(engine.allocate(BLOCKS * LAYOUT.shard_bytes, "cpu:0"), BLOCKS)
        yield made
        made.close()


def waited(memory: Any, said: list[CopiesDone]) -> CopiesDone:
    deadline = time.monotonic() + 30
    while not said:
        assert time.monotonic() < deadline
        memory.poll()
    assert not memory.copying
    return said.pop()


def test_a_copy_sees_what_was_launched_before_it_and_is_seen_once_it_is_answered(memory: Any) -> None:
    assert memory.extents.is_pinned() and memory.pages.is_cuda
    pages, extents, size = byte_view(memory.pages), byte_view(memory.extents), LAYOUT.shard_bytes
    blocks = [(i * size, i * size, size) for i in range(BLOCKS)]
    busy = torch.randn(8192, 8192, device="cuda")
    said: list[CopiesDone] = []
    for value in (1.0, 2.0):
        for _ in range(10):
            busy = busy @ busy * 1e-4  # keeps the steps' stream busy while the copy is asked for
        memory.pages.fill_(value)
        memory.copy(CopyPieces(pages, extents, blocks), said.append, into_pages=False, check=True)
        assert memory.copying
        assert waited(memory, said).bad == ()
        assert (memory.extents == value).all()
    memory.extents.fill_(3)
    memory.copy(CopyPieces(extents, pages, blocks), said.append, into_pages=True)
    waited(memory, said)
    assert (memory.pages == 3).all()


def test_blocks_that_are_not_finite_are_named(memory: Any) -> None:
    memory.pages[5, 3, 1, 2, 7, 9] = torch.nan
    memory.pages[8, 0, 0, 0, 0, 0] = torch.inf
    said: list[CopiesDone] = []
    size = LAYOUT.shard_bytes
    blocks = [(i * size, i * size, size) for i in (4, 5, 8)]
    pieces = CopyPieces(byte_view(memory.pages), byte_view(memory.extents), blocks)
    memory.copy(pieces, said.append, into_pages=False, check=True)
    assert waited(memory, said).bad == (1, 2)


@pytest.mark.parametrize("step_tokens", [0, 32, 4096])
def test_short_pieces_go_by_the_kernel_beside_any_step(memory: Any, step_tokens: int) -> None:
    """Runs of 16 KiB, as for a reader of other heads, out of pages into staging and from extents into pages."""
    from kvmesh.ranks.worker.device import region_bytes

    made: list[int] = []
    mover, memory.step_tokens = memory._mover, step_tokens
    assert mover is not None, "the kernel did not start"
    memory._mover = SimpleNamespace(
        as_table=mover.as_table, move=lambda *given: (made.append(given[3]), mover.move(*given))
    )
    pages, extents, staging = byte_view(memory.pages), byte_view(memory.extents), region_bytes(memory.staging)
    pages.random_(256)
    extents.random_(256)
    size, count = 16 << 10, 500
    spread = pages[: 2 * count * size].view(count, 2, size)[:, 0]
    said: list[CopiesDone] = []
    out = CopyPieces(pages, staging, [(2 * i * size, i * size, size) for i in range(count)])
    memory.copy(out, said.append, into_pages=False)
    waited(memory, said)
    assert torch.equal(staging[: count * size].view(count, size), spread.cpu())
    back = CopyPieces(extents, pages, [(i * size, 2 * i * size, size) for i in range(count)])
    memory.copy(back, said.append, into_pages=True)
    waited(memory, said)
    assert torch.equal(extents[: count * size].view(count, size), spread.cpu())
    assert made == {0: [64, 64], 32: [4, 16], 4096: [4, 8]}[step_tokens]


def test_a_gpu_that_is_not_there_is_refused() -> None:
    from kvmesh.ranks.worker.device_cuda import cuda_device

    with pytest.raises(ConfigError, match=r"device='cuda:64'.*this host has"):
        cuda_device("cuda:64")


def test_memory_that_cannot_be_pinned_is_told_and_no_launch_is_blamed(
    memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    memory.open_extents(memory._pinned[-1], BLOCKS)  # it is pinned already
    assert "MiB of host memory could not be pinned: " in caplog.text
    assert (torch.ones(4, device="cuda") + 1).sum().item() == 8
