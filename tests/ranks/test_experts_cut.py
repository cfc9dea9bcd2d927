"""Two real ranks that share the experts of a mixture by columns, or whole, say what one rank says. The experts of tests
are small, so that "auto" would keep them whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.config_experts import ExpertsConfig
from kvmesh.engine.parallel import cuts_experts_whole
from kvmesh.errors import ConfigError
from kvmesh.ranks import protocol as m
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.rank_driver import BLOCK, GREEDY, AnyDriver, ranks
from tests.support.reference import assert_matches_reference

TOKENS, CHUNK = 24, 32
PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(75)]


async def answer(driver: AnyDriver) -> list[int]:
    """Computes the prompt in chunks and decodes behind it."""
    pages = tuple(range(3, 3 + -(-(len(PROMPT) + TOKENS) // BLOCK)))
    for number, start in enumerate(range(0, len(PROMPT), CHUNK)):
        end = min(start + CHUNK, len(PROMPT))
        last = GREEDY if end == len(PROMPT) else None
        own = pages[: -(-end // BLOCK)]
        driver.client.send(
            m.PrefillStep(number, (m.PrefillItem(1, tuple(PROMPT[start:end]), start, own, last, False),))
        )
        done = await driver.take(m.PrefillStepDone)
    made = [done.sampled[0].token_id]
    driver.client.send(m.Join(2, pages, len(PROMPT), made[0], 0, TOKENS, 0, (), GREEDY))
    while len(made) < TOKENS:
        made += [token.token_id for token in (await driver.take(m.DecodeStepDone)).tokens]
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cut"), [("qwen3_moe", "columns"), ("deepseek_v3", "whole")])
async def test_two_ranks_say_what_the_reference_says(name: str, cut: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / name, **FAMILY_ZOO[name])
    experts = open_checkpoint(path).config.experts
    assert isinstance(experts, ExpertsConfig) and cuts_experts_whole(experts, 2, "auto"), "what nobody forces"
    async with ranks("two", path, 2, tmp_path, experts_cut=cut) as both:
        assert_matches_reference(path, PROMPT, await answer(both))


async def test_columns_that_do_not_divide_are_refused_by_the_ranks(tmp_path: Path) -> None:
    """So what is asked for reaches them."""
    path = make_checkpoint(tmp_path / "odd", **FAMILY_ZOO["qwen3_moe"] | {"moe_intermediate_size": 41})
    with pytest.raises(ConfigError, match="experts_cut='columns': tensor_parallel=2 must divide"):
        async with ranks("two", path, 2, tmp_path, experts_cut="columns"):
            pass
