"""Lives that end, come back, or come with a clock that was put back: nothing of them may stay, or stay unheard."""

import pytest

from kvmesh.kvcache.announce import Announcement
from kvmesh.services.conductor.domain import Blocks, MemberGone, Role
from tests.support.conductor.brain import Brain, chain, joined, reset
from tests.support.conductor.sharing import LONG, X, mesh

Y = chain("y", 8)


def indexed(brain: Brain, name: str) -> int:
    return next(v.indexed_blocks for v in brain.state.views(brain.now) if v.ref.instance_id == name)


@pytest.mark.parametrize("told", ["death", "name taken", "snapshot", "first blocks, then members"])
def test_a_life_with_a_smaller_incarnation_is_heard_too(told: str) -> None:
    """Incarnations come from clocks, which differ between machines and are put back: the master says who lives."""
    brain = Brain()
    brain.add("p0", Role.PREFILL, incarnation=9)
    brain.add("d0", Role.DECODE)
    brain.step(reset(1, ("p0", 9), "d0"))
    brain.seal("p0", X, incarnation=9)
    if told == "death":
        brain.step(MemberGone(("p0", 9), "died"))
    if told in ("death", "name taken"):
        brain.step(joined("p0", 3))
    elif told == "snapshot":
        brain.step(reset(1, ("p0", 3), "d0"))
    brain.register("p0", Role.PREFILL, incarnation=3)
    brain.beat("p0")
    assert brain.seal("p0", Y, incarnation=3) == []
    if told == "first blocks, then members":
        brain.step(reset(1, ("p0", 3), "d0"))
    assert indexed(brain, "p0") == len(Y)
    assert brain.state.indexed_blocks == len(Y), "the old life's blocks are still there"
    assert brain.seal("p0", Y[:1], incarnation=3, removed=Y[4:]) == []
    assert indexed(brain, "p0") == 4


def test_a_smaller_incarnation_in_the_parts_of_a_snapshot() -> None:
    brain = Brain()
    brain.step(reset(1, ("pool", 9)))
    brain.seal("pool", X, incarnation=9)
    for part, keys in enumerate((Y[:4], Y[4:])):
        brain.step(Blocks(Announcement("pool", 3, 7, keys, snapshot=True, part=part, more=part == 0)))
    brain.step(reset(1, ("pool", 3)))
    assert brain.state.indexed_blocks == len(Y)


@pytest.mark.parametrize("end", ["died", "dies and joins again", "new life", "silence"])
def test_what_was_placed_at_the_dead_is_forgotten(end: str) -> None:
    brain = mesh(2, 1)
    for _ in range(5):
        brain.placed(LONG, keys=X)
    assert len(brain.state._ledger) == 5
    if end == "new life":
        brain.add("d0", Role.DECODE, incarnation=2)
    elif end == "silence":
        for _ in range(100):
            brain.tick(1.0)
    else:
        brain.step(MemberGone(("d0", 1), "died"))
        if end != "died":
            brain.step(joined("d0"))
    assert len(brain.state._ledger) == 0
    assert len(brain.state._ledger.outgoing) == 0 or end != "silence"
