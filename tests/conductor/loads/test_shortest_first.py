"""Lines by size: what is ahead and behind, what that costs, who comes meanwhile; screening knows as much."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmesh.services.conductor.candidates import select
from kvmesh.services.conductor.domain import Load, PrefillSample, Role
from kvmesh.services.conductor.loads.queues import PRIORITY_STEP_S, PrefillQueue, PrefillWork
from kvmesh.services.conductor.loads.shortest_first import (
    ALONE,
    FADE_S,
    LASTS,
    MARKS,
    NOTED,
    OvertakingTerms,
    ShortestFirst,
    ahead,
    marks,
)
from kvmesh.services.conductor.settings import SizeSettings
from kvmesh.work_class import work_class, work_classes
from tests.conductor.candidates.test_bounds import Fleet, compare
from tests.support.conductor.brain import Brain

WEIGHT = 16.0


def work(name: str, seconds: float, at: float = 0.0, priority: int = 0, *, yields: bool = False) -> PrefillWork:
    return PrefillWork(name, round(seconds * 1e4), seconds, (), at, 1e9, priority, yields)


def queue(*works: PrefillWork, weight: float = WEIGHT) -> PrefillQueue:
    made = PrefillQueue(0.0)
    made.size_weight = weight
    for one in works:
        made.add(one)
    return made


def test_a_short_one_waits_for_what_is_shorter_and_for_what_has_waited_its_weight() -> None:
    line = queue(work("first", 0.25), work("long", 4.0), work("short", 0.5), work("other", 1.0))
    found = ahead(line, 0.0, 0, 0.75)
    assert (found.wait_s, found.behind_s, found.behind) == (0.75, 5.0, 2)
    found = ahead(line, 3.0, 0, 0.75)  # ranks 14.3; long 64; the others are done, long has begun
    assert (found.wait_s, found.behind_s, found.behind) == (2.75, 0.0, 1)
    assert ahead(line, 4.8, 0, 0.75).behind == 0  # 16.1; other ranks 16
    assert ahead(line, 60.0, 0, 0.75).wait_s == 0.0  # all is done by then


def test_waiting_wears_size_off() -> None:
    line = queue(work("begun", 200.0, 0.0), work("long", 4.0, 0.0))
    line.add(work("more", 100.0, 0.0, priority=5))
    rank_s = 4.0 * WEIGHT
    assert ahead(line, rank_s - 1.0 - 0.5 * WEIGHT, 0, 0.5).behind == 2
    assert ahead(line, rank_s + 1.0 - 0.5 * WEIGHT, 0, 0.5).behind == 1


def test_priority_counts_beside_size_and_yielding_work_is_told_apart() -> None:
    line = queue(
        work("begun", 0.5, yields=True),
        work("urgent", 1.0, priority=-1),
        work("batch", 2.0, yields=True),
        work("later", 1.0, priority=1),
    )
    found = ahead(line, 0.0, 0, 2.0)
    assert (found.wait_s, found.yielding_s, found.behind) == (3.5, 2.5, 1)
    found = ahead(line, 0.0, -2, 2.0)
    assert PRIORITY_STEP_S > 2.0 * WEIGHT - 1.0 * WEIGHT
    assert (found.wait_s, found.yielding_s, found.behind) == (0.5, 0.5, 3)


def test_what_others_lose_is_counted_and_what_is_behind_is_not_free() -> None:
    line = OvertakingTerms(SizeSettings(others=1.0, later=0.25), lambda size_s: 0.0)
    found = ahead(queue(work("begun", 9.0), work("a", 4.0), work("b", 2.0)), 0.0, 0, 0.5)
    assert line.others_s(found, 0.5) == pytest.approx(2 * 0.5 + 0.25 * 6.0)


@pytest.mark.parametrize(
    ("rate", "waits_s"),
    [
        (0.0, 3.0),
        (0.5, 6.0),  # a busy period of as much again
        (0.9, 3.0 + 0.9 * WEIGHT * 1.0),  # 30 by the busy period; but nobody passes it after its weight
        (2.0, 3.0 + 2.0 * WEIGHT * 1.0),
    ],
)
def test_who_comes_meanwhile_is_waited_for_until_the_weight_has_worn_off(rate: float, waits_s: float) -> None:
    some = queue()
    line = OvertakingTerms(SizeSettings(overtaking=1.0), lambda size_s: rate)
    assert line.wait_s(3.0, 1.0, some) == pytest.approx(waits_s)
    assert line.wait_s(0.0, 1.0, some) == 0.0, "it begins at once"
    half = replace(line, settings=SizeSettings(overtaking=0.5))
    assert half.wait_s(3.0, 1.0, some) == pytest.approx(3.0 + (waits_s - 3.0) / 2)
    assert ALONE.wait_s(3.0, 1.0, some) == 3.0


def test_rates_by_size_are_those_of_one_instance_and_fade() -> None:
    lines, rng, now = ShortestFirst(SizeSettings()), random.Random(1), 0.0
    while now < 300:
        now += rng.expovariate(8.0)
        lines.placed("m", 0.1, now)
        if rng.random() < 0.05:
            lines.placed("m", 5.0, now)
    line = lines.of("m", 4, lambda: 0.0, now)
    assert line.rate(1.0) == pytest.approx(0.8 / 4, rel=0.25)
    assert line.rate(20.0) == pytest.approx(2.8 / 4, rel=0.35)
    assert line.rate(0.05) == 0.0
    doubled = lines.of("m", 4, lambda: lines._sizes["m"].whole(now), now)  # another conductor places as much
    assert doubled.rate(1.0) == pytest.approx(2 * line.rate(1.0))
    before = line.rate(1.0)
    assert lines.of("m", 4, lambda: 0.0, now + 3 * FADE_S).rate(1.0) < 0.06 * before
    assert lines.of("another", 4, lambda: 0.0, now).rate(1.0) == 0.0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 30), st.floats(0, 20), st.integers(-1, 1)), max_size=20),
    st.floats(0, 30),
    st.floats(0.01, 40),
)
def test_marks_never_tell_of_more_ahead_than_there_is(
    placed: list[tuple[float, float, int]], now: float, size_s: float
) -> None:
    line = queue(
        *(work(f"w{i}", s, at, priority) for i, (s, at, priority) in enumerate(sorted(placed, key=lambda p: p[1])))
    )
    now = max([now, *(at for _, at, _ in placed)])
    whole_s, noted = marks(line)
    ranks = noted[:MARKS]
    assert list(ranks) == sorted(ranks)
    assert len(noted) == NOTED
    below = sum(rank <= now + work_class(size_s) * WEIGHT for rank in ranks)
    least_s = max(0.0, line.wait_s(now) - whole_s * (1 - below / MARKS))
    found = ahead(line, now, 0, size_s)
    assert least_s <= found.wait_s + 1e-6
    assert found.wait_s + found.behind_s == pytest.approx(line.wait_s(now))
    everything = ahead(line, now, 0, math.inf)
    assert everything.behind == 0


# A size is seconds; below the least normal number a class may be off by its rounding.
@given(st.floats(0, 1e12, allow_subnormal=False), st.floats(0, 1e12, allow_subnormal=False))
def test_classes_are_half_an_octave_and_in_order(one: float, two: float) -> None:
    assert work_class(one) <= one < work_class(one) * math.sqrt(2) * (1 + 1e-15) or one == 0 == work_class(one)
    assert (work_class(one) <= work_class(two)) or one > two
    assert work_classes(np.array([one, two, math.inf])).tolist() == [work_class(one), work_class(two), math.inf]


def test_who_is_only_a_little_shorter_passes_nobody() -> None:
    line = queue(work("begun", 0.5), work("first", 1.2))
    found = ahead(line, 0.0, 0, 1.1)
    assert (found.wait_s, found.behind) == (1.7, 0)
    assert ahead(line, 0.0, 0, 0.9).behind == 1


class Sized(Fleet):
    """The random fleet of test_screen, some instances of which go by size."""

    def __init__(self, seed: int, size: int, **settings: object) -> None:
        super().__init__(seed, size, **settings)  # type: ignore[arg-type]
        for i, name in enumerate(self.names):
            instance = self.brain.state._fleet.named(name)
            if instance is not None and (i % 3 or seed % 2):
                instance.queue.size_weight = WEIGHT
                self.brain.state._columns.touch(name)


@pytest.fixture
def _all_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "FEW", 0)
    monkeypatch.setattr(select, "DEEP", 10_000)


@pytest.mark.usefixtures("_all_are_many")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 32), st.integers(2, 14))
def test_what_is_screened_out_could_not_have_been_chosen_where_lines_go_by_size(seed: int, size: int) -> None:
    fleet = Sized(seed, size)
    for i in range(6):
        compare(fleet, fleet.request(i, ttft_slo_s=0.0, tbt_slo_s=0.0))
        fleet.brain.step(fleet.request(100 + i))
        fleet.vary(fleet.rng.choice(fleet.names))
        fleet.brain.now += fleet.rng.choice([0.0, 0.01, 0.2])


def test_a_short_request_goes_where_it_delays_nobody() -> None:
    """Two instances with as much to do: one long prompt in chunks, or many short ones that would all wait for it."""
    brain = Brain(1, slo_ttft_s=1e3, slo_tbt_s=1e3)
    for name in ("p1", "p2"):
        brain.add(name, Role.PREFILL, size_weight=WEIGHT)
        samples = [PrefillSample(f"{name}{n}", n, 0, n * 1e-4, 0, 0.0) for n in (100, 1000, 4000, 16000)]
        brain.beat(name, Load(free_pages=10_000, free_extents=10_000), prefill_samples=tuple(samples))
    brain.add("d", Role.DECODE)
    instances = {name: brain.state._fleet.named(name) for name in ("p1", "p2")}
    long, short = instances["p1"], instances["p2"]
    assert long is not None
    assert short is not None
    long.queue.add(replace(work("l", 4.0, brain.now), chunks=16))
    for n in range(16):
        short.queue.add(work(f"s{n}", 0.25, brain.now))
    for name in instances:
        brain.state._columns.touch(name)
    placed = brain.placed(160)
    assert placed.prefill.instance_id == "p1"


def test_the_least_wait_of_many_is_that_of_each() -> None:
    lines, now = ShortestFirst(SizeSettings()), 10.0
    for n in range(200):
        lines.placed("m", 0.01 * 1.05 ** (n % 100), now + n * 0.1)
    now += 20.0
    line = lines.of("m", 3, lambda: 0.4, now)
    there = queue()
    sizes, aheads = np.geomspace(1e-4, 60.0, 97), np.linspace(0.0, 8.0, 97)
    weights, speedups = np.full(97, there.size_weight), np.full(97, there.speedup)
    least = line.least_wait_s(aheads, sizes, weights, speedups)
    exact = np.array([line.wait_s(a, s, there) for a, s in zip(aheads.tolist(), sizes.tolist(), strict=True)])
    assert (least <= exact).all()
    assert np.count_nonzero(least > exact * (1 - 1e-6) - 1e-6) > 90  # but where rounding takes another bucket
    assert (exact > aheads + 0.1).any(), "somebody passes"


def test_marks_tell_who_ranks_last_and_the_speed() -> None:
    there = queue(*(work(f"r{n}", 0.1 * (n + 1)) for n in range(LASTS + 3)))
    ranks = sorted(there.rank(one) for one in there.works.values())
    _, noted = marks(there)
    assert len(noted) == NOTED
    assert sorted(noted[MARKS : MARKS + LASTS]) == ranks[-LASTS:]
    assert noted[-1] == there.speedup
