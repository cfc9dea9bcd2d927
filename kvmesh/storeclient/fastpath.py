"""Calls of a node's NodeStore, by the shortest way that leads to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import grpc.aio

from kvmesh.rpc.fastpath.caller import FastCaller, FoundPaths
from kvmesh.rpc.fastpath.client import Way
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.transfer.segment import machine_id, network_id

SERVICE = pb.DESCRIPTOR.services_by_name["NodeStore"]
FIND_S = 2.0


def node_calls(address: str, channel: grpc.aio.Channel, transports: Sequence[str]) -> FastCaller:
    """Of the node whose gRPC is at `address`, HOST:PORT. A Unix socket is tried when `transports` has shm: whoever
    forbids that wants to be as far away as it looks."""

    async def find(caller: FastCaller) -> FoundPaths:
        told: pb.DoorsResponse = await caller.over_grpc("Doors", pb.DoorsRequest(), FIND_S)
        return FoundPaths(told.incarnation, ways(told, address, "shm" in transports))

    return FastCaller(channel, SERVICE, find)


def ways(told: pb.DoorsResponse, address: str, unix: bool) -> tuple[Way, ...]:
    """To the doors that a node at `address` has told of, the best first."""
    found: list[Way] = []
    machine, network = _here()
    if unix and told.calls_path.startswith("@") and (told.machine, told.network) == (machine, network):
        found.append(told.calls_path)
    if told.calls_port:
        host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        found.append((host, told.calls_port))
    return tuple(found)


@cache
def _here() -> tuple[str, str]:
    return machine_id(), network_id()
