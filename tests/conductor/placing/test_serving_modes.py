"""Whether a request becomes a pair, or is alone on a coupled or on a decode instance."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import InvalidRequest, Overloaded, Unavailable
from kvmesh.services.conductor.costs.interference import shared, without_rows_s
from kvmesh.services.conductor.domain import DecodeSample, Fetch, Load, Placed, PrefillSample, Refuse, Role
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.records.explain import Decision
from kvmesh.services.conductor.score import mixed_tbt_s
from tests.support.conductor.brain import BLOCK, IDLE, Brain, chain, reset

ROWS = Load(running_requests=8, context_tokens=4000, free_pages=900, free_extents=900)
LIMIT = 300


def kind(placed: Placed) -> tuple[str, str]:
    return placed.prefill.instance_id, placed.decode.instance_id


def mesh(names: str, **more: Any) -> Brain:
    """ "p0 d0 c0 l0": prefill, decode, coupled, decode that computes up to LIMIT tokens itself."""
    brain = Brain(**more)
    brain.step(reset(1, *names.split()))
    for name in names.split():
        role = {"p": Role.PREFILL, "d": Role.DECODE, "l": Role.DECODE, "c": Role.BOTH}[name[0]]
        brain.add(name, role, **({"local_prefill_tokens": LIMIT, "chunk_tokens": 128} if name[0] == "l" else {}))
    return brain


def instance(brain: Brain, name: str) -> Instance:
    found = brain.state._fleet.named(name)
    assert found is not None
    return found


def learn(brain: Brain, name: str, per_token_s: float, step_s: float) -> None:
    """That instance's models, from samples."""
    for i in range(64):
        n = 50 + 40 * i
        sample = PrefillSample(f"{name}-{i}", n, 0, n * per_token_s, n * 1024, n * 1e-6)
        step = DecodeSample(1 + i % 16, 200 * (1 + i % 16), step_s)
        brain.beat(name, prefill_samples=(sample,), decode_samples=(step,))
        brain.now += 0.1
    for other in brain.refs:
        brain.beat(other)


def busy(name: str) -> Callable[[Brain], object]:
    return lambda brain: brain.beat(name, ROWS)


def queued(name: str, tokens: int = 40_000) -> Callable[[Brain], object]:
    return lambda brain: brain.beat(name, dataclasses.replace(IDLE, queued_tokens=tokens))


def nothing(brain: Brain) -> None:
    pass


@pytest.mark.parametrize(
    ("names", "before", "prompt", "expected"),
    [
        ("p0 d0", nothing, 100, ("p0", "d0")),
        ("c0", nothing, 3000, ("c0", "c0")),
        ("c0", busy("c0"), 3000, ("c0", "c0")),  # there is nobody else
        ("c0 c1", busy("c0"), 100, ("c1", "c1")),
        ("c0 c1", queued("c0"), 100, ("c1", "c1")),
        ("p0 l0", nothing, 100, ("l0", "l0")),  # short, and nobody is disturbed
        ("p0 l0", nothing, LIMIT, ("l0", "l0")),
        ("p0 l0", nothing, LIMIT + 1, ("p0", "l0")),
        ("p0 l0", busy("l0"), 100, ("p0", "l0")),  # short, but eight rows would wait
        ("p0 l0", queued("p0"), 100, ("l0", "l0")),
        ("p0 d0 c0", nothing, 3000, ("c0", "c0")),  # idle: no transfer to wait for
        ("p0 d0 c0", busy("c0"), 3000, ("p0", "d0")),  # eight rows would stand still for long
        ("p0 d0 c0", queued("p0"), 3000, ("c0", "c0")),
        ("p0 c0", busy("c0"), 3000, ("p0", "c0")),  # as the decode half
        ("c0 d0", busy("c0"), 100, ("c0", "d0")),  # as the prefill half: nobody else computes
        ("l0", nothing, 100, ("l0", "l0")),
    ],
)  # fmt: skip
def test_what_a_request_becomes(
    names: str, before: Callable[[Brain], object], prompt: int, expected: tuple[str, str]
) -> None:
    brain = mesh(names)
    before(brain)
    placed = brain.placed(prompt)
    assert kind(placed) == expected
    if expected[0] == expected[1]:
        assert (placed.sources, placed.decode_pulls) == (b"", ())
        assert placed.terms["transfer_tail_ms"] == 0


def test_a_pair_pays_for_its_messages() -> None:
    for seed in range(8):
        assert kind(mesh("p0 l0", seed=seed).placed(20)) == ("l0", "l0")


