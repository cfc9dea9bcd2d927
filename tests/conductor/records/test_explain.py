"""What is remembered of decisions, for how long, in which words; and that the words say what decided."""

import dataclasses
import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import Overloaded
from kvmesh.services.conductor import mapping
from kvmesh.services.conductor.costs.accuracy import AS_PREDICTED, ENOUGH
from kvmesh.services.conductor.domain import DecodeSample, Lane, Load, Outcome, PrefillSample, RequestOutcome, Role
from kvmesh.services.conductor.placing.ties import as_good
from kvmesh.services.conductor.policies.registry import BUILT_IN
from kvmesh.services.conductor.records import explain
from kvmesh.services.conductor.records.explain import Candidate, Decision, Explanations, SloMiss, WeighedKind, Winner
from kvmesh.services.conductor.settings import AffinitySettings
from tests.support.conductor.brain import BLOCK, IDLE, Brain, chain, reset
from tests.support.conductor.sharing import LONG, X, mesh

POLICIES = [*BUILT_IN]


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
    assert told["p3"] == "avoided: an earlier attempt failed there"
    decodes = sorted(verdicts(found, Role.DECODE).values())
    assert decodes == ["as good: another was drawn by chance", "chosen"]
    assert found.best_prefix_blocks == 64


def test_of_scores_that_are_as_good_the_verdict_tells_how_many_requests_are_there() -> None:
    brain = mesh(1, 2)
    same = tuple(DecodeSample(rows, 100 * rows, 0.01) for rows in range(1, 9))
    for name in ("d0", "d1"):
        brain.beat(name, decode_samples=same * 4)
    first = brain.placed(16, request_id="a")
    second = brain.placed(16, request_id="b")
    busy, free = first.decode.instance_id, second.decode.instance_id
    assert busy != free
    assert verdicts(of(brain, "b"), Role.DECODE) == {
        free: "chosen",
        busy: "as good: more requests there (1 against 0)",
    }


def test_crowds_of_several_parts_go_by_the_first_that_differs() -> None:
    winner = Winner((), 1.0, 1.1, (2, 40.0))

    def over(score_s: float, crowd: tuple[float, ...] | None, role: Role = Role.DECODE) -> str:
        return winner.over(score_s, crowd, "slower by {} ms", explain.CROWDS[role])

    assert over(1.0, (3, 0.0)) == "as good: more requests there (3 against 2)"
    assert over(1.0, (2, 1640.2)) == "as good: was given more lately (1,640 against 40 tokens)"
    assert over(1.0, (2, 40.31)) == "as good: was given more lately (40.3 against 40.0 tokens)"
    assert over(1.0, (2, 41.0), Role.PREFILL) == "as good: was given more lately (41 against 40 s of prompts)"
    assert over(1.0, (2, 40.0)) == "as good: another was drawn by chance"
    assert over(1.25, None) == "slower by 250.0 ms"
    assert over(1.00001, None) == "slower by 0.01 ms"
    longer = Winner((), 1.0, 1.1, (2, 40.0, 1.0, 0.0)).over(1.0, (2, 40.0, 1.0, 7.0), "", explain.KIND_CROWD)
    assert longer == "as good: busier (7 against 0)"


def test_who_has_no_room_for_the_whole_answer_is_told_so() -> None:
    brain = mesh(1, 2)
    brain.beat("d0", dataclasses.replace(IDLE, free_pages=8, free_extents=8))
    placed = brain.placed(100, max_tokens=400, request_id="r")
    assert placed.decode.instance_id == "d1"
    assert verdicts(of(brain, "r"), Role.DECODE) == {"d1": "chosen", "d0": "no room for the whole answer"}


