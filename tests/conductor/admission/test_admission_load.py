"""The two pools under three times the load they can take: judged as they are, they swing against each other; judged as
they will be, they do not. The real brain in a closed loop."""

from __future__ import annotations

import statistics

import pytest

from kvmesh.services.conductor.settings import AdmissionSettings, Mode
from tests.support.conductor.driven import STEP_S, Driven

SECONDS, WARM_S = 120.0, 40.0
PROMPT, OUTPUT = 16_000, 200
TBT_SLO_S = 0.1  # of 26 rows at each of two instances
RATE = 10.0


@pytest.fixture(scope="module")
def driven() -> dict[Mode, Driven]:
    return {mode: overloaded(mode) for mode in (Mode.BASELINE, Mode.EARLY, Mode.PREDICTED)}


def overloaded(mode: Mode) -> Driven:
    """Poisson arrivals, answers of exponential length, four prefill and two decode instances."""
    loop = Driven(4, 2, seed=2, slo_ttft_s=30.0, slo_tbt_s=TBT_SLO_S, admission=AdmissionSettings(mode))
    next_s = 0.0
    while loop.steps * STEP_S < SECONDS:
        while next_s <= loop.steps * STEP_S:
            next_s += loop.rng.expovariate(RATE)
            loop.ask(PROMPT, max(1, round(loop.rng.expovariate(1 / OUTPUT))))
        loop.step()
    return loop


def swings(loop: Driven) -> float:
    """Standard deviation of the rows in all batches, over their mean."""
    rows = loop.shown.rows[round(WARM_S / STEP_S) :]
    return statistics.pstdev(rows) / statistics.mean(rows)


def late_share(loop: Driven) -> float:
    """Of the time, that a batch is well over its SLO."""
    tbts = loop.shown.tbt_s[2 * round(WARM_S / STEP_S) :]
    return sum(tbt > 1.1 * TBT_SLO_S for tbt in tbts) / len(tbts)


@pytest.mark.slow
def test_judged_as_it_is_the_load_swings_and_as_it_will_be_it_does_not(driven: dict[Mode, Driven]) -> None:
    assert swings(driven[Mode.EARLY]) > 1.8 * swings(driven[Mode.PREDICTED])
    assert swings(driven[Mode.PREDICTED]) < 0.1


@pytest.mark.slow
def test_judged_as_it_will_be_rows_keep_their_slo(driven: dict[Mode, Driven]) -> None:
    assert late_share(driven[Mode.PREDICTED]) < 0.05
    assert late_share(driven[Mode.EARLY]) > 0.35
    assert late_share(driven[Mode.BASELINE]) > 0.6


@pytest.mark.slow
def test_the_steady_pool_finishes_as_much(driven: dict[Mode, Driven]) -> None:
    assert len(driven[Mode.PREDICTED].done) > 0.9 * len(driven[Mode.EARLY].done)


@pytest.mark.slow
def test_no_prefill_is_paid_for_what_is_refused(driven: dict[Mode, Driven]) -> None:
    """All that was computed is decoded: nothing but what is still on its way."""
    loop = driven[Mode.PREDICTED]
    placed = loop.brain.requests - len(loop.refused)
    waiting = sum(len(line) for line in loop.lines.values())
    running = sum(len(batch) for batch in loop.batches.values())
    assert placed == len(loop.done) + running + waiting
    assert len(loop.refused) > 0.4 * loop.brain.requests
