"""Blocks brought near before they are wanted: the nearest pool node is asked to pull them."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Sequence

import grpc

from kvmesh.kvcache.client.choice import Here, Holder, Replica
from kvmesh.kvcache.client.directory import Directory
from kvmesh.kvcache.client.hints import Hints
from kvmesh.kvcache.client.peers import Peers
from kvmesh.kvcache.client.placement import Candidate
from kvmesh.rpc import status
from kvmesh.rpc.errors import KvmeshError, Unavailable
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import common_pb2

log = logging.getLogger(__name__)

PULL_BLOCKS = 512  # of one call
PULL_MS = 60_000  # at most
AT_ONCE = 4  # calls


class Policy(enum.Enum):
    """When a prefetch returns."""

    BEST_EFFORT = "best_effort"  # at once
    WAIT = "wait"  # when all is there that can be
    DEADLINE = "deadline"  # after its time, whatever is there by then; the rest goes on coming


class Prefetcher:
    """On the event loop; `close` it."""

    def __init__(self, peers: Peers, directory: Directory, hints: Hints, here: Here) -> None:
        self._peers = peers
        self._directory = directory
        self._hints = hints
        self._here = here
        self._tasks: set[asyncio.Task[None]] = set()

    async def prefetch(self, keys: Sequence[bytes], policy: Policy, deadline: float) -> dict[bytes, bool]:
        """Which keys the near node has when this returns. Unavailable: there is none."""
        keys = list(dict.fromkeys(keys))
        left_s = max(deadline - time.monotonic(), 0.001)
        near = self._near(await self._directory.pools(left_s))
        told, _ = await self._directory.find(keys, left_s) if keys else ([], True)
        now = time.monotonic()
        replicas = [[*some, *self._hints.of(key, now)] for key, some in zip(keys, told, strict=True)]
        had = {key: any(r.holder.store_id == near.store_id for r in rs) for key, rs in zip(keys, replicas, strict=True)}
        wanted = {key: rs for key, rs in zip(keys, replicas, strict=True) if rs and not had[key]}
        if not wanted:
            return had
        whole_s = PULL_MS / 1000 if policy is Policy.DEADLINE else left_s
        task = asyncio.get_running_loop().create_task(self._pull(near, wanted, had, whole_s), name="prefetch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if policy is not Policy.BEST_EFFORT:
            await asyncio.wait({task}, timeout=max(deadline - time.monotonic(), 0))
        return dict(had)

    def _near(self, pools: Sequence[Candidate]) -> Candidate:
        """The pool node of this machine, else one of this host's addresses; of several, that with most room."""

        def distance(one: Candidate) -> int:
            return self._here.distance(Holder(one.store_id, one.address, one.incarnation, one.node_id))

        near = [one for one in pools if distance(one) < 2 and not one.draining]
        if not near:
            raise Unavailable(f"no pool node on {self._here.node_id}: prefetch brings blocks to one on this machine")
        return min(near, key=lambda one: (distance(one), -one.free_bytes))

    async def _pull(
        self, near: Candidate, wanted: dict[bytes, list[Replica]], had: dict[bytes, bool], timeout_s: float
    ) -> None:
        keys = list(wanted)
        turns = asyncio.Semaphore(AT_ONCE)
        deadline = time.monotonic() + timeout_s

        async def some(part: list[bytes]) -> None:
            async with turns:
                try:
                    held = await self._ask(near, part, wanted, deadline)
                except KvmeshError as error:
                    log.info("prefetch of %d blocks to %s: %s", len(part), near.store_id, error.message)
                    return
            now = time.monotonic()
            for key, here in zip(part, held, strict=True):
                had[key] = bool(here)
                if here:  # the master will hear of it soon
                    nearer = Replica(Holder(near.store_id, near.address, near.incarnation, near.node_id))
                    self._hints.learn(key, [nearer, *wanted[key]], now)

        await asyncio.gather(*(some(keys[at : at + PULL_BLOCKS]) for at in range(0, len(keys), PULL_BLOCKS)))

    async def _ask(
        self, near: Candidate, part: list[bytes], wanted: dict[bytes, list[Replica]], deadline: float
    ) -> bytes:
        lives = {(r.holder.store_id, r.holder.incarnation): r.holder for key in part for r in wanted[key]}
        left_s = max(deadline - time.monotonic(), 0.001)
        request = pb.PullBlocksRequest(
            keys=b"".join(part),
            holders=[
                common_pb2.InstanceRef(instance_id=h.store_id, address=h.address, incarnation=h.incarnation)
                for h in lives.values()
            ],
            timeout_ms=max(1, min(int(left_s * 1000), PULL_MS)),
            background=True,
        )
        async with self._peers.use(near.address) as peer:
            try:
                return (await peer.stub.Pull(request, timeout=left_s + 1)).held
            except grpc.RpcError as error:
                raise status.from_rpc_error(error) from None

    async def close(self) -> None:
        """Nobody waits for what is under way; the node goes on by itself."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
