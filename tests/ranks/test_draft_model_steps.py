"""Decode steps that verify what a draft model says: whatever joins, stalls, is preempted or leaves, tokens are those
of a request that runs alone, and of a model that drafts for itself every token is kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kvmesh.drafts.speculator import Speculator
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.draft_model import ModelDrafter
from kvmesh.engine.runner import Runner
from kvmesh.transfer import EngineConfig, TransferEngine
from tests.ranks.test_drafted_steps import SETTINGS
from tests.ranks.test_steps_in_flight import FrontAndRank
from tests.support.checkpoints import make_checkpoint
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
