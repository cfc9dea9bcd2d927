"""Orders for all instances of a model: each is carried out once and to its end, one at a time though several
conductors give some, and none leaves a model paused whose conductor has died."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.errors import CheckpointError, FailedWeights, InvalidRequest, OrderLapsed, Overloaded, Unavailable
from kvmesh.instance.pausing import PauseMode
from kvmesh.rpc.pb import common_pb2, conductor_pb2, conductor_pb2_grpc
from kvmesh.rpc.server import Server
from kvmesh.services.conductor.domain import NewestWeights
from kvmesh.services.conductor.model_control import ModelControl
from kvmesh.services.gateway.conductor import Conductor as GatewayConductors
from tests.support.fronts_of_orders import OrderedFront, ordered_fronts
from tests.support.nodes import until


def update(epoch: int, order_id: str = "", **more: bool) -> conductor_pb2.UpdateModelWeightsRequest:
    source = common_pb2.WeightsSource(path="/w")
    return conductor_pb2.UpdateModelWeightsRequest(
        model="m", weights_epoch=epoch, source=source, deadline_ms=20_000, order_id=order_id, **more
    )


def pause(order_id: str = "", **more: int) -> conductor_pb2.PauseModelRequest:
    return conductor_pb2.PauseModelRequest(model="m", order_id=order_id, **more)


def conductor(fronts: Sequence[OrderedFront]) -> ModelControl:
    return ModelControl(lambda: [one.known for one in fronts], lease_s=30.0)


async def dies(control: ModelControl, *calls: asyncio.Task[object]) -> None:
    """Ends what a conductor does, as its death would: it renews nothing, and says no goodbye."""
    renewing = [task for task in asyncio.all_tasks() if task.get_name().startswith("order ")]
    tasks = [*renewing, *control._orders._tasks, *calls]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvmesh.services.conductor.order_lease.OrderLease.end", _nothing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _nothing(*_: object, **__: object) -> list[object]:
    return []


async def test_an_update_whose_caller_goes_leaves_no_model_paused(tmp_path: Path) -> None:
    async with ordered_fronts(tmp_path, "a") as [one]:
        control = conductor([one])
        one.live.go.clear()
        call = asyncio.create_task(control.update(update(7)))
        async with asyncio.timeout(20):
            await one.live.updating.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        assert call.cancelled() and not one.works
        with pytest.raises(Overloaded, match="another order"):
            await control.update(update(8))
        one.live.go.set()
        await one.until_it_works()
        assert one.live.epoch == 7


async def test_an_epoch_that_none_can_follow_or_that_was_used_is_refused(tmp_path: Path) -> None:
    async with ordered_fronts(tmp_path, "a") as [one]:
        control = conductor([one])
        with pytest.raises(InvalidRequest, match=f"weights_epoch={2**64 - 1}: at most"):
            await control.update(update(2**64 - 1))
        await control.update(update(7))
        with pytest.raises(InvalidRequest, match="weights_epoch=7: must be greater than 7"):
            await control.update(update(7))
        assert one.works and one.half.ended == 1


async def test_a_conductor_that_dies_in_the_middle_leaves_no_model_paused(tmp_path: Path) -> None:
    """One instance has the new weights then, the other one takes them a moment after the lease's end."""
    async with ordered_fronts(tmp_path, "d", "p") as fronts:
        d, p = fronts
        p.live.go.clear()
        first = conductor(fronts)
        call = asyncio.create_task(first.update(update(7, "order-1")))
        await until(lambda: p.live.changing and d.live.epoch == 7)
        await dies(first, call)
        assert not d.works and not p.works
        for one in fronts:
            one.lease_ends()
        assert d.works
        assert not p.works, "while its weights change nothing is computed with them"
        p.live.go.set()
        await p.until_it_works()
        assert (d.live.epoch, p.live.epoch) == (7, 7)
        # A conductor that is told the same goes on with it, and nothing is taken twice.
        answer = await conductor(fronts).update(update(7, "order-1"))
        assert [(one.weights_epoch, one.HasField("error")) for one in answer.taken] == [(7, False)] * 2
        assert (d.live.updates, p.live.updates) == ([7], [7]) and d.works and p.works


