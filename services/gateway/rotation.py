"""Several conductors, each of which can place every request: which of them is asked first."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc.aio

from kvmesh.rpc import channels
from kvmesh.rpc.masters import split
from kvmesh.rpc.pb import conductor_pb2_grpc


@dataclass(frozen=True, slots=True)
class Asked:
    """One conductor."""

    address: str
    stub: conductor_pb2_grpc.ConductorAsyncStub


class Rotation:
    """Stays with the one that answered last: one that sees all requests places them better than two that each see half.
    Owns its channels."""

    def __init__(self, addresses: str) -> None:
        """`addresses`: "a:1,b:2". Raises ConfigError naming `conductor`."""
        self._all: list[Asked] = []
        self._channels: list[grpc.aio.Channel] = []
        for address in split(addresses, "conductor"):
            channel = channels.connect(address)
            self._channels.append(channel)
            self._all.append(Asked(address, conductor_pb2_grpc.ConductorStub(channel)))
        self._first = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def order(self) -> list[Asked]:
        """Whom to ask, one after another until one answers."""
        return self._all[self._first :] + self._all[: self._first]

    def answered(self, one: Asked) -> None:
        """It comes first from now on."""
        self._first = self._all.index(one)

    async def close(self) -> None:
        """Close the channels."""
        await asyncio.gather(*(channel.close(grace=None) for channel in self._channels))
