"""A model over one tensor of pages a cache group answers what it answers over one tensor, to the last bit, while pages
that no token sees any more are given away and full of NaN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvmesh.engine.attention.grouped import GroupedAttention
from kvmesh.engine.attention.native_backend import NativeAttention
from kvmesh.engine.attention.torch_backend import TorchAttention
from kvmesh.engine.cpu import native
from tests.support.checkpoints import prompts
from tests.support.engine.grouped_stepper import Twins

Zoo = Callable[[str], Path]
MODELS = ("gemma2", "gemma3", "mistral", "mistral-some")
needs_native = pytest.mark.skipif(
    not native.loaded(), reason="the CPU operators are not built: python -m kvmesh.engine.cpu.build"
)


def serve(twins: Twins, longest: int = 150) -> None:
    """Prompts in chunks, one after another's prefix, rows that come and go, steps of rows and chunks together."""
    long, other, short = (
        prompts(1, twins.config.vocab_size, seed=seed, low=size, high=size + 1)[0]
        for seed, size in ((1, longest), (2, longest // 2), (3, 5))
    )
    first = twins.request(long)
    twins.step(chunks=[(first, 37)])
    at = first.done // twins.block
    second = twins.request([*long[:37], *other], first, at)  # before the first one gives anything back
    twins.step(chunks=[(first, 50), (second, 3)])
    twins.step(chunks=[(second, 40)])
    twins.step(chunks=[(first, len(long) - first.done)])
    twins.step([first], [(second, len(second.token_ids) - second.done)])
    third = twins.request(short)
    twins.step([second, first], [(third, 5)])
    for _ in range(20):
        twins.step([first, third, second])
    twins.step([third])
    for _ in range(3):
        twins.step([second, first])
    assert len(first.told) == 26 and len(third.told) == 22
    assert twins.holes > 100


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
@needs_native
def test_native_answers_equal_those_over_one_tensor(zoo: Zoo, model: str, dtype: str, block: int) -> None:
    twins = Twins(zoo(model), dtype, block, 1 + 600 // block)
    assert isinstance(twins.grouped.attention, GroupedAttention)
    assert isinstance(twins.grouped.attention.backends[0], NativeAttention)
    serve(twins)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_torch_answers_equal_those_over_one_tensor(
    zoo: Zoo, model: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "loaded", lambda: False)
    twins = Twins(zoo(model), dtype, 8, 80)
    assert isinstance(twins.grouped.attention, GroupedAttention)
    assert isinstance(twins.grouped.attention.backends[0], TorchAttention)
    serve(twins)