def test_the_score_of_a_coupled_instance_tells_what_its_rows_lose() -> None:
    """C5: its TTFT is less than that of the one that was chosen, its score is not."""
    brain = mesh(1, 1)
    brain.add("c0", Role.BOTH, chunk_tokens=128)
    brain.step(reset(1, "p0", "d0", "c0"))
    brain.beat("c0", Load(running_requests=8, context_tokens=4000, free_pages=900, free_extents=900))
    brain.beat("p0", dataclasses.replace(IDLE, queued_tokens=8000))
    placed = brain.placed(2000, request_id="r")
    assert (placed.prefill.instance_id, placed.decode.instance_id) == ("p0", "d0")
    by_name = {c.ref.instance_id: c for c in of(brain, "r").candidates if c.role is Role.PREFILL}
    chosen, coupled = by_name["p0"], by_name["c0"]
    assert coupled.named_terms()["ttft_ms"] < chosen.named_terms()["ttft_ms"]
    assert coupled.score_s > chosen.score_s
    assert coupled.named_terms()["stall_ms"] > 0
    more_ms = (coupled.score_s - chosen.score_s) * 1000
    assert verdicts(of(brain, "r"))["c0"] == f"slower by {more_ms:,.1f} ms"


def test_what_does_not_fit_and_what_nobody_could_do_in_time() -> None:
    brain = mesh()
    brain.add("small", Role.PREFILL, capacity=3)
    brain.refused(Overloaded, LONG, request_id="r", ttft_slo_s=0.001)
    found = of(brain, "r")
    told = verdicts(found)
    assert told.pop("small") == "the prompt does not fit"
    assert set(told) == {"p0", "p1"}
    for c in found.candidates:
        if c.ref.instance_id in told:
            assert c.miss is not None and c.miss.predicted_s > c.miss.slo_s == 0.001
            assert told[c.ref.instance_id] == (f"over the TTFT SLO: {c.miss.predicted_s * 1000:,.1f} ms, at most 1.0")
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
    assert chosen.score_s * 1000 == pytest.approx(terms["ttft_ms"] - terms["landing_wait_ms"])


# ── every verdict, over random meshes ─────────────────────────────────────────────────────────────


def weighed(c: Candidate | WeighedKind) -> bool:
    return not c.why and bool(c.terms)


def crowd_of(c: Candidate | WeighedKind | Winner) -> tuple[float, ...] | None:
    return c.crowd if c.crowd is None or isinstance(c.crowd, tuple) else (c.crowd,)


def check_choice(
    winner: Winner, among: Sequence[tuple[tuple[object, ...], float, Candidate | WeighedKind, str]], more: str
) -> None:
    """`among`: all that might have been chosen, as (refs, score, record, verdict)."""
    scores = {refs: score for refs, score, _, _ in among}
    assert scores[winner.refs] == winner.score_s, "the winner is one of those that might"
    assert winner.near_s <= as_good(min(scores.values()))
    assert winner.score_s <= winner.near_s
    tied = [refs for refs, score in scores.items() if score <= winner.near_s]
    assert (winner.crowd is not None) == (len(tied) > 1)
    for refs, score, record, verdict in among:
        crowd = crowd_of(record)
        assert (crowd is not None) == (len(tied) > 1 and refs in tied)
        if refs == winner.refs:
            continue
        if crowd is None:
            assert score > winner.near_s
            figure = float(verdict.removeprefix(more.split("{}")[0]).removesuffix(more.split("{}")[1]).replace(",", ""))
            assert verdict == more.format(verdict[len(more.split("{}")[0]) :].removesuffix(more.split("{}")[1]))
            assert figure > 0 and figure == pytest.approx((score - winner.score_s) * 1000, abs=0.051, rel=0.06)
        else:
            mine = crowd_of(winner)
            assert mine is not None and mine <= crowd, "the least crowd wins"
            if mine == crowd:
                assert verdict == "as good: another was drawn by chance"
                continue
            at = next(at for at in range(len(mine)) if mine[at] != crowd[at])
            told = re.fullmatch(r"as good: (.*) \((\S+) against (\S+?)( .*)?\)", verdict)
            assert told is not None, verdict
            assert ("requests" in told[1]) == (at == 0)
            assert float(told[2].replace(",", "")) == pytest.approx(crowd[at], abs=0.51)
            assert float(told[2].replace(",", "")) > float(told[3].replace(",", ""))


def check_miss(miss: SloMiss, verdict: str) -> None:
    assert miss.predicted_s > miss.slo_s
    told, most = verdict.removeprefix(f"over the {miss.what}: ").split(" ms, at most ")
    assert float(told.replace(",", "")) > float(most.replace(",", "")), "it shows which one is greater"


