"""Copies beside the steps: in order with them, without the host waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvmesh.errors import ConfigError
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks.worker.device import CopiesDone
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
    pairs_out = [(memory.extents[i], memory.pages[i]) for i in range(BLOCKS)]
    busy = torch.randn(8192, 8192, device="cuda")
    said: list[CopiesDone] = []
    for value in (1.0, 2.0):
        for _ in range(10):
            busy = busy @ busy * 1e-4  # keeps the steps' stream busy while the copy is asked for
        memory.pages.fill_(value)
        memory.copy(pairs_out, said.append, into_pages=False, check=True)
        assert memory.copying
        assert waited(memory, said).bad == ()
        assert (memory.extents == value).all()
    memory.extents.fill_(3)
    memory.copy([(b, a) for a, b in pairs_out], said.append, into_pages=True)
    waited(memory, said)
    assert (memory.pages == 3).all()


def test_blocks_that_are_not_finite_are_named(memory: Any) -> None:
    memory.pages[5, 3, 1, 2, 7, 9] = torch.nan
    memory.pages[8, 0, 0, 0, 0, 0] = torch.inf
    said: list[CopiesDone] = []
    memory.copy([(memory.extents[i], memory.pages[i]) for i in (4, 5, 8)], said.append, into_pages=False, check=True)
    assert waited(memory, said).bad == (1, 2)


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
