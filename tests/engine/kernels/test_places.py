"""Decode steps of data-parallel places, replayed: all replay the same size, with rows for nobody, or all launch. The
graphs' work is done again where a GPU would replay it; ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kvmesh.engine import capture
from kvmesh.engine.attention import choice
from kvmesh.engine.axes import Axes
from kvmesh.engine.batch import DecodeBatch
from kvmesh.engine.parallel import RankMesh
from kvmesh.engine.runner import DecodeInput, PrefillInput, SampleParams
from tests.support.engine.recorded import RerunCapture
from tests.support.engine.stepper import Stepper
from tests.support.engine.threaded_mesh import over_threads
from tests.support.reference import assert_matches_reference

MODEL = "qwen3_moe"
PROMPTS = [[3 + 7 * at % 200 for at in range(length)] for length in (5, 9, 4)]
PLACES = ((0, 0), (0, 0), (1, 4))  # of each request: its place on `dp`, and in which round it comes
TOKENS, ROUNDS, MOST = 5, 10, 2


class Seen(NamedTuple):
    """What one place saw: its answers, the size replayed in each round, and how often its tokens chose experts."""

    answers: dict[int, list[int]]
    replayed: list[int]
    counted: int


def served(path: Path, mesh: RankMesh) -> Seen:
    """Runs this place's requests: a prompt is one chunk, alone in its step."""
    stepper = Stepper(path, num_pages=8, mesh=mesh)
    runner = stepper.runner
    with torch.inference_mode():
        runner._capture(max_rows=MOST, max_tokens=0)
    rounds, graphs, counts = runner.rounds, runner.graphs, runner.expert_counts
    assert rounds is not None and graphs is not None and counts is not None
    assert graphs.sizes == rounds.sizes == (1, 2) and not graphs.failed
    counts.clear()
    mine = {at: begins for at, (place, begins) in enumerate(PLACES) if place == mesh.place.dp}
    pages = {at: stepper.take(len(PROMPTS[at]) + TOKENS) for at in mine}
    answers: dict[int, list[int]] = {at: [] for at in mine}
    replayed = []
    for now in range(ROUNDS):
        new = [at for at, begins in mine.items() if begins <= now and not answers[at]]
        running = [at for at in mine if 0 < len(answers[at]) < TOKENS]
        if new:
            [token] = runner.prefill([PrefillInput(PROMPTS[new[0]], 0, pages[new[0]], SampleParams())])
            assert token is not None
            answers[new[0]].append(token.token_id)
        elif running:
            rows = [
                DecodeInput(answers[at][-1], len(PROMPTS[at]) + len(answers[at]) - 1, pages[at], SampleParams())
                for at in running
            ]
            for at, token_id in zip(running, runner.step((), DecodeBatch.of(rows))[1].token_ids.tolist(), strict=True):
                answers[at].append(token_id)
        else:
            runner.serve()
        replayed.append(rounds.replayed)
    told = counts.told()
    assert told is not None
    return Seen(answers, replayed, sum(map(sum, told)))


@pytest.mark.slow
def test_places_replay_the_same_steps(
    zoo: Callable[[str], Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    del device  # skips where there is no triton
    from triton.runtime import interpreter

    from kvmesh.engine.attention import triton_backend

    if torch.cuda.is_available():
        pytest.skip("on a GPU these are ranks over NCCL")
    one_at_a_time, run = threading.RLock(), interpreter.GridExecutor.__call__

    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with one_at_a_time:  # the interpreter is one for all threads
            return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", locked)
    monkeypatch.setattr(triton_backend, "PROCESSORS", 1)
    monkeypatch.setitem(choice.BACKENDS, "cpu", triton_backend.TritonAttention)
    monkeypatch.setattr(capture, "CudaCapture", lambda device: RerunCapture())
    path = zoo(MODEL)
    one, other = over_threads(Axes.parse("dp=2,ep=dp"), lambda mesh: served(path, mesh))
    # Two prompts, then two rows; a prompt of the other place, when nobody replays; one row of that, at last alone.
    assert one.replayed == other.replayed == [0, 0, 2, 2, 0, 2, 1, 1, 1, 0]
    answers = one.answers | other.answers
    for at, prompt in enumerate(PROMPTS):
        assert len(answers[at]) == TOKENS
        assert_matches_reference(path, prompt, answers[at])
    tokens = sum(len(prompt) + TOKENS - 1 for prompt in PROMPTS)
    assert one.counted + other.counted == tokens * 3 * 3, "rows for nobody are not counted: 3 of 7 experts, 3 layers"