def test_a_prefix_on_the_coupled_instance_draws_the_request_there() -> None:
    keys = chain("x", 64)
    brain = mesh("p0 c0", fetch=Fetch.NEVER)
    brain.beat("c0", dataclasses.replace(ROWS, running_requests=2))
    assert kind(brain.placed(64 * BLOCK + 5, keys=keys, request_id="a")) == ("p0", "c0")
    brain = mesh("p0 c0", fetch=Fetch.NEVER)
    brain.beat("c0", dataclasses.replace(ROWS, running_requests=2))
    brain.seal("c0", keys)
    placed = brain.placed(64 * BLOCK + 5, keys=keys)
    assert (kind(placed), placed.cached_tokens) == (("c0", "c0"), 64 * BLOCK)


def test_what_a_decode_instance_holds_counts_for_its_limit() -> None:
    keys = chain("x", 64)
    brain = mesh("p0 l0", fetch=Fetch.NEVER)
    assert kind(brain.placed(64 * BLOCK + 5, keys=keys)) == ("p0", "l0")
    brain = mesh("l0")
    refused = brain.refused(Unavailable, 64 * BLOCK + 5, keys=keys)
    assert "no ready prefill instance" in str(refused.error)
    assert "(l0 at most 300)" in str(refused.error)
    brain.seal("l0", keys)
    placed = brain.placed(64 * BLOCK + 5, keys=keys)
    assert (kind(placed), placed.cached_tokens) == (("l0", "l0"), 64 * BLOCK)


def test_the_slo_of_the_rows_beside_it_refuses_a_kind_and_then_the_request() -> None:
    brain = mesh("p0 c0")
    learn(brain, "c0", per_token_s=1e-3, step_s=0.02)
    learn(brain, "p0", per_token_s=1e-3, step_s=0.02)
    brain.beat("c0", dataclasses.replace(ROWS, running_requests=1, context_tokens=100))
    brain.beat("p0", dataclasses.replace(IDLE, queued_tokens=20_000))  # else the pair would win anyway
    assert kind(brain.placed(3000, tbt_slo_s=0.7)) == ("c0", "c0")
    brain.state._ledger.withdraw("r1", brain.now)
    assert kind(brain.placed(3000, tbt_slo_s=0.4, request_id="r")) == ("p0", "c0")
    found = brain.state.explain("r")
    assert found is not None
    said = {k.kind.value: found.kind_verdict(k) for k in found.kinds}
    assert said["pair"] == "chosen"
    assert said["coupled"].startswith("over the TBT SLO of the rows there: ")
    assert said["coupled"].endswith(" ms, at most 400.0")
    brain.beat("p0", dataclasses.replace(IDLE, queued_tokens=200_000))
    refused = brain.refused(Overloaded, 3000, tbt_slo_s=0.4)
    assert refused.reason == "tbt"  # the coupled one's rows are gone sooner than that queue
    assert refused.error.retry_after_ms <= 2000
    alone = mesh("c0")
    learn(alone, "c0", per_token_s=1e-3, step_s=0.02)
    assert kind(alone.placed(3000, tbt_slo_s=0.4)) == ("c0", "c0")  # no rows, nobody suffers
    assert alone.refused(InvalidRequest, 3000, ttft_slo_s=0.5).reason == "impossible"


def test_queued_prompts_of_a_coupled_instance_make_its_answers_slower() -> None:
    brain = mesh("p0 c0 d0")
    before = brain.placed(1000, avoid=frozenset({"d0"}), request_id="a")
    brain.state._ledger.withdraw("a", brain.now)
    brain.beat("c0", dataclasses.replace(IDLE, queued_tokens=50_000))
    assert kind(brain.placed(1000)) == ("p0", "d0")
    after = brain.placed(1000, avoid=frozenset({"d0"}))
    assert after.decode.instance_id == "c0"
    assert after.tbt_s > before.tbt_s + 0.01


def test_a_prompt_still_to_be_computed_is_a_row_to_be() -> None:
    brain = mesh("c0")
    brain.placed(1000, request_id="a")
    brain.now += 1
    brain.beat("c0", dataclasses.replace(IDLE, queued_tokens=1000))
    assert instance(brain, "c0").batch.requests == 1
    brain.beat("c0", IDLE, prefill_samples=(PrefillSample("a", 1000, 0, 0.1, 0, 0.0),))
    assert instance(brain, "c0").batch.requests == 0  # it is for the instance to tell now
    brain.beat("c0", dataclasses.replace(IDLE, running_requests=1), finished_request_ids=())
    assert (instance(brain, "c0").batch.requests, brain.view("c0").pending) == (1, 1)
    brain.beat("c0", IDLE, finished_request_ids=("a",))
    assert brain.view("c0").pending == 0


