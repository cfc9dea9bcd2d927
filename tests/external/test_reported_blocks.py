"""What an engine reports, with batches that are lost and engines that begin anew: exact or openly not."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.external.engine_blocks import EngineBlocks
from kvmesh.external.kv_events import BlocksRemoved, BlocksStored, KvEventsUnusable, events_of
from kvmesh.external.reported_blocks import ReportedBlocks
from kvmesh.kvcache.keys import chain, pack_tokens, split
from tests.support.external.vllm_blocks import NAMESPACE, SIZE, ReportingCache

PLACES, KEPT = 6, 3  # blocks of the engine, batches that it can replay
ROOT = NAMESPACE.root(SIZE)
SALTED = dataclasses.replace(NAMESPACE, tenant_salt="s", tenant="s")
PROMPTS = [[tree] * SIZE + [leaf] * SIZE * blocks for tree in (1, 2) for leaf in (3, 4) for blocks in (1, 2)]

SERVE = st.tuples(st.just("serve"), st.sampled_from(range(len(PROMPTS))), st.booleans(), st.booleans())
STEPS = st.lists(st.one_of(SERVE, SERVE, st.sampled_from(["clear", "clear lost", "connect", "restart"])), max_size=25)


class Wire:
    """An engine, its reports, and a reader that may lose some; `replays`: whether it can ask for what it lost."""

    def __init__(self, replays: bool) -> None:
        self.engine = ReportingCache(PLACES)
        self.held = EngineBlocks(PLACES)
        self.reported = ReportedBlocks(self.held, ROOT, SIZE, PLACES)
        self.replays = replays
        self.states = [set[bytes]()]  # of the engine, by how many batches it has published
        self.connect()

    def connect(self) -> None:
        self.reported.lost("a new connection")
        assert not self.reported.exact
        self.reported.begin()
        if self.fill():
            self.reported.caught_up()

    def restart(self) -> None:
        self.reported.lost("the engine is gone")
        self.engine, self.states = ReportingCache(PLACES), [set()]
        self.connect()

    def fill(self) -> bool:
        if not self.replays:
            return False
        first = max(self.reported.next, len(self.engine.batches) - KEPT)
        return all(self.take(seq) for seq in range(first, len(self.engine.batches)))

    def take(self, seq: int) -> bool:
        return self.reported.take(seq, events_of(self.engine.batches[seq]))

    def publish(self, lost: bool) -> None:
        self.states.append(self.engine.held())
        seq = len(self.engine.batches) - 1
        if lost:
            return
        if not self.take(seq):
            assert not self.reported.exact and "missing" in self.reported.why
            self.fill()
            if self.reported.next < seq:
                self.reported.skip_to(seq)
            self.take(seq)
        self.reported.caught_up()

    def check(self) -> None:
        if self.reported.exact:
            assert set(self.held.keys()) == self.states[self.reported.next]
        else:
            assert self.reported.why


@given(STEPS, st.booleans())
def test_what_is_called_exact_is_what_the_engine_holds(steps: list[object], replays: bool) -> None:
    wire = Wire(replays)
    for step in steps:
        match step:
            case "serve", int(prompt), bool(salted), bool(lost):
                wire.engine.serve(PROMPTS[prompt], SALTED if salted else None)
                wire.publish(lost)
            case "clear" | "clear lost":
                wire.engine.clear()
                wire.publish(step == "clear lost")
                assert wire.reported.exact or step == "clear lost"
            case "connect":
                wire.connect()
            case "restart":
                wire.restart()
        wire.check()
    # Whatever has been lost, it is exact again once the engine has emptied its cache or begun anew.
    wire.restart()
    for prompt in PROMPTS[:2]:
        wire.engine.serve(prompt)
        wire.publish(lost=False)
        assert wire.reported.exact
        wire.check()


def test_a_gap_is_filled_where_the_engine_replays_it() -> None:
    wire = Wire(replays=True)
    for at, lost in ((0, False), (1, True), (5, True), (2, False)):
        wire.engine.serve(PROMPTS[at])
        wire.publish(lost)
    assert wire.reported.exact and wire.reported.next == 4
    wire.check()
    for _ in range(KEPT + 1):
        wire.engine.serve(PROMPTS[0])
        wire.publish(lost=True)
    wire.engine.serve(PROMPTS[1])
    before = set(wire.held.keys())
    wire.publish(lost=False)
    assert not wire.reported.exact and set(wire.held.keys()) == before, "what was known last is believed"


def test_same_tokens_are_held_until_their_last_place_is_gone() -> None:
    held = EngineBlocks(4)
    reported = ReportedBlocks(held, ROOT, SIZE, 4)
    reported.begin()
    stored = BlocksStored((b"h",), None, pack_tokens([7] * SIZE), SIZE)
    for seq, event in enumerate((stored, stored, BlocksRemoved((b"h",)))):
        reported.take(seq, [event])
        reported.caught_up()
        assert held.keys() == split(chain(NAMESPACE, [7] * SIZE, SIZE))
    reported.take(3, [BlocksRemoved((b"h",))])
    assert held.keys() == [] and reported.exact
    reported.take(4, [BlocksRemoved((b"h",))])
    assert not reported.exact and "had not reported" in reported.why


def test_blocks_that_depend_on_other_things_have_no_key() -> None:
    held = EngineBlocks(8)
    reported = ReportedBlocks(held, ROOT, SIZE, 8)
    reported.begin()
    tokens = pack_tokens([7] * SIZE)
    strange = (
        BlocksStored((b"a",), None, tokens, SIZE, foreign=True),
        BlocksStored((b"b",), b"a", tokens, SIZE),  # after that one
        BlocksStored((b"c",), None, tokens, SIZE, salt="whose?"),
        BlocksStored((b"d",), None, tokens[:4], 1),
    )
    reported.take(0, strange)
    reported.caught_up()
    assert reported.exact and held.keys() == []
    reported.take(1, [BlocksRemoved((b"a", b"b", b"c", b"d"))])
    assert reported.exact


def test_an_engine_that_reports_more_than_it_has_is_not_believed() -> None:
    held = EngineBlocks(2)
    reported = ReportedBlocks(held, ROOT, SIZE, 2)
    reported.begin()
    with pytest.raises(KvEventsUnusable, match="more than the 2 blocks"):
        reported.take(0, [BlocksStored((b"a", b"b", b"c"), None, pack_tokens([1] * 3 * SIZE), SIZE)])
    assert not reported.exact and not len(held)
