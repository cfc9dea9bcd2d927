"""Requests that are over because whoever asked for their placement says so."""

from __future__ import annotations

import math

import pytest

from kvmesh.kvcache.keys import EXTERNAL
from kvmesh.services.conductor.domain import BlockKnowledge, MembersReset, Outcome, RequestReleased, Role
from kvmesh.services.conductor.records.journal import Header, Recorder, line_of
from kvmesh.services.conductor.settings import Settings
from tests.support.conductor.brain import BLOCK, Brain, card, chain

ENGINES = ("a", "b", "c")
BLOCKS = 20


@pytest.fixture
def brain() -> Brain:
    found = Brain()
    for name in ENGINES:
        engine(found, name, BlockKnowledge.FALLBACK)
    return found


def engine(brain: Brain, name: str, knowledge: BlockKnowledge) -> None:
    """Registers it, or says of one that is there how well it is known what it holds."""
    model = card(fingerprint=f"{EXTERNAL}x")
    brain.add(name, Role.BOTH, model=model, http_url=f"http://{name}:1", knowledge=knowledge)


def pending(brain: Brain) -> dict[str, int]:
    return {one.ref.instance_id: one.pending for one in brain.state.views(brain.now, brain.state.instances)}


def placed(brain: Brain, request_id: str, name: str = "x") -> tuple[str, int]:
    """The instance of a placement, and how many tokens it is believed to have."""
    answer = brain.placed(BLOCKS * BLOCK + 3, request_id=request_id, keys=chain(name, BLOCKS))
    assert answer.prefill == answer.decode
    return answer.decode.instance_id, answer.cached_tokens


def test_what_was_answered_is_there_afterwards(brain: Brain) -> None:
    first, cached = placed(brain, "r1")
    assert cached == 0 and pending(brain)[first] > 0
    assert brain.step(RequestReleased("r1", first, Outcome.DONE)) == []
    assert not any(pending(brain).values())
    brain.beat_all()  # its load says that nothing is left there
    assert placed(brain, "r2") == (first, BLOCKS * BLOCK)


def test_what_another_one_answered_is_there_and_not_where_it_was_placed(brain: Brain) -> None:
    first, _ = placed(brain, "r1")
    other = next(name for name in ENGINES if name != first)
    brain.step(RequestReleased("r1", other, Outcome.DONE))
    assert not any(pending(brain).values())
    assert placed(brain, "r2") == (other, BLOCKS * BLOCK)


def passes(brain: Brain, seconds: float) -> None:
    """So much time, in which a master is heard and every engine says that it is idle."""
    for _ in range(math.ceil(seconds)):
        brain.beat_all()
        brain.tick(1.0)


@pytest.fixture
def beside_a_master(brain: Brain) -> Brain:
    """A mesh with a store: what is promised and never announced is given up there."""
    brain.step(MembersReset(1, ()))
    return brain


def test_an_engine_that_reports_nothing_has_it_until_others_take_its_place(beside_a_master: Brain) -> None:
    brain = beside_a_master
    first, _ = placed(brain, "r1")
    brain.step(RequestReleased("r1", first, Outcome.DONE))
    passes(brain, 60 * brain.settings.confirmed_s)  # the client has read the answer, and thought about it
    assert placed(brain, "r2") == (first, BLOCKS * BLOCK)
    brain.step(RequestReleased("r2", first, Outcome.DONE))
    for number in range(200):  # the cache of an engine, 1000 blocks here, ends somewhere
        request_id = f"o{number}"
        at, _ = placed(brain, request_id, request_id)
        brain.step(RequestReleased(request_id, at, Outcome.DONE))
    assert placed(brain, "r3")[1] == 0


def test_an_engine_that_reports_its_blocks_has_what_it_reports(beside_a_master: Brain) -> None:
    brain = beside_a_master
    for name in ENGINES:
        engine(brain, name, BlockKnowledge.EXACT)
    first, _ = placed(brain, "r1")
    brain.step(RequestReleased("r1", first, Outcome.DONE))
    passes(brain, brain.settings.confirmed_s + 1)
    assert placed(brain, "r2")[1] == 0


