"""Rank processes that draft: two that share a model agree on every draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.engine.axes import Axes
from kvmesh.errors import ConfigError
from kvmesh.kvcache.keys import pack_tokens
from kvmesh.ranks import protocol as m
from kvmesh.ranks.speculation import SPECULATE, check_speculation
from kvmesh.ranks.worker.drafters import DRAFTERS
from tests.support.checkpoints import make_checkpoint
from tests.support.rank_driver import BLOCK, GREEDY, AnyDriver, ranks
from tests.support.reference import assert_matches_reference

PROMPT, TOKENS = [11, 12, 13, 14, 11, 12, 13], 40


async def answer(driver: AnyDriver, handle: int, sampling: m.Sampling) -> tuple[list[int], int, int]:
    """Returns the tokens, how many were drafted, and how many of these kept."""
    pages = tuple(range(-(-(len(PROMPT) + TOKENS) // BLOCK)))
    item = m.PrefillItem(handle, tuple(PROMPT), 0, pages, sampling, False)
    driver.client.send(m.PrefillStep(handle, (item,)))
    made = [(await driver.take(m.PrefillStepDone)).sampled[0].token_id]
    said = m.TokenHistory(pack_tokens(PROMPT), pack_tokens(made))
    driver.client.send(m.Join(handle, pages, len(PROMPT), made[0], 0, TOKENS, 0, (), sampling, said=said))
    drafted = kept = 0
    while len(made) < TOKENS:
        step = await driver.take(m.DecodeStepDone)
        made += [token.token_id for token in step.tokens]
        drafted += sum(count for _, count, _ in step.drafts)
        kept += sum(count for _, _, count in step.drafts)
    return made, drafted, kept


async def test_two_ranks_agree_on_drafts(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", num_key_value_heads=2)
    async with ranks("two", path, 2, tmp_path, speculate="suffix", max_draft_tokens=7) as both:
        await answer(both, 1, m.Sampling(1.5, 1.0, 0, 3))  # another answer, which drafts are made from
        once, _, _ = await answer(both, 2, GREEDY)
        again, drafted, kept = await answer(both, 3, GREEDY)
    assert once == again and drafted >= kept > TOKENS / 4
    assert_matches_reference(path, PROMPT, again)


def test_an_unknown_kind_of_drafts_is_refused() -> None:
    with pytest.raises(ConfigError, match="speculate='magic': must be one of off, ngram, suffix"):
        check_speculation("magic", Axes())
    assert tuple(DRAFTERS) == SPECULATE
