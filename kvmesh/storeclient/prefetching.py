"""Blocks brought near before they are wanted: the nearest pool node is asked to pull them."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Sequence

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.storeclient.choice import Holder, ReaderLocation, Replica
from kvmesh.storeclient.directory import Directory
from kvmesh.storeclient.hints import Hints
from kvmesh.storeclient.peers import Peers
from kvmesh.storeclient.placement import Candidate
from kvmesh.storeclient.pulling import AT_ONCE, PULL_MS, portions, pull

log = logging.getLogger(__name__)


class Policy(enum.Enum):
    """When a prefetch returns."""

    BEST_EFFORT = "best_effort"  # at once
    WAIT = "wait"  # when all is there that can be
    DEADLINE = "deadline"  # after its time, whatever is there by then; the rest goes on coming


class Prefetcher:
    """On the event loop; `close` it."""

    def __init__(self, peers: Peers, directory: Directory, hints: Hints, here: ReaderLocation) -> None:
        self._peers = peers
        self._directory = directory
        self._hints = hints
        self._here = here
        self._tasks: set[asyncio.Task[None]] = set()

    async def prefetch(self, keys: Sequence[bytes], policy: Policy, deadline: float) -> dict[bytes, bool]:
        """Which keys the near node has when this returns. Unavailable: there is none."""
        keys = list(dict.fromkeys(keys))
        left_s = max(deadline - time.monotonic(), 0.001)
        near = self._near(await self._directory.pools(left_s, lambda pools: bool(self._candidates(pools))))
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

        near = self._candidates(pools)
        if not near:
            raise Unavailable(f"no pool node on {self._here.node_id}: prefetch brings blocks to one on this machine")
        return min(near, key=lambda one: (self._distance(one), -one.free_bytes))

    def _candidates(self, pools: Sequence[Candidate]) -> list[Candidate]:
        return [one for one in pools if self._distance(one) < 2 and not one.draining]

    def _distance(self, one: Candidate) -> int:
        return self._here.distance(Holder(one.store_id, one.address, one.incarnation, one.node_id))

    async def _pull(
        self, near: Candidate, wanted: dict[bytes, list[Replica]], had: dict[bytes, bool], timeout_s: float
    ) -> None:
        turns = asyncio.Semaphore(AT_ONCE)
        deadline = time.monotonic() + timeout_s

        async def some(part: Sequence[bytes]) -> None:
            async with turns:
                try:
                    holders = (replica.holder for key in part for replica in wanted[key])
                    held = await pull(self._peers, near.address, part, holders, deadline)
                except KvmeshError as error:
                    log.info("prefetch of %d blocks to %s: %s", len(part), near.store_id, error.message)
                    return
            now = time.monotonic()
            for key, here in zip(part, held, strict=True):
                had[key] = bool(here)
                if here:  # the master will hear of it soon
                    nearer = Replica(Holder(near.store_id, near.address, near.incarnation, near.node_id))
                    self._hints.learn(key, [nearer, *wanted[key]], now)

        await asyncio.gather(*map(some, portions(list(wanted))))

    async def close(self) -> None:
        """Nobody waits for what is under way; the node goes on by itself."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
