"""The checker on drains and quotas: what may have gone with a drained node, and how many blocks a tenant may have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.checker import check
from tests.chaos.history import Aftermath, LimitAfter, NodeAfter
from tests.chaos.test_checker import RULES, Script, aftermath, value

TAG = "00aa00aa"
LIMIT = LimitAfter(TAG, 10, 10, {"a": 4, "b": 6, "c": 3}, 14)


def drained() -> Script:
    """A block pinned hard at a, which is drained and killed."""
    s = Script()
    s.add("put", 0, 1, holder="a", pinned=True)
    s.harm("a", "drained", 2, 4)
    s.harm("a", "memory", 4, 5)
    return s


def test_a_block_that_went_with_a_drained_node() -> None:
    s = drained()
    s.add("get", 6, 7, holder="b")
    assert s.rules(aftermath({"a": NodeAfter({}), "b": NodeAfter({"k0": value("k0")})})) == []
    s.add("get", 8, 9, outcome="miss")
    assert s.rules() == ["miss"]
    assert s.rules(aftermath({"a": NodeAfter({}), "b": NodeAfter({})})) == ["miss", "last"]


@pytest.mark.parametrize(
    ("target", "harm", "start", "end", "excuse"),
    [
        ("b", "memory", 1.1, 1.9, False),  # before the drain began
        ("b", "memory", 3, 3.5, True),  # it may have taken the block
        ("b", "reach", 7, 7.5, True),
        ("b", "reach", 2, 4, False),  # back for long
        ("a", "memory", 1.1, 1.9, True),  # robbed before it was drained
        ("a", "memory", 6, 6.5, False),  # again, when it had nothing
        ("m0", "master", 0, 20, False),
    ],
)
def test_who_may_have_lost_a_block_that_was_moved(
    target: str, harm: str, start: float, end: float, excuse: bool
) -> None:
    s = drained()
    s.harm(target, harm, start, end)
    s.add("get", 8, 9, outcome="miss")
    assert s.rules() == ([] if excuse else ["miss"])


def test_a_kill_without_a_drain_is_none() -> None:
    s = Script()
    s.add("put", 0, 1, holder="a", pinned=True)
    s.harm("a", "drained", 2, 4)
    s.harm("a", "memory", 5, 6)  # not when the drain was done: what came between is not known
    s.add("get", 8, 9, outcome="miss")
    assert s.rules() == []


def test_a_removal_that_somebody_has_yet_to_hear_of_excuses() -> None:
    s = drained()
    s.add("remove", -2, -1, acknowledged=("a",), pending=("b",))
    s.add("get", 8, 9, outcome="miss")
    assert s.rules(aftermath({"a": NodeAfter({}), "b": NodeAfter({})})) == []
    s.history.ops[1] = replace(s.history.ops[1], acknowledged=("a", "b"), pending=())
    assert s.rules() == ["miss"]


@pytest.mark.parametrize(
    ("kind", "outcome", "holder"), [("put", "ok", "b"), ("put", "error", ""), ("copy", "ok", ""), ("copy", "error", "")]
)
def test_a_pin_may_go_with_its_node_where_others_had_the_block_too(kind: str, outcome: str, holder: str) -> None:
    s = drained()
    s.add("put", 0, 1, holder="a")
    s.add("get", 8, 9, outcome="miss")
    assert s.rules() == ["miss"]
    s.add(kind, 0, 1, outcome=outcome, holder=holder, error="" if outcome == "ok" else "unavailable")
    assert s.rules() == []


def test_what_is_unsure_of_moved_blocks_is_no_excuse_for_others() -> None:
    s = Script()
    s.add("remove", -2, -1, acknowledged=("a",), pending=("b",))
    s.add("copy", 0, 1)
    s.add("put", 0, 1, holder="a", pinned=True)
    s.add("put", 0, 1, holder="b")
    s.add("get", 8, 9, outcome="miss")
    assert s.rules() == ["miss"]


def limited(after: LimitAfter, *, outcome: str = "ok", blocks: str = "10") -> list[str]:
    s = Script()
    s.add("limit", 0, 1, TAG, digest="50")
    s.add("limit", 2, 3, TAG, outcome, digest=blocks, error="" if outcome == "ok" else "unavailable")
    left: Aftermath = replace(aftermath({}), limit=after)
    return [one.rule for one in check(s.history, left, RULES)]


def test_a_tenant_within_its_limit() -> None:
    assert limited(LIMIT) == []


@pytest.mark.parametrize(
    "wrong",
    [
        replace(LIMIT, held={"a": 4, "b": 6, "c": 4}),  # 10, and one for each node
        replace(LIMIT, told=50),  # an earlier one has come back
        replace(LIMIT, told=0),
        replace(LIMIT, lifted=13),  # still held back
    ],
)
def test_a_limit_that_does_not_hold(wrong: LimitAfter) -> None:
    assert limited(wrong) == ["limit"]


def test_the_limit_at_the_end_is_the_one_that_was_taken_last() -> None:
    assert limited(LIMIT, outcome="error") == ["limit"]
    assert limited(LIMIT, blocks="9") == ["limit"]
