"""The pure parts of `benchmarks.fidelity`: live and simulated requests are measured by the same definitions."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from benchmarks.equal_cores import TRACE
from benchmarks.fidelity_live import BLOCK_TOKENS, slices
from benchmarks.fidelity_predict import FIGURES, SHARES, compared, of_outcomes, of_records, seen_by_client
from kvmesh.cli.load.load import LoadOutcome
from kvmesh.sim.fitting.calibrate import Targets
from kvmesh.sim.report.records import DONE, REFUSED, Record
from kvmesh.sim.rows import Row
from kvmesh.sim.workloads.trace import reachable


def outcomes(count: int) -> list[LoadOutcome]:
    rng = random.Random(1)
    found = []
    for index in range(count):
        gaps = [rng.expovariate(100) for _ in range(rng.randint(0, 40))]
        found.append(LoadOutcome(index, 0.0, ttft_s=rng.expovariate(4), gaps=gaps, completion_tokens=len(gaps) + 1))
    return found


def test_a_simulated_request_with_the_same_times_has_the_same_figures() -> None:
    live = outcomes(60)
    simulated = []
    for one in live:
        row = Row(1, len(one.gaps), 0.0)
        if one.gaps:
            row.leave(one.gaps[0], np.array(one.gaps[1:]))
        record = Record(one.index, "r", 0.0, 1, one.completion_tokens, outcome=DONE, ttft_s=one.ttft_s)
        record.tbt_s, record.mean_tbt_s = row.tbt()
        simulated.append(record)
    assert of_records(simulated) == pytest.approx(of_outcomes(live))
    refused = Record(99, "r", 0.0, 1, 1, outcome=REFUSED, ttft_s=99.0)
    failed = LoadOutcome(99, 0.0, code="broken_off", ttft_s=99.0, gaps=[99.0], completion_tokens=2)
    assert of_records([*simulated, refused]) == pytest.approx(of_outcomes([*live, failed])), (
        "of what was answered alone"
    )


def test_rows_tell_error_and_spread() -> None:
    def all_of(value: float) -> dict[tuple[str, int], float]:
        return dict.fromkeys(FIGURES, value)

    (row, *_) = compared([all_of(1.0), all_of(1.3), all_of(1.1)], [all_of(1.2), all_of(1.25), all_of(9.0)])
    assert (row.live_s, row.least_s, row.most_s, row.predicted_s) == (1.1, 1.0, 1.3, 1.25)
    assert row.error == pytest.approx(0.136, abs=1e-3) and row.kept and row.inside
    (row, *_) = compared([all_of(1.0)], [all_of(1.16)])
    assert not row.kept and not row.inside
    (row, *_) = compared([all_of(1.0)], [all_of(0.84)])
    assert not row.kept


def test_the_client_takes_the_place_of_decode_in_what_is_fitted_to() -> None:
    live = [LoadOutcome(n, 0.0, ttft_s=0.2, gaps=[0.03] + [0.01] * n, completion_tokens=n + 2) for n in range(30)]
    told = seen_by_client(Targets(1, 1, 1, 1, 1, prefill_s=0.5, step_s=0.004, decode_spread=0.7), live)
    assert (told.ttft_s, told.ttft_deviation_s) == pytest.approx((0.2, 0.0))
    assert (told.interval_s, told.first_s) == pytest.approx((0.01, 0.02))
    assert (told.prefill_s, told.step_s, told.decode_spread) == (0.5, 0.004, 0.7)
    measured = of_outcomes(live)
    assert told.ttft_at_s == pytest.approx([measured["TTFT", share] for share in SHARES])
    assert told.tbt_at_s == pytest.approx([measured["TBT", share] for share in SHARES])


def test_slices_follow_each_other_at_the_rate_that_is_asked_for() -> None:
    first, second = slices(TRACE, 40, 5.0, scale=Fraction(1, 16), max_output=64, context=2048, vocab=2040)
    for part in (first, second):
        assert part.times[0] == 0.0 and part.times[-1] == pytest.approx(39 / 5)
        assert list(part.times) == sorted(part.times)
    assert first.made[-1].request.index < second.made[0].request.index
    found = [set(one.keys) for one in first.requests()]
    hits, seen = 0, set[bytes]()
    for request, keys, prompt in zip(first.requests(), found, first.prompts, strict=True):
        assert len(request.keys) == len(prompt) // BLOCK_TOKENS
        usable = request.keys[: (len(prompt) - 1) // BLOCK_TOKENS]
        hits += next((n for n, key in enumerate(usable) if key not in seen), len(usable))
        seen |= keys
    assert hits * BLOCK_TOKENS == reachable(first.prompts, BLOCK_TOKENS).hit_tokens > 0
    with pytest.raises(SystemExit, match="requests=999"):
        slices(TRACE, 999, 5.0, scale=Fraction(1, 16), max_output=64, context=2048, vocab=2040)


def test_percentiles_are_those_of_replay() -> None:
    found = of_outcomes([LoadOutcome(n, 0.0, ttft_s=float(n)) for n in range(101)] + [outcomes(2)[1]])
    assert found["TTFT", 90] == pytest.approx(89.9, abs=0.2) and not math.isnan(found["TBT", 50])
