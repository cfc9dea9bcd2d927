"""Greedy tokens of the whole mesh equal Hugging Face transformers', whatever way the KV took."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.mesh.harness import Running
from tests.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300)]

# Odd on purpose: GQA ratios 1, 4, 7; tied and untied; head_dim ≠ hidden/heads; each rope scaling; odd vocabularies.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-gqa4-tied": {
        "family": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "tie_word_embeddings": True,
        "vocab_size": 301,
    },
    "llama-gqa1-linear": {
        "family": "llama",
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "hidden_size": 96,
        "vocab_size": 517,
        "rope": "linear",
    },
    "llama-gqa7-llama3": {
        "family": "llama",
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "hidden_size": 112,
        "head_dim": 32,
        "vocab_size": 389,
        "rope": "llama3",
    },
    "qwen2-bias-yarn": {
        "family": "qwen2",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "vocab_size": 333,
        "rope": "yarn",
    },
    "qwen3-gqa7": {
        "family": "qwen3",
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 411,
    },
    "qwen3-gqa4-sharded": {
        "family": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 40,
        "tie_word_embeddings": True,
        "vocab_size": 350,
        "shards": 3,
    },
    "gemma2-windows-and-caps": FAMILY_ZOO["gemma2"] | {"vocab_size": 331},
}

MeshFactory = Callable[..., AbstractAsyncContextManager[Running]]


def prompt(seed: int, length: int, vocab: int) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i * 17) % (vocab - 10) + 5 for i in range(length)]


@pytest.mark.parametrize("name", SHAPES)
async def test_cold_warm_chunked_and_sixteen_at_once(name: str, tmp_path: Path, mesh: MeshFactory) -> None:
    path = tmp_path / name
    make_checkpoint(path, **SHAPES[name])
    vocab = SHAPES[name]["vocab_size"]
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