def test_a_new_role_counts_at_once_and_keeps_what_is_pending_and_held() -> None:
    keys = chain("x", 64)
    brain = mesh("c0")
    brain.seal("c0", keys)
    assert kind(brain.placed(2000, request_id="a")) == ("c0", "c0")
    queue_s = brain.view("c0").queue_s
    assert queue_s > 0
    assert brain.register("c0", Role.PREFILL) == []
    view = brain.view("c0")
    assert (view.role, view.ready, view.pending, view.queue_s) == (Role.PREFILL, True, 2, queue_s)
    assert "no ready decode instance" in str(brain.refused(Unavailable, 100).error)
    brain.add("d0", Role.DECODE)
    placed = brain.placed(64 * BLOCK + 5, keys=keys)
    assert (kind(placed), placed.cached_tokens) == (("c0", "d0"), 64 * BLOCK)
    brain.beat("c0", IDLE, prefill_samples=(PrefillSample("a", 2000, 0, 0.2, 0, 0.0),), finished_request_ids=("a",))
    assert brain.view("c0").pending == 1
    assert brain.register("c0", Role.DECODE, local_prefill_tokens=100) == []
    assert kind(brain.placed(64 * BLOCK + 5, keys=keys)) == ("c0", "c0")
    brain.refused(Unavailable, 101)


def test_rows_left_from_an_earlier_role_are_spared() -> None:
    brain = mesh("p0 d0")
    brain.add("c0", Role.BOTH, chunk_tokens=128)
    brain.beat("c0", ROWS)
    brain.register("c0", Role.PREFILL, chunk_tokens=128)
    assert kind(brain.placed(1000)) == ("p0", "d0")
    brain.beat("p0", Load(running_requests=9))  # of an instance without rows: prompts
    assert brain.placed(1000).terms["stall_ms"] == 0


def test_the_avoided_get_nothing_while_any_other_kind_passes() -> None:
    for avoided, expected in (("c0", ("p0", "d0")), ("p0", ("c0", "c0")), ("d0", ("c0", "c0"))):
        assert kind(mesh("p0 d0 c0").placed(100, avoid=frozenset({avoided}))) == expected
    assert kind(mesh("c0").placed(100, avoid=frozenset({"c0"}))) == ("c0", "c0")


def test_rows_beside_it_are_no_part_of_what_a_prompt_teaches() -> None:
    brain = mesh("c0")
    learn(brain, "c0", per_token_s=1e-3, step_s=0.02)
    c0 = instance(brain, "c0")
    brain.beat("c0", ROWS)
    step_s = c0.decode.predict(ROWS.running_requests, ROWS.context_tokens)
    assert without_rows_s(c0, 1024, 2.0) == pytest.approx(2.0 - 2 * step_s)
    assert without_rows_s(c0, 1024, step_s) == pytest.approx(step_s / 4)
    beside = shared(c0, 1024, 1.0, 1.0, brain.now)
    assert (beside.rows, beside.stall_s) == (8, 8.0)
    assert beside.slower_s == pytest.approx(2 * step_s)
    brain.beat("c0", IDLE)
    assert without_rows_s(c0, 1024, 2.0) == 2.0


def test_the_tbt_beside_a_prompt_is_that_of_the_longest_tenth() -> None:
    assert mixed_tbt_s(0.02, 0.5, 0.0, 10.0) == 0.02
    assert mixed_tbt_s(0.02, 0.5, 0.5, 10.0) == pytest.approx(0.27)
    assert mixed_tbt_s(0.02, 0.5, 30.0, 10.0) == pytest.approx(0.52)


def told(brain: Brain, request_id: str) -> Decision:
    found = brain.state.explain(request_id)
    assert found is not None
    return found