async def test_two_conductors_do_not_order_at_once(tmp_path: Path) -> None:
    async with ordered_fronts(tmp_path, "a", "b") as fronts:
        one, other = conductor(fronts), conductor(fronts)
        fronts[1].live.go.clear()
        call = asyncio.create_task(one.update(update(7, "first")))
        await fronts[1].live.updating.wait()
        for order in (other.update(update(8)), other.pause(pause()), other.resume(resume())):
            with pytest.raises(Overloaded, match=r"order first of conductor .* is being carried out"):
                await order
        with pytest.raises(Overloaded, match="order first"):
            await fronts[0].front.pause(PauseMode.KEEP, "by hand", 1.0)
        fronts[1].live.go.set()
        await call
        assert all(front.works and front.live.epoch == 7 for front in fronts)
        both = await asyncio.gather(one.update(update(8, "x")), other.update(update(9, "y")), return_exceptions=True)
        assert any(isinstance(answer, conductor_pb2.UpdateModelWeightsResponse) for answer in both)
        assert all(front.works for front in fronts)
        assert len({front.live.epoch for front in fronts}) == 1


class LosesAnswers(conductor_pb2_grpc.ConductorServicer):
    """Carries an update out, and loses the answer of the first."""

    def __init__(self, control: ModelControl, *, loses: bool) -> None:
        self.control, self.loses, self.asked = control, loses, 0

    async def UpdateModelWeights(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked += 1
        answer = await self.control.update(request)
        if self.loses:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        return answer


async def test_an_order_whose_answer_is_lost_is_carried_out_once_by_two_conductors(tmp_path: Path) -> None:
    async with ordered_fronts(tmp_path, "a", "b") as fronts:
        services = [LosesAnswers(conductor(fronts), loses=loses) for loses in (True, False)]
        servers = [Server("127.0.0.1", 0) for _ in services]
        for service, server in zip(services, servers, strict=True):
            conductor_pb2_grpc.add_ConductorServicer_to_server(service, server.grpc)
        ports = [await server.start() for server in servers]
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        gateway = GatewayConductors(addresses, timeout_s=5, retry_s=1, max_waiting=1)
        try:
            answer = await gateway.order("UpdateModelWeights", update(7), 20.0)
        finally:
            await gateway.close()
            await asyncio.gather(*(server.stop(0) for server in servers))
        assert [service.asked for service in services] == [1, 1]
        assert [(one.weights_epoch, one.bytes) for one in answer.taken] == [(7, 1), (7, 1)]
        assert [(front.live.updates, front.half.ended, front.works) for front in fronts] == [([7], 1, True)] * 2


def resume(order_id: str = "") -> conductor_pb2.ResumeModelRequest:
    return conductor_pb2.ResumeModelRequest(model="m", order_id=order_id)


async def test_a_repeated_order_is_answered_as_the_first_time(tmp_path: Path) -> None:
    async with ordered_fronts(tmp_path, "a", "b") as fronts:
        one, other = conductor(fronts), conductor(fronts)
        first = await one.update(update(7, "u"))
        assert await one.update(update(7, "u")) == first
        told = await other.update(update(7, "u"))  # which has not heard of it
        assert (told.weights_epoch, told.taken, told.ended) == (7, first.taken, first.ended)
        assert [front.live.updates for front in fronts] == [[7], [7]]
        assert [front.half.ended for front in fronts] == [1, 1]
        with pytest.raises(InvalidRequest, match="order_id='u': was given to another order"):
            await one.update(update(8, "u"))

        assert (await one.pause(pause("p"))).ended == 2
        assert (await one.resume(resume())).instances == 2
        assert (await other.pause(pause("p"))).ended == 2, "and nothing is paused again"
        assert all(front.works for front in fronts)


async def test_a_repeat_at_another_conductor_waits_for_the_first_one(tmp_path: Path) -> None:
    async with ordered_fronts(tmp_path, "a") as [front]:
        one, other = conductor([front]), conductor([front])
        front.live.go.clear()
        first = asyncio.create_task(one.update(update(7, "u")))
        await front.live.updating.wait()
        second = asyncio.create_task(other.update(update(7, "u")))
        front.live.go.set()
        assert (await second).taken == (await first).taken and front.live.updates == [7]


async def test_who_is_paused_by_hand_stays_so_until_it_is_resumed_or_as_long_as_was_told(tmp_path: Path) -> None:
    async with ordered_fronts(tmp_path, "a", "b") as fronts:
        control = conductor(fronts)
        await control.pause(pause())
        await control.update(update(7))
        assert not any(front.works for front in fronts)
        await control.resume(resume())
        assert all(front.works for front in fronts)
        await control.update(update(8, stay_paused=True))
        assert not any(front.works for front in fronts)
        await control.resume(resume())
        await control.pause(pause(for_ms=50))
        for front in fronts:
            await front.until_it_works()
        with pytest.raises(InvalidRequest, match="for_ms=604800001: at most"):
            await control.pause(pause(for_ms=604_800_001))


async def test_one_that_cannot_take_the_weights_gets_no_work_until_it_has_some(tmp_path: Path) -> None:
    async with ordered_fronts(tmp_path, "a", "b") as fronts:
        a, b = fronts
        told: list[tuple[str, str, NewestWeights]] = []
        control = ModelControl(lambda: [one.known for one in fronts], lambda *one: told.append(one))
        b.live.error = CheckpointError("no such folder", field="path")
        answer = await control.update(update(7))
        assert [one.HasField("error") for one in answer.taken] == [False, True]
        assert a.works and not b.works and told == [("m", "ff", NewestWeights(7, "/w"))]
        await control.resume(resume())
        assert not b.works
        b.live.error = None
        await control.update(update(8))
        assert a.works and b.works

        for front in fronts:  # nobody takes them: the old ones are served on
            front.live.error = CheckpointError("no such folder", field="path")
        with pytest.raises(CheckpointError):
            await control.update(update(9))
        assert a.works and b.works and told[1:] == [("m", "ff", NewestWeights(8, "/w"))]


async def test_a_mixture_stays_out_of_work_when_its_lease_ends(tmp_path: Path) -> None:
    async with ordered_fronts(tmp_path, "a") as [front]:
        control = conductor([front])
        front.live.go.clear()
        call = asyncio.create_task(control.update(update(7)))
        await front.live.updating.wait()
        await dies(control, call)
        front.live.torn = "rank 0 did not get all weights of epoch 7"
        front.live.error = FailedWeights(front.live.torn)
        front.live.go.set()
        await until(lambda: not front.live.changing)
        front.lease_ends()
        assert not front.works
        with pytest.raises(FailedWeights, match="needs another update"):
            front.front.resume()
        front.live.torn, front.live.error = "", None  # as the next update that succeeds makes it
        await conductor([front]).update(update(8))
        assert front.works


async def test_an_order_whose_lease_has_ended_changes_nothing(tmp_path: Path) -> None:
    async with ordered_fronts(tmp_path, "d", "p") as fronts:
        control = conductor(fronts)
        lease = control._lease([one.known for one in fronts], "late")
        assert await lease.begin(time.monotonic() + 5) == b""
        fronts[1].lease_ends()
        with pytest.raises(OrderLapsed, match="order='late': its lease has ended here"):
            fronts[1].front._pause.holds.check(fronts[0].front._pause.holds._order, time.monotonic())
        await lease.release()
        assert all(front.works for front in fronts)


SLEEP = conductor_pb2.SleepModelRequest(model="m", level=1)
WAKE = conductor_pb2.WakeModelRequest(model="m")


async def test_where_one_instance_cannot_sleep_none_does(tmp_path: Path) -> None:
    async with ordered_fronts(tmp_path, "d", "p") as fronts:
        d, p = fronts
        p.sleep.error = Unavailable("rank 0 cannot sleep: a window is open")
        with pytest.raises(Unavailable, match="a window is open"):
            await conductor(fronts).sleep(SLEEP)
        assert not d.sleep.level and not p.sleep.level
        assert d.works and p.works, "what ran goes on"


async def test_who_sleeps_is_woken_before_it_is_resumed(tmp_path: Path) -> None:
    """The conductor of this test never hears that they sleep: the instances themselves refuse."""
    async with ordered_fronts(tmp_path, "d", "p") as fronts:
        control = conductor(fronts)
        slept = await control.sleep(SLEEP)
        assert [one.page_bytes for one in slept.released] == [100, 100]
        assert not any(one.works for one in fronts)
        with pytest.raises(InvalidRequest, match="it sleeps; wake it first"):
            await control.resume(conductor_pb2.ResumeModelRequest(model="m"))
        assert not any(one.works for one in fronts)
        again = await control.sleep(SLEEP)
        assert [one.page_bytes for one in again.released] == [0, 0]
        woken = await asyncio.gather(control.wake(WAKE), control.wake(WAKE))
        assert [one.instances for one in woken] == [2, 2] and all(one.works for one in fronts)


async def test_a_pause_by_hand_outlives_a_sleep(tmp_path: Path) -> None:
    async with ordered_fronts(tmp_path, "d") as [d]:
        control = conductor([d])
        await control.pause(pause())
        await control.sleep(SLEEP)
        await control.wake(WAKE)
        assert not d.works
        await control.resume(conductor_pb2.ResumeModelRequest(model="m"))
        assert d.works
