"""Ways to node stores, and which of their segments our transfer engine has open.

One channel and at most one fast path an address. A peer that failed is forgotten: the next user dials afresh and asks
for descriptors again, since another life may answer there. Its segments are closed when its last user has left: closing
fails what is under way.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from kvmesh.rpc import channels
from kvmesh.rpc.fastpath.caller import FastCaller, FoundPaths
from kvmesh.rpc.fastpath.client import Way
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.transfer import TransferEngine
from kvmesh.transfer.segment import machine_id, network_id

# Calls of a node's NodeStore, by the shortest way that leads to it.

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
    """To the fast paths that a node at `address` has told of, the best first."""
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


MAX_PEERS = 64
IDLE_S = 60.0


@dataclass(eq=False)
class Peer:
    """One address. `segments`: incarnation → the segment's name at our engine. `shown`: which state of our own segment
    the node at this address has been told, by its incarnation."""

    address: str
    channel: grpc.aio.Channel
    stub: pb_grpc.NodeStoreAsyncStub
    calls: FastCaller
    users: int = 0
    used: float = 0.0
    segments: dict[int, str] = field(default_factory=dict)
    shown: dict[int, int] = field(default_factory=dict)
    forgotten: bool = False

    async def call(self, method: str, request: Message, timeout_s: float) -> Any:
        """Of NodeStore, by the shortest way there is. Raises KvmeshError."""
        return await self.calls.call(method, request, timeout_s)

    async def close(self) -> None:
        """Bounded."""
        await self.calls.close()
        await self.channel.close(None)


class Peers:
    """The owner of all of them. On the event loop."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._names: dict[str, int] = {}  # segment → peers that use it: two addresses may lead to one node
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[Peer]:
        """The peer at this address, kept open while it is used."""
        peer = self._peers.get(address)
        if peer is None:
            channel = channels.connect(address)
            calls = node_calls(address, channel, self._engine.config.transports)
            peer = self._peers[address] = Peer(address, channel, pb_grpc.NodeStoreStub(channel), calls)
            self._tidy(peer)
        self._peers.move_to_end(address)
        peer.users += 1
        try:
            yield peer
        finally:
            peer.users -= 1
            peer.used = time.monotonic()
            if peer.forgotten:
                self._drop(peer)

    def learn(self, peer: Peer, incarnation: int, descriptor: bytes) -> str:
        """Open a life's segment; its name. TransferError: this is no descriptor, or nothing reaches it from here."""
        name = self._engine.open_segment(descriptor)
        if peer.segments.get(incarnation) != name:
            self._names[name] = self._names.get(name, 0) + 1
            peer.segments[incarnation] = name
        return name

    def forget(self, peer: Peer) -> None:
        """It failed, or has gone: closed as soon as nobody uses it."""
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
        peer.forgotten = True
        self._drop(peer)

    async def close(self) -> None:
        """All of them; those still in use are closed by their last user."""
        for peer in list(self._peers.values()):
            self.forget(peer)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._peers)

    def _tidy(self, but: Peer) -> None:
        """Forget idle peers, and the least recently used beyond MAX_PEERS."""
        idle = time.monotonic() - IDLE_S
        for peer in list(self._peers.values()):
            if peer is not but and peer.users == 0 and (peer.used < idle or len(self._peers) > MAX_PEERS):
                self.forget(peer)

    def _drop(self, peer: Peer) -> None:
        if peer.users:
            return
        for name in peer.segments.values():
            self._names[name] -= 1
            if not self._names[name]:
                del self._names[name]
                self._engine.close_segment(name)
        peer.segments.clear()
        task = asyncio.get_running_loop().create_task(peer.close(), name="close peer")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
