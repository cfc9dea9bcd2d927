"""Several conductors, each of which can place every request: which of them is asked first."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc.aio

from kvmesh.rpc import channels
from kvmesh.rpc.fastpath.caller import FastCaller
from kvmesh.rpc.fastpath.control import control_calls
from kvmesh.rpc.masters import split
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc

SERVICE = conductor_pb2.DESCRIPTOR.services_by_name["Conductor"]


@dataclass(frozen=True, slots=True)
class AskedConductor:
    """One conductor. `calls`: the way through its door, while there is one."""

    address: str
    stub: conductor_pb2_grpc.ConductorAsyncStub
    calls: FastCaller

    async def schedule(
        self, request: conductor_pb2.ScheduleRequest, timeout_s: float
    ) -> conductor_pb2.ScheduleResponse:
        """Through the door or over gRPC. Raises KvmeshError or grpc.RpcError: which of the two says which way it went;
        DoorClosed: the door's connection broke."""
        if self.calls.by_door:
            answer: conductor_pb2.ScheduleResponse = await self.calls.call("Schedule", request, timeout_s)
            return answer
        self.calls.seek()
        return await self.stub.Schedule(request, timeout=timeout_s)


class ConductorPool:
    """Stays with the one that answered last: one that sees all requests places them better than two that each see half.
    Owns its channels."""

    def __init__(self, addresses: str) -> None:
        """`addresses`: "a:1,b:2". Raises ConfigError naming `conductor`."""
        self._all: list[AskedConductor] = []
        self._channels: list[grpc.aio.Channel] = []
        for address in split(addresses, "conductor"):
            channel = channels.connect(address)
            self._channels.append(channel)
            calls = control_calls(address, channel, SERVICE)
            self._all.append(AskedConductor(address, conductor_pb2_grpc.ConductorStub(channel), calls))
        self._first = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def order(self) -> list[AskedConductor]:
        """Whom to ask, one after another until one answers."""
        return self._all[self._first :] + self._all[: self._first]

    def answered(self, one: AskedConductor) -> None:
        """It comes first from now on."""
        self._first = self._all.index(one)

    async def close(self) -> None:
        """Close doors and channels."""
        await asyncio.gather(*(one.calls.close() for one in self._all))
        await asyncio.gather(*(channel.close(grace=None) for channel in self._channels))
