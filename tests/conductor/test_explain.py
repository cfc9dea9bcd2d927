"""What is remembered of decisions, for how long, in which words."""

import pytest

from kvmesh.rpc.errors import Overloaded
from services.conductor.domain import Load, PrefillSample, Role
from services.conductor.records import explain
from services.conductor.records.explain import Candidate, Decision, Explanations
from tests.conductor.brain import Brain
from tests.conductor.sharing import LONG, X, mesh


def decision(name: str, candidates: int = 1) -> Decision:
    many = (Candidate(mesh(1).refs["p0"], Role.PREFILL, "avoided"),) * candidates
    return Decision(name, 0, "demo", 10, 0, 0, 0.0, 1.0, 1.0, many, "ttft")


def of(brain: Brain, request_id: str) -> Decision:
    found = brain.state.explain(request_id)
    assert found is not None
    return found


def verdicts(found: Decision, role: Role = Role.PREFILL) -> dict[str, str]:
    return {c.ref.instance_id: found.verdict(c) for c in found.candidates if c.role is role}


def test_the_oldest_is_forgotten_first() -> None:
    kept = Explanations(3)
    for name in "abc":
        kept.keep(decision(name))
    assert kept.get("a") is not None  # asked for: it stays
    kept.keep(decision("d"))
    kept.keep(decision("d"))
    assert [kept.get(name) is not None for name in "abcd"] == [True, False, True, True]
    assert len(kept) == 3


def test_candidates_of_all_decisions_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "MAX_CANDIDATES", 10)
    kept = Explanations(100)
    for i in range(20):
        kept.keep(decision(str(i), 4))
    assert len(kept) == 2
    kept.keep(decision("huge", 50))
    assert len(kept) == 1
    assert kept.get("huge") is not None


def test_the_brain_keeps_as_many_as_it_is_told() -> None:
    brain = mesh(max_explained=5)
    for _ in range(20):
        brain.schedule(1)
    assert brain.state.explain("r15") is None
    assert of(brain, "r16").outcome == "placed"


def test_verdicts_name_what_decided() -> None:
    brain = mesh(4, 2)
    brain.seal("p0", X)
    brain.beat("p2", ready=False, not_ready_reason="its rank is silent")
    brain.placed(LONG, keys=X, request_id="r", avoid=frozenset({"p3"}))
    found = of(brain, "r")
    told = verdicts(found)
    assert told["p0"] == "chosen"
    assert told["p1"].startswith("slower by ")
    assert told["p2"] == "not ready: its rank is silent"
    assert told["p3"] == "avoided"
    decodes = sorted(verdicts(found, Role.DECODE).values())
    assert decodes == ["as good: busier, without room or by chance", "chosen"]
    assert found.best_prefix_blocks == 64


def test_what_does_not_fit_and_what_nobody_could_do_in_time() -> None:
    brain = mesh()
    brain.add("small", Role.PREFILL, capacity=3)
    brain.refused(Overloaded, LONG, request_id="r", ttft_slo_s=0.001)
    found = of(brain, "r")
    assert verdicts(found) == {"p0": "over the SLO", "p1": "over the SLO", "small": "the prompt does not fit"}
    assert verdicts(found, Role.DECODE) == {"d0": "would do"}
    assert (found.outcome, found.placed) == ("ttft", None)
    assert "SLO" in found.message


def test_a_later_attempt_replaces_the_earlier_and_only_the_chosen_one_reports() -> None:
    brain = mesh()
    first = brain.placed(request_id="r")
    avoid = frozenset({first.prefill.instance_id})
    second = brain.placed(request_id="r", attempt=1, avoid=avoid)
    assert of(brain, "r").attempt == 1
    sample = PrefillSample("r", 100, 16, 0.5, 0, 0.0)
    brain.beat(first.prefill.instance_id, prefill_samples=(sample,))
    assert of(brain, "r").sample is None
    brain.beat(second.prefill.instance_id, prefill_samples=(sample,))
    assert of(brain, "r").sample == sample


def test_terms_add_up_to_what_was_predicted_also_while_decode_is_full() -> None:
    brain = mesh(2, 1)
    brain.seal("p0", X)
    brain.beat("d0", Load(free_pages=0, free_extents=0, running_requests=4, context_tokens=400))
    placed = brain.placed(LONG, keys=X, request_id="r")
    assert placed.terms["landing_wait_ms"] > 0
    chosen = next(c for c in of(brain, "r").candidates if c.ref == placed.prefill)
    terms = chosen.named_terms()
    start = max(terms["queue_ms"], terms.get("pull_ms", 0.0))
    total = start + terms["prefill_ms"] + terms["transfer_tail_ms"] + terms["landing_wait_ms"]
    assert terms["ttft_ms"] == pytest.approx(total) == pytest.approx(placed.ttft_s * 1000)
    assert chosen.score_s * 1000 == pytest.approx(terms["ttft_ms"])
