"""Decode steps that verify what an MTP head drafts, over a checkpoint whose head is trained: whatever joins, stalls,
is preempted or leaves, the tokens are those of a request that runs alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from tokenizers import Tokenizer

from kvmesh.drafts.speculator import Speculator
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.mtp import MtpDrafter
from kvmesh.engine.runner import Runner
from kvmesh.transfer import EngineConfig, TransferEngine
from tests.ranks.test_drafted_steps import SETTINGS
from tests.ranks.test_steps_in_flight import FrontAndRank
from tests.support.steps_world import BLOCK, Device, World

MODEL = Path(__file__).parents[2] / "examples/measured-model"
HEAD_PAGES = 5  # too few for all rows at once


class DeviceWithHead(Device):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.runner = Runner(open_checkpoint(self.path), "float32", "cpu", BLOCK, self.memory.pages, mtp=True)


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    torch.set_num_threads(1)
    with TransferEngine("rank#1", EngineConfig(transports=("shm",))) as engine:
        yield DeviceWithHead(MODEL, engine)


class FrontAndRankWithHead(FrontAndRank):
    drafted = 0
    kept = 0

    def __init__(self) -> None:
        super().__init__()
        self.drafter = MtpDrafter(self.device.runner, HEAD_PAGES)
        self.world = World(self.device, self.ahead, Speculator([self.drafter], 4, adapts=False))

    def teardown(self) -> None:
        self.world.wind_down()
        assert self.drafter.free_pages == HEAD_PAGES, "a row's pages are given back when it has left"
        assert self.world.speculator is not None
        type(self).drafted += self.world.speculator.counts.drafted[0]
        type(self).kept += self.world.speculator.counts.kept[0]


def test_tokens_are_those_of_a_request_alone(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrontAndRankWithHead, "device", device, raising=False)
    monkeypatch.setattr(FrontAndRankWithHead, "ahead", False)
    run_state_machine_as_test(FrontAndRankWithHead, settings=settings(SETTINGS, max_examples=15))
    assert FrontAndRankWithHead.drafted > FrontAndRankWithHead.kept  # of random prompts few, of some runs none


class ChecksHidden(MtpDrafter):
    """Of greedy rows: each token is what the model makes of the hidden row that is told with it."""

    def extend(self, handle: int, tokens: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        assert hidden is not None
        with torch.inference_mode():
            assert self.model.logits(hidden).argmax(-1).tolist() == list(tokens)
        super().extend(handle, tokens, hidden)


def test_most_drafts_are_kept_of_texts_as_it_was_trained_on(device: Device) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    drafter = ChecksHidden(device.runner, 16)
    world = World(device, False, Speculator([drafter], 4, adapts=False))
    for sum_asked in ("12 + 5", "31 - 4 - 2"):
        asked = f"<|im_start|>user\nHow much is {sum_asked}?<|im_end|>\n<|im_start|>assistant\n"
        prompt = tuple(tokenizer.encode(asked).ids)
        world.start(prompt, 0, 52 - len(prompt), stop_at=1000, least=0, spare=0)
    world.wind_down()
    assert world.speculator is not None
    counts = world.speculator.counts
    assert counts.kept[0] > counts.drafted[0] / 2 and counts.kept[0] >= 20, counts
