"""The batch lane: what is idle is its own, it refuses nobody, and it does not starve while there is room at all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmesh.rpc.errors import Overloaded
from services.conductor.admission import lanes
from services.conductor.admission.lanes import Asked, BatchLane
from services.conductor.domain import Lane, Placed, Refuse
from services.conductor.settings import AdmissionSettings, Mode
from tests.conductor.driven import STEP_S, Driven

TBT_SLO_S = 0.1  # of 26 rows of 16,000 tokens


def mesh(prefills: int = 1, decodes: int = 1, **more: Any) -> Driven:
    admission = AdmissionSettings(Mode.PREDICTED, **more.pop("admission", {}))
    return Driven(prefills, decodes, slo_ttft_s=30.0, slo_tbt_s=TBT_SLO_S, admission=admission, **more)


def batch(loop: Driven, prompt: int = 16_000, output: int = 200, **more: Any) -> Placed | Refuse:
    return loop.ask(prompt, output, lane=Lane.BATCH, priority=20, **more)


# ── what is idle ──────────────────────────────────────────────────────────────────────────────────


def test_an_idle_mesh_takes_batch_work_up_to_the_head_room() -> None:
    loop = mesh(prefills=4)
    taken = 0
    for _ in range(300):
        taken += isinstance(batch(loop, output=10_000), Placed)
        loop.step()
    rows = loop.shown.rows[-1]
    assert rows == taken == pytest.approx(14, abs=1)  # half of what the SLO has room for
    loop.ask(16_000, 200)
    refused = batch(loop)
    assert isinstance(refused, Refuse)
    assert refused.reason == "busy"
    assert isinstance(refused.error, Overloaded)
    assert 1000 <= refused.error.retry_after_ms <= 30_000
    assert "batch lane" in str(refused.error)


def test_it_does_not_queue_up_at_prefill() -> None:
    loop = mesh()
    answers = [batch(loop) for _ in range(20)]
    taken = sum(isinstance(a, Placed) for a in answers)
    assert taken == 3  # 1.1 s each: a queue of three seconds is not idle


def test_a_prompt_longer_than_any_slo_waits_for_an_empty_queue_and_is_taken() -> None:
    loop = mesh()
    refused = batch(loop, 200_000, request_id="x")  # 60 s
    assert isinstance(refused, Refuse)
    for _ in range(100):
        assert isinstance(refused.error, Overloaded)
        loop.run(refused.error.retry_after_ms / 1000)
        refused = batch(loop, 200_000, request_id="x")
        if isinstance(refused, Placed):
            break
    assert isinstance(refused, Placed)
    assert loop.brain.now <= 100 + 62


def test_off_refuses_nobody() -> None:
    loop = Driven(1, 1, admission=AdmissionSettings(Mode.OFF))
    assert all(isinstance(batch(loop), Placed) for _ in range(40))


# ── it refuses nobody ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", [Mode.EARLY, Mode.PREDICTED])
def test_rows_of_the_batch_lane_take_no_row_from_others(mode: Mode) -> None:
    taken = {}
    for rows in (0, 12):
        loop = Driven(8, 1, slo_tbt_s=TBT_SLO_S, admission=AdmissionSettings(mode))
        for _ in range(rows):
            assert isinstance(batch(loop, output=20_000, expected_output_tokens=20_000), Placed)
            loop.run(1.0)
        loop.run(3.0)
        assert loop.shown.rows[-1] == rows
        stays = {"max_tokens": 20_000, "expected_output_tokens": 20_000}
        taken[rows] = 0
        while isinstance(loop.ask(16_000, 20_000, **stays), Placed):
            taken[rows] += 1
            loop.run(1.5)
    assert taken[12] == taken[0] == 27


moves = st.lists(
    st.tuples(
        st.sampled_from([Lane.INTERACTIVE, Lane.BATCH, Lane.BATCH, None]),
        st.integers(1, 40_000),
        st.integers(1, 2000),
        st.integers(0, 40),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(moves, st.integers(5_000, 60_000), st.sampled_from([Mode.EARLY, Mode.PREDICTED]))
@example([(Lane.BATCH, 18_885, 1, 1)], 5_000, Mode.PREDICTED)  # it has ended before: what differed was a heartbeat
def test_who_is_refused_would_have_been_refused_without_the_batch_lane(
    history: list[tuple[Lane | None, int, int, int]], prompt: int, mode: Mode
) -> None:
    loop = Driven(2, 1, slo_ttft_s=10.0, slo_tbt_s=TBT_SLO_S, admission=AdmissionSettings(mode, head_room=0.9))
    for lane, tokens, output, steps in history:
        if lane is Lane.BATCH:
            batch(loop, tokens, output)
        elif lane is not None:
            loop.ask(tokens, output)
        loop.run(steps * STEP_S)
    limit = loop.steps + 100
    while isinstance(loop.ask(prompt, 500, request_id="probe"), Placed) and loop.steps < limit:
        loop.ask(20_000, 500)  # until somebody is refused
        loop.step()
    loop.run(2 * STEP_S)
    loop.report()  # both answers are given on the same news of those who are not of the lane
    if isinstance(loop.ask(prompt, 500, request_id="probe"), Placed):
        return
    without_batch(loop)
    assert isinstance(loop.ask(prompt, 500, request_id="probe"), Refuse)


def without_batch(loop: Driven) -> None:
    """As if none of it had come."""
    for jobs in (*loop.lines.values(), *loop.batches.values()):
        for job in [j for j in jobs if j.lane is Lane.BATCH]:
            jobs.remove(job)
            loop.brain.state._ledger.withdraw(job.name, loop.brain.now)
            if jobs not in loop.batches.values():
                loop.coming[job.decode] -= 1
    loop.report()


# ── it does not starve ────────────────────────────────────────────────────────────────────────────


def test_steady_load_within_capacity_lets_it_through() -> None:
    """Three quarters of decode's room, for ever: nothing is idle, yet everybody who waits gets his turn."""
    loop = Driven(2, 1, slo_tbt_s=0.016, admission=AdmissionSettings(batch_share=0.05))  # 20 rows of 1,000 tokens
    waiting = {f"b{index}": 0.0 for index in range(4)}
    taken: dict[str, float] = {}
    interactive = refused = 0
    for step in range(6000):
        while loop.brain.now >= 100 + interactive * 0.25:  # three and a half seconds each: 14 rows
            interactive += 1
            refused += isinstance(loop.ask(1000, 250, max_tokens=250), Refuse)
        for name, due in waiting.items():
            if step > 600 and name not in taken and loop.brain.now >= due:
                answer = batch(loop, 1000, request_id=name)
                if isinstance(answer, Placed):
                    taken[name] = loop.brain.now
                else:
                    assert isinstance(answer.error, Overloaded)
                    waiting[name] = loop.brain.now + answer.error.retry_after_ms / 1000
        loop.step()
        if len(taken) == len(waiting):
            break
    assert sorted(taken) == sorted(waiting)
    assert min(taken.values()) > 160 + 30  # nothing was idle: they waited for their turn
    assert refused == 0


