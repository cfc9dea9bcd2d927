"""A decode instance of two data-parallel ranks that share experts, in a real mesh: each is a member by itself, with
rows, pages and blocks of its own; they begin, compute and end together."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.mesh.client import Answer, until
from tests.support.mesh.direct import Direct, members
from tests.support.mesh.harness import Running, running_mesh
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

TOKENS = 12
PLACES = ("decode-0", "decode-0.dp1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latent KV, which every rank has whole, routed experts and a shared one."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "deepseek_v3", **FAMILY_ZOO["deepseek_v3"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    flags: dict[str, Any] = {"decode-0": {"mesh": "dp=2,ep=dp"}}
    folder = tmp_path_factory.mktemp("run")
    async with running_mesh(model, folder, flags=flags, block_tokens=16, memory_mb=16) as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 31 + 7 * i * i + 3 * i) % 240 + 3 for i in range(length)]


async def test_each_place_answers_as_one_rank_does(mesh: Running, model: Path) -> None:
    """At one place alone, while the other has nothing; then at both, with prompts and answers of different lengths."""
    direct = await Direct.of(mesh)
    assert {name for name in direct.members if name.startswith("decode")} == set(PLACES)

    async def ask(length: int, decode: str) -> None:
        asked = prompt(length, length)
        answer: Answer = await direct.generate(asked, TOKENS, prefill="prefill-0", decode=decode)
        assert answer.error is None and len(answer.tokens) == TOKENS
        assert_matches_reference(model, asked, answer.tokens)

    for place in PLACES:
        await ask(37, place)
    await asyncio.gather(*(ask(length, PLACES[at % 2]) for at, length in enumerate((70, 5, 18, 33, 2))))


async def test_a_rank_that_is_killed_ends_both_places(mesh: Running, model: Path) -> None:
    """One place's rank dies while the other sleeps: both are gone, and both come back."""
    before, pid = await members(mesh), mesh.pid("decode-0")
    os.kill(mesh.rank_pids("decode-0")[1], signal.SIGKILL)
    await mesh.reborn("decode-0", pid)

    async def both_anew() -> bool:
        now = await members(mesh)
        return all(name in now and now[name].incarnation != before[name].incarnation for name in PLACES)

    await until(both_anew, "both places with a new life", 30)
    direct = await Direct.of(mesh)
    answer = await direct.generate(prompt(20, 9), TOKENS, prefill="prefill-0", decode=PLACES[1])
    assert answer.error is None
    assert_matches_reference(model, prompt(20, 9), answer.tokens)
