"""Orders for all instances of a model are carried out to their end though whoever gave them goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvmesh.errors import InvalidRequest, Overloaded, Unavailable
from kvmesh.instance.pausing import PauseMode
from kvmesh.instance.served_weights import NewWeights, ServedWeights, WeightsTaken
from kvmesh.instance.servicer import Switchable, add_instance
from kvmesh.instance.sleeping import MemoryReleased, SleepLevel
from kvmesh.rpc.pb import common_pb2, conductor_pb2
from kvmesh.rpc.server import Server
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.model_control import ModelControl


class SlowFront:
    """Takes weights when `go` is set. It has no ranks."""

    role, switch, profiles, not_ready_reason = common_pb2.ROLE_BOTH, None, None, ""

    def __init__(self) -> None:
        self.ref = common_pb2.InstanceRef(instance_id="a", incarnation=1)
        self.weights = ServedWeights("ff", 0)
        self.paused = False
        self.updating, self.go, self.resumed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def pause(self, mode: PauseMode, reason: str, deadline_s: float) -> int:
        self.paused = True
        return 0

    def resume(self) -> int:
        self.paused = False
        self.resumed.set()
        return self.weights.epoch

    async def update_weights(self, new: NewWeights, deadline_s: float) -> WeightsTaken:
        self.updating.set()
        await self.go.wait()
        self.weights = ServedWeights("ff", new.epoch)
        return WeightsTaken(1, 0.0, 0.0)


def instance(address: str) -> Instance:
    model = SimpleNamespace(name="m", weights_epoch=0)
    ref = SimpleNamespace(instance_id="a", address=address, incarnation=1, life=("a", 1))
    found: Any = SimpleNamespace(model=model, ref=ref, role=SimpleNamespace(decodes=True), not_ready_reason="")
    return cast(Instance, found)


def order(epoch: int) -> conductor_pb2.UpdateModelWeightsRequest:
    source = common_pb2.WeightsSource(path="/w")
    return conductor_pb2.UpdateModelWeightsRequest(model="m", weights_epoch=epoch, source=source, deadline_ms=20_000)


async def test_an_update_whose_caller_goes_leaves_no_model_paused() -> None:
    front, server = SlowFront(), Server("127.0.0.1", 0)
    add_instance(cast(Switchable, front), server)
    port = await server.start()
    control = ModelControl(lambda: [instance(f"127.0.0.1:{port}")])
    try:
        call = asyncio.create_task(control.update(order(7)))
        async with asyncio.timeout(20):
            await front.updating.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert call.cancelled() and front.paused
            with pytest.raises(Overloaded, match="another order"):
                await control.update(order(8))
            front.go.set()
            await front.resumed.wait()
        assert (front.paused, front.weights.epoch) == (False, 7)
    finally:
        await server.stop(0)


async def test_an_epoch_that_none_can_follow_is_refused() -> None:
    control = ModelControl(lambda: [instance("127.0.0.1:1")])
    with pytest.raises(InvalidRequest, match=f"weights_epoch={2**64 - 1}: at most"):
        await control.update(order(2**64 - 1))


class SleepyFront(SlowFront):
    """Sleeps, unless it says why not."""

    def __init__(self, why_not: str = "") -> None:
        super().__init__()
        self.why_not, self.level, self.wakes = why_not, 0, 0

    async def sleep(self, level: SleepLevel, mode: PauseMode, reason: str, deadline_s: float) -> MemoryReleased:
        assert self.paused, "all are paused before any sleeps"
        if self.why_not:
            raise Unavailable(self.why_not)
        self.level = level
        return MemoryReleased(level, 100, 10)

    async def wake(self, deadline_s: float, stay_paused: bool = False) -> int:
        self.wakes += 1
        await asyncio.sleep(0)
        self.level = 0
        return 0


@asynccontextmanager
async def controlled(*fronts: SleepyFront) -> AsyncIterator[ModelControl]:
    servers, ports = [Server("127.0.0.1", 0) for _ in fronts], []
    for front, server in zip(fronts, servers, strict=True):
        add_instance(cast(Switchable, front), server)
        ports.append(await server.start())
    try:
        yield ModelControl(lambda: [instance(f"127.0.0.1:{port}") for port in ports])
    finally:
        await asyncio.gather(*(server.stop(0) for server in servers))


SLEEP, WAKE = conductor_pb2.SleepModelRequest(model="m", level=2), conductor_pb2.WakeModelRequest(model="m")


async def test_all_instances_sleep_or_none() -> None:
    one, other = SleepyFront(), SleepyFront("rank 0 cannot sleep")
    async with controlled(one, other) as control:
        with pytest.raises(Unavailable, match="cannot sleep"):
            await control.sleep(SLEEP)
        assert [(front.level, front.paused) for front in (one, other)] == [(0, False)] * 2
        other.why_not = ""
        answer = await control.sleep(SLEEP)
        assert [(given.level, given.page_bytes) for given in answer.released] == [(2, 100)] * 2
        await control.sleep(SLEEP)
        wakes = one.wakes
        woken = await asyncio.gather(control.wake(WAKE), control.wake(WAKE))
        assert one.wakes == wakes + 1, "two calls at once are one"
        assert [(answer.instances, answer.paused) for answer in woken] == [(2, False)] * 2
        assert not (one.level or one.paused or other.paused)


async def test_who_was_paused_before_it_slept_stays_paused() -> None:
    front = SleepyFront()
    async with controlled(front) as control:
        await control.pause(conductor_pb2.PauseModelRequest(model="m"))
        await control.sleep(SLEEP)
        assert (await control.wake(WAKE)).paused and front.paused
        await control.resume(conductor_pb2.ResumeModelRequest(model="m"))
        await control.sleep(SLEEP)
        await control.pause(conductor_pb2.PauseModelRequest(model="m"))  # while it sleeps: that holds, too
        assert (await control.wake(WAKE)).paused and front.paused
