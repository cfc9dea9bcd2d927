"""The threshold that follows what pulls cost and save: it finds its level, keeps its bounds, and does not flap."""

from __future__ import annotations

import dataclasses
import itertools
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout
from kvmesh.services.conductor.costs.cache_cost import CacheCost
from kvmesh.services.conductor.domain import Fetch, Load, PrefillSample, Role
from kvmesh.services.conductor.placing.placement import PlacementChoice
from kvmesh.services.conductor.placing.prefills import worth_weighing
from kvmesh.services.conductor.placing.threshold import (
    DWELL_S,
    FORGET_S,
    IDLE_S,
    MAX_AWAITED,
    MAX_CONGESTION,
    MAX_IDLE_S,
    MAX_THRESHOLD,
    NEVER,
    STEP,
    UNEVEN,
    Threshold,
)
from kvmesh.services.conductor.settings import Settings, ThresholdMode
from tests.support.conductor.brain import BLOCK, Brain, chain, reset

ADAPTIVE = Settings(threshold_mode=ThresholdMode.ADAPTIVE)
EVEN, CROWDED = [1.0, 1.0], [3.0, 0.0]
TOKENS, SAVED_S = 160, 1.0  # of every pull here


class Prefill:
    """Computes a token in 1/160 s."""

    def predict(self, computed: int, cached: int) -> float:
        return SAVED_S * computed / TOKENS


