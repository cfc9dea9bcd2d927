"""What decode tells of requests: predictions are judged by it, stays are learnt from it, it is explained."""

import dataclasses
import random

import pytest

from kvmesh.kvcache.tiers import Tier, TierUse
from kvmesh.services.conductor.costs.accuracy import ENOUGH, PredictionError, PredictionKind
from kvmesh.services.conductor.domain import (
    DecodeSample,
    MemberGone,
    Outcome,
    PrefillSample,
    RequestOutcome,
    Role,
)
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.loads import ledger
from tests.support.conductor.brain import IDLE, Brain


def pair(**settings: object) -> Brain:
    brain = Brain(**settings)
    brain.pair()
    return brain


def of(brain: Brain, name: str) -> Instance:
    found = brain.state._fleet.named(name)
    assert found is not None
    return found


def errors(brain: Brain) -> dict[PredictionKind, PredictionError]:
    return {error.what: error for error in brain.state.prediction_errors(brain.now)}


def done(request_id: str, **more: object) -> RequestOutcome:
    told = RequestOutcome(request_id, 0, Outcome.DONE, 33, 0.5, 0.02, 0.01, 1.5)
    return dataclasses.replace(told, **more)  # type: ignore[arg-type]


def test_a_placements_predictions_are_held_against_the_outcome() -> None:
    brain = pair()
    placed = brain.placed(100, request_id="r")
    brain.beat("d0", outcomes=(done("r", ttft_s=placed.life.prefill_end_s * 1.5, tbt_s=placed.tbt_s * 0.8),))
    found = errors(brain)
    assert found[PredictionKind.TTFT].bias == pytest.approx(0.5)
    assert found[PredictionKind.TBT].bias == pytest.approx(-0.2)
    assert placed.life.output_tokens > 0
    assert found[PredictionKind.OUTPUT_TOKENS].bias == pytest.approx(33 / placed.life.output_tokens - 1)


def test_an_outcome_told_twice_counts_once() -> None:
    brain = pair()
    brain.placed(100, request_id="r")
    for _ in range(3):
        brain.beat("d0", outcomes=(done("r"),))
    assert errors(brain)[PredictionKind.TTFT].samples == 1


def test_a_failure_told_again_and_again_is_one_failure() -> None:
    """What is not acknowledged is sent again: that opens no circuit breaker."""
    brain = pair()
    brain.add("p1", Role.PREFILL)
    brain.tick(0.0)
    failed = done("r", outcome=Outcome.FAILED, error="handoff_lost", blamed="p0", duration_s=0.0)
    brain.placed(100, request_id="r")
    for _ in range(3 * brain.settings.breaker.failures):
        brain.beat("d0", outcomes=(failed,))
    assert brain.view("p0").ready
    for i in range(brain.settings.breaker.failures):
        brain.beat("d0", outcomes=(dataclasses.replace(failed, request_id=f"s{i}"),))
    assert not brain.view("p0").ready


@pytest.mark.parametrize(
    "outcome",
    [
        done("r", attempt=0),  # of the attempt before
        done("stranger"),
        done("r", attempt=1, ttft_s=0.0, tbt_s=0.0, outcome=Outcome.REFUSED),
    ],
)
def test_other_outcomes_judge_no_prediction(outcome: RequestOutcome) -> None:
    brain = pair()
    brain.placed(100, request_id="r", attempt=0)
    brain.placed(100, request_id="r", attempt=1)
    brain.beat("d0", outcomes=(outcome,))
    assert errors(brain) == {}
    if outcome.attempt == 0:
        assert "r" in of(brain, "d0").batch.works, "the later attempt is still there"


def test_an_outcome_from_elsewhere_judges_nothing() -> None:
    brain = pair()
    brain.add("d1", Role.DECODE)
    placed = brain.placed(100, request_id="r")
    other = "d1" if placed.decode.instance_id == "d0" else "d0"
    brain.beat(other, outcomes=(done("r"),))
    assert errors(brain) == {}


