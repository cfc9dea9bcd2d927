"""Real rank processes of data-parallel groups that share experts: each has requests, pages and commands of its own, and
all say what one rank says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmesh.engine.axes import Axes
from kvmesh.instance.front import spawn_ranks
from kvmesh.ranks import protocol as m
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.engine.stepper import Stepper
from tests.support.rank_driver import BLOCK, GREEDY, AllRanks, Driver, staged_configure

PAGES, TOKENS = 12, 9
PROMPTS = [[(11 * i * i + 3 * i + seed) % 240 + 3 for i in range(n)] for seed, n in enumerate((40, 7, 19))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only the second half of the layers has experts: the first stage of two has none."""
    settings = FAMILY_ZOO["qwen3_moe"] | {"mlp_only_layers": [0, 1]}
    return make_checkpoint(tmp_path_factory.mktemp("model") / "qwen3_moe", **settings)


@asynccontextmanager
async def groups(text: str, model: Path, folder: Path, **settings: Any) -> AsyncIterator[list[AllRanks]]:
    """Starts an instance that is told `settings`, too; yields its groups, each driven as an instance of its own."""
    axes = Axes.parse(text)
    drivers = [Driver(rank) for rank in range(axes.world)]
    spawn_ranks([driver.client for driver in drivers], 1, axes.dp)
    known = msgspec.structs.replace(
        staged_configure(model),
        device="cpu",
        num_pages=PAGES,
        num_extents=PAGES,
        world_size=axes.world,
        mesh=text,
        group_file=str(folder / "meet"),
        group_timeout_ms=30_000,
    )
    try:
        configures = [msgspec.structs.replace(known, rank=rank, **settings) for rank in range(axes.world)]
        await asyncio.gather(*(d.client.configure(c, 120) for d, c in zip(drivers, configures, strict=True)))
        yield [AllRanks(drivers[at : at + axes.replica], axes.speaker) for at in range(0, axes.world, axes.replica)]
    finally:
        for driver in drivers:
            await driver.client.close()


async def prefilled(group: AllRanks, handle: int, prompt: list[int], first_page: int) -> tuple[int, tuple[int, ...]]:
    """Computes a prompt in two chunks; its first token, and its pages."""
    pages = tuple(range(first_page, first_page + -(-(len(prompt) + TOKENS) // BLOCK)))
    cut = len(prompt) // 2
    for step, (start, end) in enumerate(((0, cut), (cut, len(prompt))), 1):
        asked = GREEDY if end == len(prompt) else None
        group.send(
            m.PrefillStep(10 * handle + step, (m.PrefillItem(handle, tuple(prompt[start:end]), start, pages, asked),))
        )
    await group.take(m.PrefillStepDone)
    done = await group.take(m.PrefillStepDone)
    return done.sampled[0].token_id, pages


async def decoded(group: AllRanks, handle: int, prompt: list[int], first: int, pages: tuple[int, ...]) -> list[int]:
    group.send(m.Join(handle, pages, len(prompt), first, 0, TOKENS, 0, (), GREEDY))
    tokens = [first]
    while len(tokens) < TOKENS:
        done = await group.take(m.DecodeStepDone)
        tokens += [token.token_id for token in done.tokens if token.handle == handle]
    return tokens


async def answered(group: AllRanks, handle: int, prompt: list[int], first_page: int = 0) -> list[int]:
    first, pages = await prefilled(group, handle, prompt, first_page)
    return await decoded(group, handle, prompt, first, pages)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dp=2,tp=2,ep=dp+tp", "dp=2,pp=2,ep=dp"])
async def test_groups_with_uneven_work_keep_step(text: str, model: Path, tmp_path: Path) -> None:
    """One group works while the other has nothing; then the other way round; then one prefills while the other decodes;
    in between nobody has work."""
    expected = [Stepper(model).answer(prompt, TOKENS) for prompt in PROMPTS]
    async with groups(text, model, tmp_path) as (one, other):
        assert await answered(one, 1, PROMPTS[0]) == expected[0]
        assert await answered(other, 2, PROMPTS[1]) == expected[1]
        first, pages = await prefilled(one, 3, PROMPTS[0], 4)
        both = await asyncio.gather(decoded(one, 3, PROMPTS[0], first, pages), answered(other, 4, PROMPTS[2], 3))
        assert list(both) == [expected[0], expected[2]]
        # A chunk that fails before it is computed: the other group was called, and is not left waiting.
        wrong = m.PrefillItem(5, (10**6,), 0, (8,), None)
        one.send(m.PrefillStep(60, (wrong,)))
        assert (await one.take(m.RankError)).handles == (5,)
        assert await answered(other, 6, PROMPTS[1], 6) == expected[1]
        assert not any(driver.lost for group in (one, other) for driver in group.drivers)


@pytest.mark.slow
async def test_a_group_that_dies_ends_the_others(model: Path, tmp_path: Path) -> None:
    """Asleep or in a round, a leader hears that another is gone: nobody can make a step any more."""
    async with groups("dp=2,ep=dp", model, tmp_path) as (one, other):
        assert await answered(one, 1, PROMPTS[1])
        other.drivers[0].client._process.kill()  # type: ignore[union-attr]
        assert "killed by SIGKILL" in await other.drivers[0].until_lost()
        assert "gave up" in await one.drivers[0].until_lost()
