"""Decode steps that verify what a draft model says: whatever joins, stalls, is preempted or leaves, tokens are those
of a request that runs alone, and of a model that drafts for itself every token is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvmesh.drafts.speculator import Speculator
from kvmesh.engine.axes import Axes
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.draft_model import ModelDrafter
from kvmesh.engine.runner import Runner
from kvmesh.errors import ConfigError
from kvmesh.ranks.sizing import draft_pages
from kvmesh.ranks.speculation import check_draft_folder, check_speculation
from kvmesh.transfer import EngineConfig, TransferEngine
from tests.ranks.test_drafted_steps import SETTINGS
from tests.ranks.test_speculation import PROMPT, answer
from tests.ranks.test_steps_in_flight import FrontAndRank
from tests.support.checkpoints import make_checkpoint
from tests.support.rank_driver import GREEDY, ranks
from tests.support.reference import assert_matches_reference
from tests.support.steps_world import BLOCK, Device, World

DRAFT_PAGES = 12  # too few for all rows at once


def drafter_of(device: Device, pages: int) -> ModelDrafter:
    runner = Runner(
        open_checkpoint(device.path), "float32", "cpu", BLOCK, torch.zeros(pages, *device.runner.layout.shape)
    )
    return ModelDrafter(runner, runner.config.vocab_size, least=0.0)


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    torch.set_num_threads(1)
    path = make_checkpoint(tmp_path_factory.mktemp("tiny") / "m", vocab_size=300, hidden_size=32, intermediate_size=32)
    with TransferEngine("rank#1", EngineConfig(transports=("shm",))) as engine:
        yield Device(path, engine)


class FrontAndRankWithDraftModel(FrontAndRank):
    drafted = 0
    kept = 0

    def __init__(self) -> None:
        super().__init__()
        self.drafter = drafter_of(self.device, DRAFT_PAGES)
        self.world = World(self.device, self.ahead, Speculator([self.drafter], 4, adapts=False))

    def teardown(self) -> None:
        self.world.wind_down()
        assert self.drafter.free_pages == DRAFT_PAGES, "a row's pages are given back when it has left"
        assert self.world.speculator is not None
        type(self).drafted += self.world.speculator.counts.drafted[0]
        type(self).kept += self.world.speculator.counts.kept[0]


def test_tokens_are_those_of_a_request_alone(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrontAndRankWithDraftModel, "device", device, raising=False)
    monkeypatch.setattr(FrontAndRankWithDraftModel, "ahead", False)
    run_state_machine_as_test(FrontAndRankWithDraftModel, settings=settings(SETTINGS, max_examples=15))
    assert FrontAndRankWithDraftModel.drafted >= FrontAndRankWithDraftModel.kept


def test_of_a_model_that_drafts_for_itself_every_token_is_kept(device: Device) -> None:
    drafter = drafter_of(device, 40)
    speculator = Speculator([drafter], 4, adapts=False)
    world = World(device, False, speculator)
    for prompt in ((1, 2, 3), (4, 5), (7, 8, 9, 10, 11)):
        world.start(prompt, 0, 24, stop_at=1000, least=0, spare=6)
    world.wind_down()
    [drafted], [kept] = speculator.counts.drafted, speculator.counts.kept
    assert drafted == kept > 40, (drafted, kept)
    assert drafter.free_pages == 40


# ── rank processes ───────────────────────────────────────────────────────────────────────────────


async def test_two_ranks_have_the_drafts_of_the_first(tmp_path: Path) -> None:
    """The model drafts for itself: its drafts are right, and soon known to take longer than they are worth."""
    path = make_checkpoint(tmp_path / "model", num_key_value_heads=2)
    told: dict[str, Any] = {"speculate": "draft+ngram", "draft_model": str(path), "max_draft_tokens": 7}
    async with ranks("two", path, 2, tmp_path, **told) as both:
        made, drafted, kept = await answer(both, 1, GREEDY)
    assert drafted >= kept >= 1
    assert_matches_reference(path, PROMPT, made)


def test_a_draft_model_is_named_where_one_drafts_and_there_alone() -> None:
    check_draft_folder("draft+suffix", "m")
    check_draft_folder("mtp", "")
    with pytest.raises(ConfigError, match="speculate='draft': name the draft model's folder"):
        check_draft_folder("draft", "")
    with pytest.raises(ConfigError, match="draft_model='m': speculate='mtp' asks no draft model"):
        check_draft_folder("mtp", "m")


def test_stages_refuse_a_draft_model() -> None:
    with pytest.raises(ConfigError, match="speculate='draft' with pp=2: a stage would wait for what the first rank"):
        check_speculation("draft", Axes(pp=2))
    for axes in ("tp=4", "tp=2,cp=2", "dp=2", "tp=2,dcp=2"):
        check_speculation("draft+ngram", Axes.parse(axes))


def test_a_draft_models_kv_is_bounded() -> None:
    assert draft_pages(100, 1000, 250) == 100
    assert draft_pages(100, 1000, 500) == 50
    assert draft_pages(1, 1000, 5000) == 1
