"""What a request is held to, when it is refused, and when it may come again."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import Overloaded
from kvmesh.services.conductor.domain import Lane, Load, Outcome, Placed, Refuse, RequestOutcome, Role, Schedule
from kvmesh.services.conductor.mapping import placement_out
from kvmesh.services.conductor.settings import AdmissionSettings, Mode
from tests.support.conductor.brain import Brain, card
from tests.support.conductor.driven import BEAT_EVERY, STEP_S, Driven

LONG: dict[str, Any] = {"model": card(max_context_tokens=1 << 20), "capacity": 1 << 20}

STAYS: dict[str, Any] = {"max_tokens": 20_000, "expected_output_tokens": 20_000}


def brain_of(mode: Mode, **more: Any) -> Brain:
    brain = Brain(admission=AdmissionSettings(mode, more.pop("by_model", ())), **more)
    brain.add("p0", Role.PREFILL, **LONG)
    brain.add("d0", Role.DECODE, max_running=256, **LONG)
    brain.beat("d0", busy(0))
    return brain


def busy(rows: int, tokens: int = 0) -> Load:
    return Load(running_requests=rows, context_tokens=tokens, free_pages=1 << 19, free_extents=1 << 19)


# ── SLOs ──────────────────────────────────────────────────────────────────────────────────────────


def test_its_own_slo_then_its_models_then_everybodys() -> None:
    by_model = (("other", 0.001, 10.0),)
    brain = brain_of(Mode.PREDICTED, by_model=by_model)
    brain.placed()
    assert brain.refused(Overloaded, ttft_slo_s=0.001).reason == "ttft"
    assert brain.refused(Overloaded, tbt_slo_s=0.001).reason == "tbt"
    other = card("other", "f2")
    brain.add("p1", Role.PREFILL, model=other)
    brain.add("d1", Role.DECODE, model=other)
    refused = brain.refused(Overloaded, model="other")
    assert "over the SLO of 1 ms" in str(refused.error)
    brain.placed(model="other", ttft_slo_s=30.0)


def test_a_lax_request_does_not_take_the_tbt_of_those_who_are_there() -> None:
    brain = brain_of(Mode.PREDICTED, slo_tbt_s=0.1)
    brain.beat("d0", busy(27, 27 * 16_000))  # 102 ms with another one
    refused = brain.refused(Overloaded, 16_000, tbt_slo_s=60.0)
    assert "over the SLO of 100 ms" in str(refused.error)
    brain.beat("d0", busy(0))
    for _ in range(60):
        brain.placed(tbt_slo_s=60.0, **STAYS)  # among those who are content with it
    brain.refused(Overloaded, tbt_slo_s=0.015)


def test_a_strict_request_does_not_keep_an_instance_for_itself() -> None:
    brain = brain_of(Mode.PREDICTED, slo_ttft_s=200.0, slo_tbt_s=0.1)
    brain.placed(1000, max_tokens=1000, tbt_slo_s=0.0105)
    for _ in range(3):
        brain.placed(80_000, max_tokens=1000)


# ── modes ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", list(Mode))
def test_the_tbt_that_each_mode_judges(mode: Mode) -> None:
    brain = brain_of(mode, slo_tbt_s=0.1)
    brain.beat("d0", busy(64, 64 * 8000))  # 117 ms with the newcomer
    answer = brain.schedule(8000)
    assert isinstance(answer, Placed) == (mode in (Mode.OFF, Mode.BASELINE))


@pytest.mark.parametrize("mode", list(Mode))
def test_what_decode_checks_for_itself(mode: Mode) -> None:
    """Its own SLO, and for those who come later none tighter than the model's default; nothing where nobody asks."""
    brain = brain_of(mode, slo_tbt_s=0.1)
    asked = mode not in (Mode.OFF, Mode.BASELINE)
    for slo_s, held_s in ((0.0, 0.1), (0.05, 0.1), (60.0, 60.0)):
        placed = brain.placed(tbt_slo_s=slo_s)
        assert (placed.tbt_slo_s, placed.held_tbt_s) == ((slo_s or 0.1, held_s) if asked else (0, 0))
        told = placement_out(placed)
        assert (told.tbt_slo_ms, told.held_tbt_ms) == (placed.tbt_slo_s * 1000, placed.held_tbt_s * 1000)
    for more in ({"lane": Lane.BATCH}, {"answered_tokens": 3}):
        placed = brain_of(mode, slo_tbt_s=0.1).placed(**more)
        assert (placed.tbt_slo_s, placed.held_tbt_s) == (0, 0)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_ttft_is_judged_on_arrival_unless_nothing_is(mode: Mode) -> None:
    brain = brain_of(mode, slo_ttft_s=5.0)
    answers = [brain.schedule(50_000, max_tokens=1) for _ in range(3)]  # 5.6 s each
    assert [isinstance(a, Placed) for a in answers] == [mode is Mode.OFF] * 3
    assert isinstance(brain.schedule(10_000), Placed) or mode is Mode.OFF