def check(found: Decision, policy: str) -> None:
    """Nothing is asked of the brain: all follows from what is kept."""
    mapping.decision_out(found, found.at + 1.0)
    for c in found.candidates:
        verdict, terms = found.verdict(c), c.named_terms()
        assert (verdict == "chosen") == found.is_chosen(c)
        if c.miss is not None:
            check_miss(c.miss, verdict)
        if not weighed(c):
            continue
        if c.role is Role.DECODE:
            assert sum(terms.values()) == pytest.approx(c.score_s * 1000)
        else:
            lost = sum(terms.get(name, 0.0) for name in ("stall_ms", "line_ms", "session_ms", "lately_ms"))
            assert terms["ttft_ms"] - terms["landing_wait_ms"] + lost == pytest.approx(c.score_s * 1000)
    for role in (Role.PREFILL, Role.DECODE):
        told = [c for c in found.candidates if c.role is role and weighed(c)]
        winner = found.prefill if role is Role.PREFILL else found.decode
        if winner is None:
            assert all(c.miss is not None or found.verdict(c) == "would do" for c in told)
            continue
        may = [c for c in told if c.miss is None and (winner.short or not c.short)]
        check_choice(winner, [((c.ref,), c.score_s, c, found.verdict(c)) for c in may], "slower by {} ms")
        for c in told:
            if c.miss is None and c.short and not winner.short:
                assert found.verdict(c) == "no room for the whole answer"
    for k in found.kinds:
        if k.miss is not None:
            check_miss(k.miss, found.kind_verdict(k))
        if k.terms:
            parts = sum(v for name, v in k.named_terms().items() if name not in ("rows", "tbt_ms", "rows_tbt_ms"))
            assert parts == pytest.approx(k.cost_s * 1000)
    if found.kind is not None:
        may_be = [k for k in found.kinds if not k.why and k.miss is None and not k.avoided]
        told_kinds = [((k.prefill, k.decode), k.cost_s, k, found.kind_verdict(k)) for k in may_be]
        check_choice(found.kind, told_kinds, "costs {} ms more")
        assert {found.kind_verdict(k) for k in found.kinds if k.avoided} <= {explain.AVOIDED}
        if found.placed is not None:
            assert found.kind.refs == (found.placed.prefill, found.placed.decode)
    elif found.placed is not None:
        assert policy not in ("kvcache", "cache_aware")
    if found.placed is not None and found.placed.prefill != found.placed.decode:
        assert found.prefill is not None and found.prefill.refs == (found.placed.prefill,)
        assert found.decode is not None and found.decode.refs == (found.placed.decode,)


def random_mesh(rng: random.Random, policy: str, many: bool) -> Brain:
    brain = Brain(
        rng.randrange(99), policy=policy, affinity=AffinitySettings(rng.choice((0.0, 0.05)), rng.choice((0.0, 0.02)))
    )
    kinds = "pppdddccl" * 3 if many else rng.choice(("pd", "ppdd", "ppddc", "pdcl", "ccc", "pppdl", "pdl"))
    names = [f"{kind}{at}" for at, kind in enumerate(kinds)]
    brain.step(reset(1, *names))
    for name in names:
        role = {"p": Role.PREFILL, "d": Role.DECODE, "l": Role.DECODE, "c": Role.BOTH}[name[0]]
        more: dict[str, Any] = {"local_prefill_tokens": 300} if name[0] == "l" else {}
        weight = rng.choice((0.0, 0.0, 1.0))
        brain.add(
            name, role, chunk_tokens=rng.choice((0, 128)), size_weight=weight, capacity=rng.choice((60, 1000)), **more
        )
    return brain


