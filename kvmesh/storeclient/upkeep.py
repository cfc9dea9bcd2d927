"""What is done with blocks that are there: removed, pinned, copied, moved, brought near, counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import NoneType

from kvmesh.storeclient import forks
from kvmesh.storeclient.arguments import MAX_REPLICAS, MAX_TTL_MS, flag, instance, listed, milliseconds, whole
from kvmesh.storeclient.calls import left
from kvmesh.storeclient.choice import Replica
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.directory import Directory, Quota, Removed
from kvmesh.storeclient.hints import Hints
from kvmesh.storeclient.holding import Holding
from kvmesh.storeclient.moving import NO_BLOCK, Moved, Mover
from kvmesh.storeclient.own_keys import OwnKeys, Ref
from kvmesh.storeclient.prefetching import Policy, Prefetcher
from kvmesh.storeclient.writing import Pin


class Upkeep:
    """Part of StoreClient."""

    config: ClientConfig
    _directory: Directory
    _hints: Hints
    _holding: Holding
    _keys: OwnKeys
    _mover: Mover
    _prefetcher: Prefetcher
    _closed: bool

    async def remove(self, *refs: Ref, timeout_ms: int | None = None) -> Removed:
        """These blocks, everywhere; names among them are unbound. See `Removed` for who has heard of it."""
        deadline = self._deadline(timeout_ms)
        names = [ref for ref in refs if isinstance(ref, str)]
        keys = [key for key in await self._keys.resolved(refs, deadline) if key is not None]
        self._hints.forget(keys)
        done = Removed()
        if keys:
            done = await self._directory.remove(left(deadline), keys=list(dict.fromkeys(keys)))
            self._hints.forget(keys)
        # Only now: whoever has to say it again must still find what the names stood for.
        await self._keys.unbind_removed(names, deadline)
        return done

    async def remove_namespace(self, *, timeout_ms: int | None = None) -> Removed:
        """Every block of this client's namespace, KV blocks of the tenant of that name included."""
        self._hints.forget_tag(self._keys.tag)
        done = await self._directory.remove(left(self._deadline(timeout_ms)), prefix=self._keys.tag)
        self._hints.forget_tag(self._keys.tag)
        return done

    async def pin(self, *refs: Ref, ttl_ms: int = 0, timeout_ms: int | None = None) -> list[int]:
        """At every node that has them: softly for `ttl_ms` (they go last), or with 0 hard (they stay). How many nodes
        did, for each. Overloaded: a node has too much pinned already."""
        ttl_ms = whole("ttl_ms", ttl_ms, 0, MAX_TTL_MS)
        kind = Pin.SOFT if ttl_ms else Pin.HARD
        return await self._pin(refs, kind, ttl_ms, self._deadline(timeout_ms))

    async def unpin(self, *refs: Ref, timeout_ms: int | None = None) -> list[int]:
        return await self._pin(refs, Pin.NONE, 0, self._deadline(timeout_ms))

    async def _pin(self, refs: Sequence[Ref], kind: Pin, ttl_ms: int, deadline: float) -> list[int]:
        keys = await self._keys.resolved(refs, deadline)
        done = await self._holding.pin([key for key in keys if key is not None], kind, ttl_ms, deadline)
        return [done[key] if key is not None else 0 for key in keys]

    async def change_replica(
        self, refs: Sequence[Ref], replicas: int, *, hard: bool = False, timeout_ms: int | None = None
    ) -> list[int]:
        """How many nodes are to hold each block (0: as many as there happen to be); the master sees to it. `hard`:
        pinned hard at each. How many do now."""
        deadline = self._deadline(timeout_ms)
        replicas, hard = whole("replicas", replicas, 0, MAX_REPLICAS), flag("hard", hard)
        refs = listed("refs", refs)
        keys = await self._keys.resolved(refs, deadline)
        known = [key for key in keys if key is not None]
        live = await self._directory.change_replica(known, replicas, hard, left(deadline)) if known else []
        by_key = dict(zip(known, live, strict=True))
        return [by_key[key] if key is not None else 0 for key in keys]

    async def prefetch(
        self, refs: Sequence[Ref], policy: Policy = Policy.BEST_EFFORT, *, timeout_ms: int | None = None
    ) -> list[bool]:
        """Have the nearest pool node copy these blocks; which it has when this returns. BEST_EFFORT returns at once,
        WAIT when all is done that can be, DEADLINE after `timeout_ms` whatever is done. Unavailable: no pool node is
        near."""
        deadline = self._deadline(timeout_ms)
        instance("policy", policy, Policy)
        refs = listed("refs", refs)
        keys = await self._keys.resolved(refs, deadline)
        here = await self._prefetcher.prefetch([key for key in keys if key is not None], policy, deadline)
        return [key is not None and here[key] for key in keys]

    async def copy(self, refs: Sequence[Ref], *, to: str, timeout_ms: int | None = None) -> list[Moved]:
        """Have the node `to` pull a copy of each block; what it has already stays. The master's word (`change_replica`)
        stands: of more copies than it is to keep, one goes again. InvalidRequest: there is no such node."""
        deadline = self._deadline(timeout_ms)
        instance("to", to, str)
        refs = listed("refs", refs)
        keys = await self._keys.resolved(refs, deadline)
        done = await self._mover.copy([key for key in keys if key is not None], to, deadline)
        return [done[key] if key is not None else NO_BLOCK for key in keys]

    async def move(
        self, refs: Sequence[Ref], *, to: str, source: str | None = None, timeout_ms: int | None = None
    ) -> list[Moved]:
        """As `copy`; then the copy at `source` goes, in every tier (None: at the one other node that has it). A hard
        pin there comes along, a soft one does not. A copy that is being read all the time stays, and its `Moved` says
        so. There is no moment in which neither has it. InvalidRequest: there is no such node."""
        deadline = self._deadline(timeout_ms)
        instance("to", to, str)
        instance("source", source, str, NoneType)
        refs = listed("refs", refs)
        keys = await self._keys.resolved(refs, deadline)
        done = await self._mover.move([key for key in keys if key is not None], to, source, deadline)
        return [done[key] if key is not None else NO_BLOCK for key in keys]

    async def replicas(self, refs: Sequence[Ref], *, timeout_ms: int | None = None) -> list[list[Replica]]:
        """What the master knows of each block's holders; `locate_many` asks them."""
        deadline = self._deadline(timeout_ms)
        refs = listed("refs", refs)
        keys = await self._keys.resolved(refs, deadline)
        known = [key for key in keys if key is not None]
        found = dict(zip(known, (await self._directory.find(known, left(deadline)))[0], strict=True)) if known else {}
        return [found[key] if key is not None else [] for key in keys]

    async def quotas(self, *, timeout_ms: int | None = None) -> list[Quota]:
        """Of every namespace that has one, with what it uses now."""
        return await self._directory.quotas(left(self._deadline(timeout_ms)))

    async def set_quota(self, namespace: str, blocks: int, *, timeout_ms: int | None = None) -> None:
        """So many blocks in memory over all nodes, copies counted, for it and for the tenant of that salt; 0: no limit
        any more. Nodes hear of it with their next heartbeats. Overloaded: too many are set."""
        await self._directory.set_quota(namespace, blocks, left(self._deadline(timeout_ms)))

    def _deadline(self, timeout_ms: float | None) -> float:
        self._check_open()
        timeout_ms = self.config.timeout_ms if timeout_ms is None else milliseconds("timeout_ms", timeout_ms)
        return time.monotonic() + timeout_ms / 1000

    def _check_open(self) -> None:
        """Raises Unavailable when this client is closed, InvalidRequest when it is a parent process's."""
        if self._closed:
            raise forks.closed(self)
