"""Thousands of members die at once: the work goes in small steps, and others are answered between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.clock import Tick
from kvmesh.errors import UnknownInstance
from kvmesh.kvcache.announce import Announcement
from kvmesh.rpc import channels
from kvmesh.rpc.pb import store_pb2
from kvmesh.rpc.server import Server
from kvmesh.services.store import main
from kvmesh.services.store.config import StoreConfig
from kvmesh.services.store.domain import (
    Announce,
    Beat,
    Change,
    NodeJoined,
    NodeRole,
    Publish,
    RefuseCall,
    RegisteredNode,
)
from kvmesh.services.store.state import MAX_ENDS, MasterState
from tests.support.store.mesh import TIMEOUT, Node, Watcher, keys
from tests.support.tracing import lines

LEASE = 2.0
MANY = 3000


def member(i: int) -> RegisteredNode:
    return RegisteredNode(f"m{i}", "h:1", 1, NodeRole.POOL, "node", f"m{i}")


def ended(actions: Any) -> list[str]:
    return [a.member.instance_id for a in actions if isinstance(a, Publish) and a.change is Change.DIED]


def crowd(count: int) -> MasterState:
    state = MasterState(lease_s=LEASE, stall_s=1e9)
    for i in range(count):
        state.step(NodeJoined(member(i)), 0.0)
    return state


def test_a_step_ends_a_few_and_the_next_ones_the_rest() -> None:
    state = crowd(MANY)
    steps = [ended(state.step(Tick(), 5.0))]
    while state.overdue:
        steps.append(ended(state.step(Tick(), 5.0)))
    assert all(len(step) == MAX_ENDS for step in steps[:-1])
    assert sorted(name for step in steps for name in step) == sorted(f"m{i}" for i in range(MANY))
    assert state.members == []


def test_who_speaks_too_late_is_dead_though_others_are_ended_first() -> None:
    state = crowd(MANY)
    beat = state.step(Beat(f"m{MANY - 1}", 1), 5.0)
    assert f"m{MANY - 1}" in ended(beat)
    assert any(isinstance(a, RefuseCall) and isinstance(a.error, UnknownInstance) for a in beat)
    said = state.step(Announce(Announcement(f"m{MANY - 2}", 1, 1, tuple(keys(1)))), 5.0)
    assert f"m{MANY - 2}" in ended(said) and any(isinstance(a, RefuseCall) for a in said)
    joined = state.step(NodeJoined(member(MANY - 3)), 5.0)
    changes = [(a.change, a.member.instance_id) for a in joined if isinstance(a, Publish)]
    assert changes[-2:] == [(Change.DIED, f"m{MANY - 3}"), (Change.JOINED, f"m{MANY - 3}")]
    while state.overdue:
        assert f"m{MANY - 3}" not in ended(state.step(Tick(), 5.0))
    assert state.members == [member(MANY - 3)]


@given(
    beats=st.lists(st.tuples(st.integers(0, 99), st.floats(0, 3)), max_size=40),
    times=st.lists(st.floats(0, 1.5), max_size=12),
)
def test_only_those_silent_for_a_lease_die_and_all_of_them(beats: list[tuple[int, float]], times: list[float]) -> None:
    """Against a table of last beats, with steps at any moments."""
    state = crowd(100)
    last = dict.fromkeys((f"m{i}" for i in range(100)), 0.0)
    events = sorted([(at, i) for i, at in beats] + [(at, None) for at in _sums(times)], key=lambda e: e[0])
    now = 0.0
    for now, who in events:
        for name in ended(state.step(Tick() if who is None else Beat(f"m{who}", 1), now)):
            assert now - last.pop(name) > LEASE
        if who is not None and f"m{who}" in last:
            last[f"m{who}"] = now
    now += 0.5
    for _ in range(2):  # what an earlier step had found, then what has become late since
        state.step(Tick(), now)
        while state.overdue:
            state.step(Tick(), now)
    assert {m.instance_id for m in state.members} == {name for name, at in last.items() if now - at <= LEASE}


def _sums(parts: list[float]) -> list[float]:
    total, found = 0.0, []
    for part in parts:
        total += part
        found.append(total)
    return found


@pytest.fixture
async def master() -> AsyncIterator[tuple[main.Master, grpc.aio.Channel]]:
    """A real one whose ticks are the test's."""
    service = main.Master(StoreConfig(heartbeat_interval_ms=10_000, lease_ms=20_000, max_members=MANY + 1))
    server = Server("127.0.0.1", 0)
    service.add_to(server)
    await server.start()
    try:
        async with channels.connect(server.address) as channel:
            yield service, channel
    finally:
        await service.close()
        await server.stop(0)


async def test_others_are_answered_while_a_thousand_are_buried(
    master: tuple[main.Master, grpc.aio.Channel],
) -> None:
    service, channel = master
    assert service.session is not None
    state, servicer = service.session.state, service.session.servicer
    dead = [member(i) for i in range(MANY)]
    for one in dead:
        servicer._step(NodeJoined(one))
    alive = Node(channel, "alive")
    await alive.join()
    watcher = Watcher(channel)
    await watcher.until(lambda: len(watcher.members) == MANY + 1)
    for one in dead:
        state._lives[one.instance_id].last_beat = time.monotonic() - 1e6
    state._nobody_dies_until = float("-inf")
    left: list[int] = []

    async def ask() -> None:
        while state.overdue or not left:
            await alive.stub.Lookup(store_pb2.LookupRequest(keys=keys(1)[0]), timeout=TIMEOUT)
            left.append(len(state._lives))

    asking = asyncio.create_task(ask())
    await alive.stub.ListMembers(store_pb2.ListMembersRequest(), timeout=TIMEOUT)  # this finds them
    await asking
    assert any(1 < count < MANY for count in left), f"answered only before and after: {left}"
    await watcher.until(lambda: set(watcher.members) == {"alive"})


def test_ending_one_costs_the_same_however_many_end_and_whatever_they_held() -> None:
    """The most that any one step does, in lines of code, when a thousand terms end at once."""

    def most(count: int, held: int) -> int:
        state = crowd(count)
        packed = keys(held)
        for i in range(0, count, 10):
            state.step(Announce(Announcement(f"m{i}", 1, 1, tuple(packed), snapshot=True)), 0.0)
        costs = [lines(lambda: state.step(Tick(), 5.0), "services/store")]  # this finds them all
        while state.overdue:
            costs.append(lines(lambda: state.step(Tick(), 5.0), "services/store"))
        assert len(costs) >= count // MAX_ENDS
        return max(costs[1:])

    small = most(256, 10)
    assert most(1024, 10) <= 1.1 * small and most(1024, 500) <= 1.1 * small
