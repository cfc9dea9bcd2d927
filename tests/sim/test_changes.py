"""Instances whose steps scatter, that slow down, freeze, die, come and go: by hand, and what is true of any of them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from math import inf, isnan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import ConfigError
from kvmesh.sim.changes import (
    FreezePhase,
    JoinEvent,
    KillEvent,
    LeaveEvent,
    SlowPhase,
    StepClock,
    changes_of,
    noticed,
)
from kvmesh.sim.config import MeshMode, SimConfig
from kvmesh.sim.host import HostModel
from kvmesh.sim.report.records import DONE, FAILED, REFUSED, Record
from kvmesh.sim.workloads.workload import SimRequest
from tests.support.sim.fleets import BLOCK, Linear, coupled, mesh, node, request, served

TIMES = Linear()

# ── step times ────────────────────────────────────────────────────────────────────────────────────


def test_a_step_goes_slower_in_a_slow_phase_and_stands_still_in_a_frozen_one() -> None:
    clock = StepClock("p0", 0, slow=[SlowPhase("p0", 10, 20, 3), SlowPhase("p1", 0, 99, 9)])
    assert clock.step_s(0.0, 4.0, "prefill", 0) == 4.0
    assert clock.step_s(8.0, 4.0, "prefill", 0) == pytest.approx(2 + 2 * 3)
    assert clock.step_s(8.0, 6.0, "prefill", 0) == pytest.approx(2 + 10 + (4 - 10 / 3))
    assert (clock.times(9.9), clock.times(10.0), clock.times(20.0)) == (1, 3, 1)
    always = StepClock("p0", 0, slow=[SlowPhase("p0", 0, inf, 2)])
    assert always.step_s(4.0, 1.0, "prefill", 0) == pytest.approx(2.0), "a single phase is one, too"
    frozen = StepClock("p0", 0, slow=[SlowPhase("p0", 0, inf, 2)], freeze=[FreezePhase("p0", 5, 9)])
    assert frozen.step_s(4.0, 1.0, "prefill", 0) == pytest.approx(6.0)
    assert frozen.step_s(4.0, 0.5, "prefill", 0) == pytest.approx(1.0), "it ends as the freeze begins"
    assert frozen.step_s(6.0, 1.0, "prefill", 0) == pytest.approx(5.0)
    assert [frozen.thaws_s(at) for at in (4.9, 5.0, 8.9, 9.0)] == [4.9, 9, 9, 9]
    assert frozen.times(7.0) == inf


PHASES = st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 20), st.floats(0.2, 8)), max_size=4)


@given(PHASES, PHASES, st.floats(0, 60), st.lists(st.floats(0.01, 5), min_size=1, max_size=6), st.floats(0, 0.5))
def test_steps_in_a_row_are_steps_one_by_one(
    slow: list[tuple[float, float, float]],
    freeze: list[tuple[float, float, float]],
    now: float,
    usual: list[float],
    noise: float,
) -> None:
    clock = StepClock(
        "d0",
        3,
        noise=noise,
        spread=noise,
        slow=[SlowPhase("d0", at, at + long, times) for at, long, times in slow],
        freeze=[FreezePhase("d0", at, at + long) for at, long, _ in freeze],
    )
    ends = clock.ends_s(now, np.array(usual), "decode", 254)
    at = now
    for n, (seconds, end) in enumerate(zip(usual, ends, strict=True)):
        at += clock.step_s(at, seconds, "decode", 254 + n)
        assert at == pytest.approx(end, rel=1e-9, abs=1e-9)
    assert all(np.diff([now, *ends]) > 0)
    # What was done between two moments: the integral of 1 / `times`, step by step of a fine grid.
    if not noise:
        grid = np.linspace(now, ends[-1], 2_001)
        done = sum((b - a) / clock.times((a + b) / 2) for a, b in pairwise(grid))
        assert done == pytest.approx(sum(usual), rel=0.03, abs=0.03)


def test_noise_keeps_the_mean_and_hangs_on_the_number_of_the_step_alone() -> None:
    usual = np.ones(20_000)
    clock = StepClock("p0", 1, noise=0.3)
    found = np.diff(clock.ends_s(0.0, usual, "prefill", 0), prepend=0.0)
    assert found.mean() == pytest.approx(1, abs=0.01)
    assert np.log(found).std() == pytest.approx(0.3, abs=0.01)
    late = StepClock("p0", 1, noise=0.3)  # asked for the last ones first
    for number in (19_999, 700, 3, 700):
        assert late.step_s(0.0, 1.0, "prefill", number) == pytest.approx(found[number], rel=1e-6)
    others = StepClock("p1", 1, noise=0.3), StepClock("p0", 2, noise=0.3)
    assert len({one.step_s(0.0, 1.0, kind, 0) for one in (clock, *others) for kind in ("prefill", "decode")}) == 6


def test_each_instance_has_a_factor_of_its_own() -> None:
    factors = np.array([StepClock(f"p{n}", 0, spread=0.2).factor for n in range(4000)])
    assert np.log(factors).std() == pytest.approx(0.2, abs=0.01)
    assert factors.mean() == pytest.approx(1, abs=0.02)
    clock = StepClock("p7", 0, spread=0.2)
    assert clock.step_s(5.0, 2.0, "prefill", 0) == pytest.approx(2 * factors[7])
    assert StepClock("p7", 0).factor == 1


# ── one request or two ────────────────────────────────────────────────────────────────────────────


def answers(asked: list[SimRequest], **changes: object) -> list[Record]:
    return served(mesh(**changes), asked)


def test_a_clock_that_changes_nothing_changes_nothing() -> None:
    asked = [request(n, 0.05 * n, 50 + 37 * n % 600, 1 + 13 * n % 90, n % 7 or None) for n in range(60)]
    plain = answers(asked)
    timed = answers(asked, slow=(SlowPhase("p0", 0, inf, 1), SlowPhase("d0", 0, inf, 1)))
    for one, other in zip(plain, timed, strict=True):
        for name in ("prefill_start_s", "first_token_s", "kv_end_s", "finish_s", "tbt_s", "mean_tbt_s"):
            expected = pytest.approx(getattr(one, name), rel=1e-9, nan_ok=True)
            assert getattr(other, name) == expected, (one.index, name)


def test_a_slow_prefill_and_a_slow_decode_take_so_much_longer() -> None:
    asked = [request(0, 1.0, 160, 21)]
    (one,) = answers(asked, slow=(SlowPhase("p0", 0, 5, 3), SlowPhase("d0", 0, 5, 2)))
    assert one.ttft_s == pytest.approx(3 * TIMES.prefill_s([(160, 0)]))
    joined = one.kv_end_s
    usual = sum(TIMES.decode_s(1, 160 + n) for n in range(20))
    assert one.finish_s - joined == pytest.approx(2 * usual, rel=1e-6)


def test_who_is_frozen_goes_on_where_it_stood() -> None:
    (one,) = answers([request(0, 0.0, 160, 21)], freeze=(FreezePhase("p0", 0.01, 3.01),))
    assert one.ttft_s == pytest.approx(3 + TIMES.prefill_s([(160, 0)]))
    assert one.outcome == DONE


def test_a_frozen_instance_gets_nothing_once_it_is_silent() -> None:
    asked = [request(n, 0.1 * n, 32, 2) for n in range(120)]
    records = answers(asked, prefills=2, decodes=2, freeze=(FreezePhase("p0", 3.0, 8.0),), heartbeat_s=0.2)
    late = [one for one in records if 3.0 + 1.5 + 0.3 < one.at_s < 8.0]
    assert {one.prefill for one in late} == {"p1"}
    stuck = [one for one in records if one.prefill == "p0" and 3.0 <= one.at_s < 8.0]
    assert stuck and all(one.first_token_s > 8.0 for one in stuck)


def test_those_that_a_long_freeze_has_are_placed_again() -> None:
    asked = [request(n, 0.1 * n, 32, 2) for n in range(60)]
    frozen = (FreezePhase("p0", 3.0, 40.0),)
    records = answers(asked, prefills=2, decodes=2, freeze=frozen, heartbeat_s=0.2, lost_after_s=5.0)
    assert {one.outcome for one in records} == {DONE}
    moved = [one for one in records if one.first_token_s > 8.0]
    assert moved and {one.prefill for one in moved} == {"p1"}


def test_an_answer_goes_on_elsewhere_when_its_decode_instance_dies() -> None:
    asked = [request(0, 0.0, 160, 100)]
    usual = answers(asked, decodes=2)[0]
    when = usual.first_token_s + (usual.finish_s - usual.first_token_s) / 2
    (one,) = answers(asked, decodes=2, kill=(KillEvent(usual.decode, when),))
    assert one.decode != usual.decode
    assert (one.outcome, one.ttft_s) == (DONE, usual.ttft_s)
    assert usual.finish_s < one.finish_s < usual.finish_s + 0.2, "it makes what was left, and not all of it again"


def test_a_prompt_is_computed_elsewhere_when_its_prefill_instance_dies() -> None:
    asked = [request(0, 0.0, 480, 5)]
    usual = answers(asked, prefills=2)[0]
    (one,) = answers(asked, prefills=2, kill=(KillEvent(usual.prefill, usual.ttft_s / 2),))
    assert one.prefill != usual.prefill
    assert one.ttft_s == pytest.approx(1.5 * usual.ttft_s, rel=0.01)


def test_a_newcomer_has_the_name_and_none_of_the_blocks() -> None:
    asked = [request(0, 0.0, 320, 2, family=1), request(1, 4.0, 336, 2, family=1), request(2, 6.0, 336, 2, family=1)]
    kept = answers(asked)
    lost = answers(asked, kill=(KillEvent("p0", 2.0, 1.0), KillEvent("d0", 2.0, 1.0)))
    assert [one.cached_tokens for one in kept] == [0, 320, 320]
    assert [one.cached_tokens for one in lost] == [0, 0, 320]


def test_requests_wait_for_the_only_one_to_come_back_and_fail_in_the_end() -> None:
    asked = [request(0, 3.0, 32, 2)]
    (back,) = answers(asked, kill=(KillEvent("p0", 2.0, 6.0),))
    assert (back.outcome, 8.0 < back.first_token_s < 9.0) == (DONE, True)
    (gone,) = answers(asked, kill=(KillEvent("p0", 2.0),), patience_s=5.0)
    assert (gone.outcome, gone.reason) == (REFUSED, "no_instance")


def test_who_joins_is_used_and_who_leaves_ends_what_it_has() -> None:
    asked = [request(n, 0.05 * n, 160, 10) for n in range(200)]
    records = answers(asked, prefills=2, decodes=2, join=(JoinEvent("p1", 3.0),), leave=(LeaveEvent("d0", 6.0),))
    assert {one.outcome for one in records} == {DONE}
    assert {one.prefill for one in records if one.at_s < 3.0} == {"p0"}
    assert "p1" in {one.prefill for one in records if one.at_s > 3.0}
    assert "d0" in {one.decode for one in records if one.at_s < 6.0}
    assert {one.decode for one in records if one.at_s > 7.1} == {"d1"}  # a heartbeat later


# ── true of any ───────────────────────────────────────────────────────────────────────────────────

NAMES = st.sampled_from(("p0", "p1", "p2", "d0", "d1"))
MOMENTS = st.floats(0, 4)
ASKED = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 700), st.integers(1, 120), st.one_of(st.none(), st.integers(0, 3))),
    min_size=1,
    max_size=25,
)


@st.composite
def surprises(draw: st.DrawFn) -> dict[str, object]:
    """Whatever happens; one of each pool is left alone."""
    free = st.sampled_from(("p1", "p2", "d1"))
    kills = [KillEvent(draw(free), draw(MOMENTS), draw(st.sampled_from((0.0, 0.5, 2.0, inf)))) for _ in range(2)]
    freezes = [FreezePhase(draw(NAMES), at, at + draw(st.floats(0.1, 3))) for at in draw(st.lists(MOMENTS, max_size=2))]
    slow = [SlowPhase(draw(NAMES), at, at + 2, draw(st.floats(0.3, 6))) for at in draw(st.lists(MOMENTS, max_size=2))]
    return {
        "kill": kills,
        "freeze": freezes,
        "slow": slow,
        "join": [JoinEvent("p2", draw(MOMENTS))] if draw(st.booleans()) else [],
        "leave": [LeaveEvent(draw(st.sampled_from(("p1", "d1"))), draw(MOMENTS))] if draw(st.booleans()) else [],
        "noise": draw(st.sampled_from((0.0, 0.3))),
        "spread": draw(st.sampled_from((0.0, 0.2))),
        "profiled": draw(st.booleans()),
        "lost_after_s": draw(st.sampled_from((0.5, 20.0))),
        "seed": draw(st.integers(0, 99)),
        "heartbeat_s": 0.2,
    }


HOST = HostModel(cores=2.0, door_s=0.001, between_s=0.0005, turn_s=0.001, handoff_s=0.002)


@settings(max_examples=20, deadline=None)
@given(ASKED, surprises(), st.sampled_from((64, 256)), st.booleans(), st.sampled_from((None, HOST)))
def test_everybody_ends_once_and_everything_comes_back_whatever_happens(
    asked: list[tuple[float, int, int, int | None]],
    changes: dict[str, object],
    pages: int,
    with_ssd: bool,
    host: HostModel | None,
) -> None:
    """`run` itself asserts that all pages, extents and promises came back, at those that live."""
    spec = node(
        kv_tokens=pages * BLOCK,
        dram_tokens=90 * BLOCK,
        nic_bytes_per_s=3e6,
        ssd_tokens=1000 * BLOCK if with_ssd else 0,
        ssd_read_bytes_per_s=2e6,
    )
    requests = [request(n, *rest) for n, rest in enumerate(sorted(asked, key=lambda one: one[0]))]
    small = {"chunk_tokens": 128, "batch_tokens": 128, "long_tokens": 128, "load_bytes_per_s": 5e6}
    config = mesh(3, 2, spec, host=host, **small, **changes)
    records = served(config, requests)
    assert [one.index for one in records] == [one.index for one in requests]
    for record, one in zip(records, requests, strict=True):
        assert record.outcome in (DONE, FAILED, REFUSED)
        assert record.outcome == DONE or record.reason
        if record.outcome == DONE:
            assert record.output_tokens == one.output_tokens
            assert one.at_s < record.first_token_s <= record.finish_s
            assert isnan(record.tbt_s) or record.tbt_s >= record.mean_tbt_s * (1 - 1e-9) > 0
        else:
            assert record.reason in ("decode", "out of KV memory"), "there is always somebody to serve it"
    again = served(config, requests)
    assert list(map(repr, records)) == list(map(repr, again))


# ── what is noticed ───────────────────────────────────────────────────────────────────────────────


def test_when_a_change_was_noticed_and_when_it_was_forgiven() -> None:
    every = [n / 10 for n in range(1000)]  # placements, ten a second
    odd = {at: n % 2 == 1 for n, at in enumerate(every)}

    def told(taken: dict[float, bool], able: float = 0.25) -> tuple[float, float]:
        placed = [(at, "p1" if taken[at] else "p0") for at in every]
        found = noticed("slow", "p1", 20.0, 60.0, able, 0.5, placed, 100.0)
        return found.noticed_s, found.back_s

    late = {at: odd[at] and not 25 <= at < 60 for at in every}
    assert told(late) == (pytest.approx(3, abs=0.6), 0.0)  # four strays and a quarter are allowed
    assert told(late, able=0.0) == (pytest.approx(5, abs=0.2), 0.0)
    never = {at: odd[at] for at in every}
    assert told(never)[0] > 35
    assert isnan(told(never, able=0.0)[0]) or told(never, able=0.0)[0] > 39
    slow_to_return = {at: odd[at] and not 25 <= at < 70 for at in every}
    assert told(slow_to_return)[1] == pytest.approx(10 - 3, abs=1)  # 40% of the 15 s that begin then
    assert math.isnan(told({at: odd[at] and at < 25 for at in every})[1])


# ── what cannot be ────────────────────────────────────────────────────────────────────────────────

SECONDS = st.integers(0, 1000).map(float)
SOME = {
    "slow": st.builds(SlowPhase, NAMES, SECONDS, SECONDS | st.just(inf), SECONDS),
    "freeze": st.builds(FreezePhase, NAMES, SECONDS, SECONDS),
    "kill": st.builds(KillEvent, NAMES, SECONDS, SECONDS | st.just(inf)),
    "join": st.builds(JoinEvent, NAMES, SECONDS),
    "leave": st.builds(LeaveEvent, NAMES, SECONDS),
}


@given(st.data(), st.sampled_from(sorted(SOME)))
def test_what_is_said_of_a_change_is_what_it_is_read_from(data: st.DataObject, name: str) -> None:
    some = data.draw(st.lists(SOME[name], max_size=3))
    assert changes_of(name, ",".join(map(str, some))) == tuple(some)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"noise": -0.1}, "noise=-0.1: must be not negative"),
        ({"noise": math.nan}, "noise=nan: must be"),
        ({"spread": 4.0}, "spread=4.0: must be at most 3"),
        ({"slow": [SlowPhase("p0", 3, 2, 3)]}, "slow=p0:3-2:3: must be from 0 s on, until later"),
        ({"slow": [SlowPhase("p0", 3, 5, 0)]}, "slow=p0:3-5:0: must be .* times above 0"),
        ({"freeze": [FreezePhase("p0", 3, inf)]}, "freeze=p0:3-: must be"),
        ({"kill": [KillEvent("p0", -1)]}, "kill=p0:-1: must be from 0 s on"),
        ({"kill": [KillEvent("c0", 1)]}, "kill=c0:1: must be of one of d0"),
        ({"join": [JoinEvent("p0", 1)]}, "join=p0:1: must be after another prefill instance"),
        ({"leave": [LeaveEvent("p7", 1)]}, "leave=p7:1: must be of one of d0"),
    ],
)
def test_what_cannot_happen_is_named(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        mesh(**changes)


def test_coupled_instances_stay_as_they_are() -> None:
    with pytest.raises(ConfigError, match=r"noise=0.1: must be left alone in mode coupled-chunked"):
        coupled(MeshMode.COUPLED_CHUNKED, noise=0.1)


def test_no_column_of_a_table_tells_more_than_before() -> None:
    from kvmesh.sim.report.tables import COLUMNS

    assert not {"waits", "left_tokens"} & set(COLUMNS) and "ttft_s" in COLUMNS
    assert replace(SimConfig(prefill=(node(),), decode=(node(),))).changes is False