def placement(pull_s: float, tokens: int = TOKENS) -> PlacementChoice:
    """As much of a choice as is looked at: `tokens` are fetched, and TOKENS go to decode."""
    return choice_of(CacheCost(BLOCK, 1024), tokens // BLOCK, pull_s)


def choice_of(cost: CacheCost, pulled_blocks: int, pull_s: float, pushed: int = TOKENS) -> PlacementChoice:
    instance = SimpleNamespace(model=SimpleNamespace(block_tokens=BLOCK, cost=cost), prefill=Prefill())
    p = SimpleNamespace(
        pulled_blocks=pulled_blocks,
        instance=instance,
        computed_tokens=10,
        cached_tokens=TOKENS,
        pull_s=pull_s,
        local_blocks=4,
        pushed_tokens=pushed,
    )
    return cast(PlacementChoice, SimpleNamespace(prefill=p))


class Run:
    """A threshold, a clock, and pulls of which each takes `real_s` where the fitted model says `model_s`."""

    def __init__(self, start: Settings = ADAPTIVE) -> None:
        self.now = 100.0
        self.threshold = Threshold(start, self.now)
        self.asked = 0
        self.seen: list[tuple[float, float, float]] = []

    def pull(self, model_s: float, real_s: float, got: int = TOKENS) -> None:
        self.asked += 1
        name = f"r{self.asked}"
        self.threshold.placed(name, placement(model_s * self.threshold.congestion))
        sample = PrefillSample(name, 10, got, 0.1, 0, 0.0, got, got * 1024, real_s)
        self.threshold.sampled(sample, self.now)

    def push(self, seconds: float) -> None:
        """A prompt that fetches nothing is computed in 0.1 s and sent to decode in so many."""
        self.asked += 1
        name = f"r{self.asked}"
        self.threshold.placed(name, placement(0.0, tokens=0))
        self.threshold.sampled(PrefillSample(name, 10, TOKENS, 0.1, TOKENS * 1024, seconds), self.now)

    def rest(self, seconds: float, push_s: float) -> None:
        """Nobody pulls for so long; five pushes a second."""
        for _ in range(int(seconds * 5)):
            self.now += 0.2
            self.push(push_s)
            self.threshold.tick(EVEN, self.now)
            self.seen.append((self.now, self.threshold.value(self.now), self.threshold.congestion))

    def go(self, seconds: float, model_s: float, real_s: float, waits: list[float], **more: Any) -> None:
        """Five pulls a second for so long."""
        for _ in range(int(seconds * 5)):
            self.now += 0.2
            self.threshold.tick(waits, self.now)
            self.pull(model_s, real_s, **more)
            self.seen.append((self.now, self.threshold.value(self.now), self.threshold.congestion))

    @property
    def changes(self) -> list[float]:
        """When it was another one than before."""
        found, last = [], self.seen[0][1:]
        for at, *now in self.seen:
            if tuple(now) != last:
                found.append(at)
                last = (now[0], now[1])
        return found


def test_fixed_it_is_what_it_is() -> None:
    run = Run(Settings(balancing_threshold=2.5))
    run.go(60, 0.1, 5.0, CROWDED)
    assert (run.threshold.value(run.now), run.threshold.congestion, run.threshold.changes) == (2.5, 1.0, 0)


def test_pulls_that_take_longer_than_computing_raise_it_step_by_step_until_nobody_fetches() -> None:
    run = Run()
    run.go(40, 1.0, 1.0, EVEN)
    run.seen = [seen for seen in run.seen if seen[1] < NEVER] + run.seen[-1:]
    values = list(dict.fromkeys(value for _, value, _ in run.seen))
    assert values[-2:] == [MAX_THRESHOLD, NEVER]
    assert all(b == pytest.approx(min(MAX_THRESHOLD, a * STEP)) for a, b in itertools.pairwise(values[:-1]))
    assert run.threshold.congestion == 1.0, "they took what was predicted"


def test_where_fetching_is_hopeless_it_ends_at_once() -> None:
    run = Run()
    run.go(7, 3.0, 3.0, EVEN)
    assert run.threshold.value(run.now) == NEVER and run.threshold.changes == 1


def test_never_stops_even_who_has_nothing_of_a_prefix() -> None:
    assert worth_weighing(10, 0, MAX_THRESHOLD) and not worth_weighing(10, 0, NEVER)
    assert not worth_weighing(10, 1, NEVER)


def test_cheap_pulls_lower_it_and_below_where_it_began_only_while_queues_are_uneven() -> None:
    start = dataclasses.replace(ADAPTIVE, balancing_threshold=4.0)
    even, crowded = Run(start), Run(start)
    even.go(60, 0.1, 0.1, EVEN)
    crowded.go(60, 0.1, 0.1, CROWDED)
    assert even.threshold.value(0) == 4.0 and crowded.threshold.value(0) == 1.0
    even.go(14, 3.0, 3.0, EVEN)
    assert even.threshold.value(0) == NEVER
    even.go(60, 0.1, 0.1, EVEN)
    assert even.threshold.value(0) == 4.0


def stopped() -> Run:
    """Wires have become slow, and nothing is fetched any more."""
    run = Run()
    run.rest(10, 0.05)
    run.go(7, 0.1, 3.0, EVEN)
    assert run.threshold.value(0) == NEVER
    return run


def test_pushes_that_are_fast_again_bring_it_back_at_once() -> None:
    run = stopped()
    run.rest(MAX_IDLE_S / 2, 3 * SAVED_S)
    assert run.threshold.value(0) == NEVER, "pushes say that no trial is worth it"
    run.rest(3 * FORGET_S, 0.3)
    assert run.threshold.value(0) == 1.0 and run.threshold.congestion == 1.0


def test_without_a_word_from_pushes_it_is_tried_again_and_after_failures_less_often() -> None:
    run, gaps = stopped(), []
    for _ in range(4):
        since = run.now
        while run.threshold.value(0) == NEVER:
            run.rest(1, 0.3)
        gaps.append(run.now - since)
        run.go(7, 3.0, 3.0, EVEN)
    assert run.threshold.value(0) == NEVER
    assert gaps == pytest.approx([IDLE_S, 2 * IDLE_S, 4 * IDLE_S, MAX_IDLE_S], abs=2 * DWELL_S)


def test_pulls_that_bring_nothing_raise_it() -> None:
    run = Run()
    run.go(7, 0.1, 0.3, EVEN, got=0)
    assert run.threshold.value(0) == NEVER and run.threshold.congestion == 1.0


def test_congestion_converges_to_what_is_measured_and_back() -> None:
    run = Run()
    run.go(60, 0.1, 0.35, EVEN)
    assert run.threshold.congestion == pytest.approx(3.5, rel=0.05)
    settled = len(run.changes)
    run.go(60, 0.1, 0.35, EVEN)
    assert len(run.changes) == settled, "nothing new: no change"
    run.go(60, 0.1, 0.1, EVEN)
    assert run.threshold.congestion == 1.0


def test_without_pulls_it_goes_home() -> None:
    run = Run()
    run.go(80, 1.0, 20.0, EVEN)
    assert run.threshold.value(0) == NEVER and run.threshold.congestion == MAX_CONGESTION
    for _ in range(int(9 * IDLE_S)):
        run.now += 1.0
        run.threshold.tick(CROWDED, run.now)
    assert run.threshold.value(0) == 1.0 and run.threshold.congestion == 1.0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.02, 1.5), st.floats(0.1, 0.6))
def test_noise_moves_it_once_in_a_dwell_at_most_and_never_back_and_forth(seed: int, mean: float, noise: float) -> None:
    """Log-normal noise around a steady cost: at the end it stays, or moves between neighbours a few times."""
    rng, run = random.Random(seed), Run()
    for _ in range(600):
        run.now += 0.2
        run.threshold.tick(CROWDED if rng.random() < 0.5 else EVEN, run.now)
        run.pull(mean, mean * rng.lognormvariate(0, noise))
        run.seen.append((run.now, run.threshold.value(0), run.threshold.congestion))
    for at, following in itertools.pairwise(run.changes):
        assert following - at >= DWELL_S - 1e-6
    turns = [value for _, value, _ in run.seen]
    directions = [b > a for a, b in itertools.pairwise(turns) if a != b]
    assert sum(a != b for a, b in itertools.pairwise(directions)) <= 1, "it flaps"


