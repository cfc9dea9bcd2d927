"""Schedules are what their seed says, strike everything, and leave enough alive."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.transfer.fault_rules import Script
from tests.chaos import nemesis

MASTERS, NODES = ("m0", "m1", "m2"), ("n0", "n1", "n2", "n3", "n4")


@given(st.integers(0, 2**32), st.floats(1.0, 200.0), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_bounds(seed: int, duration_s: float, redis: bool, links: bool) -> None:
    made = nemesis.make(seed, duration_s, MASTERS, NODES, redis=redis, links=links)
    assert made == nemesis.make(seed, duration_s, MASTERS, NODES, redis=redis, links=links)
    for step in made.steps:
        assert step.target != made.spared
        assert step.peer != made.spared
        assert step.seconds > 0
        assert step.until <= max(duration_s, step.at + 0.11)
        assert links or step.blow not in ("cut", "cut-one-way", "slow")
        assert redis or step.target != "redis"
        at_once = [other for other in made.steps if other.at <= step.at < other.until]
        away = [other.target for other in at_once if other.target in NODES]
        assert len(away) == len(set(away)) <= nemesis.MAX_DOWN
        assert sum(other.target == nemesis.LEADER for other in at_once) <= len(MASTERS) - 1


def test_every_kind_of_blow_falls_early_whatever_the_seed() -> None:
    for seed in range(50):
        blows = {(s.blow, s.target == nemesis.LEADER) for s in nemesis.make(seed, 25.0, MASTERS, NODES).steps}
        assert {("kill", True), ("freeze", True), ("restart-redis", False), ("reads", False)} <= blows


def test_two_seeds_differ() -> None:
    assert nemesis.make(1, 20.0, MASTERS, NODES) != nemesis.make(2, 20.0, MASTERS, NODES)


def test_rules_are_ones_that_the_fault_transport_takes() -> None:
    for rule in nemesis.READ_FAULTS:
        assert len(Script.parse(f'{{"rules": [{rule}]}}').rules) == 1
