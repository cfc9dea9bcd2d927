"""A machine that is known is found again, from nothing but what its conductor has logged."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean

import pytest

from kvmesh.errors import ConfigError
from kvmesh.services.conductor.costs.file import Costs
from kvmesh.services.conductor.costs.fit import Coefficients
from kvmesh.sim.config import SimConfig
from kvmesh.sim.fitting.calibrate import calibrate, of_intervals, residuals_of, targets_of
from kvmesh.sim.fitting.mesh_fit import MeshFit, config_of, costs_of
from kvmesh.sim.fitting.observed import observe, pooled
from kvmesh.sim.hardware.times import Fitted
from kvmesh.sim.host import HostModel, scattered
from kvmesh.sim.report.records import Record
from kvmesh.sim.run import run
from kvmesh.sim.workloads.workload import SimRequest, key
from tests.support.sim.fleets import BLOCK, mesh, node
from tests.support.sim.recorded import record

ALONE = Costs(prefill=Coefficients(0.004, 1e-4, 0.0), decode_step=Coefficients(0.003, 3e-4, 0.0))
SCATTER = tuple(math.exp(0.3 * (n / 10 - 1)) for n in range(21))
HOST = HostModel(
    cores=2, door_s=0.004, between_s=0.001, handoff_s=0.006, prefill_residuals=SCATTER, decode_residuals=SCATTER
)


def requests(count: int, seed: int, per_s: float = 9.0) -> list[SimRequest]:
    """Bursts of one to six; nobody shares a block."""
    rng, at_s, found = random.Random(seed), 0.0, list[SimRequest]()
    while len(found) < count:
        burst = rng.randint(1, 6)
        at_s += rng.expovariate(per_s / 3.5)
        for _ in range(burst):
            index, tokens = len(found), rng.randint(40, 1200)
            keys = tuple(key(index * 1000 + n) for n in range(tokens // BLOCK))
            found.append(SimRequest(index, at_s, tokens, rng.randint(4, 30), keys))
    return found[:count]


def machine() -> SimConfig:
    spec = node(times=Fitted(ALONE), kv_tokens=1 << 16, dram_tokens=1 << 16, nic_bytes_per_s=4e9)
    return mesh(2, 2, spec, host=HOST, heartbeat_s=0.2, announce_s=0.05)


def quantiles(records: list[Record]) -> list[float]:
    found = []
    for values in (sorted(one.ttft_s for one in records), sorted(one.tbt_s for one in records)):
        found += [values[int(share * (len(values) - 1))] for share in (0.5, 0.9)]
    return found


@pytest.mark.long
def test_a_known_machine_is_found_again_and_predicts_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    live, served = machine(), requests(70, seed=1)
    lines, _ = record(monkeypatch, live, served)
    observed = observe(lines, since_s=0.0)
    costs = costs_of(observed)
    residuals = residuals_of(observed, costs)
    start = config_of(observed, MeshFit(costs, HostModel(cores=2)), hop_s=0.0, layers=4)
    fit = calibrate(start, served, targets_of(observed, residuals), residuals, rounds=2, passes=1)
    assert fit.found.off(fit.targets) < 0.1
    measured, simulated = fit.targets.measured(), fit.found.measured()
    for name in ("ttft_at_s[0]", "ttft_at_s[1]", "tbt_at_s[0]", "tbt_at_s[1]"):
        assert simulated[name] == pytest.approx(measured[name], rel=0.2), name
    # What is reported was stretched by sharing: alone is less than that.
    assert fit.host.prefill_alone < 0.95 and fit.host.decode_alone < 0.95
    other = requests(90, seed=2)
    real, predicted, naive = list[Record](), list[Record](), list[Record]()
    for seed in range(2):
        run(replace(live, seed=seed + 10), other, sink=real.append)
        run(replace(start, host=fit.host, seed=seed), other, sink=predicted.append)
    run(replace(start, host=None), other, sink=naive.append)
    errors = [abs(one / want - 1) for one, want in zip(quantiles(predicted), quantiles(real), strict=True)]
    naive_errors = [abs(one / want - 1) for one, want in zip(quantiles(naive), quantiles(real), strict=True)]
    assert max(errors) < 0.15, errors
    assert max(naive_errors) > 0.15, "the fit was not needed: the test shows nothing"


def test_what_a_log_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    served = requests(30, seed=3)
    lines, records = record(monkeypatch, machine(), served)
    observed = observe(lines)
    assert {name: one.role.value for name, one in observed.instances.items()} == {
        "p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode",
    }  # fmt: skip
    assert observed.settings.slo_ttft_s == machine().conductor.slo_ttft_s
    again = {(one.input_tokens, one.output_tokens, one.keys) for one in observed.requests()}
    known = set(observed.outcomes)
    assert again <= {(one.input_tokens, one.output_tokens, one.keys) for one in served} and len(known) > 20
    by_name = {one.request_id: one for one in records}
    for name, outcome in observed.outcomes.items():
        assert outcome.ttft_s == pytest.approx(by_name[name].ttft_s)
    late = observe(lines, since_s=served[10].at_s + 0.2)
    assert set(late.asked) < set(observed.asked) and set(late.prefills) <= set(late.asked)
    config = config_of(observed, MeshFit(costs_of(observed)))
    assert config.prefill[0].kv_tokens == 1 << 16 and config.block_tokens == BLOCK


def test_runs_of_the_same_mesh_are_pooled_for_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    first = observe(record(monkeypatch, machine(), requests(40, seed=6))[0])
    second = observe(
        line.replace(b'"request_id":"', b'"request_id":"s')
        for line in record(monkeypatch, machine(), requests(50, seed=7))[0]
    )
    both = pooled([first, second])
    assert both.rows == [*first.rows, *second.rows] and both.instances == first.instances
    assert both.prefills == first.prefills | second.prefills and len(both.prefills) > len(second.prefills)
    targets = [targets_of(one, residuals_of(one, costs_of(one))) for one in (first, second, both)]
    counts = [len(one.done()) for one in (first, second)]
    assert sum(counts) == len(both.done())
    mean = sum(one.ttft_s * count for one, count in zip(targets, counts, strict=False)) / sum(counts)
    assert targets[2].ttft_s == pytest.approx(mean)
    assert not set(first.asked) & set(second.asked) and first.rows == pooled([first]).rows
    with pytest.raises(ConfigError, match="is in two of them"):
        pooled([first, first])


def test_a_broken_last_line_is_passed_over_and_an_empty_log_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, _ = record(monkeypatch, machine(), requests(5, seed=4))
    assert observe([*lines[:-1], lines[-1][:20]]).instances
    with pytest.raises(ConfigError, match="is empty"):
        observe([])
    with pytest.raises(ConfigError, match="0 prompts: at least 20"):
        residuals_of(observe(lines[:3]), ALONE)


def test_the_first_interval_is_told_apart_from_the_others() -> None:
    rng = random.Random(5)
    told = [(n, 0.008 + 0.02 / n + rng.gauss(0, 0.0002)) for n in (rng.randint(1, 60) for _ in range(300))]
    interval, first = of_intervals(told)
    assert interval == pytest.approx(0.008, rel=0.05) and first == pytest.approx(0.02, rel=0.05)
    assert of_intervals([(10, 0.01)] * 5) == pytest.approx((0.01, 0.0)), "all alike: nothing can be told apart"


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_scatter_keeps_the_mean(power: float) -> None:
    found = scattered([0.5, 0.8, 1.0, 1.5, 4.0], power)
    assert fmean(found) == pytest.approx(1.0) and list(found) == sorted(found)
    assert (found[-1] / found[0]) == pytest.approx(8**power)
