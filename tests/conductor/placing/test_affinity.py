"""Nearness as a term of the score: bounded, fading, never stronger than load."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.services.conductor.costs.models import PREFILL_PRIOR
from kvmesh.services.conductor.domain import Load, PrefillSample, Role, Schedule
from kvmesh.services.conductor.placing import affinity
from kvmesh.services.conductor.placing.affinity import Affinity
from kvmesh.services.conductor.placing.nearness import NOWHERE, NearInstances
from kvmesh.services.conductor.placing.placement import PlacementChoice
from kvmesh.services.conductor.score import COUNTED_TOKENS, attention_pairs
from kvmesh.services.conductor.settings import AffinitySettings
from tests.support.conductor.brain import Brain, chain

BOTH = AffinitySettings(session_s=0.2, origin_s=0.1)
EACH_S = 0.2 / COUNTED_TOKENS  # of a session at decode, where a score is that of one token


def asked(**more: Any) -> Schedule:
    return Schedule("r", 0, "demo", 10, 10, **more)


def at(prefill: str, decode: str) -> PlacementChoice:
    """As much of a choice as is looked at."""
    half = lambda name: SimpleNamespace(instance=SimpleNamespace(ref=SimpleNamespace(instance_id=name)))  # noqa: E731
    return cast(PlacementChoice, SimpleNamespace(prefill=half(prefill), decode=half(decode)))


def mesh(prefills: int, decodes: int, **near: float) -> Brain:
    brain = Brain(affinity=AffinitySettings(**near), lease_s=1e9)
    for n in range(prefills):
        brain.add(f"p{n}", Role.PREFILL)
    for n in range(decodes):
        brain.add(f"d{n}", Role.DECODE)
    return brain


def test_off_or_unknown_it_is_nothing() -> None:
    off, known = Affinity(AffinitySettings()), Affinity(BOTH)
    request = asked(session="s", origin="o")
    off.placed(request, at("p", "d"), 0.0)
    assert off.near(request, 0.0) is NOWHERE and not len(off)
    assert known.near(request, 0.0) is NOWHERE
    known.placed(asked(), at("p", "d"), 0.0)
    assert not len(known), "no session, no origin"


def test_a_session_is_where_its_last_request_went() -> None:
    known, request = Affinity(BOTH), asked(session="s")
    known.placed(request, at("p0", "d0"), 0.0)
    known.placed(request, at("p1", "d1"), 0.0)
    near = known.near(request, 0.0)
    assert (near.prefill_s("p1"), near.decode_s("d1")) == (0.0, 0.0)
    assert (near.prefill_s("p0"), near.decode_s("d0"), near.decode_s("new")) == (0.2, EACH_S, EACH_S)
    faded = known.near(request, affinity.SESSION_FADES_S)
    assert 0.07 < faded.prefill_s("p0") < 0.08
    for other in (asked(session="t"), asked(session="s", tenant="x")):
        assert known.near(other, 0.0) is NOWHERE


def test_an_origin_gathers_at_decode_alone_and_the_latest_place_is_nearest() -> None:
    known, request = Affinity(BOTH), asked(origin="o")
    known.placed(request, at("p0", "d0"), 0.0)
    known.placed(request, at("p1", "d1"), 5.0)
    near = known.near(request, 5.0)
    assert near.prefill_s("p9") == 0.0 and near.decode_s("d1") == 0.0
    assert 0 < near.decode_s("d0") < near.decode_s("d9") == 0.1 / COUNTED_TOKENS


def test_tables_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(affinity, "MAX_SESSIONS", 10)
    monkeypatch.setattr(affinity, "MAX_ORIGINS", 5)
    known = Affinity(BOTH)
    for n in range(50):
        known.placed(asked(session=f"s{n}", origin=f"o{n}"), at("p", "d"), float(n))
        known.placed(asked(origin="hot"), at("p", f"d{n}"), float(n))
    assert len(known) == 15
    assert known.near(asked(session="s0"), 50.0) is NOWHERE and known.near(asked(session="s49"), 50.0) is not NOWHERE
    assert len(known.near(asked(origin="hot"), 50.0).origin._at) == affinity.MAX_PLACES


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("st"), st.sampled_from("op"), st.integers(0, 6), st.floats(0, 30)), max_size=40)
)
def test_its_terms_are_never_negative_and_never_more_than_they_may(story: list[tuple[str, str, int, float]]) -> None:
    known, now = Affinity(BOTH), 0.0
    for session, origin, place, pause_s in story:
        now += pause_s
        request = asked(session=session, origin=origin)
        near = known.near(request, now)
        for n in range(8):
            assert 0 <= near.prefill_s(f"p{n}") <= 0.2 and 0 <= near.decode_s(f"d{n}") <= 0.3 / COUNTED_TOKENS + 1e-12
        if near is not NOWHERE:
            assert any(near.session_decode.far_s(f"d{n}") == 0 for n in range(7)), "somebody is nearest"
        known.placed(request, at(f"p{place}", f"d{place}"), now)


def test_nobody_is_near() -> None:
    assert NearInstances().far_s("i") == 0.0 and NearInstances({}).most_s == 0.0


def test_sessions_stay_until_load_costs_more() -> None:
    brain = mesh(4, 4, session_s=0.2)
    went = set()
    for _ in range(6):
        placed = brain.placed(session="s")
        went.add((placed.prefill.instance_id, placed.decode.instance_id))
        for ref in (placed.prefill, placed.decode):
            brain.beat(ref.instance_id, finished_request_ids=(f"r{brain.requests}",))
        brain.now += 1.0
    assert len(went) == 1
    ((prefill, decode),) = went
    brain.beat(prefill, Load(queued_requests=1, queued_tokens=100_000, free_pages=1000, free_extents=1000))
    brain.beat(decode, Load(running_requests=60, context_tokens=900_000, free_pages=1000, free_extents=1000))
    placed = brain.placed(session="s")
    assert placed.prefill.instance_id != prefill and placed.decode.instance_id != decode
    assert brain.placed(session="s").prefill == placed.prefill, "now it is there"


def test_explain_shows_the_terms() -> None:
    brain = mesh(2, 2, session_s=0.2, origin_s=0.1)
    first = brain.placed(session="s", origin="o")
    brain.placed(session="s", origin="o")
    decision = brain.state.explain("r2")
    assert decision is not None
    terms = {c.ref.instance_id: c.named_terms() for c in decision.candidates}
    far_prefill = "p1" if first.prefill.instance_id == "p0" else "p0"
    far_decode = "d1" if first.decode.instance_id == "d0" else "d0"
    assert terms[first.prefill.instance_id]["session_ms"] == 0 and terms[far_prefill]["session_ms"] == 200
    assert (terms[far_decode]["session_ms"], terms[far_decode]["origin_ms"]) == pytest.approx(
        (200 / COUNTED_TOKENS, 100 / COUNTED_TOKENS)
    )
    told = {c.ref.instance_id: decision.verdict(c) for c in decision.candidates}
    assert told[first.decode.instance_id] == "chosen" and told[far_decode].startswith("slower by")
    brain.placed()
    plain = brain.state.explain("r3")
    assert plain is not None and not any("session_ms" in c.named_terms() for c in plain.candidates)


def test_an_origin_gathers_and_overflows() -> None:
    """Five origins at eight decode instances: each keeps to a few, all are used evenly enough."""
    gathered, spread = (_spread(origin_s) for origin_s in (0.2, 0.0))
    places = [len({d for o, d in gathered if o == n}) for n in range(5)]
    assert sum(places) < sum(len({d for o, d in spread if o == n}) for n in range(5)) * 0.7, places
    most = max(Counter(d for _, d in gathered).values())
    assert most <= 3 * len(gathered) / 8, "bounded by load"


def _spread(origin_s: float) -> list[tuple[int, str]]:
    brain = mesh(2, 8, origin_s=origin_s)
    went = []
    for n in range(160):
        placed = brain.placed(200, origin=f"o{n % 5}", max_tokens=64, ttft_slo_s=1e6)
        went.append((n % 5, placed.decode.instance_id))
        brain.now += 0.01
    return went


def test_siblings_are_computed_where_the_first_one_is() -> None:
    near = Affinity(AffinitySettings()).near(asked(sibling_prefill="p1"), 0.0)
    assert (near.prefill_s("p1"), near.prefill_s("p0")) == (0.0, affinity.SIBLING_S)
    assert near.decode_s("d0") == near.decode_s("d1") == 0.0, "their answers may be made anywhere"
    near = Affinity(AffinitySettings()).near(asked(sibling_prefill="p1"), 0.0, 30.0)
    assert near.prefill_s("p0") == 30.0, "a long prompt is computed once, however long its last blocks take"
    known = Affinity(BOTH)
    known.placed(asked(session="s"), at("p0", "d0"), 0.0)
    near = known.near(asked(session="s", sibling_prefill="p1"), 0.0)
    assert near.prefill_s("p1") == 0.0 < near.prefill_s("p0") < near.prefill_s("p2")


@pytest.mark.parametrize("slower", [1, 40])
def test_a_sibling_waits_for_the_first_one_rather_than_compute_elsewhere(slower: int) -> None:
    """However slow the instances are: on slow ones the last blocks of seven take longer than a second, too."""
    brain = mesh(3, 2)
    for tokens in range(100, 2000, 100):
        took_s = slower * PREFILL_PRIOR.at(tokens, attention_pairs(tokens, 0), 1)
        for name in ("p0", "p1", "p2"):
            brain.beat(name, prefill_samples=(PrefillSample(f"r{tokens}", tokens, 0, took_s, 0, 0.0),))
    keys = chain("prompt", 93)
    first = brain.placed(1500, keys=keys)
    there = first.prefill.instance_id
    for _ in range(7):
        assert brain.placed(1500, keys=keys, sibling_prefill=there).prefill.instance_id == there
    assert brain.placed(1500, keys=chain("other", 93)).prefill.instance_id != there
