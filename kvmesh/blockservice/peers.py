"""Other node stores: how they are called, and which of their segments are open here.

Each address has one channel and at most one fast path. The least recently used peers are closed beyond `MAX_PEERS`,
idle ones after `IDLE_S`. A peer that failed is forgotten: the next user dials afresh and asks for descriptors again,
since another incarnation may answer there. A peer's segments are closed when its last user has left, as closing fails
what is under way.
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
from kvmesh.rpc.authorisation import ServerRole
from kvmesh.rpc.fastpath.caller import FastCaller, FoundPaths
from kvmesh.rpc.fastpath.client import Way
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.transfer.segment import machine_id, network_id

MAX_PEERS = 64
IDLE_S = 60.0
FIND_S = 2.0
SERVICE = pb.DESCRIPTOR.services_by_name["NodeStore"]

Life = tuple[str, int]  # store id, incarnation


# ── the fastest way to call a node ───────────────────────────────────────────────────────────────────


def node_calls(address: str, channel: grpc.aio.Channel, transports: Sequence[str]) -> FastCaller:
    """Returns the caller of the NodeStore whose gRPC is at `address`, HOST:PORT. It tries a Unix socket only when
    `transports` has shm: whoever forbids shm wants nodes on this host to be reached like distant ones."""

    async def find(caller: FastCaller) -> FoundPaths:
        told: pb.DoorsResponse = await caller.over_grpc("Doors", pb.DoorsRequest(), FIND_S)
        return FoundPaths(told.incarnation, ways(told, address, "shm" in transports), ticket=told.ticket)

    return FastCaller(channel, SERVICE, find)


def ways(told: pb.DoorsResponse, address: str, unix: bool) -> tuple[Way, ...]:
    """Returns the fast paths that a node at `address` has named, the best first."""
    found: list[Way] = []
    if unix and told.calls_path.startswith("@") and (told.machine, told.network) == this_machine():
        found.append(told.calls_path)
    if told.calls_port:
        host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        found.append((host, told.calls_port))
    return tuple(found)


@cache
def this_machine() -> tuple[str, str]:
    """Returns this process's machine id and network id: a node with the same ones is reached by Unix sockets."""
    return machine_id(), network_id()


# ── peers ────────────────────────────────────────────────────────────────────────────────────────────


class SegmentOpener(Protocol):
    """Opens peers' segments where bytes are to be read, and counts their users: at a front's ranks or at a client's own
    transfer engine."""

    def open(self, descriptor: bytes, /) -> str:
        """Adds a user of the segment and returns its name. Raises TransferError when `descriptor` is malformed."""
        ...

    def release(self, name: str, /) -> None:
        """Takes a user away; after the last one the segment is closed."""
        ...


@dataclass(eq=False)
class Peer:
    """Describes the node at one address. `segments` has the segment names (one for each rank) of the incarnations met
    there, each held open once for all users. `shown` has, by incarnation of the node, which state of our own segment it
    has been told."""

    address: str
    channel: grpc.aio.Channel
    calls: FastCaller
    users: int = 0
    idle_since: float = 0.0
    segments: dict[Life, tuple[str, ...]] = field(default_factory=dict)
    shown: dict[int, int] = field(default_factory=dict)
    forgotten: bool = False

    async def call(self, method: str, request: Message, timeout_s: float) -> Any:
        """Calls NodeStore in the fastest way there is. Raises KvmeshError."""
        return await self.calls.call(method, request, timeout_s)

    async def close(self) -> None:
        """Ends the fast path and the channel, within a bounded time."""
        await self.calls.close()
        await self.channel.close(None)


class PeerPool:
    """Owns all peers of one process. It belongs to the event loop; its owner must `close` it."""

    def __init__(self, segments: SegmentOpener, transports: Sequence[str]) -> None:
        """`transports` are those that this process may use; see `node_calls`."""
        self._segments = segments
        self._transports = transports
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[Peer]:
        """Yields the peer at this address, kept open while it is used."""
        peer = self._peers.get(address)
        new = peer is None
        if peer is None:
            channel = channels.connect(address, ServerRole.NODE)
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
        """Opens the segments of an incarnation (one for each rank) until the peer is forgotten, and releases those of
        an earlier one. Returns their names. Raises TransferError when a descriptor is malformed, or nothing reaches its
        segment from here."""
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
        """Forgets a peer that failed or has gone: it is closed as soon as nobody uses it."""
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
        peer.forgotten = True
        self._drop(peer)

    def tidy(self) -> None:
        """Forgets idle peers (a dead one's memory stays mapped until then), and the least recently used beyond
        MAX_PEERS."""
        idle = time.monotonic() - IDLE_S
        for peer in list(self._peers.values()):
            if peer.users == 0 and (peer.idle_since < idle or len(self._peers) > MAX_PEERS):
                self.forget(peer)

    def __len__(self) -> int:
        return len(self._peers)

    async def close(self) -> None:
        """Forgets all peers; those still in use are closed by their last user."""
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