def disturb(brain: Brain, rng: random.Random, keys: tuple[bytes, ...]) -> None:
    name = rng.choice(list(brain.refs))
    free = rng.choice((5, 30, 900))
    load = Load(
        running_requests=rng.choice((0, 0, 1, 7)),
        context_tokens=rng.randrange(5000),
        queued_tokens=rng.choice((0, 0, 800, 9000)),
        free_pages=free,
        free_extents=free,
    )
    more: dict[str, Any] = {}
    if rng.random() < 0.3:
        tokens = rng.randrange(20, 2000)
        sample = PrefillSample(f"s{rng.random()}", tokens, 0, tokens * rng.choice((2e-5, 2e-4)), tokens * 1024, 1e-3)
        more["prefill_samples"] = (sample,)
        more["decode_samples"] = (DecodeSample(3, 900, rng.choice((0.004, 0.03))),)
    brain.beat(name, load, ready=rng.random() < 0.95, **more)
    if rng.random() < 0.4:
        brain.seal(name, keys[: rng.randrange(1, 40)])


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(["kvcache"] * 4 + POLICIES), st.booleans())
def test_every_verdict_follows_from_the_numbers_that_decided(rng: random.Random, policy: str, many: bool) -> None:
    brain = random_mesh(rng, policy, many)
    keys = chain("x", 94)
    for _ in range(15):
        brain.now += rng.random() * 0.1
        for _ in range(rng.randrange(3)):
            disturb(brain, rng, keys)
        prompt = rng.choice((20, 200, 1500))
        brain.schedule(
            prompt,
            keys=keys[: prompt // BLOCK] if rng.random() < 0.6 else (),
            max_tokens=rng.choice((1, 16, 900)),
            ttft_slo_s=rng.choice((0.0, 0.0, 0.0, 0.03, 0.3)),
            tbt_slo_s=rng.choice((0.0, 0.0, 0.0, 0.011, 0.05)),
            avoid=frozenset(rng.sample(list(brain.refs), rng.choice((0, 0, 1)))),
            lane=rng.choice((Lane.INTERACTIVE, Lane.INTERACTIVE, Lane.BATCH)),
            priority=rng.choice((0, 0, 3)),
            session=rng.choice(("", "s")),
            origin=rng.choice(("", "o")),
        )
        found = brain.state.explain(f"r{brain.requests}")
        if found is not None:
            check(found, policy)


# ── how sure a prediction was ─────────────────────────────────────────────────────────────────────


def test_a_placement_tells_between_which_figures_its_like_have_ended() -> None:
    brain = mesh(1, 1)
    for n, slower in zip(range(ENOUGH + 3), itertools.cycle((1.0, 2.0, 3.0))):
        brain.placed(100, request_id=f"a{n}", max_tokens=8)
        placed = of(brain, f"a{n}").placed
        assert placed is not None
        told = RequestOutcome(
            f"a{n}", 0, Outcome.DONE, 8, placed.life.prefill_end_s * slower, placed.tbt_s * 0.5, 0.01, 1.0
        )
        expected = of(brain, f"a{n}").expected
        assert expected is not None and expected.ttft.samples == (n if n >= ENOUGH else 0)
        if n < ENOUGH:
            assert expected.ttft == expected.tbt == AS_PREDICTED
        brain.beat("d0", outcomes=(told,), finished_request_ids=(f"a{n}",))
    placed = brain.placed(100, request_id="r")
    expected = of(brain, "r").expected
    assert expected is not None
    assert expected.ttft[:4] == (pytest.approx(1.0), pytest.approx(2.0), pytest.approx(3.0), ENOUGH + 3)
    assert expected.tbt[:4] == (pytest.approx(0.5), pytest.approx(0.5), pytest.approx(0.5), ENOUGH + 3)
    out = mapping.decision_out(of(brain, "r"), brain.now)
    told_ms = (out.ttft.low_ms, out.ttft.expected_ms, out.ttft.high_ms)
    assert told_ms == pytest.approx([1000 * slower * placed.life.prefill_end_s for slower in (1, 2, 3)])
    assert placed.expected_ttft_s == pytest.approx(out.ttft.expected_ms / 1000)
    assert out.tbt.high_ms == pytest.approx(placed.tbt_s * 500) and out.tbt.samples == ENOUGH + 3
    brain.refused(Overloaded, LONG, request_id="no", ttft_slo_s=0.001)
    assert of(brain, "no").expected is None