def test_explain_names_every_kind_its_terms_and_the_winner() -> None:
    brain = mesh("p0 d0 c0 l0")
    brain.beat("c0", ROWS)
    placed = brain.placed(400, request_id="r")
    found = told(brain, "r")
    kinds = {k.decode.instance_id if k.prefill == k.decode else "pair": k for k in found.kinds}
    assert set(kinds) == {"pair", "c0", "l0"}
    assert [found.kind_verdict(k) for k in found.kinds if found.is_chosen_kind(k)] == ["chosen"]
    assert found.kind_verdict(kinds["l0"]) == "computes at most 300 uncached tokens itself, of 400"
    assert found.kind_verdict(kinds["c0"]).startswith("costs ")
    terms = kinds["c0"].named_terms()
    assert terms["rows"] == 8
    assert terms["stall_ms"] > 8 * 10
    for each in (kinds["pair"], kinds["c0"]):
        named = each.named_terms()
        total = sum(named[name] for name in ("ttft_ms", "stall_ms", "answer_ms", "handoff_ms"))
        assert each.cost_s * 1000 == pytest.approx(total)
    assert kinds["pair"].named_terms()["ttft_ms"] == pytest.approx(placed.ttft_s * 1000)
    brain.beat("c0")
    brain.placed(100, request_id="s", avoid=frozenset({"l0", "d0"}))
    verdicts = {(c.ref.instance_id, c.role): told(brain, "s").verdict(c) for c in told(brain, "s").candidates}
    assert verdicts["p0", Role.PREFILL].startswith("of the best pair: costs ")


NAMES = ("p0", "p1", "d0", "l0", "c0", "c1")
ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)
moves = st.one_of(
    st.tuples(st.just("role"), st.sampled_from(NAMES), st.tuples(st.sampled_from(ROLES), st.sampled_from((0, 200)))),
    st.tuples(st.just("ready"), st.sampled_from(NAMES), st.booleans()),
    st.tuples(st.just("load"), st.sampled_from(NAMES), st.tuples(st.integers(0, 9), st.integers(0, 20_000))),
    st.tuples(st.just("seal"), st.sampled_from(NAMES), st.integers(1, 40)),
    st.tuples(st.just("place"), st.frozensets(st.sampled_from(NAMES), max_size=3), st.integers(1, 1500)),
    st.tuples(st.just("place"), st.frozensets(st.sampled_from(NAMES), max_size=3), st.integers(1, 1500)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(moves, max_size=40), st.integers(0, 3), st.sampled_from((0.05, 1e9)))
def test_no_kind_that_a_role_forbids_never_the_unready_and_explain_agrees(
    steps: list[tuple[str, Any, Any]], seed: int, slo_s: float
) -> None:
    brain = Brain(seed, slo_ttft_s=slo_s, slo_tbt_s=slo_s)
    brain.step(reset(1, *NAMES))
    role, ready, limit = dict.fromkeys(NAMES, Role.BOTH), dict.fromkeys(NAMES, True), dict.fromkeys(NAMES, 0)
    for name in NAMES:
        brain.add(name, Role.BOTH)
    keys, held = chain("x", 94), dict.fromkeys(NAMES, 0)
    for move, name, value in steps:
        brain.now += 0.01
        if move == "role":
            role[name], limit[name] = value
            assert brain.register(name, value[0], local_prefill_tokens=value[1]) == []
        elif move == "ready":
            ready[name] = value
            brain.beat(name, ready=value)
        elif move == "load":
            load = dataclasses.replace(IDLE, running_requests=value[0], queued_tokens=value[1])
            brain.beat(name, load, ready=ready[name])
        elif move == "seal":
            brain.seal(name, keys[held[name] : value])
            held[name] = max(held[name], value)
        else:
            _check(
                brain, brain.schedule(value, keys=keys[: value // BLOCK], avoid=name), value, role, ready, limit, held
            )


def _check(
    brain: Brain,
    answer: Placed | Refuse,
    prompt: int,
    role: dict[str, Role],
    ready: dict[str, bool],
    limit: dict[str, int],
    held: dict[str, int],
) -> None:
    found = told(brain, f"r{brain.requests}")
    chosen = [k for k in found.kinds if found.is_chosen_kind(k)]
    if isinstance(answer, Refuse):
        assert not chosen
        return
    prefill, decode = answer.prefill.instance_id, answer.decode.instance_id
    assert ready[prefill]
    assert ready[decode]
    assert role[decode] is not Role.PREFILL
    if prefill != decode:
        assert role[prefill] is not Role.DECODE
    elif role[decode] is Role.DECODE:
        assert prompt - min(held[decode], (prompt - 1) // BLOCK) * BLOCK <= limit[decode]
    assert [(k.prefill, k.decode) for k in chosen] == [(answer.prefill, answer.decode)]
    clean = [k for k in found.kinds if not k.why]
    assert chosen[0] in clean
    assert answer.ttft_s >= 0
