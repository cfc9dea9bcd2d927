"""All figures of a host at once, from how measurements answer to them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from kvmesh.sim.fitting.surface import FAR, FIGURES, LEAST_STEPS, RUNS, SCATTERS, STEP, better, design, moved
from kvmesh.sim.host import HostModel

WIDE = tuple(math.exp(0.2 * (n - 2)) for n in range(5))
HOST = HostModel(
    cores=2, prefill_alone=0.8, decode_alone=0.9, door_s=0.01, rest_s=0.01, between_s=0.004, turn_s=0.004,
    handoff_s=0.02, prefill_residuals=WIDE, decode_residuals=WIDE,
)  # fmt: skip


def width(residuals: tuple[float, ...]) -> float:
    return math.log(residuals[-1] / residuals[0])


def measured(host: HostModel) -> dict[str, float]:
    """Each figure moves several, none of them alone."""
    values = [getattr(host, name) for name in LEAST_STEPS] + [width(getattr(host, name)) for name in SCATTERS]
    return {f"m{at}": one**0.8 * math.prod(values) ** 0.05 for at, one in enumerate(values)}


def test_every_two_columns_of_the_design_are_orthogonal_and_runs_have_mirror_images() -> None:
    steps = design()
    assert steps.shape == (RUNS, len(FIGURES)) and set(steps.ravel()) == {-1.0, 1.0}
    assert (steps.T @ steps == RUNS * np.eye(len(FIGURES))).all()
    rows = {tuple(row) for row in steps}
    assert len(rows) == RUNS and all(tuple(-np.array(row)) in rows for row in rows)


def test_figures_that_move_each_others_measurements_are_found_together() -> None:
    rng = random.Random(3)
    wanted = moved(HOST, np.array([rng.uniform(-1.2, 1.2) for _ in FIGURES]))
    found = HOST
    for _ in range(2):
        found = better(found, measured(wanted), lambda host, number: measured(host))
    for name in LEAST_STEPS:
        before, after = (abs(getattr(one, name) / getattr(wanted, name) - 1) for one in (HOST, found))
        assert after < max(0.02, before / 5), name
    for name in SCATTERS:
        assert width(getattr(found, name)) == pytest.approx(width(getattr(wanted, name)), rel=0.03)


def test_a_measurement_counts_by_its_noise() -> None:
    """Two say otherwise of the door: what scatters by half from run to run gives way to what does by a hundredth."""

    def told(host: HostModel, number: int) -> Mapping[str, float]:
        rng = random.Random(number)
        return {"calm": host.door_s * rng.lognormvariate(0, 0.01), "wild": host.door_s * rng.lognormvariate(0, 0.5)}

    found = better(HOST, {"calm": HOST.door_s * 1.1, "wild": HOST.door_s * 0.6}, told)
    assert found.door_s == pytest.approx(HOST.door_s * 1.1, rel=0.04)
    assert found.handoff_s == pytest.approx(HOST.handoff_s, rel=STEP), "nothing asks for another"


def test_nothing_goes_below_zero_or_far_in_one_pass() -> None:
    bare = replace(HOST, rest_s=0.0, door_s=0.0005)
    runs: list[HostModel] = []

    def told(host: HostModel, number: int) -> Mapping[str, float]:
        runs.append(host)
        return {"rest": 0.01 + host.rest_s, "door": 0.01 + host.door_s, "hand": host.handoff_s, "no": 1.0}

    found = better(bare, {"rest": 0.005, "door": 0.005, "hand": 9.0, "no": 0.0}, told)
    assert len(runs) == RUNS and found.rest_s == 0.0 and found.door_s == 0.0
    assert found.handoff_s == pytest.approx(bare.handoff_s * (1 + FAR * STEP), rel=1e-6)
    assert HostModel.of_json(found.to_json()) == found
    plain = [getattr(found, name) for name in LEAST_STEPS] + [one for name in SCATTERS for one in getattr(found, name)]
    assert {type(one) for one in plain} == {float}, "nothing of numpy's goes on into times and files"