@pytest.mark.parametrize(
    ("outcome", "learns"),
    [(Outcome.DONE, True), (Outcome.CANCELLED, True), (Outcome.FAILED, False), (Outcome.REFUSED, False)],
)
def test_stays_are_learnt_from_what_was_served(outcome: Outcome, learns: bool) -> None:
    brain = pair()
    batch, before = of(brain, "d0").batch, of(brain, "d0").batch.residence_s
    for i in range(60):
        brain.placed(10, request_id=f"r{i}")
        brain.now += 0.01  # what the conductor hears is late or early, what decode measured is not
        told = done(f"r{i}", outcome=outcome, duration_s=4.0)
        brain.beat("d0", outcomes=(told,), finished_request_ids=(f"r{i}",))
        brain.beat("p0", finished_request_ids=(f"r{i}",))
    assert batch.residence_s == pytest.approx(4.0 if learns else before, rel=0.02)
    assert batch.works == {}


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.CANCELLED])
def test_who_is_not_admitted_at_decode_leaves_the_queue_of_prefill(outcome: Outcome) -> None:
    """It is placed no other time: the refusal was final, or its client has gone."""
    brain = pair()
    placed = brain.placed(4000, request_id="r")
    queue, later = of(brain, "p0").queue, brain.placed(4000, request_id="s")
    assert later.terms["queue_ms"] > 0
    brain.beat("d0", outcomes=(done("r", outcome=outcome, duration_s=0.0, ttft_s=0.0, tbt_s=0.0),))
    assert list(queue.works) == ["s"]
    assert queue.wait_s(brain.now) == pytest.approx(placed.terms["prefill_ms"] / 1e3, rel=0.01)
    brain.beat("d0", outcomes=(done("s", outcome=outcome, duration_s=0.1, ttft_s=0.0, tbt_s=0.0),))
    assert list(queue.works) == ["s"], "prefill was asked for this one, and tells itself how it ended"


def test_what_is_kept_of_placements_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_PROMISED", 10)
    brain = pair()
    for i in range(30):
        brain.placed(1, request_id=f"r{i}")
    assert len(brain.state._ledger._promised) == 10
    brain.beat("d0", outcomes=(done("r0"), done("r29")))
    assert errors(brain)[PredictionKind.TTFT].samples == 1


def test_samples_are_judged_before_they_are_learnt() -> None:
    brain = pair()
    expected = of(brain, "p0").prefill.predict(100, 0)
    brain.done("p0", "r", 100, seconds=3 * expected)
    assert errors(brain)[PredictionKind.PREFILL].bias == pytest.approx(2.0)
    brain.done("p0", "s", 100, seconds=3 * expected)  # by now it knows
    assert errors(brain)[PredictionKind.PREFILL].bias == pytest.approx(1.0), "the median of 2 and 0"


def test_every_kind_of_sample_is_judged() -> None:
    brain = pair()
    sample = PrefillSample("r", 100, 64, 0.01, 10_000_000, 0.02, 64, 1_000_000, 0.03)
    brain.beat("p0", prefill_samples=(sample,), tiers=(TierUse(Tier.SSD, 1, 1, 1, 1_000_000, 10**9),))
    brain.beat("d0", decode_samples=(DecodeSample(4, 400, 0.02),))
    assert set(errors(brain)) == {
        PredictionKind.PREFILL,
        PredictionKind.TRANSFER,
        PredictionKind.PULL,
        PredictionKind.DECODE_STEP,
        PredictionKind.TIER_LOAD,
    }


def test_an_outcome_is_explained_beside_what_was_expected() -> None:
    brain = pair()
    brain.placed(100, request_id="r")
    outcome = done("r", outcome=Outcome.FAILED, error="handoff_lost", blamed="p0")
    brain.beat("d0", outcomes=(done("r", attempt=4), outcome))
    decision = brain.state.explain("r")
    assert decision is not None
    assert decision.ended == outcome


def test_the_dead_leave_no_promise_that_a_new_life_keeps() -> None:
    brain = pair()
    brain.placed(100, request_id="r")
    brain.step(MemberGone(("d0", 1), "died"))
    brain.add("d0", Role.DECODE, incarnation=2)
    brain.beat("d0", outcomes=(done("r"),))
    assert errors(brain) == {}


# ── machines of two kinds ─────────────────────────────────────────────────────────────────────────


def prefill_s(tokens: int, speed: float) -> float:
    return (0.01 + 1e-4 * tokens) / speed


