"""Cores that jobs share, the door, what scatters."""

from __future__ import annotations

from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import ConfigError
from kvmesh.quantiles import quantile
from kvmesh.sim.host import Cores, HostModel, Machine, quantiles_of
from kvmesh.sim.loop import Loop

JOB = st.tuples(st.floats(0, 10), st.floats(0.001, 5))


def ends(cores: float, jobs: list[tuple[float, float]]) -> list[float]:
    """When each (begin, work) is over."""
    loop = Loop()
    shared = Cores(loop, cores)
    found = [0.0] * len(jobs)
    for at, (begin, work) in enumerate(jobs):

        def begin_it(at: int = at, work: float = work) -> None:
            shared.run(work, lambda: found.__setitem__(at, loop.now))

        loop.at(begin, begin_it)
    loop.run()
    return found


def test_as_many_jobs_as_cores_run_as_if_alone() -> None:
    assert ends(2, [(0, 1), (0.5, 3)]) == pytest.approx([1, 3.5])


def test_three_jobs_on_two_cores_take_half_as_long_again() -> None:
    assert ends(2, [(0, 1), (0, 1), (0, 1)]) == pytest.approx([1.5, 1.5, 1.5])


def test_who_comes_later_slows_the_others_from_then_on() -> None:
    # Alone until 1, then half as fast: 1 s of work is left to the first, and takes 2.
    assert ends(1, [(0, 2), (1, 1)]) == pytest.approx([3, 3])


@settings(max_examples=100, deadline=None)
@given(st.floats(0.5, 4), st.lists(JOB, min_size=1, max_size=12))
def test_no_work_is_lost_and_nobody_is_faster_than_alone(cores: float, jobs: list[tuple[float, float]]) -> None:
    found = ends(cores, jobs)
    for (begin, work), end in zip(jobs, found, strict=True):
        assert end >= begin + work / min(1.0, cores) - 1e-6
    # Of all that ends first by work left, shares are equal: who began together with less work ends no later.
    for one, first in zip(jobs, found, strict=True):
        for other, second in zip(jobs, found, strict=True):
            if one[0] == other[0] and one[1] <= other[1]:
                assert first <= second + 1e-6
    span = max(found) - min(begin for begin, _ in jobs)
    assert sum(work for _, work in jobs) <= cores * span + 1e-6


def test_the_door_takes_requests_one_by_one_and_needs_a_core() -> None:
    loop = Loop()
    machine = Machine(loop, HostModel(cores=1, door_s=0.25), seed=0)
    inside: list[float] = []
    for _ in range(3):
        machine.enter(lambda: inside.append(loop.now))
    loop.run()
    assert inside == pytest.approx([0.25, 0.5, 0.75])
    machine.cores.run(10, lambda: None)
    machine.enter(lambda: inside.append(loop.now))
    loop.run()
    assert inside[-1] == pytest.approx(0.75 + 0.5)


def test_steps_take_what_is_fitted_times_what_they_are_alone_times_a_residual() -> None:
    model = HostModel(cores=4, prefill_alone=0.5, decode_alone=2.0, between_s=0.01, decode_residuals=(3.0,))
    loop = Loop()
    machine = Machine(loop, model, seed=0)
    seen: list[tuple[str, float, float]] = []
    over: list[float] = []
    machine.watch = lambda role, usual_s, took_s: seen.append((role, usual_s, took_s))
    machine.prefill(0.1, lambda: over.append(loop.now))
    machine.decode(0.1, lambda: over.append(loop.now))
    loop.run()
    assert sorted(seen) == [("decode", 0.1, pytest.approx(0.6)), ("prefill", 0.1, pytest.approx(0.05))]
    assert over == pytest.approx([0.05, 0.61]), "what comes between two steps is not of the step"


def test_a_turn_is_waited_for_only_where_cores_are_taken() -> None:
    loop = Loop()
    machine = Machine(loop, HostModel(cores=2, turn_s=0.5), seed=0)
    over: list[float] = []
    machine.decode(0.1, lambda: over.append(loop.now))
    machine.decode(0.1, lambda: over.append(loop.now))
    loop.run()
    assert over == pytest.approx([0.1, 0.1])
    machine.cores.run(100, lambda: None)
    machine.cores.run(100, lambda: None)
    began = loop.now
    waits = []
    for _ in range(400):
        machine.decode(1e-9, lambda: waits.append(loop.now - began))
    loop.run()
    assert sum(waits) / len(waits) == pytest.approx(0.5, rel=0.15)


def test_handoffs_scatter_as_much_as_they_last_and_need_no_core() -> None:
    loop = Loop()
    machine = Machine(loop, HostModel(cores=1, handoff_s=0.02), seed=0)
    machine.cores.run(1000, lambda: None)
    found: list[float] = []
    for _ in range(500):
        machine.handoff(lambda: found.append(loop.now))
    loop.run(lambda: len(found) == 500)
    assert fmean(found) == pytest.approx(0.02, rel=0.1) and pstdev(found) == pytest.approx(0.02, rel=0.1)
    at_once: list[float] = []
    Machine(Loop(), HostModel(cores=1), seed=0).handoff(lambda: at_once.append(0.0))
    assert at_once, "a host that is not fitted keeps nobody waiting"


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (1.0, 4.0)])
def test_a_draw_lies_between_quantiles(share: float, value: float) -> None:
    assert quantile((1.0, 2.0, 4.0), share) == pytest.approx(value)
    assert quantile((7.0,), share) == 7.0


def test_quantiles_of_many_values_keep_the_ends_and_the_middle() -> None:
    found = quantiles_of([float(n) for n in range(10_000, 0, -1)], 101)
    assert (found[0], found[50], found[-1]) == pytest.approx((1, 5000.5, 10_000)) and len(found) == 101


def test_a_model_comes_back_from_its_file() -> None:
    model = HostModel(cores=2, door_s=0.01, turn_s=0.002, decode_residuals=(0.5, 1.0, 1.5))
    assert HostModel.of_json(model.to_json()) == model


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([], "must be an object"),
        ({}, "host.cores: is missing"),
        ({"cores": 0}, "host.cores=0.0: must be a number above 0"),
        ({"cores": "2"}, "host.cores='2': must be a number"),
        ({"cores": 2, "doors": 1}, "host.doors: no such field"),
        ({"cores": 2, "door_s": -1}, "host.door_s=-1.0: must be a number, at least 0"),
        ({"cores": 2, "decode_residuals": [2, 1]}, "must be in rising order"),
        ({"cores": 2, "decode_residuals": []}, "must be 1 to"),
        ({"cores": 2, "decode_residuals": [1, True]}, "must be a list of numbers"),
    ],
)
def test_what_cannot_be_is_named(told: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HostModel.of_json(told)
    assert words in caught.value.message
