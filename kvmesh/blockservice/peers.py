"""Channels to other node stores, and which of their segments our ranks have open already.

One channel an address, the least recently used closed beyond `MAX_PEERS`, idle ones after `IDLE_S`. A peer that failed
is forgotten: the next user dials afresh and asks for descriptors again, since another life may answer there.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from kvmesh.blockservice.peer_segments import PeerSegments
from kvmesh.rpc import channels
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc

MAX_PEERS = 64
IDLE_S = 60.0

Life = tuple[str, int]  # instance id, incarnation


@dataclass(eq=False)
class Peer:
    """One address. `segments`: of the lives met there, each held open once for all users."""

    address: str
    channel: grpc.aio.Channel
    users: int = 0
    idle_since: float = 0.0
    segments: dict[Life, tuple[str, ...]] = field(default_factory=dict)
    forgotten: bool = False

    @property
    def stub(self) -> pb_grpc.NodeStoreAsyncStub:
        return pb_grpc.NodeStoreStub(self.channel)


class Peers:
    """The owner of all of them. On the event loop."""

    def __init__(self, segments: PeerSegments) -> None:
        self._segments = segments
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[Peer]:
        """The peer at this address, kept open while it is used."""
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address, channels.connect(address))
        self._peers.move_to_end(address)
        peer.users += 1
        try:
            self._evict()
            yield peer
        finally:
            peer.users -= 1
            peer.idle_since = time.monotonic()
            if peer.forgotten:
                self._drop(peer)

    def learn(self, peer: Peer, life: Life, descriptors: Sequence[bytes]) -> tuple[str, ...]:
        """Open a life's segments (one a rank) at our ranks until the peer is forgotten; an earlier life's are let go.
        Returns their names. TransferError: one is no descriptor."""
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
        """It failed, or has gone: closed as soon as nobody uses it."""
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
        peer.forgotten = True
        if peer.users == 0:
            self._drop(peer)

    def tidy(self) -> None:
        """Forget peers that nobody has used for a while (a dead one's memory stays mapped until then)."""
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.users == 0 and now - peer.idle_since > IDLE_S:
                self.forget(peer)

    def __len__(self) -> int:
        return len(self._peers)

    async def close(self) -> None:
        """All of them; those still in use are closed by their last user."""
        for peer in list(self._peers.values()):
            self.forget(peer)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _evict(self) -> None:
        for peer in list(self._peers.values()):
            if len(self._peers) <= MAX_PEERS:
                return
            if peer.users == 0:
                self.forget(peer)

    def _drop(self, peer: Peer) -> None:
        if peer.users:
            return
        for names in peer.segments.values():
            self._release(names)
        peer.segments.clear()
        task = asyncio.get_running_loop().create_task(peer.channel.close(None), name="close channel")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            self._segments.release(name)