def test_who_will_have_left_is_seen_by_prediction_alone() -> None:
    """A very long prompt joins when those who run now are gone."""
    for mode in (Mode.EARLY, Mode.PREDICTED):
        brain = brain_of(mode, slo_ttft_s=200.0, slo_tbt_s=0.1)
        for _ in range(20):
            brain.placed(16_000, max_tokens=3000, expected_output_tokens=3000)
            brain.now += 1.2
            for name in ("p0", "d0"):
                brain.beat(name, busy(0))
        brain.beat("d0", busy(20, 20 * 16_000))
        answer = brain.schedule(200_000, max_tokens=30, tbt_slo_s=0.08)
        assert isinstance(answer, Placed) == (mode is Mode.PREDICTED), answer


def test_who_is_on_his_way_is_seen_by_prediction_alone() -> None:
    for mode in (Mode.EARLY, Mode.PREDICTED):
        brain = brain_of(mode, slo_ttft_s=200.0, slo_tbt_s=0.1)
        for _ in range(27):  # decode's rows are full
            brain.placed(16_000, **STAYS)
        assert isinstance(brain.schedule(16_000), Placed) == (mode is Mode.EARLY)


def full(waiting: int) -> Load:
    """No page of the device is free, host memory is; so many have landed there and wait."""
    return Load(running_requests=32, context_tokens=32 * 1000, waiting_requests=waiting, free_extents=1 << 19)


@pytest.mark.parametrize("mode", list(Mode))
def test_waiting_for_pages_counts_as_the_slowest_interval(mode: Mode) -> None:
    """KV that lands in host memory waits there, between the first token and the second."""
    brain = brain_of(mode, slo_tbt_s=0.1)
    for _ in range(20):
        brain.placed(1000, max_tokens=64)
        brain.now += 1.0
        for name in ("p0", "d0"):
            brain.beat(name, busy(32, 32 * 1000))
    brain.beat("d0", full(waiting=100))
    answer = brain.schedule(1000, max_tokens=64)
    assert isinstance(answer, Placed) == (mode in (Mode.OFF, Mode.BASELINE))
    if isinstance(answer, Refuse):
        assert answer.reason == "tbt" and isinstance(answer.error, Overloaded) and answer.error.retry_after_ms > 100
    brain.beat("d0", busy(32, 32 * 1000))
    assert isinstance(brain.schedule(1000, max_tokens=64), Placed)


def test_who_waits_for_no_pages_is_chosen() -> None:
    brain = brain_of(Mode.OFF)
    brain.add("d1", Role.DECODE, max_running=256, **LONG)
    brain.beat("d1", busy(33, 33 * 1000))
    brain.beat("d0", full(waiting=100))
    assert brain.placed(1000).decode.instance_id == "d1"


def test_a_later_joiner_counts_though_it_is_not_there_at_the_first_token() -> None:
    """A request that finds an idle prefill instance is there before those in the queue of another, and would be among
    them."""
    brain = brain_of(Mode.PREDICTED, slo_ttft_s=200.0, slo_tbt_s=0.1)
    for _ in range(27):
        brain.placed(16_000, **STAYS)
    brain.add("p1", Role.PREFILL, **LONG)
    assert brain.refused(Overloaded, 16_000, **STAYS).reason == "tbt"
    brain.placed(16_000, max_tokens=16)  # gone before most of them come


