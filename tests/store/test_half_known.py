"""What a master must not conclude from what it has not heard yet: after a change of leader, of tiers below DRAM, of
what is being written, of what it leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.clock import Tick
from kvmesh.kvcache.tiers import Tier
from kvmesh.services.store.policy.quotas import TagQuota
from kvmesh.services.store.policy.store_policy import PolicyLimits
from tests.support.store.world import Node, World


def key(i: int) -> bytes:
    return b"tag1" + i.to_bytes(12, "big")


def world(*tiers: Tier, limits: PolicyLimits | None = None) -> tuple[World, Node]:
    """One node with blocks in each tier, and another; both are members, and nobody has announced."""
    node = Node("a", tiers or (Tier.DRAM,), "m")
    made = World([node, Node("b", (Tier.DRAM,), "other")], limits or PolicyLimits())
    for at, tier in enumerate(node.tiers):
        for i in range(5):
            node.seal(key(10 * at + i), tier)
    for each in made.nodes.values():
        made.beat(each)  # joins
    return made, node


def run(made: World, rounds: int = 4, *, announce: bool = True, reached: bool = True) -> None:
    for _ in range(rounds):
        made.now += 1
        made.state.step(Tick(), made.now)
        for node in made.nodes.values():
            made.beat(node)
            if announce:
                made.announce_all(node)
        for order in made.state.policy.tick(made.now)[0]:
            made.carry_out(order, reached)


def drained(made: World) -> bool:
    drain = made.state.policy.drains.get("a")
    assert drain is not None
    assert drain.done or made.state.policy.drains.sole_blocks("a"), "0 only when it is known"
    assert made.state.policy.drains.drained == {"a": drain.done}
    return drain.done


def test_a_node_that_has_not_announced_is_not_drained() -> None:
    """As after a change of leader: the drain was kept, the map begins empty."""
    made, _ = world()
    made.state.policy.drain("a", cancel=False)
    run(made, announce=False)
    assert not drained(made)
    run(made, 8)
    assert drained(made) and made.nodes["b"].blocks() >= made.nodes["a"].blocks()


def test_what_lies_below_dram_keeps_a_node_from_being_drained() -> None:
    made, node = world(Tier.DRAM, Tier.SSD)
    made.state.policy.drain("a", cancel=False)
    for _ in range(8):
        run(made, 1, announce=False)
        for each in made.nodes.values():
            while made.announce(each, Tier.DRAM, force=False):
                pass
        made.announce(node, Tier.DRAM)
    assert not drained(made)
    run(made, 8)
    assert drained(made) and made.nodes["b"].blocks() >= node.blocks()


def test_what_is_still_being_written_keeps_a_node_from_being_drained() -> None:
    """It takes nothing more, but what it had begun will be sealed."""
    made, node = world()
    run(made)
    made.state.policy.drain("a", cancel=False)
    node.writing = 1
    run(made, 8)
    assert not drained(made)
    node.seal(key(77))
    node.writing = 0
    made.beat(node)  # before the new block is announced
    run(made, 2, announce=False)
    assert not drained(made)
    run(made, 8)
    assert drained(made) and key(77) in made.nodes["b"].blocks()


@pytest.mark.parametrize("why", ["shed", "cut"])
def test_what_the_map_leaves_out_keeps_a_node_from_being_drained(why: str) -> None:
    limits = PolicyLimits(max_map_bytes=600) if why == "shed" else PolicyLimits()
    made, _ = world(limits=limits)
    if why == "cut":
        made.state.blocks._max = 3
    run(made, 1)
    made.state.policy.drain("a", cancel=False)
    run(made, 8)
    assert not drained(made)
    drain = made.state.policy.drains.get("a")
    assert drain is not None and "max_" in drain.why_not


def test_a_lower_tier_that_has_not_announced_may_hold_anything() -> None:
    made, node = world(Tier.DRAM, Tier.SSD)
    known = made.state.policy.known
    for each in made.nodes.values():
        made.beat(each)
        while made.announce(each, Tier.DRAM, force=False):
            pass
        made.announce(each, Tier.DRAM)
    assert known.unheard == ["a"]
    made.announce_all(node)
    assert known.unheard == []
    node.restart(warm=True)
    made.beat(node)
    assert known.unheard == ["a"]


def test_a_new_leader_lets_nobody_evict_what_it_has_not_heard_of() -> None:
    made, _ = world()
    quotas = made.state.policy
    quotas.set_quota(TagQuota(b"tag1", 6))
    made.beat(made.nodes["a"])
    assert quotas.allowances("a", 0.0) == {}
    run(made)
    assert quotas.allowances("a", made.now)[b"tag1"] >= 5


def test_a_quota_that_an_earlier_leader_has_lifted_is_lifted_everywhere() -> None:
    """Nodes keep what they were told last: that there are none must be said, once a life."""
    made, _ = world()
    run(made)
    told = made.state.policy.allowances("a", made.now)
    assert told and not any(told.values())
    assert made.state.policy.allowances("a", made.now) == {}


def test_a_name_stands_while_its_block_may_be_among_those_left_out() -> None:
    made, _ = world(limits=PolicyLimits(max_map_bytes=600, names_grace_s=1.0))
    policy = made.state.policy
    run(made, 6)
    gone = [i for i in range(5) if not made.state.blocks.holders(key(i))]
    assert gone and policy.memory.missing
    policy.bind("n", [("y", key(gone[0]))], made.now)[2]()
    made.now += 10
    assert policy.bind("n", [("y", key(99))], made.now)[0] == [key(gone[0])]


def test_a_gap_makes_a_node_unknown_until_its_snapshot() -> None:
    made, node = world()
    run(made)
    assert "a" in made.state.policy.known
    node.seal(key(50))
    word = node.announcers[Tier.DRAM].next()
    assert word is not None
    made.deliver(node, replace(word, seq=word.seq + 3))
    assert made.state.policy.known.unheard == ["a"]
    node.announcers[Tier.DRAM].acked(want_snapshot=True)
    made.announce_all(node)
    assert made.state.policy.known.unheard == []
