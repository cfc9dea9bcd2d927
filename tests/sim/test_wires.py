"""NICs that change during a run: fair rates after every change, and longer pulls while they are slow."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import ConfigError
from kvmesh.sim.config import SimConfig, WireChange
from kvmesh.sim.hardware.hardware import hardware
from kvmesh.sim.hardware.shapes import shape_of
from kvmesh.sim.hardware.times import node_spec
from kvmesh.sim.links import Flow, Link, Links
from kvmesh.sim.loop import Loop
from kvmesh.sim.report.records import Record
from kvmesh.sim.run import run
from kvmesh.sim.workloads.workload import SimRequest, key
from tests.sim.test_links import brute_force, demands

SLOW, FAST_AGAIN = 100.0, 200.0


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_after_a_link_has_changed_rates_are_those_of_a_brute_force_solver(data: st.DataObject) -> None:
    capacities = data.draw(st.lists(st.floats(1, 100), min_size=1, max_size=4))
    loop = Loop()
    links, wires = Links(loop), [Link(str(n), c) for n, c in enumerate(capacities)]
    paths = st.sets(st.integers(0, len(wires) - 1), min_size=1, max_size=3)
    flows: list[tuple[list[int], float, Flow]] = []
    for path, demand in data.draw(st.lists(st.tuples(paths, demands), min_size=1, max_size=6)):
        flow = links.open([wires[n] for n in sorted(path)], lambda: None)
        flow.feed(1e9 if demand == inf else 0.0, produced=0.0 if demand == inf else demand)
        flows.append((sorted(path), demand, flow))
    for at, capacity in data.draw(
        st.lists(st.tuples(st.integers(0, len(wires) - 1), st.floats(1, 100)), min_size=1, max_size=4)
    ):
        links.resize(wires[at], capacity)
        capacities[at] = capacity
        expected = brute_force(capacities, [path for path, _, _ in flows], [demand for _, demand, _ in flows])
        assert [flow.rate for _, _, flow in flows] == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_bytes_that_were_sent_before_count_at_the_old_rate() -> None:
    loop, ends = Loop(), list[float]()
    links, wire = Links(loop), Link("w", 10.0)
    flow = links.open([wire], lambda: ends.append(loop.now))
    flow.feed(100.0, close=True)
    loop.at(4.0, lambda: links.resize(wire, 2.0))
    loop.at(14.0, lambda: links.resize(wire, 40.0))
    loop.run()
    assert ends == [pytest.approx(15.0)]  # 40 in 4 s, 20 in 10 s, 40 in 1 s
    with pytest.raises(ValueError, match="capacity=0"):
        links.resize(wire, 0.0)


def small(**more: object) -> SimConfig:
    """Two prefill nodes, one decode node."""
    spec = node_spec(hardware("a100"), 8, shape_of("llama3-70b"), weight_dtype="bf16", kv_dtype="bf16")
    spec = replace(spec, dram_tokens=1_000_000, nic_bytes_per_s=12.5e9)
    return replace(SimConfig(prefill=(spec,) * 2, decode=(spec,)), **more)  # type: ignore[arg-type]


def test_kv_takes_longer_to_decode_while_its_nic_is_slow() -> None:
    slow = (WireChange(SLOW, 0.1, ("d0",)), WireChange(FAST_AGAIN, 1.0))
    requests = [SimRequest(n, 20.0 * n, 8192, 2, tuple(key(1000 * n + b) for b in range(16))) for n in range(15)]
    after: dict[int, float] = {}

    def keep(record: Record) -> None:
        after[record.index] = record.kv_end_s - record.prefill_end_s

    run(small(wires=slow), requests, sink=keep)
    usual, slowed = after[0], after[6]
    assert slowed > 5 * usual
    assert after[14] == pytest.approx(usual, rel=0.01)


@pytest.mark.parametrize(
    "change", [WireChange(-1.0, 0.5), WireChange(0.0, 0.0), WireChange(0.0, 0.5, ("p7",))], ids=repr
)
def test_what_cannot_be_is_refused(change: WireChange) -> None:
    with pytest.raises(ConfigError, match="wires"):
        small(wires=(change,))
