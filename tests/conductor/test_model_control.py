"""Orders for all instances of a model, over a served instance that does nothing but what it is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc.aio

from kvmesh.rpc.pb import common_pb2, conductor_pb2, instance_pb2, instance_pb2_grpc
from kvmesh.services.conductor.model_control import ModelControl

WAIT_S = 10.0


class ToldInstance(instance_pb2_grpc.InstanceServicer):
    """Notes its orders; an update waits until `may_end`."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.updating, self.may_end, self.resumed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def Pause(self, request: Any, context: Any) -> instance_pb2.PauseResponse:  # noqa: N802
        self.told.append("pause")
        return instance_pb2.PauseResponse()

    async def UpdateWeights(self, request: Any, context: Any) -> instance_pb2.UpdateWeightsResponse:  # noqa: N802
        self.told.append("update")
        self.updating.set()
        await self.may_end.wait()
        return instance_pb2.UpdateWeightsResponse()

    async def Resume(self, request: Any, context: Any) -> instance_pb2.ResumeResponse:  # noqa: N802
        self.told.append("resume")
        self.resumed.set()
        return instance_pb2.ResumeResponse(weights_epoch=5)


async def test_an_update_whose_caller_goes_away_leaves_nothing_paused() -> None:
    told, server = ToldInstance(), grpc.aio.server()
    instance_pb2_grpc.add_InstanceServicer_to_server(told, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    known: Any = SimpleNamespace(
        ref=SimpleNamespace(instance_id="d0", address=f"127.0.0.1:{port}", incarnation=1),
        model=SimpleNamespace(name="demo", weights_epoch=0),
        role=SimpleNamespace(decodes=True),
        not_ready_reason="",
    )
    control = ModelControl(lambda: [known])
    request = conductor_pb2.UpdateModelWeightsRequest(weights_epoch=5, source=common_pb2.WeightsSource())
    try:
        order = asyncio.create_task(control.update(request))
        await asyncio.wait_for(told.updating.wait(), WAIT_S)
        order.cancel()
        await asyncio.gather(order, return_exceptions=True)
        told.may_end.set()
        await asyncio.wait_for(told.resumed.wait(), WAIT_S)
        assert told.told == ["pause", "update", "resume"]
    finally:
        await server.stop(None)