SECONDS = st.floats(0.01, 50.0, allow_nan=False)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["earn", "ask"]), SECONDS, st.integers(0, 5), st.floats(0, 20)), max_size=80))
def test_turns_go_by_age_and_within_the_share(steps: list[tuple[str, float, int, float]]) -> None:
    """Nothing is ever idle. What is taken in turn is paid out of the share, but for one request's overdraft."""
    lane = BatchLane(AdmissionSettings(batch_share=0.1, patience_s=10.0))
    now, earned, taken, dearest = 0.0, 0.0, 0.0, 0.0
    first: dict[str, float] = {}
    gone: dict[str, float] = {}
    for move, seconds, who, pause in steps:
        now += pause
        if move == "earn":
            lane.earn(seconds)
            earned += 0.1 * seconds
            continue
        name = f"r{who}"
        way = lane.way_in(_busy(name), now)
        assert way in ("", "turn")
        if way:
            assert now - first[name] >= 10.0
            assert all(gone[n] <= now or at >= first[name] for n, at in first.items())
            lane.taken(name, way, seconds)
            dearest = max(dearest, seconds)
            taken += seconds
            del first[name], gone[name]
        else:
            lane.told_to_wait(name, 5.0, now)
            if gone.get(name, 0.0) <= now:
                first[name] = now
            gone[name] = now + lanes.GONE_FACTOR * 5.0 + lanes.GONE_S
        assert taken <= earned + dearest
    now += 1000.0  # whoever is still there in the end is taken, once earned
    lane.told_to_wait("last", 5.0, now)
    lane.earn(10_000.0)
    assert taken > 10_000 or lane.way_in(_busy("last"), now + 10.5) == "turn"


def _busy(name: str) -> Asked:
    return Asked(name, 30.0, 0.1, queue_s=5.0, prefill_s=1.0, tbt_s=0.09, idle_tbt_s=0.01, room=True)


def test_no_turn_takes_rows_over_their_slo() -> None:
    lane = BatchLane(AdmissionSettings(patience_s=1.0))
    lane.earn(1000.0)
    over = Asked("x", 30.0, 0.1, queue_s=5.0, prefill_s=1.0, tbt_s=0.11, idle_tbt_s=0.01, room=True)
    lane.told_to_wait("x", 1.0, 0.0)
    assert lane.way_in(over, 2.0) == ""
    assert lane.way_in(_busy("x"), 2.0) == "turn"


def test_memory_is_bounded_and_newcomers_push_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_WAITING", 3)
    lane = BatchLane(AdmissionSettings(patience_s=1.0))
    for index in range(10):
        lane.told_to_wait(f"r{index}", 10.0, 0.0)
    assert len(lane) == 3
    lane.earn(1000.0)
    assert lane.way_in(_busy("r0"), 5.0) == "turn"
