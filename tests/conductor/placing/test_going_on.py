"""Requests that go on after their instance was lost: no load refuses them, the rest is foretold, no TTFT is taught."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.errors import InvalidRequest, Overloaded, Unavailable
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.services.conductor.costs.accuracy import PredictionKind
from kvmesh.services.conductor.costs.lengths import ENOUGH, LearntLengths
from kvmesh.services.conductor.domain import Lane, Load, Outcome, Placed, RequestOutcome, Role, Schedule
from kvmesh.services.conductor.mapping import schedule_in
from kvmesh.services.conductor.settings import AdmissionSettings, Mode
from kvmesh.sim.fitting import decisions
from tests.conductor.records.test_journal import Lines, recorded
from tests.support.conductor.brain import IDLE, Brain, card

LONG: dict[str, Any] = {"model": card(max_context_tokens=1 << 20), "capacity": 1 << 20}
FULL = Load(running_requests=64, context_tokens=64 * 8000, free_pages=1 << 19, free_extents=1 << 19)


def full_mesh(mode: Mode) -> Brain:
    """Nobody new gets in but where nothing is judged."""
    brain = Brain(admission=AdmissionSettings(mode), slo_ttft_s=0.001, slo_tbt_s=0.001)
    brain.add("p0", Role.PREFILL, **LONG)
    brain.add("d0", Role.DECODE, max_running=256, **LONG)
    brain.beat("d0", FULL)
    return brain


@pytest.mark.parametrize("lane", list(Lane))
@pytest.mark.parametrize("mode", list(Mode))
def test_no_load_refuses_what_was_admitted_once(mode: Mode, lane: Lane) -> None:
    brain = full_mesh(mode)
    if mode is not Mode.OFF:
        brain.refused(Overloaded, 8000, lane=lane)
    assert isinstance(brain.schedule(8000, lane=lane, attempt=1, answered_tokens=20), Placed)
    if mode is not Mode.OFF:
        brain.refused(Overloaded, 8000, lane=lane)  # it has opened the door to nobody else


def test_without_an_instance_it_is_refused() -> None:
    brain = full_mesh(Mode.PREDICTED)
    brain.beat("d0", FULL, ready=False)
    assert brain.refused(Unavailable, 8000, attempt=1, answered_tokens=20).reason == "no_instance"


def test_its_first_token_is_nobodys_ttft_and_its_length_is_whole() -> None:
    brain = Brain()
    brain.pair()
    brain.placed(100, request_id="r")
    brain.placed(112, request_id="r", attempt=1, answered_tokens=12, max_tokens=40)
    brain.beat("d0", IDLE, outcomes=(RequestOutcome("r", 1, Outcome.DONE, 20, 9.0, 0.02, 0.02, 10.0),))
    errors = {error.what: error for error in brain.state.prediction_errors(brain.now)}
    assert PredictionKind.TTFT not in errors or not errors[PredictionKind.TTFT].samples
    assert errors[PredictionKind.TBT].samples == errors[PredictionKind.OUTPUT_TOKENS].samples == 1


def asked(name: str = "r", **more: Any) -> Schedule:
    values: dict[str, Any] = {"tenant": "t", "endpoint": "chat", "max_tokens": 4096}
    return Schedule(name, more.pop("attempt", 0), "demo", 500, **(values | more))


def test_lengths_are_taught_and_foretold_of_the_whole_answer() -> None:
    known = LearntLengths()
    for n in range(2 * ENOUGH):
        half = 50 if n % 2 else 0  # every other one was moved after 50 tokens
        known.placed(asked(attempt=n % 2, answered_tokens=half, max_tokens=4096 - half))
        known.ended(RequestOutcome("r", n % 2, Outcome.DONE, 100 - half))
    assert known.predict(asked()).p50 == pytest.approx(100, rel=0.15)
    assert known.predict(asked(answered_tokens=60, max_tokens=4036)).p50 == pytest.approx(40, rel=0.4)
    assert known.predict(asked(answered_tokens=60, max_tokens=10)).mean == pytest.approx(10)
    assert known.predict(asked(answered_tokens=400, max_tokens=3000)).mean == pytest.approx(400)  # none was as long


def test_only_longer_answers_tell_of_the_rest() -> None:
    known = LearntLengths()
    for _ in range(4 * ENOUGH):
        for tokens in (16, 256):
            known.placed(asked())
            known.ended(RequestOutcome("r", 0, Outcome.DONE, tokens))
    assert known.predict(asked()).mean == pytest.approx(136, rel=0.15)
    assert known.predict(asked(answered_tokens=32)).mean == pytest.approx(224, rel=0.1)


def test_an_answer_cut_at_its_limit_is_known_to_be_cut() -> None:
    """60 tokens and 40 more with a limit of 40: it might have been longer, as the longer ones known are."""
    known = LearntLengths()
    for _ in range(2 * ENOUGH):
        known.placed(asked())
        known.ended(RequestOutcome("r", 0, Outcome.DONE, 1000))
    for _ in range(2 * ENOUGH):
        known.placed(asked(attempt=1, answered_tokens=60, max_tokens=40))
        known.ended(RequestOutcome("r", 1, Outcome.DONE, 40))
    assert known.predict(asked()).p50 == pytest.approx(1000, rel=0.15)


def test_more_answer_than_prompt_is_refused() -> None:
    request = pb.ScheduleRequest(request_id="r", model="demo", prompt_tokens=10, answered_tokens=9)
    assert schedule_in(request).answered_tokens == 9
    request.answered_tokens = 10
    with pytest.raises(InvalidRequest, match="answered_tokens=10"):
        schedule_in(request)


def test_the_log_replays_it_and_reads_logs_without_the_field() -> None:
    lines = Lines()
    brain = recorded(lines)
    brain.pair()
    brain.placed(100, request_id="r")
    brain.placed(120, request_id="r", attempt=1, answered_tokens=20)
    older = []
    for raw in lines.lines:
        told = json.loads(raw)
        if told["kind"] == "decision" and not told["event"]["answered_tokens"]:
            del told["event"]["answered_tokens"]
        older.append(json.dumps(told).encode() + b"\n")
    for log in (lines.lines, older):
        found = decisions.replay(log)
        assert (found.decisions, found.different) == (2, 0)
