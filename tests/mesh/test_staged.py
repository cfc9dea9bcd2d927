"""The whole mesh with pages that the transfer engine cannot reach, as a GPU's: KV lands in host extents, pushes go
through staging slots, copies are done as late as they may be, steps are launched ahead. Greedy tokens do not notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import prompt
from tests.support.mesh.harness import Running
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300)]

VOCAB = 331
MeshFactory = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.mark.parametrize(("prefill", "order"), [("cpu-staged", "on"), ("cpu", "auto")])
async def test_tokens_after_staged_copies_equal_the_reference(
    tmp_path: Path, mesh: MeshFactory, prefill: str, order: str
) -> None:
    """Few pages: requests wait in extents, running ones are swapped out and in again, and what prefill computed long
    ago is loaded from its host segment by the very step that needs it."""
    path = make_checkpoint(tmp_path / "model", num_hidden_layers=3)
    flags = {
        "prefill": {"prefill_chunk_tokens": 48, "device": prefill, "num_pages": 20, "num_extents": 96},
        "decode": {"device": "cpu-staged", "num_pages": 24, "num_extents": 64, "async_steps": order},
    }
    async with mesh(path, block_tokens=16, flags=flags) as running:
        first: dict[int, list[int]] = {}
        for seed, length in ((1, 37), (2, 131)):
            asked = prompt(seed, length, VOCAB)
            cold = await running.client.generate(asked, 12)
            assert (cold.error, cold.cached_tokens) == (None, 0)
            assert_matches_reference(path, asked, cold.tokens)
            warm = await running.client.generate(asked, 12)
            assert (warm.error, warm.cached_tokens) == (None, length // 16 * 16)
            assert warm.tokens == cold.tokens
            first[seed] = cold.tokens
        prompts = [prompt(3 + i, 5 + 9 * i, VOCAB) for i in range(12)]
        answers = await asyncio.gather(*(running.client.generate(p, 40) for p in prompts))
        for p, a in zip(prompts, answers, strict=True):
            assert a.error is None
            assert_matches_reference(path, p, a.tokens)
        for seed, length in ((2, 131), (1, 37)):
            again = await running.client.generate(prompt(seed, length, VOCAB), 12)
            assert again.error is None and again.cached_tokens > 0
            assert again.tokens == first[seed]
        await running.settled()
