"""How often each expert is chosen is counted where it is chosen: by hand, in whole steps, and in captured steps, whose
rows for nobody are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvmesh.engine.batch import DecodeBatch, DecodeInput, PrefillInput, SampleParams
from kvmesh.engine.config_experts import ExpertsConfig
from kvmesh.engine.expert_counts import ExpertCounts
from kvmesh.engine.models.moe import MoE, count_choices
from kvmesh.engine.pieces import PieceGraphs
from kvmesh.errors import InternalError
from tests.support.engine.recorded import RecordedCapture
from tests.support.engine.stepper import Stepper

Zoo = Callable[[str], Path]
CPU = torch.device("cpu")


def test_choices_are_counted_by_hand_and_layer_by_layer() -> None:
    counts = ExpertCounts(ExpertsConfig((1, 4), 5, 2, 8), CPU)
    counts.add(0, torch.tensor([[0, 3], [3, 4], [3, 0]]))
    counts.add(1, torch.tensor([[1, 2]]))
    counts.add(0, torch.tensor([[2, 3]]))
    assert counts.told() == [[2, 0, 1, 4, 1], [0, 1, 1, 0, 0]]
    with counts.only(counts.once(torch.tensor([True, False, True]))):
        counts.add(1, torch.tensor([[0, 1], [2, 3], [4, 0]]))
    assert counts.told() == [[2, 0, 1, 4, 1], [2, 2, 1, 0, 1]]
    counts.add(1, torch.tensor([[3, 3]]))  # outside: every token again
    assert counts.told() == [[2, 0, 1, 4, 1], [2, 2, 1, 2, 1]]
    counts.clear()
    assert counts.told() == [[0] * 5, [0] * 5]


def routed_by_hand(stepper: Stepper) -> list[list[int]]:
    """Makes the router of each layer choose by the tokens' number alone; answers what it is asked for, layer by
    layer."""
    experts = stepper.runner.config.experts
    assert experts is not None
    asked: list[list[int]] = []
    for layer in stepper.runner.model.layers:
        block: Any = getattr(layer, "mlp", None)
        if isinstance(block, MoE):
            own: list[int] = []
            asked.append(own)

            def choose(x: torch.Tensor, own: list[int] = own, layer: int = len(asked)) -> Any:
                chosen = (torch.arange(len(x))[:, None] * layer + torch.arange(experts.chosen)) % experts.count
                own += chosen.flatten().tolist()
                return chosen, torch.full(chosen.shape, 0.5)

            block.router = choose  # type: ignore[assignment]
    return asked


def test_every_token_of_every_step_is_counted_once_at_each_layer(zoo: Zoo) -> None:
    stepper = Stepper(zoo("glm4_moe"))  # its first layers have none
    counts, experts = stepper.runner.expert_counts, stepper.runner.config.experts
    assert counts is not None and experts is not None and counts.layers == experts.layers != ()
    asked = routed_by_hand(stepper)
    prompt = list(range(3, 26))
    pages = stepper.take(40)
    token = stepper.prefill(prompt, pages, chunks=(16,))
    stepper.decode([DecodeInput(token, len(prompt), pages, SampleParams())], 4)
    told = counts.told()
    assert told == [[Counter(own)[expert] for expert in range(experts.count)] for own in asked]
    assert told is not None and [sum(row) for row in told] == [27 * experts.chosen] * len(experts.layers)


def test_a_model_without_experts_counts_nothing(zoo: Zoo) -> None:
    stepper = Stepper(zoo("qwen2"))
    assert stepper.runner.expert_counts is None
    with pytest.raises(InternalError, match=r"layers \[\] have experts, the configuration says \[0\]"):
        count_choices(stepper.runner.model.layers, ExpertsConfig((0,), 4, 2, 8), CPU)


def test_rows_of_a_captured_decode_step_that_stand_for_none_are_not_counted(zoo: Zoo) -> None:
    """They are at position 0; what they choose is not counted, what the others choose is, at every layer."""
    stepper = Stepper(zoo("qwen3_moe"))
    counts = stepper.runner.expert_counts
    assert counts is not None
    asked = routed_by_hand(stepper)
    pages = [stepper.take(16) for _ in range(3)]
    for own in pages:
        stepper.prefill([5, 6, 7], own)
    rows = [DecodeInput(9, 3, own, SampleParams()) for own in pages[:2]] + [DecodeInput(0, 0, pages[2], SampleParams())]
    counts.clear()
    for own in asked:
        own.clear()
    batch = DecodeBatch.of(rows)
    with torch.inference_mode():
        stepper.runner._replayable(torch.from_numpy(batch.token_ids), stepper.runner._plan(batch, ()))
    of_two = len(asked[0]) * 2 // 3
    assert counts.told() == [
        [Counter(own[:of_two])[expert] for expert in range(counts.table.shape[1])] for own in asked
    ]


def test_pieces_count_the_tokens_of_the_step_alone(zoo: Zoo) -> None:
    """Replays of one bucket: by 5 and by 3 tokens, then by as many as it has."""
    stepper = Stepper(zoo("qwen3_moe"))
    runner, counts = stepper.runner, stepper.runner.expert_counts
    assert counts is not None
    for layer in runner.model.layers:  # the loop looks at values, which a record cannot
        block: Any = layer
        block.mlp.experts = lambda x, chosen, weights: x.float() * weights.sum(1, keepdim=True)
    with torch.inference_mode():
        runner.pieces = PieceGraphs(runner.model, runner.attention, (8,), RecordedCapture(), counts)
    counts.clear()
    experts = runner.config.experts
    assert experts is not None
    tokens = 0
    for length in (5, 3, 8):
        runner.prefill([PrefillInput(list(range(3, 3 + length)), 0, stepper.take(16), SampleParams())])
        tokens += length
        told = counts.told()
        assert told is not None and [sum(row) for row in told] == [tokens * experts.chosen] * len(experts.layers)


def test_a_gpu_tells_what_was_asked_for_before_and_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's copy is stood in for: it is done when the test says so."""
    done: list[bool] = []

    class Event:
        def record(self) -> None:
            done.append(False)

        def query(self) -> bool:
            return done[-1]

    counts = ExpertCounts(ExpertsConfig((0,), 3, 1, 8), CPU)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    own = counts.table
    counts.table = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    monkeypatch.setattr(counts, "_host", Copied(own))
    counts.add(0, torch.tensor([[2], [2]]))
    assert counts.told() is None  # asked
    counts.add(0, torch.tensor([[1]]))
    assert counts.told() is None and len(done) == 1  # under way: no second copy
    done[-1] = True
    assert counts.told() == [[0, 0, 2]] and len(done) == 2
    done[-1] = True
    assert counts.told() == [[0, 1, 2]]


class Copied:
    """Pinned memory into which a copy of `source` goes at once."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source, self.kept = source, source.clone()

    def copy_(self, _: object, non_blocking: bool) -> None:
        assert non_blocking
        self.kept = self.source.clone()

    def tolist(self) -> Any:
        return self.kept.tolist()
