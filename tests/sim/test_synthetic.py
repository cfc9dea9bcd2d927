"""Synthetic workloads: what is asked for comes, prefixes are a tree, and nothing piles up."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from typing import Any

import pytest

from kvmesh.errors import ConfigError
from kvmesh.services.conductor.domain import Lane
from kvmesh.sim.workloads.synthetic import LengthDistribution, SyntheticConfig, synthetic
from kvmesh.sim.workloads.workload import SimRequest

BIG = 1 << 20  # no block is full: where keys do not matter


def made(seed: int = 0, **changes: Any) -> list[SimRequest]:
    return list(synthetic(SyntheticConfig(**{"requests": 2000, "block_tokens": 64, **changes}), seed))


def gaps(requests: list[SimRequest]) -> list[float]:
    return [b.at_s - a.at_s for a, b in itertools.pairwise(requests)]


def test_a_seed_is_a_workload_and_its_beginning_does_not_depend_on_the_end() -> None:
    first = made(1, requests=500)
    assert first == made(1, requests=500) != made(2, requests=500)
    assert made(1, requests=50) == first[:50]


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 3.0])
def test_arrivals_have_rate_and_burstiness(burstiness: float) -> None:
    between = gaps(made(requests=10_000, block_tokens=BIG, rate=4.0, burstiness=burstiness))
    mean = statistics.fmean(between)
    assert mean == pytest.approx(0.25, rel=0.1)
    assert statistics.pstdev(between) / mean == pytest.approx(burstiness, rel=0.1)


def test_full_blocks_have_keys() -> None:
    for one in made(requests=500):
        assert len(one.keys) == one.input_tokens // 64 and len(set(one.keys)) == len(one.keys)


def test_turns_of_a_session_go_on_where_the_last_one_ended() -> None:
    """The next prompt holds the last one, its answer, and something new; it comes after its thinking."""
    sessions = defaultdict(list)
    for one in made(turns=4.0, think_s=5.0, user=LengthDistribution(300, 0.5), max_input=10**6):
        sessions[one.session].append(one)
    lengths = [len(turns) for turns in sessions.values()]
    assert statistics.fmean(lengths) == pytest.approx(4.0, rel=0.15)
    assert max(lengths) > 8 and min(lengths) == 1
    pauses = [gap for turns in sessions.values() for gap in gaps(turns)]
    assert statistics.fmean(pauses) > 0.9 * 5.0
    for turns in sessions.values():
        for before, after in itertools.pairwise(turns):
            assert after.keys[: len(before.keys)] == before.keys
            assert after.input_tokens > before.input_tokens + before.output_tokens
            assert after.at_s > before.at_s
            assert (after.tenant, after.origin, after.lane) == (before.tenant, before.origin, before.lane)


def test_prefixes_are_a_tree_of_applications() -> None:
    """Those of one application share its system prompt, those of two share nothing."""
    requests = made(
        applications=3,
        depth=1,
        branching=2,
        turns=1.0,
        system=LengthDistribution(640, 0),
        node=LengthDistribution(640, 0),
        user=LengthDistribution(64, 0),
    )
    roots = defaultdict(set)
    branches = defaultdict(set)
    for one in requests:
        roots[one.tenant].add(one.keys[:10])
        branches[one.tenant].add(one.keys[:20])
    assert len(roots) == 3 and all(len(prefixes) == 1 for prefixes in roots.values())
    assert all(len(paths) == 2 for paths in branches.values())
    assert len({prefix for prefixes in roots.values() for prefix in prefixes}) == 3
    assert len({one.keys[20:] for one in requests}) == len(requests)  # what is said now is said once


def test_popularity_follows_zipf() -> None:
    counts = defaultdict(int)
    for one in made(requests=10_000, block_tokens=BIG, applications=10, zipf=1.0, turns=1.0):
        counts[one.tenant] += 1
    harmonic = sum(1 / rank for rank in range(1, 11))
    for rank in (1, 2, 5, 10):
        assert counts[f"app{rank - 1}"] / 10_000 == pytest.approx(1 / rank / harmonic, rel=0.12)
    even = made(requests=10_000, block_tokens=BIG, applications=10, zipf=0.0, turns=1.0)
    assert sum(one.tenant == "app9" for one in even) == pytest.approx(1000, rel=0.12)


def test_lengths_are_log_normal_with_their_mean_and_bound() -> None:
    outputs = [
        one.output_tokens for one in made(requests=10_000, block_tokens=BIG, output=LengthDistribution(200, 0.8, 2000))
    ]
    assert statistics.fmean(outputs) == pytest.approx(200, rel=0.05)
    assert statistics.stdev(map(math.log, outputs)) == pytest.approx(0.8, rel=0.05)
    assert max(outputs) == 2000 and min(outputs) >= 1
    fixed = made(output=LengthDistribution(200, 0))
    assert {one.output_tokens for one in fixed} == {200}


def test_prompts_are_bounded_and_end_their_session() -> None:
    requests = made(turns=50.0, think_s=0.0, max_input=4096, user=LengthDistribution(1000, 0))
    assert max(one.input_tokens for one in requests) == 4096
    last: dict[str, SimRequest] = {}
    for one in requests:
        assert one.session not in last or last[one.session].input_tokens < 4096
        last[one.session] = one


def test_lanes_and_origins_are_dealt_out() -> None:
    requests = made(requests=5000, block_tokens=BIG, batch_share=0.25, origins=4, turns=1.0)
    assert sum(one.lane is Lane.BATCH for one in requests) == pytest.approx(1250, rel=0.12)
    assert {one.origin for one in requests} == {"o0", "o1", "o2", "o3"}


def test_it_goes_on_for_ever_and_holds_those_alone_who_think() -> None:
    endless = synthetic(SyntheticConfig(requests=0, rate=50.0, think_s=2.0, turns=5.0, block_tokens=BIG))
    for _ in itertools.islice(endless, 10_000):
        pass
    assert len(endless.gi_frame.f_locals["thinking"]) < 400  # about rate x think time


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rate", 0.0), ("burstiness", -1.0), ("applications", 0), ("branching", 0), ("depth", -1), ("turns", 0.5),
        ("think_s", -1.0), ("batch_share", 1.5), ("origins", 0), ("max_input", 0), ("requests", -1), ("zipf", -1.0),
        ("user", LengthDistribution(0)), ("output", LengthDistribution(10, 9)),
        ("system", LengthDistribution(10, 1, 0)), ("applications", 10**9),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SyntheticConfig(**{field: value})
    assert caught.value.field == field
