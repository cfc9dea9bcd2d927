"""Equal instances share one model; one of them departs from it by evidence of its own alone."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.services.conductor.costs.fit import Coefficients
from kvmesh.services.conductor.costs.models import DecodeModel, PrefillModel, TransferModel
from kvmesh.services.conductor.domain import DecodeSample, Load, Placed, PrefillSample, Role
from kvmesh.services.conductor.placing.ties import TieCandidate, even_out
from tests.support.conductor.brain import IDLE, Brain, chain

TRUE = Coefficients(a=0.01, b=5e-5, c=0.0)


class Fleet:
    """Prefill instances of one kind that measure prompts."""

    def __init__(self, instances: int, noise: float = 0.1, seed: int = 0) -> None:
        self.rng, self.noise, self.now = random.Random(seed), noise, 100.0
        self.shared = PrefillModel()
        self.own = [PrefillModel(shared=self.shared, name=f"p{i}") for i in range(instances)]
        self.slower = [1.0] * instances

    def measure(self, at: int) -> None:
        """One prompt there."""
        tokens = self.rng.randrange(100, 2000)
        seconds = TRUE.at(tokens, 0) * self.slower[at] * math.exp(self.rng.gauss(0, self.noise))
        self.own[at].add(tokens, 0, seconds, self.now)

    def rounds(self, count: int, every_s: float = 0.2) -> None:
        """Each measures one prompt a round."""
        for _ in range(count):
            self.now += every_s
            for at in range(len(self.own)):
                self.measure(at)

    def factor(self, at: int) -> float:
        """How many times as slow as its equals it is thought to be."""
        self.shared.equals.fade(self.now)
        return self.own[at].predict(1000, 0) / self.shared.equals.present.at(1000, 500_000)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 5), st.floats(0.01, 0.15), st.integers(0, 1 << 20))
def test_equal_instances_are_predicted_exactly_alike(instances: int, noise: float, seed: int) -> None:
    fleet, apart = Fleet(instances, noise, seed), 0
    for _ in range(60):
        fleet.rounds(1)
        apart += len({own.predict(500, 100) for own in fleet.own}) > 1
    assert apart <= 6  # noise may look like a difference for a moment, hardly ever


def test_a_newcomer_is_what_its_equals_are_now() -> None:
    fleet = Fleet(2)
    fleet.rounds(20)
    newcomer = PrefillModel(shared=fleet.shared, name="new")
    assert newcomer.predict(1000, 0) == fleet.own[0].predict(1000, 0)
    fleet.slower = [3.0, 3.0]
    fleet.rounds(8)
    assert newcomer.predict(1000, 0) == fleet.own[0].predict(1000, 0)
    assert newcomer.predict(1000, 0) == pytest.approx(3 * TRUE.at(1000, 0), rel=0.3)


@pytest.mark.parametrize("times", [3.0, 1 / 3])
@pytest.mark.parametrize("instances", [2, 3, 5])
def test_one_that_changes_is_found_out_within_a_few_samples(instances: int, times: float) -> None:
    fleet = Fleet(instances, noise=0.15)
    fleet.rounds(30)
    fleet.slower[0] = times
    seen = 0
    while not times**0.5 < fleet.factor(0) < times**2 and not times**2 < fleet.factor(0) < times**0.5:
        fleet.rounds(1)
        seen += 1
        assert seen <= 4
    assert all(fleet.factor(at) == 1.0 for at in range(1, instances))


def test_one_stall_is_no_slowness() -> None:
    fleet = Fleet(2, noise=0.1)
    fleet.rounds(30)
    fleet.slower[0] = 20.0
    fleet.rounds(1)
    fleet.slower[0] = 1.0
    for _ in range(5):
        assert fleet.factor(0) == 1.0
        fleet.rounds(1)


def test_rare_long_stalls_count_for_what_they_cost() -> None:
    """Of the steps that a heartbeat tells of one in ten takes 20 times as long: it is three times as slow."""
    shared = DecodeModel()
    slow, good = (DecodeModel(shared=shared, name=name) for name in "ab")
    now = 0.0
    for beat in range(40):
        now += 0.2
        for model in (slow, good):
            for step in range(10):
                stalled = model is slow and beat >= 20 and step == beat % 10
                model.add(4, 1000, 0.2 if stalled else 0.01, now)
    assert 2 < slow.predict(4, 1000) / good.predict(4, 1000) < 4


def test_who_is_thought_slow_is_tried_again_within_fifteen_seconds_and_one_sample_decides() -> None:
    fleet = Fleet(2, noise=0.15)
    fleet.rounds(20)
    fleet.slower[0] = 3.0
    fleet.rounds(6)
    assert fleet.factor(0) > 2
    waited_s = 0
    while fleet.factor(0) > 1.0:
        waited_s += 1
        fleet.now += 1.0
        fleet.measure(1)
    assert 5 <= waited_s <= 14
    fleet.measure(0)
    fleet.now += 0.1
    fleet.measure(0)
    assert fleet.factor(0) > 1.5  # still slow
    for _ in range(14):
        fleet.now += 1.0
        fleet.measure(1)
    fleet.slower[0] = 1.0
    fleet.measure(0)
    assert fleet.factor(0) == 1.0


def test_different_hardware_is_told_apart_and_stays_so() -> None:
    fleet = Fleet(4, noise=0.1)
    fleet.slower = [1.0, 1.0, 2.0, 2.0]
    fleet.rounds(60)
    for _ in range(20):
        fleet.rounds(1)
        fast, slow = fleet.own[0].predict(1000, 0), fleet.own[2].predict(1000, 0)
        assert 1.6 < slow / fast < 2.4


def test_wires_are_shared_and_departed_from_likewise() -> None:
    shared = TransferModel()
    one, two = (TransferModel(shared=shared, name=name) for name in "ab")
    now = 0.0
    for _ in range(20):
        now += 0.2
        for model in (one, two):
            model.add(1 << 20, 0, (1 << 20) / 1e8, now)
    assert one.bytes_per_s == two.bytes_per_s == pytest.approx(1e8, rel=0.2)
    for _ in range(6):
        now += 0.2
        one.add(1 << 20, 0, (1 << 20) / 1e8, now)
        two.add(1 << 20, 0, (1 << 20) / 2e7, now)
    assert two.bytes_per_s < one.bytes_per_s / 2


def test_who_leaves_says_nothing_of_the_others() -> None:
    fleet = Fleet(3)
    fleet.slower = [1.0, 5.0, 5.0]
    fleet.rounds(20)
    for gone in fleet.own[1:]:
        gone.leave()
    fleet.own = fleet.own[:1]
    fleet.rounds(20)
    assert fleet.factor(0) == 1.0
    assert fleet.own[0].predict(1000, 0) == pytest.approx(TRUE.at(1000, 0), rel=0.2)


# ── the same, through the whole brain ───────────────────────────────────────────────────────────────


def serve(brain: Brain, placed: Placed, seconds: float = 0.01, steps: tuple[float, ...] = (0.001,) * 4) -> None:
    """It is computed, answered and gone."""
    name = f"r{brain.requests}"
    brain.done(placed.prefill.instance_id, name, 100, seconds=seconds)
    samples = tuple(DecodeSample(1, 100, step) for step in steps)
    brain.beat(placed.decode.instance_id, decode_samples=samples, finished_request_ids=(name,))


@pytest.mark.parametrize("instances", [2, 3])
def test_no_equal_instance_starves(instances: int) -> None:
    """C0: the steps are ten times as fast as the prior of an instance that nobody has measured."""
    brain = Brain()
    for i in range(instances):
        brain.add(f"p{i}", Role.PREFILL)
        brain.add(f"d{i}", Role.DECODE)
    prefills, decodes = Counter[str](), Counter[str]()
    for _ in range(200):
        brain.now += 0.02
        placed = brain.placed()
        prefills[placed.prefill.instance_id] += 1
        decodes[placed.decode.instance_id] += 1
        serve(brain, placed, seconds=0.005 * brain.state.instances[0].capacity_blocks / 1000)
    for counted in (prefills, decodes):
        assert len(counted) == instances
        assert max(counted.values()) <= (0.6 if instances == 2 else 0.45) * 200, counted


def test_a_slowed_instance_loses_its_share_and_gets_it_back() -> None:
    """C4, at 6 requests a second."""
    brain, rng = Brain(), random.Random(0)
    brain.add("p0", Role.PREFILL)
    brain.add("p1", Role.PREFILL)
    brain.add("d0", Role.DECODE)
    shares: list[tuple[float, str]] = []

    def run(seconds: float, slower: float) -> None:
        until = brain.now + seconds
        while brain.now < until:
            placed = brain.placed()
            shares.append((brain.now, placed.prefill.instance_id))
            took = 0.02 * math.exp(rng.gauss(0, 0.15)) * (slower if placed.prefill.instance_id == "p1" else 1)
            serve(brain, placed, seconds=took)
            for _ in range(2):
                brain.now += 1 / 12
                brain.beat_all()
                brain.tick(0.0)

    def share(first: float, last: float) -> float:
        picked = [name for at, name in shares if first <= at < last]
        return picked.count("p1") / len(picked)

    run(20, 1.0)
    assert 0.4 < share(brain.now - 10, brain.now) < 0.6
    slowed = brain.now
    run(20, 3.0)
    assert share(slowed + 3, brain.now) < 0.2
    back = brain.now
    run(25, 1.0)
    assert share(back + 15, brain.now) > 0.4


def test_a_prompt_that_does_not_move_keeps_others_away() -> None:
    brain = Brain()
    brain.add("p0", Role.PREFILL)
    brain.add("p1", Role.PREFILL)
    brain.add("d0", Role.DECODE)
    stuck = brain.placed().prefill.instance_id
    others = Counter[str]()
    for _ in range(40):
        brain.now += 0.5
        for name in ("p0", "p1", "d0"):
            brain.beat(name, Load(free_pages=1000, free_extents=1000, queued_tokens=100) if name == stuck else IDLE)
        placed = brain.placed()
        others[placed.prefill.instance_id] += 1
        if placed.prefill.instance_id != stuck:
            sample = PrefillSample(f"r{brain.requests}", 100, 0, 0.01, 102_400, 0.001)
            brain.beat(placed.prefill.instance_id, prefill_samples=(sample,))
        brain.beat("d0", finished_request_ids=(f"r{brain.requests}",))
    assert others[stuck] <= 2, others


# ── ties ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_shared_prefix_is_warmed_everywhere_and_a_session_stays_where_it_is() -> None:
    """Sessions begin with one system prompt; their second turns find all that their first ones left."""
    brain = Brain()
    for name in ("p0", "p1", "p2"):
        brain.add(name, Role.PREFILL)
    brain.add("d0", Role.DECODE)
    system, homes, again = chain("system", 12), Counter[str](), 0
    for session in range(24):
        brain.now += 0.2
        brain.beat_all()
        first = brain.placed(16 * 16, keys=(*system, *chain(f"s{session}", 4)))
        computed = 16 * 16 - first.cached_tokens
        brain.done(first.prefill.instance_id, f"r{brain.requests}", computed, seconds=0.01 + 5e-5 * computed)
        brain.seal(first.prefill.instance_id, (*system, *chain(f"s{session}", 4)))
        homes[first.prefill.instance_id] += 1
        brain.now += 0.2
        second = brain.placed(16 * 40, keys=(*system, *chain(f"s{session}", 26)))
        again += second.prefill.instance_id == first.prefill.instance_id
        brain.done(second.prefill.instance_id, f"r{brain.requests}", 300, seconds=0.025)
    assert max(homes.values()) <= 0.45 * 24, homes
    assert again >= 22


def test_no_more_is_given_up_for_evenness_than_it_is_worth() -> None:
    def handicap(better: float, most: float, given: float, wait: float = 0.0) -> float:
        return even_out([TieCandidate(0.1, 0.0, most, given), TieCandidate(0.1 + better, wait, most, 0.0)])[0]

    assert handicap(0.01, 0.02, 10.0) == pytest.approx(0.01)
    assert handicap(0.03, 0.02, 10.0) == 0.0  # too dear
    assert handicap(0.01, 0.02, 0.05) == 0.0  # it was given hardly more
    assert handicap(0.01, 0.02, 10.0, wait=1.0) == 0.0  # the other one has a queue
