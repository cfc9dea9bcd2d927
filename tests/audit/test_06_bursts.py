"""Audit 6: in a burst, heartbeats waited behind placements, and healthy instances were taken for silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvmesh.clock import CaughtUp, Tick
from kvmesh.errors import Overloaded
from kvmesh.rpc import channels
from kvmesh.rpc.call_queue import caught_up
from kvmesh.rpc.fastpath import frames
from kvmesh.rpc.pb import doors_pb2, doors_pb2_grpc
from kvmesh.services.conductor.domain import Role
from kvmesh.services.conductor.state import ConductorState
from kvmesh.services.gateway.concurrency import AnswerRoom, PlacementRoom
from kvmesh.services.store.domain import Beat, NodeJoined
from kvmesh.services.store.state import MasterState
from tests.conductor.test_service import Mesh, beat, meshed, scheduling
from tests.store.test_state import member
from tests.support.conductor.brain import Brain

SCHEDULES = 400


@contextlib.asynccontextmanager
async def fast_path(mesh: Mesh) -> AsyncIterator[Any]:
    async with channels.connect(mesh.conductor_service.address) as channel:
        request = doors_pb2.FindDoorRequest(service="kvmesh.v1.Conductor")
        told = await doors_pb2_grpc.DoorsStub(channel).FindDoor(request, timeout=10)
    opened = []

    async def dial() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", told.port)
        opened.append(writer)
        writer.write(frames.hello(told.life))
        await reader.readexactly(len(frames.hello(told.life)))
        return reader, writer

    try:
        yield dial
    finally:
        for writer in opened:
            writer.close()


async def test_a_heartbeat_is_taken_before_placements_that_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    step = ConductorState.step

    def recorded(self: ConductorState, event: Any, now: float) -> Any:
        taken.append(type(event).__name__)
        return step(self, event, now)

    monkeypatch.setattr(ConductorState, "step", recorded)
    async with meshed() as mesh:
        await mesh.add("p0")
        await mesh.add("d0")
        async with fast_path(mesh) as dial:
            asking, beating = await dial(), await dial()
            calls = [
                frames.encode(
                    frames.CALL, n + 1, scheduling(request_id=f"r{n}").SerializeToString(), b"Schedule", 60_000
                )
                for n in range(SCHEDULES)
            ]
            taken.clear()
            asking[1].write(b"".join(calls))
            beating[1].write(frames.encode(frames.CALL, 1, beat("p0", seq=2).SerializeToString(), b"Heartbeat", 60_000))
            async with asyncio.timeout(60):
                while taken.count("Schedule") < SCHEDULES or "Heartbeat" not in taken:  # noqa: ASYNC110
                    await asyncio.sleep(0)
    before = taken[: taken.index("Heartbeat")].count("Schedule")
    assert before < SCHEDULES // 4, f"{before} of {SCHEDULES} placements came before the heartbeat"


def test_who_waits_to_be_heard_is_not_silent() -> None:
    """Conductor: silence is judged up to the time up to which everything has been heard."""
    brain = Brain(lease_s=1.5)
    brain.add("p0", Role.PREFILL)
    brain.step(CaughtUp(brain.now))
    brain.now += 5
    (instance,) = brain.state.instances
    assert brain.state.why_not(instance, brain.now) == "", "nobody knows yet what waits in its socket"
    assert next(iter(brain.state.views(brain.now))).ready
    brain.step(CaughtUp(brain.now - 0.1))
    assert "silent for 4900 ms" in brain.state.why_not(instance, brain.now)
    brain.beat("p0")
    assert brain.state.why_not(instance, brain.now) == ""


def test_a_member_that_waits_to_be_heard_is_not_dead() -> None:
    """Store master: a beat that is read late belongs to a living member."""
    state = MasterState(lease_s=1.5, stall_s=1e9)
    joined = member("p0")
    state.step(NodeJoined(joined), 10.0)
    state.step(CaughtUp(10.0), 10.0)
    state.step(Tick(), 15.0)
    state.step(Beat(joined.instance_id, joined.incarnation), 15.0)
    assert state.lives(joined.instance_id, joined.incarnation)
    state.step(CaughtUp(20.0), 20.1)
    assert not state.lives(joined.instance_id, joined.incarnation)


async def test_caught_up_waits_until_no_call_comes_over_grpc() -> None:
    calls = iter([0, 3, 3, 5, 5, 5])
    looked: list[int] = []

    def count() -> int:
        looked.append(next(calls))
        return looked[-1]

    times = iter(range(10))
    assert await caught_up(count, lambda: float(next(times))) == 2.0
    assert looked == [0, 3, 3, 5, 5, 5]


def test_answers_beyond_the_room_are_refused_at_once() -> None:
    room = AnswerRoom(3)
    room.enter(2)
    room.enter(1)
    waits = set()
    for _ in range(20):
        with pytest.raises(Overloaded, match="max_answers=3") as caught:
            room.enter(1)
        waits.add(caught.value.retry_after_ms)
    assert room.answers == 3 and len(waits) > 10
    room.leave(2)
    room.enter(2)


async def test_placements_under_way_are_bounded_and_first_come_first_served() -> None:
    room, order, most = PlacementRoom(2, 5.0), [], 0
    inside = 0

    async def place(number: int) -> None:
        nonlocal inside, most
        async with room:
            inside += 1
            most = max(most, inside)
            order.append(number)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(place(number) for number in range(20)))
    assert most == 2 and order == list(range(20))
    full = PlacementRoom(1, 0.01)
    async with full:
        with pytest.raises(Overloaded):
            async with full:
                raise AssertionError("there is no room")
    async with full:
        pass
