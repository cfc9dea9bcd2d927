"""Links are shared max-min fairly: against a solver by definition, and against integrating small steps."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.sim.links import Flow, Link, Links
from kvmesh.sim.loop import Loop


def brute_force(capacities: list[float], paths: list[list[int]], caps: list[float]) -> list[float]:
    """All rates rise together; who has what he asks for, or whose link is full, stops."""
    rates, done = [0.0] * len(paths), [cap <= 0 for cap in caps]
    while not all(done):
        rising = [f for f in range(len(paths)) if not done[f]]
        level = rates[rising[0]]
        step = min(caps[f] for f in rising) - level
        for link, capacity in enumerate(capacities):
            users = [f for f in rising if link in paths[f]]
            if users:
                used = sum(rates[f] for f in range(len(paths)) if link in paths[f])
                step = min(step, (capacity - used) / len(users))
        for f in rising:
            rates[f] += max(step, 0.0)
        for f in rising:
            full = any(
                sum(rates[g] for g in range(len(paths)) if link in paths[g]) >= capacities[link] * (1 - 1e-9)
                for link in paths[f]
            )
            done[f] = full or rates[f] >= caps[f] * (1 - 1e-9)
    return rates


demands = st.one_of(st.just(inf), st.floats(0.1, 50))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rates_are_those_of_a_brute_force_solver_after_every_change(data: st.DataObject) -> None:
    capacities = data.draw(st.lists(st.floats(1, 100), min_size=1, max_size=5))
    loop = Loop()
    links, wires = Links(loop), [Link(str(n), c) for n, c in enumerate(capacities)]
    wanted = data.draw(
        st.lists(
            st.tuples(st.sets(st.integers(0, len(wires) - 1), min_size=1, max_size=3), demands), min_size=1, max_size=8
        )
    )
    flows: list[tuple[list[int], float, Flow]] = []
    for at, (path, demand) in enumerate(wanted):
        if flows and at % 3 == 2:  # somebody leaves, too
            flows.pop(data.draw(st.integers(0, len(flows) - 1)))[2].cancel()
        flow = links.open([wires[n] for n in sorted(path)], lambda: None)
        flow.feed(1e9 if demand == inf else 0.0, produced=0.0 if demand == inf else demand)
        flows.append((sorted(path), demand, flow))
        expected = brute_force(capacities, [path for path, _, _ in flows], [demand for _, demand, _ in flows])
        assert [flow.rate for _, _, flow in flows] == pytest.approx(expected, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.integers(0, 2), st.integers(0, 2), st.floats(1, 500)), min_size=1, max_size=8
    )
)
def test_ends_are_those_of_integrating_the_shares(jobs: list[tuple[float, int, int, float]]) -> None:
    """(start, sender, receiver, bytes) between three machines with wires of 10, 20 and 50 bytes a second."""
    capacity = [10.0, 20.0, 50.0]
    loop = Loop()
    links = Links(loop)
    tx, rx = [Link(f"{n}.tx", c) for n, c in enumerate(capacity)], [Link(f"{n}.rx", c) for n, c in enumerate(capacity)]
    ends: dict[int, float] = {}

    def begin(n: int, sender: int, receiver: int, nbytes: float) -> None:
        flow = links.open((tx[sender], rx[receiver]), lambda: ends.setdefault(n, loop.now))
        flow.feed(nbytes, close=True)

    for n, (at, sender, receiver, nbytes) in enumerate(jobs):
        loop.at(at, lambda n=n, s=sender, r=receiver, b=nbytes: begin(n, s, r, b))  # type: ignore[misc]
    loop.run()
    expected, left, now = {}, {n: job[3] for n, job in enumerate(jobs)}, 0.0
    while left:
        here = [n for n in left if jobs[n][0] <= now]
        rates = brute_force(capacity * 2, [[jobs[n][1], 3 + jobs[n][2]] for n in here], [inf] * len(here))
        arrivals = [jobs[n][0] - now for n in left if jobs[n][0] > now]
        step = min([*arrivals, *(left[n] / rate for n, rate in zip(here, rates, strict=True))])
        now += step
        for n, rate in zip(here, rates, strict=True):
            left[n] -= rate * step
        for n in [n for n in here if left[n] < 1e-6]:
            del left[n]
            expected[n] = now
    assert ends == pytest.approx(expected, abs=1e-3)
    assert sum(link.sent for link in tx) == pytest.approx(sum(job[3] for job in jobs), abs=1e-2)


def test_what_is_produced_goes_as_it_comes_and_ends_with_its_last_byte() -> None:
    loop = Loop()
    links, wire = Links(loop), Link("wire", 100.0)
    ends: list[float] = []
    flow = links.open((wire,), lambda: ends.append(loop.now))
    flow.feed(0.0, produced=30.0)  # slower than the wire: nothing waits
    loop.at(2.0, lambda: flow.feed(20.0, close=True))  # the last layer, when the step ends
    loop.run()
    assert ends == [pytest.approx(2.2)]
    assert wire.sent == pytest.approx(80.0)


def test_a_backlog_is_sent_at_the_whole_share_until_it_is_gone() -> None:
    loop = Loop()
    links, wire = Links(loop), Link("wire", 100.0)
    ends: dict[str, float] = {}
    slow = links.open((wire,), lambda: ends.setdefault("slow", loop.now))
    other = links.open((wire,), lambda: ends.setdefault("other", loop.now))
    slow.feed(0.0, produced=80.0)
    other.feed(100.0, close=True)  # both get 50: 30 a second pile up for 2 seconds
    loop.at(3.0, lambda: slow.feed(0.0, close=True))  # 60 piled up by 2.0, 20 a second gone since then: 40 left
    loop.run()
    assert ends == {"other": pytest.approx(2.0), "slow": pytest.approx(3.4)}


def test_a_cancelled_flow_leaves_its_share_to_others_and_never_ends() -> None:
    loop = Loop()
    links, wire = Links(loop), Link("wire", 10.0)
    ends: list[str] = []
    one, two = (links.open((wire,), lambda name=name: ends.append(f"{name}@{loop.now:g}")) for name in "ab")  # type: ignore[misc]
    one.feed(100.0, close=True)
    two.feed(10.0, close=True)
    loop.at(1.0, one.cancel)
    loop.run()
    assert ends == ["b@1.5"]


def test_moments_never_go_back_and_equal_ones_keep_their_order() -> None:
    loop = Loop()
    said: list[tuple[float, str]] = []
    for name, at in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("d", 2.0)):
        loop.at(at, lambda name=name: said.append((loop.now, name)))  # type: ignore[misc]
    loop.at(1.5, lambda: loop.at(0.5, lambda: said.append((loop.now, "late"))) and None)
    loop.run()
    assert said == [(1.0, "a"), (1.0, "b"), (1.5, "late"), (2.0, "c"), (2.0, "d")]
    assert all(x[0] <= y[0] for x, y in pairwise(said))
