"""Lines by size in simulated meshes: short prompts first, long ones not forgotten, admission that knows who passes."""

from __future__ import annotations

import random

import pytest

from kvmesh.services.conductor.settings import AdmissionSettings, Mode, Settings, SizeSettings
from kvmesh.sim.config import SimConfig
from kvmesh.sim.report.records import DONE, Record
from kvmesh.sim.run import run
from kvmesh.sim.workloads.workload import SimRequest
from tests.support.sim.fleets import BLOCK, mesh
from tests.support.sim.fleets import request as one_request

WEIGHT = 8.0


def workload(count: int = 400, per_s: float = 14.0) -> list[SimRequest]:
    """Sizes that vary a lot: one in eight is twenty times as long. More than two instances can compute."""
    rng, at_s, found = random.Random(3), 0.0, list[SimRequest]()
    for index in range(count):
        at_s += rng.expovariate(per_s)
        tokens = rng.randint(2000, 4000) if rng.random() < 0.125 else rng.randint(40, 300)
        found.append(one_request(index, at_s, tokens - tokens % BLOCK + 1, 2, family=1000 + index))
    return found


def served(config: SimConfig, requests: list[SimRequest]) -> list[Record]:
    records: list[Record] = []
    run(config, requests, sink=records.append)
    return records


def mean_s(records: list[Record]) -> float:
    done = [one.ttft_s for one in records if one.outcome == DONE]
    return sum(done) / len(done)


def test_a_short_prompt_passes_a_long_one_and_a_long_one_passes_in_the_end() -> None:
    long, short = one_request(0, 0.0, 3200, 1), one_request(1, 0.01, 160, 1, family=7)
    by_size = {r.index: r for r in served(mesh(size_weight=WEIGHT), [long, short])}
    by_arrival = {r.index: r for r in served(mesh(size_weight=1e-18), [long, short])}
    assert by_size[1].first_token_s < by_size[0].first_token_s
    assert by_arrival[1].first_token_s > by_arrival[0].first_token_s
    stream = [one_request(n, 0.01 * n, 160, 1, family=n) for n in range(1, 400)]  # more than there is time for
    records = {r.index: r for r in served(mesh(size_weight=WEIGHT), [long, *stream])}
    assert records[0].first_token_s < max(r.first_token_s for r in records.values()), "it is not the last one"


@pytest.mark.slow
def test_the_mean_is_lower_than_by_arrival_and_nothing_is_lost() -> None:
    requests = workload()
    by_arrival = served(mesh(2, 2, size_weight=1e-18), requests)
    by_size = served(mesh(2, 2, size_weight=WEIGHT), requests)
    assert len(by_size) == len(by_arrival) == len(requests)
    assert mean_s(by_size) < 0.8 * mean_s(by_arrival)


@pytest.mark.slow
def test_admission_that_foresees_overtaking_takes_fewer_that_will_be_late() -> None:
    requests = workload(600, 40.0)
    late = []
    for share in (0.0, 1.0):
        settings = Settings(
            slo_ttft_s=5.0,
            slo_tbt_s=10.0,
            admission=AdmissionSettings(mode=Mode.PREDICTED),
            sizes=SizeSettings(overtaking=share),
        )
        records = served(mesh(2, 2, size_weight=WEIGHT, conductor=settings), requests)
        taken = [one for one in records if one.outcome == DONE]
        late.append(sum(one.ttft_s > 5.0 for one in taken) / len(taken))
    assert late[1] < 0.75 * late[0], late
