"""Clients that wait: for an answer before they ask again; when they are refused, for the time that they are told."""

from __future__ import annotations

from itertools import pairwise
from math import isnan, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import ConfigError
from kvmesh.services.conductor.settings import Settings
from kvmesh.sim.report.records import DONE, Record, RetryWait
from kvmesh.sim.report.summary import Summary
from kvmesh.sim.run import run
from kvmesh.sim.workloads.sessions import SessionClients, SessionConfig
from kvmesh.sim.workloads.synthetic import LengthDistribution, SyntheticConfig, synthetic
from kvmesh.sim.workloads.workload import Clients, ClosedLoop, SimRequest
from tests.support.sim.fleets import BLOCK, Linear, mesh, node, request

TIMES = Linear()


def served(clients: Clients, **changes: object) -> list[Record]:
    """Records in the order of their ends."""
    records: list[Record] = []
    run(mesh(**changes), clients, sink=records.append)
    return records


# ── closed loops ──────────────────────────────────────────────────────────────────────────────────


@given(st.integers(1, 9), st.integers(0, 30))
@settings(max_examples=20, deadline=None)
def test_so_many_are_under_way_at_any_time(in_flight: int, count: int) -> None:
    asked = [request(n, 99.0, 20 + 31 * n % 300, 1 + n % 20) for n in range(count)]
    records = served(ClosedLoop(asked, in_flight))
    assert sorted(one.index for one in records) == list(range(count))
    ends = [one.finish_s for one in records]
    came = sorted(one.at_s for one in records)
    assert came[:in_flight] == [0.0] * min(in_flight, count)
    assert came[in_flight:] == pytest.approx(sorted(ends)[: max(0, count - in_flight)])


def test_nobody_in_flight_is_refused() -> None:
    with pytest.raises(ConfigError, match="closed=0: must be at least 1"):
        ClosedLoop([], 0)


# ── sessions ──────────────────────────────────────────────────────────────────────────────────────

SMALL = SessionConfig(
    sessions=5,
    turns=4,
    start_s=2.0,
    think_s=0.5,
    block_tokens=BLOCK,
    applications=2,
    system=LengthDistribution(100, 0.0),
    user=LengthDistribution(40, 0.5),
    output=LengthDistribution(30, 0.5),
)


