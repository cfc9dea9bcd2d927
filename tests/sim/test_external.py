"""The product's conductor before engines of others, in virtual time: it finds what they hold, and everything ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from kvmesh.errors import KvmeshError
from kvmesh.external import instance
from kvmesh.external.engine_book import EngineBook
from kvmesh.membership import registrar
from kvmesh.services.conductor.domain import BlockKnowledge, Event
from kvmesh.services.conductor.placing.placement import ServingMode
from kvmesh.services.conductor.records.journal import Header, Recorder
from kvmesh.services.conductor.settings import AdmissionSettings, Mode, Settings
from kvmesh.services.conductor.state import ConductorState
from kvmesh.sim import external
from kvmesh.sim.config import MeshMode, Routing, SimConfig
from kvmesh.sim.coupled_cluster import CoupledCluster
from kvmesh.sim.external import ConductorRouter
from kvmesh.sim.fitting.decisions import replay
from kvmesh.sim.loop import Loop
from kvmesh.sim.report.records import DONE, FAILED, REFUSED, Record
from kvmesh.sim.run import System, run
from kvmesh.sim.workloads.sessions import SessionClients, SessionConfig
from kvmesh.sim.workloads.synthetic import LengthDistribution
from tests.support.sim.fleets import BLOCK, NEVER_REFUSE, coupled, node, request, served

BOTH = pytest.mark.parametrize("routing", [Routing.CONDUCTOR, Routing.CONDUCTOR_EXACT], ids=lambda one: one.value)
AGENTS = SessionConfig(
    sessions=9,
    turns=4,
    start_s=4.0,
    think_s=1.0,
    block_tokens=BLOCK,
    applications=3,
    system=LengthDistribution(128, 0.0),
    user=LengthDistribution(80, 0.5),
    output=LengthDistribution(24, 0.5),
)


def engines(routing: Routing, count: int = 3, *, kv_tokens: int = 4096, **changes: Any) -> SimConfig:
    told: dict[str, Any] = {"heartbeat_s": 0.2, "profiled": False, "chunk_tokens": 128, "routing": routing}
    return coupled(MeshMode.COUPLED_CHUNKED, count, node(kv_tokens=kv_tokens), **(told | changes))


def agents(config: SimConfig) -> list[Record]:
    """Records in the order of their ends."""
    records: list[Record] = []
    run(config, SessionClients(AGENTS), sink=records.append)
    return records


def hit_rate(records: Iterable[Record]) -> float:
    found = list(records)
    return sum(one.cached_tokens for one in found) / sum(one.input_tokens for one in found)


def router_of(system: System) -> ConductorRouter:
    assert isinstance(system, CoupledCluster) and isinstance(system.router, ConductorRouter)
    return system.router


# ── what the conductor finds ──────────────────────────────────────────────────────────────────────────────────────


@BOTH
def test_second_turns_go_where_their_prefixes_lie(routing: Routing) -> None:
    """So late a placement itself tells nothing any more (`confirmed_s`)."""
    first = [request(n, 1.0 + n, 320, 40, answer_keys=(f"answer {n}".encode().ljust(16, b"."),)) for n in range(5)]
    again = [
        replace(
            request(5 + n, 20.0 + 3 * n, 500, 5), keys=(*one.keys, *one.answer_keys, *request(90 + n, 0, 140, 1).keys)
        )
        for n, one in enumerate(reversed(first))
    ]
    records = served(engines(routing), [*first, *again])
    before, after = records[:5], records[5:]
    assert len({one.prefill for one in before}) == 3
    assert [one.prefill for one in after] == [one.prefill for one in reversed(before)]
    assert {one.cached_tokens for one in before} == {0} and {one.cached_tokens for one in after} == {320 + BLOCK}
    assert all(two.ttft_s < one.ttft_s for one, two in zip(before, after, strict=True))


@BOTH
def test_with_caches_too_small_for_all_sessions_it_finds_more_than_plain_routers(routing: Routing) -> None:
    found = agents(engines(routing, kv_tokens=1200))
    assert len(found) == 36 and {one.outcome for one in found} == {DONE}
    plain = [hit_rate(agents(engines(one, kv_tokens=1200))) for one in (Routing.ROUND_ROBIN, Routing.LEAST_LOADED)]
    assert hit_rate(found) > 1.1 * max(plain)


def test_policies_of_the_conductor_place_at_engines_too() -> None:
    hashed = engines(Routing.CONDUCTOR, conductor=replace(NEVER_REFUSE, policy="session_hash"))
    homes: dict[str, list[str]] = {}
    for one in sorted(agents(hashed), key=lambda record: record.index):
        homes.setdefault(one.session, []).append(one.prefill)
    stays = sum(after == before for at in homes.values() for before, after in pairwise(at))
    assert stays >= 0.8 * 9 * 3, "sessions stay, but for bounded loads"
    turns = agents(engines(Routing.CONDUCTOR, conductor=replace(NEVER_REFUSE, policy="round_robin")))
    assert {n: [one.prefill for one in turns].count(n) for n in ("c0", "c1", "c2")} == {"c0": 12, "c1": 12, "c2": 12}


@pytest.mark.parametrize("kv_tokens", [1200, 4096])
def test_what_is_exact_is_what_the_engine_holds(kv_tokens: int) -> None:
    config, loop, records = engines(Routing.CONDUCTOR_EXACT, kv_tokens=kv_tokens), Loop(), list[Record]()
    cluster = CoupledCluster(config, loop, records.append)
    asked = [request(n, 0.1 * n, 60 + 61 * n % 500, 1 + 7 * n % 40, n % 5 or None) for n in range(60)]
    for one in asked:
        loop.at(one.at_s, lambda one=one: cluster.submit(one))  # type: ignore[misc]
    loop.run(deadline_s=60.0)
    assert len(records) == 60
    cluster.check_empty()
    router = router_of(cluster)
    assert (len(set().union(*(one.keys for one in asked))) > kv_tokens // BLOCK * 3) is (kv_tokens == 1200)
    views = {view.ref.instance_id: view for view in router.brains.states[0].views(loop.now)}
    for engine in cluster.instances:
        held = set(engine.cache.keys())
        assert set(router.externals[engine.name].blocks.keys()) == held
        view = views[engine.name]
        assert (view.indexed_blocks, view.knowledge, view.ready) == (len(held), BlockKnowledge.EXACT, True)


def test_belief_is_an_lru_of_what_was_placed_there() -> None:
    beliefs: dict[str, int] = {}
    run(
        engines(Routing.CONDUCTOR, kv_tokens=1200),
        SessionClients(AGENTS),
        last=lambda system: beliefs.update(
            {name: len(one.blocks) for name, one in router_of(system).externals.items()}
        ),
    )
    assert set(beliefs.values()) == {1200 // BLOCK}


# ── what engines tell ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", [MeshMode.COUPLED_CHUNKED, MeshMode.COUPLED_PREFILL_FIRST])
def test_conductors_learn_from_what_an_external_instance_sees(mode: MeshMode) -> None:
    """They begin with priors that are far off. Tokens and their times are those of the records."""
    outcomes: dict[str, Any] = {}
    heard = ConductorState.step

    def step(self: ConductorState, event: Event, now: float) -> Any:
        for one in getattr(event, "outcomes", ()):
            outcomes[one.request_id] = one
        return heard(self, event, now)

    asked = [request(n, 0.4 * n, 100 + 97 * n % 900, 20 + n % 30) for n in range(60)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConductorState, "step", step)
        records = served(replace(engines(Routing.CONDUCTOR), mode=mode), asked)
    errors = [abs(one.predicted_ttft_s - one.ttft_s) / one.ttft_s for one in records]
    assert sum(errors[30:]) / 30 < 0.25 < errors[0]
    assert len(outcomes) >= 50
    for record in records:
        if (told := outcomes.get(record.request_id)) is not None:
            assert told.output_tokens == record.output_tokens
            assert told.ttft_s == pytest.approx(record.ttft_s, abs=2e-6)
            assert told.mean_tbt_s == pytest.approx(record.mean_tbt_s, rel=0.01)
            assert told.tbt_s <= record.tbt_s * 1.001


def test_a_request_that_would_miss_its_slo_is_refused_and_comes_again_when_told() -> None:
    strict = Settings(slo_ttft_s=0.2, slo_tbt_s=1.0, admission=AdmissionSettings(mode=Mode.PREDICTED))
    asked = [request(n, 1.0 + 0.01 * n, 1000, 5) for n in range(12)]
    config = engines(Routing.CONDUCTOR, 2, conductor=strict, profiled=True)
    once = served(config, asked)
    refused = [one for one in once if one.outcome == REFUSED]
    assert 4 <= len(refused) < 12 and {one.reason for one in refused} == {"ttft"}
    assert all(len(one.waits) == 1 and one.waits[0].told_s > 0 and one.finish_s != one.finish_s for one in refused)
    again = served(replace(config, retries=20), asked)
    assert {one.outcome for one in again} == {DONE} and sum(one.retries for one in again) >= len(refused)
    assert all(one.waits[-1].placed for one in again if one.waits)
    assert all(one.outcome == DONE for one in served(engines(Routing.LEAST_LOADED, 2, conductor=strict), asked))


def test_what_an_engine_turns_away_goes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No conductor hears in time what the others have placed, so one engine gets more than it takes."""
    asked = [request(n, 1.0, 100, 30) for n in range(8)]
    refused: list[str] = []
    book = EngineBook.refused

    def note(self: EngineBook, request_id: str, attempt: int, error: KvmeshError) -> None:
        refused.append(request_id)
        book(self, request_id, attempt, error)

    monkeypatch.setattr(EngineBook, "refused", note)
    records = served(engines(Routing.CONDUCTOR, 2, max_running=4, conductors=8, hop_s=0.01), asked)
    assert [one.outcome for one in records] == [DONE] * 8 and refused
    assert [one.prefill for one in records].count("c0") == 4


