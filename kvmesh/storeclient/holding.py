"""Calls to the nodes that hold blocks: who really has them, and pins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvmesh.blockservice.peers import Peer, PeerPool
from kvmesh.errors import KvmeshError, Overloaded, Unavailable
from kvmesh.kvcache.size_classes import BYTES
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.storeclient.directory import Directory
from kvmesh.storeclient.reading.leased import REBUILD_S, REBUILDING
from kvmesh.storeclient.replicas import Hints, Holder, ReaderLocation, Replica
from kvmesh.storeclient.writing import Pin

T = TypeVar("T")

CALL_S = 2.0


@dataclass(frozen=True, slots=True)
class Place:
    """Names a node that has a block."""

    holder: Holder
    tier: Tier
    nbytes: int


class HolderQueries:
    """Asks the holders of blocks; it belongs to the event loop."""

    def __init__(self, peers: PeerPool, directory: Directory, hints: Hints, here: ReaderLocation) -> None:
        self._peers = peers
        self._hints = hints
        self._directory = directory
        self._here = here

    async def places(self, keys: Sequence[bytes], deadline: float) -> dict[bytes, list[Place]]:
        """Returns the nodes that say they have each key, the nearest first; nodes that do not answer are left out.
        Raises Unavailable when no node has a key and the master does not know all nodes yet."""
        found: dict[bytes, list[Place]] = {key: [] for key in keys}

        async def ask(peer: Peer, holder: Holder, some: list[bytes], left_s: float) -> None:
            answer = await peer.call("Exists", pb.ExistsRequest(keys=b"".join(some)), left_s)
            for key, tier, nbytes in zip(some, answer.tiers, answer.nbytes, strict=True):
                if tier:
                    place = Place(holder, Tier(tier), nbytes)
                    if place not in found[key]:  # a node may be asked again
                        found[key].append(place)

        await self._known(lambda: all(found.values()), keys, deadline, ask)
        for some in found.values():
            some.sort(key=lambda place: (self._here.distance(place.holder), place.tier, place.holder.store_id))
        return found

    async def pin(self, keys: Sequence[bytes], kind: Pin, ttl_ms: int, deadline: float) -> dict[bytes, int]:
        """Pins keys and returns how many nodes have done so. Raises Overloaded when one has too much pinned, and
        Unavailable as `places` does."""
        done: dict[bytes, set[str]] = {key: set() for key in keys}

        async def ask(peer: Peer, holder: Holder, some: list[bytes], left_s: float) -> None:
            request = pb.PinBlocksRequest(
                keys=b"".join(some), layout=BYTES, kind=pb.PinKind.ValueType(kind), ttl_ms=ttl_ms
            )
            answer = await peer.call("Pin", request, left_s)
            for key, did in zip(some, answer.done, strict=True):
                if did:
                    done[key].add(holder.store_id)

        for error in await self._known(lambda: all(done.values()), keys, deadline, ask):
            if isinstance(error, Overloaded):
                raise error
        return {key: len(nodes) for key, nodes in done.items()}

    async def _known(
        self,
        enough: Callable[[], bool],
        keys: Sequence[bytes],
        deadline: float,
        ask: Callable[[Peer, Holder, list[bytes], float], Awaitable[None]],
    ) -> list[KvmeshError]:
        """Calls `_everybody` again until it was `enough` or the master knows all nodes; returns the errors of the last
        time."""
        while True:
            errors, complete = await self._everybody(keys, deadline, ask)
            if complete or enough():
                return errors
            if time.monotonic() + REBUILD_S >= deadline:
                raise Unavailable(REBUILDING)
            await asyncio.sleep(REBUILD_S)

    async def _everybody(
        self,
        keys: Sequence[bytes],
        deadline: float,
        ask: Callable[[Peer, Holder, list[bytes], float], Awaitable[None]],
    ) -> tuple[list[KvmeshError], bool]:
        """Asks each holder about what it has according to the master, or to what was put or read just now, all side by
        side. Returns the errors, and whether the master knows all nodes."""
        keys = list(dict.fromkeys(keys))
        if not keys:
            return [], True
        left_s = max(deadline - time.monotonic(), 0.001)
        replicas: list[list[Replica]]
        replicas, complete = await self._directory.find(keys, left_s)
        lives: dict[tuple[str, int], Holder] = {}
        asked: dict[Holder, dict[bytes, None]] = {}  # two tiers of a node are one node to ask
        now = time.monotonic()
        for key, some in zip(keys, replicas, strict=True):
            for replica in (*some, *self._hints.of(key, now)):
                holder = lives.setdefault((replica.holder.store_id, replica.holder.incarnation), replica.holder)
                asked.setdefault(holder, {})[key] = None
        errors: list[KvmeshError] = []

        async def one(holder: Holder, some: list[bytes]) -> None:
            async with self._peers.use(holder.address) as peer:
                try:
                    await ask(peer, holder, some, min(CALL_S, max(deadline - time.monotonic(), 0.001)))
                except KvmeshError as error:
                    errors.append(error)

        await asyncio.gather(*(one(holder, list(some)) for holder, some in asked.items()))
        return errors, complete