def taught(speeds: dict[str, float]) -> Brain:
    """Each prefill instance has shown what it takes, as fast as it is."""
    brain, rng = Brain(), random.Random(2)
    for name in speeds:
        brain.add(name, Role.PREFILL)
    brain.add("d0", Role.DECODE)
    for i in range(120):
        brain.now += 0.2
        for name, speed in speeds.items():
            tokens = rng.randint(50, 3000)
            seconds = prefill_s(tokens, speed) * rng.gauss(1, 0.05)
            brain.beat(name, prefill_samples=(PrefillSample(f"{name}{i}", tokens, 0, seconds, 0, 0.0),))
        brain.beat("d0")
    return brain


def test_fast_and_slow_instances_are_told_apart() -> None:
    speeds = {"fast": 4.0, "slow": 1.0}
    brain = taught(speeds)
    for name, speed in speeds.items():
        assert of(brain, name).prefill.predict(1000, 0) == pytest.approx(prefill_s(1000, speed), rel=0.05)
    placed = brain.placed(1000)
    assert placed.prefill.instance_id == "fast"
    assert placed.terms["prefill_ms"] == pytest.approx(1000 * prefill_s(1000, 4.0), rel=0.05)
    assert placed.ttft_s >= prefill_s(1000, 4.0) * 0.95


def test_a_slow_instance_gets_its_share_by_its_own_speed() -> None:
    """Of equal prompts that come at once, four go to one that is four times as fast while one goes to the other."""
    brain = taught({"fast": 4.0, "slow": 1.0})
    to = [brain.placed(2000).prefill.instance_id for _ in range(25)]
    assert to.count("fast") == pytest.approx(20, abs=2)
    decision = brain.state.explain("r25")
    assert decision is not None
    own = {c.ref.instance_id: c.named_terms()["prefill_ms"] for c in decision.candidates if c.role is Role.PREFILL}
    assert own["slow"] == pytest.approx(4 * own["fast"], rel=0.1)


def test_a_newcomer_begins_between_its_peers_and_finds_its_own() -> None:
    brain = taught({"fast": 4.0, "slow": 1.0})
    brain.add("new", Role.PREFILL)
    first = of(brain, "new").prefill.predict(1000, 0)
    assert prefill_s(1000, 4.0) * 0.9 < first < prefill_s(1000, 1.0) * 1.1
    for i in range(40):
        sample = PrefillSample(f"n{i}", 100 + 50 * i, 0, prefill_s(100 + 50 * i, 2.0), 0, 0.0)
        brain.beat("new", prefill_samples=(sample,))
    assert of(brain, "new").prefill.predict(1000, 0) == pytest.approx(prefill_s(1000, 2.0), rel=0.05)
    assert of(brain, "slow").prefill.predict(1000, 0) == pytest.approx(prefill_s(1000, 1.0), rel=0.05)


def test_decode_instances_too_have_models_of_their_own() -> None:
    brain = Brain()
    brain.add("p0", Role.PREFILL)
    for name in ("fast", "slow"):
        brain.add(name, Role.DECODE)
    for i in range(60):
        brain.now += 0.2
        for name, step_s in (("fast", 0.01), ("slow", 0.04)):
            brain.beat(name, IDLE, decode_samples=(DecodeSample(1 + i % 8, 500, step_s * (1 + 0.01 * (i % 8))),))
        brain.beat("p0")
    placed = brain.placed(100)
    assert placed.decode.instance_id == "fast"
    assert placed.tbt_s == pytest.approx(0.01, rel=0.15)


def test_what_is_told_follows_what_was_seen_lately() -> None:
    """Every request takes twice as long as the models think until its first token, and half as long between two."""
    brain = pair()
    for n in range(ENOUGH + 1):
        placed = brain.placed(100, request_id=f"r{n}")
        at = 2.0 if n >= ENOUGH else 1.0
        assert placed.expected_ttft_s == pytest.approx(at * placed.life.prefill_end_s)
        assert placed.expected_tbt_s == pytest.approx(placed.tbt_s / at)
        ended = done(f"r{n}", ttft_s=2 * placed.life.prefill_end_s, tbt_s=placed.tbt_s / 2)
        brain.beat("d0", outcomes=(ended,), finished_request_ids=(f"r{n}",))
        brain.beat("p0", finished_request_ids=(f"r{n}",))
    told = errors(brain)[PredictionKind.TTFT]
    assert told.samples == ENOUGH + 1 and told.bias == pytest.approx(1.0)
    assert told.low == pytest.approx(1.8), "the last one was told right"