def test_an_answer_that_no_engine_can_hold_fails_by_name() -> None:
    (one,) = served(engines(Routing.CONDUCTOR, 1, kv_tokens=20 * BLOCK), [request(0, 1.0, 200, 200)])
    assert (one.outcome, one.reason) == (FAILED, "longer than the pages hold")


# ── the same again ────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
def test_it_comes_out_the_same_again(routing: Routing) -> None:
    config = engines(routing, 2, kv_tokens=1200, conductors=2, seed=3)
    assert list(map(repr, agents(config))) == list(map(repr, agents(config)))


def test_a_decision_log_of_engines_is_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[Event, float]] = []
    step = ConductorState.step

    def log(self: ConductorState, event: Event, now: float) -> Any:
        heard.append((event, now))
        return step(self, event, now)

    monkeypatch.setattr(ConductorState, "step", log)
    agents(engines(Routing.CONDUCTOR_EXACT, 2, kv_tokens=1200))
    monkeypatch.undo()
    lines: list[bytes] = []
    recorder = Recorder(Header(7, 0.0, NEVER_REFUSE), lambda line: lines.append(line) or len(lines), 1 << 30)  # type: ignore[func-returns-value]
    for event, now in heard:
        recorder.step(event, now)
    found = replay(lines)
    assert (found.decisions, found.placed, found.different) == (36, 36, 0)
    why = recorder.state.explain("r35")
    assert why is not None
    assert {kind.decode.instance_id for kind in why.kinds} == {"c0", "c1"}
    assert all(kind.kind is ServingMode.COUPLED and kind.cost_s > 0 for kind in why.kinds)


def test_intervals_are_those_of_the_real_instance() -> None:
    assert (external.URGE_GAP_S, external.ANNOUNCED_KEYS) == (registrar.URGE_GAP_S, instance.ANNOUNCED_KEYS)
