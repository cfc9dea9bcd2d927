"""Whole meshes on one GPU: coupled, and prefill beside decode, say what transformers says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import NEEDS_GPU
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import prompt
from tests.support.mesh.harness import running_mesh
from tests.support.reference import assert_matches_reference

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.mesh,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("cold_services"),
]
VOCAB = 331


@pytest.mark.parametrize("kind", ["coupled", "pair"])
async def test_tokens_of_a_mesh_on_one_gpu(tmp_path: Path, kind: str) -> None:
    path = make_checkpoint(tmp_path / "model", num_hidden_layers=3)
    settings: dict[str, Any] = {"prefill": 0, "decode": 0, "coupled": 1} if kind == "coupled" else {}
    own = {"device": "cuda", "num_pages": 96, "num_extents": 64}
    flags = {"prefill": {"prefill_chunk_tokens": 48, **own}, "decode": own | {"num_pages": 24}, "coupled": own}
    async with running_mesh(path, tmp_path / "run", block_tokens=16, flags=flags, **settings) as running:
        for seed, length in ((1, 37), (2, 131)):
            asked = prompt(seed, length, VOCAB)
            cold = await running.client.generate(asked, 12)
            assert (cold.error, cold.cached_tokens) == (None, 0)
            assert_matches_reference(path, asked, cold.tokens)
            warm = await running.client.generate(asked, 12)
            assert warm.error is None and warm.cached_tokens > 0
            assert_matches_reference(path, asked, warm.tokens)
        prompts = [prompt(3 + i, 5 + 9 * i, VOCAB) for i in range(12)]
        answers = await asyncio.gather(*(running.client.generate(p, 40) for p in prompts))
        for p, a in zip(prompts, answers, strict=True):
            assert a.error is None
            assert_matches_reference(path, p, a.tokens)
        await running.settled()
