"""Schedules are what their seed says, strike everything, and leave enough alive."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmesh.testing.fault.rules import Script
from tests.chaos import nemesis

MASTERS, NODES = ("m0", "m1", "m2"), ("n0", "n1", "n2", "n3", "n4")
NEAR = ("n3", "n4")
ROUNDING_S = 1e-9  # of a step's begin and length, added


@example(3813, 6.471400578363528, False, True)
@given(st.integers(0, 2**32), st.floats(1.0, 200.0), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_bounds(seed: int, duration_s: float, redis: bool, links: bool) -> None:
    made = nemesis.make(seed, duration_s, MASTERS, NODES, redis=redis, links=links, near=NEAR)
    assert made == nemesis.make(seed, duration_s, MASTERS, NODES, redis=redis, links=links, near=NEAR)
    for step in made.steps:
        assert step.target != made.spared
        assert step.peer != made.spared
        assert step.seconds > 0
        assert step.until <= max(duration_s, step.at + 0.11) + ROUNDING_S
        assert step.blow not in ("cut", "cut-one-way", "slow") or not {step.target, step.peer} & {*NEAR}
        assert links or step.blow not in ("cut", "cut-one-way", "slow")
        assert redis or step.target != "redis"
        at_once = [other for other in made.steps if other.at <= step.at < other.until]
        struck = [other.target for other in at_once if other.target in NODES]
        draining = [other.target for other in at_once if other.blow == "drain"]
        assert len(struck) == len(set(struck))
        assert len(struck) - len(draining) <= nemesis.MAX_DOWN
        assert len(draining) <= 1
        assert sum(other.target == nemesis.LEADER for other in at_once) <= len(MASTERS) - 1


def test_every_kind_of_blow_falls_early_whatever_the_seed() -> None:
    for seed in range(50):
        made = nemesis.make(seed, 25.0, MASTERS, NODES, near=NEAR)
        blows = {(s.blow, s.target == nemesis.LEADER) for s in made.steps}
        masters = {("kill", True), ("freeze", True), ("restart-redis", False)}
        assert blows >= masters | {(blow, False) for blow in ("kill", "rot", "drain", "freeze", "slow", "reads")}


def test_two_seeds_differ() -> None:
    assert nemesis.make(1, 20.0, MASTERS, NODES) != nemesis.make(2, 20.0, MASTERS, NODES)


def test_rules_are_ones_that_the_fault_transport_takes() -> None:
    for rule in (*nemesis.READ_FAULTS, *nemesis.NODE_FAULTS):
        assert len(Script.parse(f'{{"rules": [{rule}]}}').rules) == 1
