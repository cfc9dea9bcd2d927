"""The same runner on a CUDA device; needs one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvmesh.engine.local import GenerateParams, LocalEngine
from tests.checkpoints import prompts
from tests.reference import assert_matches_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", ["qwen3-gqa4-yarn", "qwen2-gqa4-tied", "llama-gqa7-linear"])
def test_greedy_tokens_equal_the_reference(zoo: Callable[[str], Path], name: str) -> None:
    engine = LocalEngine(zoo(name), device="cuda", block_tokens=16, num_pages=160, prefill_chunk_tokens=53)
    asked = prompts(16, engine.config.vocab_size, seed=3)
    for prompt, answer in zip(asked, engine.generate(asked, GenerateParams(max_tokens=20)), strict=True):
        assert_matches_reference(zoo(name), prompt, answer.token_ids)


def test_seeded_sampling_runs_on_the_device(zoo: Callable[[str], Path]) -> None:
    params = GenerateParams(max_tokens=12, temperature=1.0, top_p=0.9, top_k=20, seed=5, logprobs=2)
    engine = LocalEngine(zoo("qwen2-gqa4-tied"), device="cuda", dtype="bfloat16", num_pages=8)
    first, second = (engine.generate([[1, 2, 3]], params)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
