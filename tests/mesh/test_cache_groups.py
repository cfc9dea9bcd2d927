"""Models that are kept by cache groups through real instances: from prefill to decode, within one instance, cold and
over what is there already. Tokens are transformers'."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint, prompts
from tests.support.engine.qwen3_next import make_qwen3_next
from tests.support.mesh.direct import Direct
from tests.support.mesh.harness import Running
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK, LONG, ANSWER = 16, 150, 24
KEPT = {"cache_groups": True, "prefill_chunk_tokens": 48, "num_pages": 40}
FLAGS = {
    "conductor": {"slo_tbt_ms": 60_000},  # what is slow on a busy machine is answered all the same
    "prefill": KEPT,
    "decode": {"cache_groups": True, "num_pages": 40},
    "coupled": KEPT,
}
# What is found of the long prompt when it comes again: a state lies at the end of every eighth block.
WARM = {"gemma2": 144, "qwen3_next": 128}
WAYS = [("prefill-0", "decode-0"), ("coupled-0", "coupled-0"), ("prefill-0", "coupled-0")]

MeshFactory = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.mark.parametrize("name", WARM)
async def test_tokens_are_the_references_whatever_way_they_took(name: str, tmp_path: Path, mesh: MeshFactory) -> None:
    path = tmp_path / name
    path = make_qwen3_next(path) if name == "qwen3_next" else make_checkpoint(path, **FAMILY_ZOO[name])
    [long] = prompts(1, 250, seed=21, low=LONG, high=LONG + 1)
    async with mesh(path, block_tokens=BLOCK, prefill=1, decode=1, coupled=1, flags=FLAGS) as running:
        for instance in running.instances():
            await running.ready(instance)
        direct = await Direct.of(running)
        for prefill, decode in WAYS:
            salt = f"{prefill} {decode}"
            for cached in (0, WARM[name]):
                answer = await direct.generate(long, ANSWER, prefill=prefill, decode=decode, salt=salt)
                assert answer.error is None
                assert answer.cached_tokens == cached
                assert_matches_reference(path, long, answer.tokens)
        asked = [prompts(1, 250, seed=100 + n, low=5 + 17 * n, high=6 + 17 * n)[0] for n in range(8)]
        answers = await asyncio.gather(*(running.client.generate(prompt, ANSWER) for prompt in asked))
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer.error is None
            assert_matches_reference(path, prompt, answer.tokens)
        await running.settled()