@pytest.mark.parametrize("how", ["it was lost", "it reports now"])
def test_what_was_believed_of_an_engine_ends_when_it_cannot_be_so(beside_a_master: Brain, how: str) -> None:
    brain = beside_a_master
    first, _ = placed(brain, "r1")
    brain.step(RequestReleased("r1", first, Outcome.DONE))
    if how == "it was lost":  # another process may answer there next
        brain.beat(first, ready=False)
        brain.beat(first)
    else:
        engine(brain, first, BlockKnowledge.EXACT)
    passes(brain, 1)
    assert placed(brain, "r2")[1] == 0


@pytest.mark.parametrize("max_tokens", [3000, 8])
def test_an_answer_that_takes_long_leaves_its_prompt_there(beside_a_master: Brain, max_tokens: int) -> None:
    """Nobody reports that its prompt is computed; with few tokens even the answer is long overdue when it ends."""
    brain = beside_a_master
    answer = brain.placed(BLOCKS * BLOCK + 3, request_id="r1", keys=chain("x", BLOCKS), max_tokens=max_tokens)
    first = answer.decode.instance_id
    passes(brain, 3 * brain.settings.pending_timeout_s)
    assert any(pending(brain).values()) == (max_tokens > 8)
    brain.step(RequestReleased("r1", first, Outcome.DONE))
    assert not any(pending(brain).values())
    assert placed(brain, "r2") == (first, BLOCKS * BLOCK)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.REFUSED])
def test_what_an_engine_did_not_take_it_does_not_have(brain: Brain, outcome: Outcome) -> None:
    first, _ = placed(brain, "r1")
    brain.step(RequestReleased("r1", first, outcome))
    assert not any(pending(brain).values())
    brain.beat_all()
    assert placed(brain, "r2")[1] == 0


@pytest.mark.parametrize("served", ["", "nobody"])
def test_what_nobody_answered_leaves_nothing(brain: Brain, served: str) -> None:
    placed(brain, "r1")
    brain.step(RequestReleased("r1", served, Outcome.CANCELLED))
    assert not any(pending(brain).values())
    assert placed(brain, "r2")[1] == 0


def test_told_twice_or_of_the_unknown_it_does_nothing(brain: Brain) -> None:
    first, _ = placed(brain, "r1")
    placed(brain, "r2", "y")
    before = pending(brain)
    for request_id in ("r1", "r1", "never"):
        brain.step(RequestReleased(request_id, first, Outcome.DONE))
    after = pending(brain)
    assert sum(after.values()) == sum(before.values()) - before[first] + after[first] > 0
    brain.step(RequestReleased("r2", "", Outcome.CANCELLED))
    assert not any(pending(brain).values())


def test_an_engine_that_fails_requests_rests(brain: Brain) -> None:
    brain.tick(1.0)
    for number in range(20):
        placed(brain, f"r{number}", f"k{number}")
        brain.step(RequestReleased(f"r{number}", "a", Outcome.FAILED))
    views = {one.ref.instance_id: one for one in brain.state.views(brain.now, brain.state.instances)}
    assert views["a"].breaker and not views["b"].breaker
    assert "rests" in views["a"].breaker


def test_a_reservation_whose_end_is_never_told_is_forgotten(brain: Brain) -> None:
    placed(brain, "r1")
    brain.now += 3600
    for _ in range(10):
        brain.now += 1
        brain.beat_all()
        brain.tick(1.0)
    assert not any(pending(brain).values())


def test_the_decision_log_has_it() -> None:
    lines: list[bytes] = []
    recorder = Recorder(Header(1, 0.0, Settings()), lambda line: lines.append(line) or 0, 1 << 20)
    event = RequestReleased("r1", "a", Outcome.DONE)
    recorder.step(event, 1.0)
    found = line_of(lines[-1], 2)
    assert found is not None and found.event == event
