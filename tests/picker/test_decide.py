"""The order of endpoints, and what is said where there is none."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import ModelNotFound, Unavailable
from kvmesh.services.picker.decide import (
    PickableEngine,
    PickableGateway,
    engines_by_load,
    gateways_in_order,
    none_left,
    with_fallbacks,
)

ADDRESSES = [f"10.0.0.{n}:8000" for n in range(1, 6)]
addresses = st.lists(st.sampled_from(ADDRESSES), unique=True)
subsets = st.none() | st.frozensets(st.sampled_from([*ADDRESSES, "10.9.9.9:1"]))


@given(addresses, subsets, st.data())
def test_only_ready_endpoints_of_the_subset_are_named(
    given_: list[str], subset: frozenset[str] | None, data: st.DataObject
) -> None:
    ready = {one: data.draw(st.booleans()) for one in given_}
    loads = {one: data.draw(st.integers(0, 9)) for one in given_}
    turn = data.draw(st.integers(0, 1000))
    may = {one for one in given_ if ready[one] and (subset is None or one in subset)}
    engines = [PickableEngine(one, one, "m", ready[one], 0.0, loads[one]) for one in given_]
    found = [one.address for one in engines_by_load(engines, subset, {}, turn)]
    assert sorted(found) == sorted(may)
    assert [loads[one] for one in found] == sorted(loads[one] for one in may)
    gateways = [PickableGateway(one, ready[one], loads[one]) for one in given_]
    for session in ("", "chat-7"):
        assert sorted(gateways_in_order(gateways, subset, session, turn)) == sorted(may)
    least = gateways_in_order(gateways, subset, "", turn)
    assert [loads[one] for one in least] == sorted(loads[one] for one in may)


def test_equal_ones_have_their_turns() -> None:
    gateways = [PickableGateway(one, True) for one in ADDRESSES]
    first = Counter(gateways_in_order(gateways, None, "", turn)[0] for turn in range(50))
    assert set(first.values()) == {10}
    engines = [PickableEngine(one, one, "m", True) for one in ADDRESSES]
    first = Counter(engines_by_load(engines, None, {}, turn)[0].address for turn in range(50))
    assert set(first.values()) == {10}


def test_requests_that_were_sent_without_a_placement_count() -> None:
    engines = [PickableEngine(one, one, "m", True, requests=2) for one in ADDRESSES[:2]]
    assert engines_by_load(engines, None, {ADDRESSES[0]: 1}, 0)[0].address == ADDRESSES[1]


def test_a_session_stays_and_few_move_with_a_gateway() -> None:
    gateways = [PickableGateway(one, True) for one in ADDRESSES]
    sessions = [f"s{n}" for n in range(500)]
    before = {one: gateways_in_order(gateways, None, one, random.randrange(99))[0] for one in sessions}
    assert before == {one: gateways_in_order(gateways, None, one, 0)[0] for one in sessions}
    counts = Counter(before.values())
    assert max(counts.values()) < 2 * min(counts.values())
    without = [replace(one, ready=one.address != ADDRESSES[2]) for one in gateways]
    after = {one: gateways_in_order(without, None, one, 0)[0] for one in sessions}
    assert {one for one in sessions if before[one] != after[one]} == {
        one for one in sessions if before[one] == ADDRESSES[2]
    }


def test_a_gateway_with_more_than_its_share_gives_sessions_away() -> None:
    idle = [PickableGateway(one, True) for one in ADDRESSES]
    own = gateways_in_order(idle, None, "s", 0)
    crowded = [replace(one, requests=40 if one.address == own[0] else 1) for one in idle]
    assert gateways_in_order(crowded, None, "s", 0) == [*own[1:], own[0]]


def test_fallbacks_are_others_and_bounded() -> None:
    assert with_fallbacks("b", ["a", "b", "c", "d"], 2) == ("b", "a", "c")
    assert with_fallbacks("b", ["b"], 2) == ("b",)
    assert with_fallbacks("b", ["a"], 0) == ("b",)


def test_what_is_missing_is_said() -> None:
    unknown = none_left("x", {"demo"}, 0, 0, None)
    assert isinstance(unknown, ModelNotFound) and "'x'" in unknown.message and "demo" in unknown.message
    for endpoints, ready, subset, text in (
        (0, 0, None, "no endpoint is known"),
        (3, 0, None, "none of 3 endpoints is ready"),
        (3, 3, frozenset[str](), "subset of endpoints is empty"),
        (3, 3, frozenset({"10.9.9.9:1"}), "none of the 1 endpoints that the proxy allows"),
    ):
        err = none_left("", (), endpoints, ready, subset)
        assert isinstance(err, Unavailable) and err.retry_after_ms
        assert text in err.message