def test_learnt_lengths_tell_who_will_have_left() -> None:
    """The same limit, but this tenant's answers are short."""
    brain = brain_of(Mode.PREDICTED, slo_ttft_s=200.0, slo_tbt_s=0.1)
    for index in range(20):
        brain.placed(100, tenant="short", max_tokens=4000, request_id=f"s{index}")
        brain.beat(
            "d0",
            busy(0),
            outcomes=(RequestOutcome(f"s{index}", 0, Outcome.DONE, 10),),
            finished_request_ids=(f"s{index}",),
        )
        brain.beat("p0", finished_request_ids=(f"s{index}",))
    assert brain.state.scheduling.admission.lengths.predict(_asked("short")).mean == pytest.approx(10, rel=0.1)
    for _ in range(40):  # they leave as fast as they come: one a second, for a tenth of a second
        brain.placed(16_000, tenant="short", max_tokens=4000)


def _asked(tenant: str) -> Any:
    return Schedule("x", 0, "demo", 100, 4000, tenant=tenant)


def test_loads_are_the_papers() -> None:
    brain = brain_of(Mode.PREDICTED, slo_ttft_s=10.0, slo_tbt_s=0.1)
    loads = brain.state.loads(brain.state.instances, brain.now)["demo"]
    assert (loads.prefill, loads.decode, loads.greatest) == (0, 0, 0)
    brain.placed(50_000)
    brain.beat("d0", busy(26, 26 * 16_000))
    loads = brain.state.loads(brain.state.instances, brain.now)["demo"]
    assert loads.decode == pytest.approx(0.958, rel=0.01)
    assert loads.prefill == pytest.approx(2 * 0.5635, rel=0.02)  # the queue, and another prompt as long
    assert loads.greatest == loads.prefill


# ── Retry-After ───────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60_000), st.integers(1, 3000)), min_size=1, max_size=30),
    st.integers(1, 60_000),
    st.sampled_from([Mode.EARLY, Mode.PREDICTED]),
)
def test_who_waits_as_told_is_taken_in_a_quiet_mesh(others: list[tuple[int, int]], prompt: int, mode: Mode) -> None:
    loop = Driven(1, 1, slo_ttft_s=8.0, slo_tbt_s=0.1, admission=AdmissionSettings(mode))
    for tokens, output in others:
        loop.ask(tokens, output, max_tokens=output)
    answer = loop.ask(prompt, 50, max_tokens=50, request_id="x")
    # Short prompts are thought to pass long ones, and this mesh computes them in turn: so some are told twice more.
    for _ in range(3):
        if isinstance(answer, Placed):
            break
        assert isinstance(answer, Refuse) and isinstance(answer.error, Overloaded)
        steps = math.ceil(answer.error.retry_after_ms / 1000 / STEP_S)
        loop.run((steps + BEAT_EVERY) * STEP_S)  # what is known is a heartbeat old
        answer = loop.ask(prompt, 50, max_tokens=50, request_id="x")
    assert isinstance(answer, Placed), answer


# ── priorities ────────────────────────────────────────────────────────────────────────────────────


def test_the_least_urgent_are_refused_first() -> None:
    """Each priority is taken up to its share of the room."""
    taken = {}
    for priority in (-1, 0, 1, 3, 9):
        brain = brain_of(Mode.PREDICTED, slo_ttft_s=10.0, slo_tbt_s=10.0)
        count = 0
        while isinstance(brain.schedule(10_000, priority=priority, max_tokens=1), Placed):  # 0.6 s each
            count += 1
        taken[priority] = count
    assert taken[-1] == taken[0] == 15
    assert [taken[p] for p in (0, 1, 3, 9)] == sorted([taken[p] for p in (0, 1, 3, 9)], reverse=True)
    assert 7 <= taken[9] <= 8  # half of it


def test_a_low_priority_is_still_taken_by_an_idle_mesh() -> None:
    brain = brain_of(Mode.PREDICTED, slo_ttft_s=6.0)
    brain.placed(50_000, priority=9)  # 5.6 s alone


def test_the_urgent_see_the_queue_that_they_overtake() -> None:
    brain = brain_of(Mode.PREDICTED, slo_ttft_s=10.0, slo_tbt_s=10.0)
    for _ in range(15):
        brain.placed(10_000, max_tokens=1)
    brain.refused(Overloaded, 10_000)
    urgent = brain.placed(10_000, priority=-1)
    assert urgent.terms["queue_ms"] == pytest.approx(635, rel=0.02)  # what has begun is not overtaken
    late = brain.placed(100, priority=1, ttft_slo_s=60.0)
    assert late.terms["queue_ms"] == pytest.approx(16 * 635, rel=0.02)
