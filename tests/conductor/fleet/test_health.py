"""Cordons and breakers as the brain minds them: who never gets work, who is tried again, that a pool stays open."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmesh.errors import InvalidRequest, Overloaded, Unavailable, UnknownInstance
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.services.conductor.domain import Cordon, CordonState, Load, Outcome, Placed, Refuse, RequestOutcome, Role
from kvmesh.services.conductor.fleet.cordons import MAX_CORDONS, MAX_REASON, Cordons, changes
from kvmesh.services.conductor.settings import BreakerSettings
from tests.conductor.peers.test_leadership import TIMEOUT, conductor, config
from tests.conductor.test_service import beat, scheduling
from tests.support.conductor.brain import Brain
from tests.support.services import until

CORDONED, DRAINING, OPEN = CordonState.CORDONED, CordonState.DRAINING, CordonState.OPEN
BREAKER = BreakerSettings(failures=3, window_s=10.0, rest_s=5.0, max_rest_s=20.0, probe_s=30.0)


def brain(prefills: int = 2, decodes: int = 2, **more: Any) -> Brain:
    made = Brain(breaker=BREAKER, forget_s=1e9, lease_s=1e9, pending_timeout_s=1e9, **more)
    for i in range(prefills):
        made.add(f"p{i}", Role.PREFILL)
    for i in range(decodes):
        made.add(f"d{i}", Role.DECODE)
    made.tick(0)
    return made


def ended(b: Brain, by: str, outcome: Outcome, request_id: str, blamed: str = "", duration_s: float = 0.0) -> None:
    told = RequestOutcome(request_id, 0, outcome, blamed=blamed, duration_s=duration_s)
    b.beat(by, outcomes=(told,), finished_request_ids=(request_id,))


def fail(b: Brain, blamed: str, times: int = 3, reporter: str = "d0") -> None:
    for i in range(times):
        ended(b, reporter, Outcome.FAILED, f"{blamed}-{b.now}-{i}", blamed)


# ── cordons ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", [CORDONED, DRAINING])
def test_a_cordon_outlives_the_instance_and_ends_by_word(state: CordonState) -> None:
    b = brain(1, 1)
    assert b.step(Cordon("p0", state, "new disk")) == []
    told = b.refused(Unavailable)
    assert f"p0: {state.value}: new disk" in told.error.message
    assert (b.view("p0").cordon, b.view("p0").cordon_reason, b.view("p0").ready) == (state, "new disk", False)
    b.add("p0", Role.PREFILL, incarnation=2)
    b.refused(Unavailable)
    assert b.step(Cordon("p0", OPEN)) == []
    b.placed()
    assert b.view("p0").cordon is OPEN


def test_idle_is_told_of_the_closed_alone_and_only_when_nothing_is_there_or_coming() -> None:
    b = brain(1, 1)
    assert b.state.idle(b.now) == {}
    b.placed(request_id="one")
    b.step(Cordon("p0", DRAINING))
    b.step(Cordon("not here", CORDONED, kept=True))
    assert b.state.idle(b.now) == {"p0": False}, "a placement is on its way"
    b.beat("p0", Load(running_requests=1), finished_request_ids=("one",))
    assert b.state.idle(b.now) == {"p0": False}, "it reports a request"
    b.beat("p0")
    assert b.state.idle(b.now) == {"p0": True}
    b.step(Cordon("p0", OPEN))
    assert b.state.idle(b.now) == {}


def test_whose_word_is_taken() -> None:
    b = brain(1, 1)
    (told,) = b.step(Cordon("nobody", CORDONED))
    assert isinstance(told, Refuse) and isinstance(told.error, UnknownInstance) and "nobody" in told.error.message
    (told,) = b.step(Cordon("p0", CORDONED, "x" * (MAX_REASON + 1)))
    assert isinstance(told, Refuse) and isinstance(told.error, InvalidRequest) and told.error.field == "reason"
    assert b.step(Cordon("not here yet", CORDONED, "kept by Redis", kept=True)) == []
    b.add("not here yet", Role.PREFILL)
    assert b.view("not here yet").not_ready_reason == "cordoned: kept by Redis"


def test_there_are_not_more_cordons_than_fit() -> None:
    cordons = Cordons()
    for i in range(MAX_CORDONS):
        cordons.put(Cordon(f"i{i}", CORDONED))
    assert isinstance(cordons.refusal(Cordon("one more", CORDONED), known=True), Overloaded)
    assert cordons.refusal(Cordon("i0", DRAINING), known=True) is None
    assert cordons.refusal(Cordon("one more", OPEN), known=True) is None


words = st.dictionaries(
    st.sampled_from("abcd"), st.tuples(st.sampled_from([CORDONED, DRAINING]), st.sampled_from("xy"))
)


@given(before=words, after=words)
def test_changes_lead_from_one_set_of_words_to_another(before: Any, after: Any) -> None:
    cordons = Cordons()
    for event in changes({}, before):
        cordons.put(event)
    told = list(changes(before, after))
    for event in told:
        cordons.put(event)
    assert {name: cordons.of(name) for name in "abcd"} == {name: after.get(name, (OPEN, "")) for name in "abcd"}
    assert len(told) == sum(before.get(name) != after.get(name) for name in "abcd")


# ── breakers ──────────────────────────────────────────────────────────────────────────────────────


def test_who_fails_requests_rests_and_is_tried_with_one() -> None:
    b = brain()
    fail(b, "p0")
    assert b.view("p0").breaker == "rests for 5.0 s more: 3 of 3 requests failed within 10 s"
    assert {b.placed().prefill.instance_id for _ in range(20)} == {"p1"}
    b.tick(5.0)
    first = [b.placed(request_id=f"x{i}").prefill.instance_id for i in range(20)]
    assert first.count("p0") == 1, "one probe, whatever the load"
    probe = f"x{first.index('p0')}"
    ended(b, "d0", Outcome.CANCELLED, probe, duration_s=0.1)
    b.tick(0.1)
    again = [b.placed(request_id=f"y{i}").prefill.instance_id for i in range(30)]
    assert again.count("p0") == 1, "a cancelled probe makes room for another"
    b.done("p0", f"y{again.index('p0')}", 100)
    assert b.view("p0").breaker == ""
    assert "p0" in {b.placed().prefill.instance_id for _ in range(20)}


def test_a_probe_that_fails_doubles_the_rest() -> None:
    b = brain()
    fail(b, "d1")
    b.tick(5.0)
    placed = {f"x{i}": b.placed(request_id=f"x{i}").decode.instance_id for i in range(20)}
    (probe,) = [name for name, where in placed.items() if where == "d1"]
    ended(b, "d1", Outcome.FAILED, probe, "d1", 0.5)
    assert b.view("d1").breaker.startswith("rests for 10.0 s more: it failed again after its rest")


def test_many_good_requests_keep_an_instance_at_work() -> None:
    b = brain()
    for i in range(30):
        ended(b, "d1", Outcome.DONE, f"good{i}")
    fail(b, "d1", 5)
    assert b.view("d1").breaker == ""


def test_a_report_told_twice_counts_once() -> None:
    b = brain()
    for _ in range(5):
        ended(b, "d0", Outcome.FAILED, "same", "p0")
    assert b.view("p0").breaker == ""


def test_a_new_life_does_not_pay_for_the_last_one() -> None:
    b = brain()
    b.tick(10.0)
    b.add("p0", Role.PREFILL, incarnation=2)
    b.tick(1.0)
    for i in range(5):
        ended(b, "d0", Outcome.FAILED, f"late{i}", "p0", duration_s=3.0)
    assert b.view("p0").breaker == ""
    fail(b, "p0")
    assert b.view("p0").breaker != ""


def test_a_pool_that_fails_as_a_whole_stays_open() -> None:
    b = brain(3, 1)
    fail(b, "d0")
    assert b.view("d0").breaker == "", "the only one"
    fail(b, "p0")
    assert b.view("p0").breaker != "", "one of three"
    fail(b, "p1")
    assert [b.view(f"p{i}").breaker for i in range(3)] == [""] * 3, "two of three: it is not the instances"
    b.add("p3", Role.PREFILL)
    b.tick(0)
    assert [bool(b.view(f"p{i}").breaker) for i in range(4)] == [True, True, False, False]
    b.step(Cordon("p3", CORDONED))
    b.tick(0)
    assert [b.view(f"p{i}").breaker for i in range(3)] == [""] * 3, "who is away cannot work in their place"


states = st.sampled_from([CORDONED, DRAINING, OPEN])
happenings = st.one_of(
    st.tuples(st.just("fail"), st.sampled_from(["p0", "p1", "p2", "d0", "d1"]), st.integers(1, 4)),
    st.tuples(
        st.just("cordon"), st.sampled_from(["p0", "p1", "d0", "d1"]), st.sampled_from([CORDONED, DRAINING, OPEN])
    ),
    st.tuples(st.just("place"), st.just(""), st.integers(1, 4)),
    st.tuples(st.just("wait"), st.just(""), st.sampled_from([0.5, 5.0, 40.0])),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(happenings, max_size=30))
def test_nobody_gets_work_against_a_word_and_no_pool_is_shut(story: list[tuple[str, str, Any]]) -> None:
    b = brain(3, 2)
    words = dict.fromkeys(b.refs, OPEN)
    for what, name, how in story:
        if what == "fail":
            fail(b, name, how)
        elif what == "cordon":
            b.step(Cordon(name, how))
            words[name] = how
        elif what == "wait":
            b.tick(how)
        b.tick(0)
        for role in "pd":
            able = [i for i in b.refs if i[0] == role and words[i] is OPEN]
            resting = [i for i in able if b.view(i).not_ready_reason]
            assert 2 * len(resting) <= len(able)
        for _ in range(how if what == "place" else 0):
            answer = b.schedule()
            free = [any(words[i] is OPEN for i in b.refs if i[0] == role) for role in "pd"]
            if isinstance(answer, Placed):
                assert words[answer.prefill.instance_id] is OPEN
                assert words[answer.decode.instance_id] is OPEN
            else:
                assert not all(free), answer


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["p0", "p1"]), st.booleans()), min_size=1, max_size=40))
def test_whoever_rests_is_tried_again(story: list[tuple[str, bool]]) -> None:
    b = brain(3, 1)
    for name, pause in story:
        fail(b, name, 3)
        if pause:
            b.tick(1.0)
    b.tick(max(BREAKER.max_rest_s, BREAKER.probe_s))
    assert all(b.view(i).breaker == "" for i in b.refs)


# ── as a service ──────────────────────────────────────────────────────────────────────────────────


async def test_reported_failures_rest_an_instance_of_a_running_conductor() -> None:
    number = 0
    async with conductor(config(None)) as one:
        await one.serve("p0", "p1", "d0")

        async def rests() -> bool:
            nonlocal number
            number += 1
            failing = beat("d0", seq=1 + number)
            failing.outcomes.add(request_id=f"r{number}", outcome=pb.OUTCOME_FAILED, error="unavailable", blamed="p0")
            await one.stub.Heartbeat(failing, timeout=TIMEOUT)
            return (await one.reasons())["p0"].startswith("rests for ")

        await until(rests)
        placed = [(await one.stub.Schedule(scheduling(), timeout=TIMEOUT)).placement for _ in range(5)]
        assert {placement.prefill.instance_id for placement in placed} == {"p1"}
