"""Fitted at once from what a mesh reported, saved, read again."""

import json
import random

import pytest

from kvmesh.errors import ConfigError
from kvmesh.kvcache.tiers import Tier
from kvmesh.services.conductor.costs import models as cost
from kvmesh.services.conductor.costs.file import Costs, fit_all, fit_decode_step, fit_pull, fit_tier, fit_transfer
from kvmesh.services.conductor.costs.models import Coefficients
from kvmesh.services.conductor.domain import DecodeSample, PrefillSample

PREFILL = Coefficients(0.02, 2e-4, 3e-8)
STEP = Coefficients(0.012, 1e-5, 2e-7, 4e-4, 32)
RNG = random.Random(11)


def prefills(count: int) -> list[PrefillSample]:
    """Of an instance that sends at 2 GB/s and pulls at 1 GB/s after 5 ms."""
    found = []
    for i in range(count):
        computed, cached, steps = RNG.randint(16, 4000), RNG.choice([0, 2000]), RNG.randint(1, 6)
        seconds = PREFILL.at(computed, cost.attention_pairs(computed, cached), steps) * RNG.gauss(1, 0.03)
        sent, pulled = computed * 10_000, cached * 10_000
        told = (f"r{i}", computed, cached, seconds, sent, sent / 2e9, cached, pulled, 0.005 + pulled / 1e9)
        found.append(PrefillSample(*told, steps=steps))
    return found


def steps(count: int) -> list[DecodeSample]:
    found = []
    for _ in range(count):
        rows = RNG.randint(1, 96)
        context = rows * RNG.randint(50, 3000)
        found.append(DecodeSample(rows, context, STEP.at(rows, context) * RNG.gauss(1, 0.03)))
    return found


def test_a_live_run_gives_back_what_it_was_made_with() -> None:
    found = fit_all(prefills(800), steps(1500))
    for computed, cached, in_steps in ((100, 0, 1), (3000, 0, 6), (500, 2000, 1)):
        pairs = cost.attention_pairs(computed, cached)
        assert found.prefill.at(computed, pairs, in_steps) == pytest.approx(
            PREFILL.at(computed, pairs, in_steps), rel=0.04
        )
    for rows in (1, 16, 32, 64, 96):
        assert found.decode_step.at(rows, rows * 1000) == pytest.approx(STEP.at(rows, rows * 1000), rel=0.05)
    assert found.transfer.b == pytest.approx(1 / 2e9, rel=0.01)
    assert found.pull.at(20_000_000, 0) == pytest.approx(0.025, rel=0.05)


def test_outliers_are_bounded_in_a_file_too() -> None:
    frozen = [
        DecodeSample(s.batch, s.context_tokens, s.duration_s * (30 if i % 12 == 0 else 1))
        for i, s in enumerate(steps(600))
    ]
    assert fit_decode_step(frozen).at(16, 16_000) == pytest.approx(STEP.at(16, 16_000), rel=0.08)
    stuck = [PrefillSample(f"r{i}", 1, 0, 0.1, 10_000_000, 9.0 if i % 20 == 0 else 0.01) for i in range(200)]
    assert fit_transfer(stuck).b == pytest.approx(1e-9, rel=0.01)


def test_pulls_and_reads_are_fitted_alike() -> None:
    pulls = [
        (nbytes, holders, 0.004 + nbytes / 3e9 + 0.002 * (holders - 1))
        for nbytes in (10**6, 10**8, 10**9)
        for holders in (1, 3)
    ]
    assert fit_pull(pulls * 10).at(5e8, 2) == pytest.approx(0.004 + 5e8 / 3e9 + 0.004, rel=0.03)
    reads = [(nbytes, 0.001 + nbytes / 2e9) for nbytes in (10**5, 10**6, 10**8)]
    assert fit_tier(reads * 10, cost.TIER_PRIORS[Tier.SSD]).at(1e7, 0) == pytest.approx(0.001 + 1e7 / 2e9, rel=0.05)


def test_bytes_of_a_pull_are_never_free() -> None:
    """Small pulls, whose time is nearly all overhead and scatters: least squares see no slope, or one that falls."""
    rng = random.Random(4)
    pulls = [
        (nbytes, 1, 0.01 * rng.lognormvariate(0, 0.2) * slower)
        for nbytes, slower in ((1 << 20, 1.5), (2 << 20, 1.0), (4 << 20, 1.0))
        for _ in range(20)
    ]
    found = fit_pull(pulls)
    assert 0 < found.b <= cost.PULL_PRIOR.b
    assert found.at(2 << 20, 0) == pytest.approx(0.011, rel=0.3)
    assert all(found.b * nbytes <= seconds for nbytes, _, seconds in pulls), "no pull was faster than its bytes"
    assert fit_pull([(1 << 30, 1, 0.01)] * 40).b <= 0.01 / (1 << 30), "a fast one shows that a byte takes less"


def test_nothing_measured_is_the_prior() -> None:
    assert fit_all([], []) == Costs()


def test_a_file_is_read_as_it_was_written() -> None:
    found = fit_all(prefills(50), steps(50))
    assert Costs.of_json(json.loads(json.dumps(found.to_json()))) == found
    assert Costs.of_json({"kvmesh_costs": 1, "prefill": {"a": 1, "b": 2, "c": 3}}).prefill == Coefficients(1, 2, 3)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({}, "kvmesh_costs=None: must be 1"),
        ({"kvmesh_costs": 1, "prefil": {}}, "prefil: no such part"),
        ({"kvmesh_costs": 1, "pull": 3}, "pull=3: must be an object"),
        ({"kvmesh_costs": 1, "pull": {"a": 1, "b": 1}}, "pull.c=None: must be a number"),
        ({"kvmesh_costs": 1, "pull": {"a": -1, "b": 1, "c": 0}}, "pull.a=-1: must be a number, at least 0"),
        ({"kvmesh_costs": 1, "pull": {"a": 1, "b": 1, "c": 0, "e": 0}}, "pull.e: no such coefficient"),
        ({"kvmesh_costs": 1, "pull": {"a": True, "b": 1, "c": 0}}, "pull.a=True"),
        ({"kvmesh_costs": 1, "pull": {"a": float("nan"), "b": 1, "c": 0}}, "pull.a=nan"),
    ],
)
def test_what_is_wrong_is_named(told: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Costs.of_json(told)
    assert text in str(caught.value)