@settings(max_examples=100, deadline=None)
@given(
    st.floats(0.0, 20.0),
    st.lists(
        st.tuples(st.floats(0, 40), st.floats(0, 10), st.floats(0, 100), st.integers(0, 2 * TOKENS), st.floats(0, 10)),
        max_size=60,
    ),
)
def test_it_never_leaves_its_bounds(base: float, story: list[tuple[float, float, float, int, float]]) -> None:
    run = Run(dataclasses.replace(ADAPTIVE, balancing_threshold=base))
    low, high = run.threshold.bounds
    for pause_s, model_s, real_s, got, queue_s in story:
        run.now += pause_s
        run.threshold.tick([queue_s, 0.0], run.now)
        before = run.threshold.value(0)
        for _ in range(6):
            run.pull(model_s, real_s, got=got)
        after = run.threshold.value(0)
        assert min(1.0, base) == low and high == max(MAX_THRESHOLD, base)
        assert low <= after <= high or after == NEVER
        if after < NEVER:
            assert min(before / STEP, high) - 1e-9 <= after <= max(1.0, before) * STEP + 1e-9, "one step"
        assert 1.0 <= run.threshold.congestion <= MAX_CONGESTION


def test_what_never_comes_back_is_forgotten() -> None:
    threshold = Threshold(ADAPTIVE)
    for n in range(MAX_AWAITED + 500):
        threshold.placed(f"r{n}", placement(0.1))
    assert len(threshold._awaited) == MAX_AWAITED


def test_unevenness_of_nearly_nothing_is_none() -> None:
    threshold = Threshold(ADAPTIVE)
    threshold.tick([0.01, 0.0, 0.0, 0.0], 1.0)
    assert threshold._uneven < UNEVEN
    threshold.tick([], 2.0)
    assert threshold._uneven == 0.0


def until_computing(mode: ThresholdMode) -> int:
    """Pulls that have taken 20 ms take 300 ms, and computing 160 ms: how many requests still fetch."""
    brain, blocks = Brain(threshold_mode=mode, fetch=Fetch.CHEAPER, lease_s=1e9), 100
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
        brain.add(name, role)
    brain.step(reset(1, "p0", "p1", "d0"))
    for n in range(40):  # what computing takes is known
        brain.done("p1", f"warm{n}", 50 * n + 1, seconds=(50 * n + 1) * 1e-4)
    busy = Load(queued_requests=9, queued_tokens=900_000, free_pages=1000, free_extents=1000)

    def pulled(pull_s: float) -> int:
        """By one request whose prompt p0 alone has, which is busy."""
        keys, tokens = chain(f"k{brain.requests}", blocks), blocks * BLOCK + 1
        brain.beat("p0", busy)
        brain.seal("p0", keys)
        placed = brain.placed(tokens, keys=keys, ttft_slo_s=1e6)
        cached = sum(r.blocks for r in placed.pulls) * BLOCK
        name, computed = f"r{brain.requests}", tokens - cached
        took_s = pull_s if cached else 0.0
        sample = PrefillSample(name, computed, cached, computed * 1e-4, 0, 0.0, cached, cached * 1024, took_s)
        brain.beat("d0")
        brain.tick(0.4)
        brain.beat("p1", prefill_samples=(sample,), finished_request_ids=(name,))
        return cached // BLOCK

    assert [pulled(0.02) for _ in range(20)] == [blocks] * 20
    return sum(pulled(0.3) > 0 for _ in range(60))


def test_the_brain_turns_to_computing_no_later_than_its_model_does() -> None:
    adaptive, fixed = until_computing(ThresholdMode.ADAPTIVE), until_computing(ThresholdMode.FIXED)
    assert 0 < adaptive <= fixed, (adaptive, fixed)


def test_of_several_groups_tokens_are_those_that_were_computed_or_spared_whatever_their_bytes() -> None:
    """One snapshot that is fetched spares six blocks; a push of few bytes is the fruit of many tokens."""
    states = CacheGroup("state", (0,), CacheLayout(1, 1, 8), CacheKind.STATE, 4)
    cost = CacheCost(BLOCK, 0, ((CacheGroup("all", (1,), CacheLayout(2, 1, 8)), 10), (states, 1000)))
    threshold = Threshold(ADAPTIVE)
    threshold.placed("r", choice_of(cost, 1, 0.5, pushed=80))
    (awaited,) = threshold._awaited.values()
    assert awaited.tokens == TOKENS - 4 * BLOCK == 96
    assert awaited.saved_s == pytest.approx(SAVED_S * 96 / TOKENS)
    assert awaited.pushed_s == pytest.approx(SAVED_S * 80 / TOKENS)
    threshold.placed("r", choice_of(cost, 0, 0.0, pushed=80))  # nothing is fetched: what it has it had
    assert next(iter(threshold._awaited.values())).tokens == 0
