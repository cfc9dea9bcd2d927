"""An instance whose ranks share contexts and heads, in a real mesh: of a model with latents it prefills for
data-parallel places that share experts, and decodes itself beside chunks; ranks of any cut write and read a pool node's
blocks. (Other ways: test_kinds_of_cache.)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.mesh.client import Answer, until
from tests.support.mesh.direct import Direct, blocks_at
from tests.support.mesh.harness import Running, running_mesh
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

BLOCK, TOKENS = 16, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "deepseek_v3", **FAMILY_ZOO["deepseek_v3"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    flags: dict[str, Any] = {
        "coupled-0": {"mesh": "cp=2,tp=2", "prefill_chunk_tokens": 48, "offload_percent": 0},
        "decode-0": {"mesh": "dp=2,ep=dp"},
    }
    shape: dict[str, Any] = {"prefill": 0, "decode": 1, "coupled": 1, "pool": 1, "block_tokens": BLOCK}
    async with running_mesh(model, tmp_path_factory.mktemp("run"), flags=flags, **shape) as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 31 + 7 * i * i + 3 * i) % 240 + 3 for i in range(length)]


def check(model: Path, asked: list[int], answer: Answer) -> None:
    assert answer.error is None
    assert len(answer.tokens) == TOKENS
    assert_matches_reference(model, asked, answer.tokens)


@pytest.mark.parametrize("decode", ["decode-0.dp1", "coupled-0"])
async def test_tokens_do_not_depend_on_who_has_which_part_of_a_block(mesh: Running, model: Path, decode: str) -> None:
    """Several requests at a time, so that rows join and leave while others run; then the same prompts again, whose
    blocks lie at both ends already, but for what the last block lacks."""
    direct = await Direct.of(mesh)
    asked = [prompt(length, seed) for seed, length in enumerate((130, 17, 16, 95, 3))]
    for _ in range(2):
        calls = [direct.generate(one, TOKENS, prefill="coupled-0", decode=decode, salt=decode) for one in asked]
        answers = await asyncio.gather(*calls)
        for one, answer in zip(asked, answers, strict=True):
            check(model, one, answer)
    assert [answer.cached_tokens for answer in answers] == [128, 16, 0, 80, 0]
    await mesh.settled()


async def test_a_pool_nodes_blocks_are_written_and_read_by_ranks_of_any_cut(mesh: Running, model: Path) -> None:
    """What the instance computes it offloads at once: a place of one rank reads it from the pool node, and so does the
    instance's next life."""
    direct, asked = await Direct.of(mesh), prompt(130, 9)
    check(model, asked, await direct.generate(asked, TOKENS, prefill="coupled-0", decode="coupled-0", salt="pool"))
    keys = direct.keys(asked, "pool")

    async def offloaded() -> bool:
        return set(keys) <= await blocks_at(mesh.mesh.addresses["pool-0"])

    await until(offloaded, f"{len(keys)} blocks at the pool node")
    pulls = [("pool-0", 0, len(keys))]
    answer = await direct.generate(
        asked, TOKENS, prefill="coupled-0", decode="decode-0", salt="pool", decode_pulls=pulls
    )
    check(model, asked, answer)
    assert answer.timings is not None
    assert answer.timings.at_decode_tokens == len(keys) * BLOCK
    old = mesh.pid("coupled-0")
    mesh.kill("coupled-0")
    await mesh.restarted("coupled-0", old)
    await direct.refresh()
    answer = await direct.generate(asked, TOKENS, prefill="coupled-0", decode="decode-0.dp1", salt="pool", pulls=pulls)
    check(model, asked, answer)
    assert answer.timings is not None
    assert answer.timings.pulled_tokens == answer.cached_tokens == len(keys) * BLOCK
    await mesh.settled()
