"""Promises of long prompts: noted at marks, rounded down between them, bounded."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvcache.announce import Announcement
from kvmesh.services.conductor.domain import MemberGone, Role
from kvmesh.services.conductor.prefixes.index import Index
from kvmesh.services.conductor.prefixes.pending import COARSE, EACH, FINE, SOME, Pending, marks, positions, span
from tests.support.conductor.brain import Brain, card, chain, joined

LONG = chain("x", 700)


@given(st.integers(0, 3000))
def test_marks_are_the_same_for_every_prompt_but_for_the_last_one(blocks: int) -> None:
    found = positions(blocks)
    rule = [i for i in range(blocks) if i < EACH or (i + 1) % (FINE if i < SOME else COARSE) == 0]
    assert list(found) == sorted({*rule, *([blocks - 1] if blocks else [])})
    covered = sum(span(ordinal) for ordinal in range(len(found)))
    assert blocks <= covered < blocks + COARSE
    assert len(marks(LONG[: min(blocks, 700)])) == len(positions(min(blocks, 700)))


@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 700), st.integers(0, 700))
def test_what_is_promised_is_rounded_down_and_what_is_announced_is_exact(
    promised: int, asked: int, shared: int, sealed: int
) -> None:
    """An instance was given the first `promised` blocks and has announced `sealed` of them; another prompt begins with
    `shared` blocks of the same and is `asked` long."""
    index, life = Index(), ("a", 1)
    slot = index.pending.open(10_000)
    if sealed:
        index.hear(Announcement("a", 1, 1, LONG[:sealed]), life, slot)
    index.place(life, slot, marks(LONG[:promised]), "r")
    shared = min(shared, asked)
    prompt = LONG[:shared] + chain("y", asked - shared)
    known = set(positions(promised)) & set(positions(asked))
    coming = max((i + 1 for i in known if i < shared), default=0)
    place = index.place_of(life, slot)
    assert index.survey(prompt).depth(place) == max(coming, min(sealed, shared))
    if shared == asked == promised:
        assert coming == promised  # the very same prompt is known to its end
    index.pending.withdraw(slot, marks(LONG[:promised]), "r")
    assert len(index.pending) == 0
    assert index.survey(prompt).depth(place) == min(sealed, shared)


def test_promises_take_bounded_memory_however_many_are_made() -> None:
    pending, most = Pending(), 0
    slot = pending.open(5000)
    for i in range(400):
        pending.place(slot, marks(chain(f"p{i}", 500)), f"r{i}")
        assert pending.blocks(slot) <= 5000
        most = max(most, len(pending))
    assert most <= 5000
    assert len(pending) < 5000 // 4  # of long prompts far fewer marks than blocks
    pending.close(slot)
    assert len(pending) == 0
    assert pending.open(1) == slot


def test_instances_that_come_and_go_leave_nothing_in_the_columns() -> None:
    brain = Brain(forget_s=1.0)
    table = brain.state._columns

    def life(i: int) -> None:
        model = card(weights_epoch=i % 50)
        for name, role in ((f"p{i}", Role.PREFILL), (f"d{i}", Role.DECODE)):
            brain.add(name, role, model=model)
            brain.seal(name, LONG[:10])
            brain.step(joined(name))
        brain.schedule(100)
        for name in (f"p{i}", f"d{i}"):
            brain.step(MemberGone((name, 1), "left"))
        brain.tick(2.0)

    def size() -> int:
        slots = table.slots
        parts = (table._rows, slots._of, table._groups, table._row_of_pending, table._dirty, table.instances)
        kept = (table._masks, table._known, table._registered, table._has_rare, *table._rare)
        return sum(map(len, (*parts, *kept))) + table._data.size + slots._asked.size

    for i in range(60):
        life(i)
    before = size()
    for i in range(60, 300):
        life(i)
    assert size() <= before
    assert len(table) <= 2
    assert sys.getsizeof(brain.state._index.truth.moved) < 10_000
