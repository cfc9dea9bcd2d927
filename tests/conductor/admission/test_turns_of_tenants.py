"""Nobody is refused for what others wait for, where prefill gives each tenant its turn."""

from __future__ import annotations

import pytest

from kvmesh.services.conductor.domain import Placed, Refuse, Role
from tests.support.conductor.brain import Brain

PROMPT = 2000


def brain(*, fair: bool) -> Brain:
    """One pair; prompts of a tenant wait at prefill, until one more would be refused."""
    made = Brain(0, slo_ttft_s=5.0, slo_tbt_s=10.0)
    made.add("p0", Role.PREFILL, tenant_fairness=fair, size_weight=16.0, capacity=100_000)
    made.add("d0", Role.DECODE, capacity=100_000)
    for _ in range(200):
        if isinstance(refused := made.schedule(PROMPT, tenant="greedy"), Refuse):
            assert refused.reason == "ttft"
            return made
    raise AssertionError("the queue has no end")


def test_who_has_a_turn_of_its_own_is_taken() -> None:
    made = brain(fair=True)
    taken = made.schedule(PROMPT, tenant="modest")
    assert isinstance(taken, Placed)
    assert taken.ttft_s > 5.0, "what is foretold counts all that waits"
    assert isinstance(made.schedule(PROMPT, tenant="greedy"), Refuse), "its own prompts fill its turns"


@pytest.mark.parametrize(("fair", "tenant"), [(False, "modest"), (True, "greedy")])
def test_in_one_queue_for_all_and_with_one_tenant_nothing_changes(fair: bool, tenant: str) -> None:
    assert isinstance(brain(fair=fair).schedule(PROMPT, tenant=tenant), Refuse)