def turns(config: SessionConfig, seed: int = 0) -> dict[int, list[SimRequest]]:
    """By session; each answered as soon as it is asked."""
    sessions = SessionClients(config, seed)
    found: dict[int, list[SimRequest]] = {}
    for one in sessions.first():
        asked: SimRequest | None = one
        while asked is not None:
            found.setdefault(asked.index // config.turns, []).append(asked)
            asked = sessions.after(asked.index, asked.at_s, done=True)
    return found


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 64), st.integers(0, 99))
def test_every_prompt_holds_what_was_said_before(block: int, seed: int) -> None:
    config = SessionConfig(
        sessions=5, turns=4, block_tokens=block, applications=2, system=LengthDistribution(100, 0.0),
        user=LengthDistribution(40, 1.0), output=LengthDistribution(30, 1.0),
    )  # fmt: skip
    found = turns(config, seed)
    assert [len(one) for one in found.values()] == [4] * 5
    for asked in found.values():
        for before, after in pairwise(asked):
            assert after.input_tokens > before.input_tokens + before.output_tokens
            known = (*before.keys, *before.answer_keys)
            assert len(known) == (before.input_tokens + before.output_tokens - 1) // block
            assert after.keys[: len(known)] == known
            assert after.left_tokens == len(before.keys) * block
        assert all(len(one.keys) == one.input_tokens // block for one in asked)
        assert asked[0].left_tokens == 0 and asked[-1].answer_keys == ()
    own = [key for asked in found.values() for key in asked[-1].keys[100 // block :]]
    assert len(set(own)) == len(own), "what sessions say is theirs"
    shared = {asked[0].keys[: 100 // block] for asked in found.values()}
    assert len(shared) == (2 if block <= 100 else 1), "and applications share what comes first"
    assert turns(config, seed) == found


def test_a_turn_comes_when_the_last_answer_was_read() -> None:
    records = served(SessionClients(SMALL), prefills=2, decodes=2)
    assert {one.outcome for one in records} == {DONE} and len(records) == 20
    by_index = {one.index: one for one in records}
    assert [by_index[4 * n].at_s for n in range(5)] == pytest.approx([0.4 * n for n in range(5)])
    gaps = [by_index[n].at_s - by_index[n - 1].finish_s for n in by_index if n % 4]
    assert all(0.25 <= gap <= 0.75 for gap in gaps) and len(set(gaps)) == len(gaps)


def test_a_session_without_an_answer_is_over() -> None:
    records = served(SessionClients(SMALL), spec=node(kv_tokens=240, dram_tokens=4096))
    ends = {one.index: one.outcome for one in records}
    short = [n for n in range(5) if any(ends.get(4 * n + at) != DONE for at in range(4))]
    assert short, "some are too long for the pages"
    for number in short:
        told = [ends.get(4 * number + at) for at in range(4)]
        last = next(at for at, end in enumerate(told) if end != DONE)
        assert told[last] not in (DONE, None) and told[last + 1 :] == [None] * (3 - last)


def test_decode_keeps_answers_that_somebody_may_ask_for() -> None:
    """With wires as fast as these to fetch is always cheaper."""
    summary = Summary()
    fast = node(nic_bytes_per_s=1e12)
    sink: list[Record] = []
    run(mesh(1, 1, fast), SessionClients(SMALL), sink=lambda one: (summary.add(one), sink.append(one))[0])
    assert summary.left_cached == 1
    later = [one for one in sink if one.index % 4]
    assert all(one.cached_tokens >= one.left_tokens for one in later)
    assert any(one.cached_tokens > one.left_tokens + BLOCK for one in later)
    assert summary.share("prefill", "p0") == 1 == summary.busiest("decode", "output")
    assert isnan(summary.share("coupled", "c0")) and isnan(Summary().left_cached)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sessions": 0}, "sessions=0: must be at least 1"),
        ({"turns": 0}, "turns=0: must be at least 1"),
        ({"think_s": -1.0}, "think_s=-1: must be at least 0"),
        ({"user": LengthDistribution(0)}, "user=0:1:128000: must be a mean"),
        ({"sessions": 10_000, "turns": 10_000}, "sessions=10000x10000: must be at most"),
    ],
)
def test_sessions_that_cannot_be_are_named(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SessionConfig(**changes)  # type: ignore[arg-type]


def test_arrivals_can_be_evenly_apart() -> None:
    found = [one.at_s for one in synthetic(SyntheticConfig(requests=5, rate=4.0, burstiness=0.0))]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.25])


# ── Retry-After ───────────────────────────────────────────────────────────────────────────────────


def test_what_a_client_had_to_be_told_is_when_its_turn_is_in_time() -> None:
    """Ten at once, each half a second of work: the brain takes what it thinks can be in time, and the others stand in
    line for what is left of it."""
    each_s = TIMES.prefill_s([(4000, 0)])
    asked = [request(n, 5.0, 4000, 1) for n in range(10)]
    big = node(kv_tokens=65_536, dram_tokens=131_072)
    settings_ = Settings(slo_ttft_s=2.2 * each_s, slo_tbt_s=1e6)
    records: list[Record] = []
    summary = Summary(ttft_slo_s=2.2 * each_s)
    config = mesh(1, 1, big, conductor=settings_, retries=4, chunk_tokens=4096, batch_tokens=4096, long_tokens=4096)
    run(config, asked, sink=lambda one: (records.append(one), summary.add(one))[0])
    refused = sorted((one for one in records if one.waits), key=lambda one: one.index)
    taken = 10 - len(refused)
    assert 1 <= taken <= 3
    for turn, one in enumerate(refused):
        due_s = max(0.0, (taken + turn + 1) * each_s - 2.2 * each_s)
        assert one.waits[0].right_s == pytest.approx(due_s, abs=0.02), one.index
    came = [wait for one in refused for at, wait in enumerate(one.waits) if at < one.retries]
    assert summary.waits["came"] == len(came) and summary.waits["placed"] == sum(wait.placed for wait in came)
    assert summary.waits["told"] == sum(len(one.waits) for one in refused)
    assert all(one.waits[-1].placed for one in refused if one.outcome == DONE)


@pytest.mark.parametrize(
    ("told_s", "right_s", "ratio", "is_right"),
    [
        (3.0, 2.0, 1.5, True),
        (3.0, 1.0, 3.0, False),
        (0.5, 2.0, 0.25, False),
        (0.05, 0.01, 1.0, True),
        (1.0, nan, nan, False),
    ],
)
def test_right_is_within_a_factor_of_two(told_s: float, right_s: float, ratio: float, is_right: bool) -> None:
    wait = RetryWait(told_s, right_s)
    assert wait.ratio == pytest.approx(ratio, nan_ok=True)
    assert wait.is_right is is_right
