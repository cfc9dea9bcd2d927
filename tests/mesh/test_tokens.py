"""Greedy tokens of the whole mesh equal Hugging Face transformers', whatever way the KV took."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.mesh.harness import Running
from tests.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300)]

# Odd on purpose: GQA ratios 1, 4, 7; tied and untied; head_dim ≠ hidden/heads; each rope scaling; odd vocabularies.
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHAPES: dict[str, dict[str, object]] = {
    "llama-gqa4-tied": {"family": "llama", "heads": 8, "kv_heads": 2, "head_dim": 24, "tied": True, "vocab": 301},
    "llama-gqa1-linear": {
        "family": "llama", "heads": 3, "kv_heads": 3, "head_dim": 16, "vocab": 517,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "llama-gqa7-llama3": {
        "family": "llama", "heads": 7, "kv_heads": 1, "head_dim": 32, "vocab": 389, "rope_scaling": LLAMA3,
    },
    "qwen2-bias-yarn": {
        "family": "qwen2", "heads": 4, "kv_heads": 4, "head_dim": 16, "tied": True, "vocab": 333, "rope_scaling": YARN,
    },
    "qwen3-gqa7": {"family": "qwen3", "heads": 14, "kv_heads": 2, "head_dim": 8, "tied": False, "vocab": 411},
    "qwen3-gqa4-sharded": {
        "family": "qwen3", "heads": 4, "kv_heads": 1, "head_dim": 40, "tied": True, "vocab": 350, "shards": 3,
    },
}  # fmt: skip

MeshFactory = Callable[..., AbstractAsyncContextManager[Running]]


def prompt(seed: int, length: int, vocab: int) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i * 17) % (vocab - 10) + 5 for i in range(length)]


@pytest.mark.parametrize("name", SHAPES)
async def test_cold_warm_chunked_and_sixteen_at_once(name: str, tmp_path: Path, mesh: MeshFactory) -> None:
    path = tmp_path / name
    spec = dict(SHAPES[name])
    make_checkpoint(path, **spec)  # type: ignore[arg-type]
    vocab = int(spec["vocab"])  # type: ignore[call-overload]
    async with mesh(path, block_tokens=16, flags={"prefill": {"prefill_chunk_tokens": 48}}) as running:
        cold = prompt(1, 37, vocab)
        answer = await running.client.generate(cold, 12)
        assert (answer.error, answer.cached_tokens) == (None, 0)
        assert_matches_reference(path, cold, answer.tokens)

        warm = await running.client.generate(cold, 12)
        assert (warm.error, warm.cached_tokens) == (None, 32)
        assert warm.tokens == answer.tokens

        chunked = prompt(2, 131, vocab)
        answer = await running.client.generate(chunked, 12)
        assert (answer.error, answer.cached_tokens) == (None, 0)
        assert_matches_reference(path, chunked, answer.tokens)

        prompts = [prompt(3 + i, 5 + 7 * i, vocab) for i in range(16)]
        answers = await asyncio.gather(*(running.client.generate(p, 10) for p in prompts))
        for p, a in zip(prompts, answers, strict=True):
            assert a.error is None
            assert_matches_reference(path, p, a.tokens)
        await running.settled()
