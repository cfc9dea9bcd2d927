"""A mesh of a model with several cache groups, simulated: the conductor's own code, bytes of what is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout
from kvmesh.services.conductor.domain import Placed
from kvmesh.services.conductor.prefixes.grouped_survey import GroupedSurvey
from kvmesh.sim.brains import Brains
from kvmesh.sim.cluster import Cluster
from kvmesh.sim.config import SimConfig
from kvmesh.sim.hardware.hardware import GIB, hardware
from kvmesh.sim.hardware.shapes import shape_of
from kvmesh.sim.hardware.times import node_spec
from kvmesh.sim.report.records import Record
from kvmesh.sim.run import run as simulate
from kvmesh.sim.workloads.workload import SimRequest
from tests.support.conductor.brain import chain
from tests.support.sim.scenarios import node

B = 16
LAYOUT = CacheLayout(2, 1, 32)
OBJECT = 2 * 32 * 2 * B  # bytes of one layer's block
GROUPS = (
    (CacheGroup("all", (0,), LAYOUT), 2),
    (CacheGroup("window64", (1, 2, 3), LAYOUT, CacheKind.WINDOW, 64), 2),
    (CacheGroup("state", (4,), CacheLayout(1, 1, 1024, "float32"), CacheKind.STATE, 4), 4),
)
STATE = 4096


def request(at: int, at_s: float, tokens: int, *, fork: int = 0) -> SimRequest:
    shared, blocks = (tokens - fork) // B, tokens // B
    return SimRequest(at, at_s, tokens, 4, chain("same", shared) + chain(f"own{at}", blocks - shared))


def run(requests: list[SimRequest], prefills: int = 1, groups: Any = GROUPS) -> tuple[list[Record], Cluster]:
    spec = node(1.0, groups=groups)
    config = SimConfig(prefill=(spec,) * prefills, decode=(spec,), block_tokens=B)
    records: list[Record] = []
    systems: list[Any] = []
    simulate(config, requests, sink=records.append, last=systems.append)
    return sorted(records, key=lambda record: record.index), systems[0]


@pytest.mark.parametrize("prefills", [1, 2])
def test_a_hit_ends_at_a_snapshot_and_wires_carry_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, prefills: int
) -> None:
    surveys, placed = [], []
    schedule = Brains.schedule

    def noted(brains: Brains, asked: Any) -> Any:
        surveys.append(brains.states[0]._index.survey(asked.keys, _cost(brains), asked.prompt_tokens))
        placed.append(schedule(brains, asked))
        return placed[-1]

    monkeypatch.setattr(Brains, "schedule", noted)
    # 330 tokens are 20 blocks; the second prompt shares 18 of them and could go on behind 16.
    records, system = run([request(0, 0.0, 330), request(1, 20.0, 330, fork=40)], prefills)
    assert [record.outcome for record in records] == ["done", "done"]
    assert [record.cached_tokens for record in records] == [0, 16 * B]
    assert all(isinstance(survey, GroupedSurvey) for survey in surveys)
    assert isinstance(placed[1], Placed) and placed[1].cached_tokens == 16 * B
    # Of 330 tokens 21 blocks are sent of the first prompt; the window of the token at 330 begins in block 16. Of the
    # second, decode has the first 18 blocks. Where another instance computes it, that fetches 16 blocks, of the window
    # those from 12 on, and one state.
    first = 21 * OBJECT + 5 * 3 * OBJECT + STATE
    second = 3 * OBJECT + 3 * 3 * OBJECT + STATE
    pulled = 16 * OBJECT + 4 * 3 * OBJECT + STATE if prefills == 2 else 0
    assert records[1].pulled_tokens == (16 * B if prefills == 2 else 0)
    assert sum(node.tx.sent for node in system.nodes.values()) == pytest.approx(first + second + pulled)


def _cost(brains: Brains) -> Any:
    return next(iter(brains.states[0].instances)).model.cost


def test_without_groups_the_whole_prefix_is_hit() -> None:
    records, _ = run([request(0, 0.0, 330), request(1, 20.0, 330, fork=40)], groups=())
    assert records[1].cached_tokens == 18 * B


def test_nodes_of_a_grouped_model_hold_more() -> None:
    """Gemma 3 on 8 H200: device memory by running requests of 32k, host memory by whole blocks."""
    shape, gpu = shape_of("gemma3-27b"), hardware("h200")
    spec = node_spec(gpu, 8, shape, block_tokens=64)
    plain = node_spec(gpu, 8, replace(shape, groups=(CacheGroup("all", tuple(range(62)), CacheLayout(2, 16, 128)),)))
    assert 5 < spec.kv_tokens / plain.kv_tokens < 6  # docs/reports/memory.md: 5.29, of blocks of 64
    assert spec.dram_tokens == plain.dram_tokens == 1024 * GIB // (62 * 2 * 16 * 128 * 2)
    assert [(group.name, itemsize) for group, itemsize in spec.groups] == [("all", 2), ("window1024", 2)]
