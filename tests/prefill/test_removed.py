"""What is removed while a prompt is computed, or lies in pages, is neither matched nor sealed again from there."""

from __future__ import annotations

import pytest

from kvmesh.blockservice.removals import NotHere
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import prefill_pb2 as pb
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill import wire
from kvmesh.services.prefill.state import PrefillState
from tests.support.prefill.script import BOOT_NS, make_state, prompt

TOKENS, KEYS = prompt("abcd+2", 4)


def sealed_by(state: PrefillState, event: ev.Event) -> list[bytes]:
    """Which blocks this leads to be sealed, once the ranks have copied."""
    before = set(state.store.keys())
    for action in state.step(event, BOOT_NS):
        if isinstance(action, m.TellRank) and isinstance(action.message, m.SealCopy):
            state.step(m.FromRank(0, m.SealCopied(action.message.ticket, 1, 2)), BOOT_NS)
    state.check_integrity()
    return [key for key in KEYS if key in set(state.store.keys()) - before]


def start(state: PrefillState, handle: int, removed_seq: int = 0) -> tuple[list[ev.Action], m.PrefillStep]:
    asked = ev.Start(
        handle, 1, f"r{handle}", TOKENS, KEYS, m.Sampling(0.0, 1.0, 0, 0), BOOT_NS * 2, removed_seq=removed_seq
    )
    said = state.step(asked, BOOT_NS)
    (step,) = [a.message for a in said if isinstance(a, m.TellRank) and isinstance(a.message, m.PrefillStep)]
    return said, step


def done(step: m.PrefillStep) -> m.FromRank:
    sampled = tuple(m.Sampled(item.handle, 7) for item in step.items)
    return m.FromRank(0, m.PrefillStepDone(step.step_id, BOOT_NS, BOOT_NS + 1, sampled))


def remove(state: PrefillState, gone: NotHere) -> None:
    state.store.remove([key for key in KEYS if key in gone])
    state.step(gone, BOOT_NS)
    state.check_integrity()


@pytest.mark.parametrize(
    ("gone", "kept"),
    [
        (NotHere(frozenset({KEYS[2]})), 2),
        (NotHere(frozenset(), KEYS[0]), 0),
        (NotHere(frozenset(), b""), 0),
        (NotHere(frozenset({b"another".ljust(16)})), 4),
    ],
    ids=["one", "prefix", "all", "another"],
)
def test_a_step_that_is_under_way(gone: NotHere, kept: int) -> None:
    state = make_state(extents=16, chunk=64)
    _, step = start(state, 1)
    remove(state, gone)
    assert sealed_by(state, done(step)) == list(KEYS[:kept])
    assert sorted(state.cache.keys()) == sorted(KEYS[:kept])
    state.step(ev.HandoffCancelled(1, "no more"), BOOT_NS)
    _, step = start(state, 2)
    assert step.items[0].start == kept * 4, "computed anew"
    assert sealed_by(state, done(step)) == list(KEYS[kept:])


def test_what_lies_in_pages_is_not_matched_any_more() -> None:
    state = make_state(extents=16, chunk=64)
    assert sealed_by(state, done(start(state, 1)[1])) == list(KEYS)
    state.step(ev.HandoffCancelled(1, "no more"), BOOT_NS)
    remove(state, NotHere(frozenset({KEYS[1]})))
    assert state.cache.keys() == [KEYS[0]] and sorted(state.store.keys()) == [KEYS[0], *KEYS[2:]]
    _, step = start(state, 2)
    assert step.items[0].start == 4
    assert sealed_by(state, done(step)) == [KEYS[1]]


def test_decode_is_told_how_far_this_node_was_when_the_request_came() -> None:
    said, _ = start(make_state(extents=16, chunk=64), 1, removed_seq=7)
    (begin,) = [a for a in said if isinstance(a, ev.SendBeginFill)]
    assert wire.event_out(begin, 5) == pb.HandoffEvent(begin_fill=pb.BeginFill(handle=5, num_blocks=5, removed_seq=7))
