"""Whole meshes on one GPU: coupled, and prefill beside decode, say what transformers says; of a model with states, with
drafts that are verified, and after a sleep that gave the GPU's memory back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from kvmesh.rollout import RolloutClient
from tests.gpu import NEEDS_GPU
from tests.mesh.test_drafts import counted
from tests.mesh.test_kinds_of_cache import with_tokenizer
from tests.mesh.test_rollout import marked
from tests.support.checkpoints import make_checkpoint
from tests.support.engine.qwen3_next import make_qwen3_next
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


@pytest.mark.parametrize("kind", ["coupled", "pair", "states"])
async def test_tokens_of_a_mesh_on_one_gpu(tmp_path: Path, kind: str) -> None:
    if kind == "states":
        path = with_tokenizer(make_qwen3_next(tmp_path / "model"))
    else:
        path = make_checkpoint(tmp_path / "model", num_hidden_layers=3)
    settings: dict[str, Any] = {"prefill": 0, "decode": 0, "coupled": 1} if kind == "coupled" else {}
    own = {"device": "cuda", "num_pages": 96, "num_extents": 64}
    few = own if kind == "states" else own | {"num_pages": 24}
    flags = {"prefill": {"prefill_chunk_tokens": 48, **own}, "decode": few, "coupled": own}
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


async def test_drafts_are_verified_on_one_gpu(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", num_hidden_layers=3)
    own = {"device": "cuda", "num_pages": 96, "num_extents": 64}
    settings: dict[str, Any] = {"prefill": 0, "decode": 0, "coupled": 1, "speculate": "suffix"}
    async with running_mesh(path, tmp_path / "run", block_tokens=16, flags={"coupled": own}, **settings) as running:
        asked = [[20 + n, 41, 52 + n, 63, 74] * 5 for n in range(6)]
        for _ in range(2):  # the second time an answer is drafted from the first
            answers = await asyncio.gather(*(running.client.generate(p, 64) for p in asked))
            for p, a in zip(asked, answers, strict=True):
                assert a.error is None
                assert_matches_reference(path, p, a.tokens)
        drafted = await counted(running, "kvmesh_decode_draft_tokens_total", ("coupled-0",))
        kept = await counted(running, "kvmesh_decode_accepted_draft_tokens_total", ("coupled-0",))
        assert drafted >= kept > 6 * 32
        await running.settled()


async def test_a_sleep_gives_the_gpus_memory_back(tmp_path: Path) -> None:
    """Pages of 1 GiB at each of two instances; weights that a trainer wrote meanwhile answer afterwards."""
    path = make_checkpoint(tmp_path / "model", vocab_size=VOCAB)
    own = {"device": "cuda", "num_extents": 64, "rollout_folders": str(tmp_path)}
    flags = {"gateway": {"rollout": True}, "prefill-0": own, "decode-0": own}
    async with running_mesh(path, tmp_path / "run", block_tokens=16, memory_mb=1024, flags=flags) as running:
        asked = prompt(5, 70, VOCAB)
        before = (await running.client.generate(asked, 24)).tokens
        assert_matches_reference(path, asked, before)
        async with RolloutClient(running.http) as mesh:
            for level in (1, 2):
                free, _ = torch.cuda.mem_get_info()
                given = await mesh.sleep(level)
                gained = torch.cuda.mem_get_info()[0] - free
                print(f"level {level}: told {given.page_bytes >> 20} MiB, the GPU has {gained >> 20} MiB more")
                assert given.page_bytes > 1900 << 20 and gained > 0.9 * given.page_bytes
                await mesh.wake()
                assert (await running.client.generate(asked, 24)).tokens == before
            await mesh.sleep(2)
            update = await mesh.update_weights(path=str(marked(tmp_path / "new", path, 101)))
            assert await mesh.wake() == update.epoch
        assert (await running.client.generate(asked, 24)).tokens == [101] * 24
        await running.settled()
