"""Other node stores: how they are called, and which of their segments are open here.

One channel and at most one fast path an address, the least recently used closed beyond `MAX_PEERS`, idle ones after
`IDLE_S`. A peer that failed is forgotten: the next user dials afresh and asks for descriptors again, since another life
may answer there. Its segments are closed when its last user has left: closing fails what is under way.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import grpc.aio
from google.protobuf.message import Message

from kvmesh.errors import KvmeshError, Overloaded, UnknownInstance
from kvmesh.rpc import channels
from kvmesh.rpc.fastpath.caller import FastCaller, FoundPaths
from kvmesh.rpc.fastpath.client import Way
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.transfer.segment import machine_id, network_id

MAX_PEERS = 64
IDLE_S = 60.0
FIND_S = 2.0
SERVICE = pb.DESCRIPTOR.services_by_name["NodeStore"]

Life = tuple[str, int]  # store id, incarnation


# ── the shortest way to a node's calls ───────────────────────────────────────────────────────────────


def node_calls(address: str, channel: grpc.aio.Channel, transports: Sequence[str]) -> FastCaller:
    """Calls of the NodeStore whose gRPC is at `address`, HOST:PORT. A Unix socket is tried when `transports` has shm:
    whoever forbids that wants to be as far away as it looks."""

    async def find(caller: FastCaller) -> FoundPaths:
        told: pb.DoorsResponse = await caller.over_grpc("Doors", pb.DoorsRequest(), FIND_S)
        return FoundPaths(told.incarnation, ways(told, address, "shm" in transports))

    return FastCaller(channel, SERVICE, find)


def ways(told: pb.DoorsResponse, address: str, unix: bool) -> tuple[Way, ...]:
    """The fast paths that a node at `address` has told of, the best first."""
    found: list[Way] = []
    if unix and told.calls_path.startswith("@") and (told.machine, told.network) == this_machine():
        found.append(told.calls_path)
    if told.calls_port:
        host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        found.append((host, told.calls_port))
    return tuple(found)


@cache
def this_machine() -> tuple[str, str]:
    """This process's machine and network: a node that tells the same ones is reached by Unix sockets."""
    return machine_id(), network_id()


# ── peers ────────────────────────────────────────────────────────────────────────────────────────────


class SegmentOpener(Protocol):
    """Opens peers' segments where bytes are to be read: at a front's ranks or at a client's own transfer engine. Counts
    their users."""

    def open(self, descriptor: bytes, /) -> str:
        """Returns the segment's name, which has one user more. Raises TransferError when this is no descriptor."""
        ...

    def release(self, name: str, /) -> None:
        """The segment has one user less; after the last one it is closed."""
        ...


@dataclass(eq=False)
class Peer:
    """One address. `segments`: names, one a rank, of the lives met there, each held open once for all users. `shown`:
    which state of our own segment the node at this address has been told, by its incarnation."""

    address: str
    channel: grpc.aio.Channel
    calls: FastCaller
    users: int = 0
    idle_since: float = 0.0
    segments: dict[Life, tuple[str, ...]] = field(default_factory=dict)
    shown: dict[int, int] = field(default_factory=dict)
    forgotten: bool = False

    async def call(self, method: str, request: Message, timeout_s: float) -> Any:
        """Calls NodeStore by the shortest way there is. Raises KvmeshError."""
        return await self.calls.call(method, request, timeout_s)

    async def close(self) -> None:
        """Ends the fast path and the channel. Bounded."""
        await self.calls.close()
        await self.channel.close(None)


class PeerPool:
    """Owns all peers of one process. On the event loop; `close` it."""

    def __init__(self, segments: SegmentOpener, transports: Sequence[str]) -> None:
        """`transports`: those that this process may use; see `node_calls`."""
        self._segments = segments
        self._transports = transports
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[Peer]:
        """The peer at this address, kept open while it is used."""
        peer = self._peers.get(address)
        new = peer is None
        if peer is None:
            channel = channels.connect(address)
            peer = self._peers[address] = Peer(address, channel, node_calls(address, channel, self._transports))
        self._peers.move_to_end(address)
        peer.users += 1
        try:
            if new:
                self.tidy()
            yield peer
        finally:
            peer.users -= 1
            peer.idle_since = time.monotonic()
            if peer.forgotten:
                self._drop(peer)

    def learn(self, peer: Peer, life: Life, descriptors: Sequence[bytes]) -> tuple[str, ...]:
        """Open a life's segments (one a rank) until the peer is forgotten; an earlier life's are let go. Returns their
        names. Raises TransferError when one is no descriptor, or nothing reaches it from here."""
        names: list[str] = []
        try:
            for descriptor in descriptors:
                names.append(self._segments.open(descriptor))
        except BaseException:
            self._release(names)
            raise
        for known in [k for k in peer.segments if k[0] == life[0]]:
            self._release(peer.segments.pop(known))
        peer.segments[life] = tuple(names)
        return tuple(names)

    def forget(self, peer: Peer) -> None:
        """The peer failed, or has gone: it is closed as soon as nobody uses it."""
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
        peer.forgotten = True
        self._drop(peer)

    def tidy(self) -> None:
        """Forget idle peers (a dead one's memory stays mapped until then), and the least recently used beyond
        MAX_PEERS."""
        idle = time.monotonic() - IDLE_S
        for peer in list(self._peers.values()):
            if peer.users == 0 and (peer.idle_since < idle or len(self._peers) > MAX_PEERS):
                self.forget(peer)

    def __len__(self) -> int:
        return len(self._peers)

    async def close(self) -> None:
        """Forget all of them; those still in use are closed by their last user."""
        for peer in list(self._peers.values()):
            self.forget(peer)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _drop(self, peer: Peer) -> None:
        if peer.users:
            return
        for names in peer.segments.values():
            self._release(names)
        peer.segments.clear()
        task = asyncio.get_running_loop().create_task(peer.close(), name="close peer")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            self._segments.release(name)


def worth_forgetting(error: KvmeshError) -> bool:
    """Whether the peer must be dialled afresh after this error."""
    return (error.retryable or isinstance(error, UnknownInstance)) and not isinstance(error, Overloaded)
