"""Copies that nodes make for this client: to a node that the caller names, or to a near one before they are wanted.

The receiver of a copy pulls it. A move makes a copy, and then removes the old one. In between the new copy is leased,
and the old holder spares a block that is leased there: of two clients that move a block past one another one is told so
and tries again, and a master that removes copies leaves the new one alone. So at every moment some node has the block.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.message import Message

from kvmesh.blockservice.object_family import family_of
from kvmesh.blockservice.peers import PeerPool
from kvmesh.clock import lease_clock
from kvmesh.errors import DeadlinePassed, InvalidRequest, KvmeshError, Unavailable
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import common_pb2
from kvmesh.storeclient.directory import Directory
from kvmesh.storeclient.holding import HolderQueries, Place
from kvmesh.storeclient.placement import PoolCandidate
from kvmesh.storeclient.replicas import Hints, Holder, ReaderLocation, Replica

log = logging.getLogger(__name__)

PULL_BLOCKS = 512  # blocks in one call
PULL_MS = 60_000  # the longest time of one call
HOLDERS = 64  # named in one call
AT_ONCE = 4  # calls of one operation that run at once
# The new copy is leased so long: also for a moment after the old one has gone, as a master that has just been told of
# the old one may be about to trim the new one.
GUARD_MS = 3_000
CALL_S = 2.0  # a node that has not answered by then has not done it
AGAIN_S = (0.02, 0.5)  # the wait before a leased block is tried again: from the first, doubling, to the second
PINNED, LEASED = 1, 2  # why a node spared a block


def portions(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yields as many keys as one call may carry."""
    return (keys[at : at + PULL_BLOCKS] for at in range(0, len(keys), PULL_BLOCKS))


async def pull(
    peers: PeerPool, address: str, keys: Sequence[bytes], holders: Iterable[Holder], deadline: float
) -> bytes:
    """Lets the node at `address` pull blocks. Returns one byte for each key: 1 if it is in that node's memory now. It
    takes until `deadline` (monotonic s) at most. Raises KvmeshError when the node does not answer, or refuses."""
    lives = {(holder.store_id, holder.incarnation): holder for holder in holders}
    left_s = max(deadline - time.monotonic(), 0.001)
    request = pb.PullBlocksRequest(
        keys=b"".join(keys),
        holders=[
            common_pb2.InstanceRef(instance_id=one.store_id, address=one.address, incarnation=one.incarnation)
            for one in list(lives.values())[:HOLDERS]
        ],
        timeout_ms=max(1, min(int(left_s * 1000), PULL_MS)),
        background=True,
    )
    async with peers.use(address) as peer:
        held: bytes = (await peer.calls.over_grpc("Pull", request, left_s + 1)).held
        return held


# ── copies and moves ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Moved:
    """Tells what became of one block. `held` says that the receiver has it now. `source` is the node whose copy has
    been removed; "" if none has. `pinned` says that its hard pin came along. `cause` says why not all that was asked
    for was done; "" if it was."""

    key: bytes
    held: bool = False
    source: str = ""
    pinned: bool = False
    cause: str = ""


NO_BLOCK = Moved(b"", cause="no block has that name")


@dataclass(slots=True)
class _Work:
    """Keeps one call of copy or move. `source` is as the caller named it, `places` are the nodes that said they have
    each key, and `done` is what is known of each key by now."""

    to: Holder
    deadline: float
    moving: bool = False
    source: str | None = None
    places: dict[bytes, list[Place]] = field(default_factory=dict)
    done: dict[bytes, Moved] = field(default_factory=dict)

    def note(self, key: bytes, **changes: object) -> None:
        self.done[key] = replace(self.done[key], **changes)  # type: ignore[arg-type]

    def others(self, key: bytes) -> list[Holder]:
        return [place.holder for place in self.places[key] if place.holder.store_id != self.to.store_id]

    def leaving(self, key: bytes) -> list[Holder]:
        """Returns the holders whose copy may be meant to be removed."""
        return [one for one in self.others(key) if self.source in (None, one.store_id)]

    def here(self, key: bytes) -> bool:
        return len(self.others(key)) < len(self.places[key])

    def unclear(self, key: bytes) -> str:
        """Returns why nothing can be done with the block, or ""."""
        if not self.places[key]:
            return "no node has it"
        leaving = self.leaving(key)
        if self.moving and len(leaving) > 1:
            names = ", ".join(sorted(one.store_id for one in leaving))
            return f"{names} have it: name the one whose copy is to go"
        if self.moving and not leaving and not self.here(key):
            return f"{self.source} does not have it"
        return ""


@dataclass(slots=True)
class _Guard:
    """Has leases of `keys` at the receiver, until `until` (lease clock)."""

    keys: list[bytes]
    leases: list[int]
    until: float


class Mover:
    """Copies and moves blocks; it belongs to the event loop. `rng` draws how long calls that are in each other's way
    wait."""

    def __init__(
        self, peers: PeerPool, directory: Directory, holding: HolderQueries, hints: Hints, rng: random.Random
    ) -> None:
        self._peers = peers
        self._directory = directory
        self._holding = holding
        self._hints = hints
        self._rng = rng

    async def copy(self, keys: Sequence[bytes], to: str, deadline: float) -> dict[bytes, Moved]:
        """Copies blocks and returns what became of each. Raises InvalidRequest when there is no such node."""
        work = _Work(await self._node(to, deadline), deadline)
        await self._copy(work, dict.fromkeys(keys))
        return work.done

    async def move(self, keys: Sequence[bytes], to: str, source: str | None, deadline: float) -> dict[bytes, Moved]:
        """Moves blocks as `copy` copies them. A copy that is in use when it is to be removed is tried again until
        `deadline`."""
        if source == to:
            raise InvalidRequest.of("source", source, "is the node to which the blocks are to be moved")
        work = _Work(await self._node(to, deadline), deadline, True, source)
        await self._copy(work, dict.fromkeys(keys))
        todo, wait = list(work.done), AGAIN_S[0]
        while todo := await self._all_handed_over(work, todo):
            if time.monotonic() + wait > deadline:
                break
            await asyncio.sleep(wait * self._rng.uniform(0.5, 1))
            wait = min(2 * wait, AGAIN_S[1])
            try:
                await self._copy(work, todo)  # whoever moved them the other way may have removed the new copy
            except KvmeshError:
                break  # what has been done so far is known
        return work.done

    async def _node(self, name: str, deadline: float) -> Holder:
        members = await self._directory.members(name, max(deadline - time.monotonic(), 0.001))
        if (found := members.get(name)) is None:
            raise InvalidRequest.of("to", name, f"no such node; there are {', '.join(sorted(members)) or 'none'}")
        return Holder(name, found.instance.address, found.instance.incarnation, found.node_id)

    # ── copies ───────────────────────────────────────────────────────────────────────────────────────

    async def _copy(self, work: _Work, keys: Iterable[bytes]) -> None:
        """Pulls the blocks that are missing. It does not raise for a single block."""
        keys = list(keys)
        work.places |= await self._holding.places(keys, work.deadline)
        wanted = []
        for key in keys:
            why, here = work.unclear(key), work.here(key)
            work.done[key] = replace(work.done.get(key, Moved(key)), held=here, cause=why)
            if not (why or here):
                wanted.append(key)
        turns = asyncio.Semaphore(AT_ONCE)

        async def some(part: Sequence[bytes]) -> None:
            holders = [holder for key in part for holder in work.others(key)]
            why = "it could not be read in time, was removed meanwhile, or does not fit there"
            held = bytes(len(part))
            async with turns:
                try:
                    held = await pull(self._peers, work.to.address, part, holders, work.deadline)
                except KvmeshError as error:
                    why = error.message
            now = time.monotonic()
            for key, here in zip(part, held, strict=True):
                work.note(key, held=bool(here), cause="" if here else f"{work.to.store_id} has not taken it: {why}")
                if here:  # the master will be told soon
                    self._hints.learn(key, [Replica(work.to), *map(Replica, work.others(key))], now)

        await asyncio.gather(*map(some, portions(wanted)))

    # ── the end of the old copy ──────────────────────────────────────────────────────────────────────

    async def _all_handed_over(self, work: _Work, keys: Iterable[bytes]) -> list[bytes]:
        """Removes the old copies of blocks that the receiver has. Returns the blocks that must be tried again."""
        by_source: dict[Holder, list[bytes]] = {}
        for key in keys:
            if work.done[key].held and not work.done[key].cause:
                for old in work.leaving(key):
                    by_source.setdefault(old, []).append(key)
        parts = [(old, part) for old, some in by_source.items() for part in portions(some)]
        ends = await asyncio.gather(*(self._handed_over(work, old, part) for old, part in parts))
        return [key for some in ends for key in some]

    async def _handed_over(self, work: _Work, old: Holder, keys: Sequence[bytes]) -> list[bytes]:
        """Lets `old` remove what the receiver has under a lease. Returns the blocks that were in use there, or have
        left the receiver meanwhile."""
        again: list[bytes] = []
        try:
            guard = await self._guard(work, keys)
            left = [key for key in keys if key not in set(guard.keys)]
            for key in left:
                work.note(key, held=False, cause=f"{work.to.store_id} has let go of it again")
            spared = await self._let_go(work, old, guard.keys, guard.until, pinned=True)
            if hard := [key for key, why in spared.items() if why == PINNED]:
                spared |= await self._let_go(work, old, await self._pin(work, hard), guard.until, pinned=False)
            again = left + [key for key, why in spared.items() if why == LEASED]
            if guard.leases and len(again) > len(left):  # whoever moves them the other way must find them free
                await self._guard(work, [key for key in keys if work.done[key].source])
                request = pb.ReleaseBlocksRequest(lease_id=guard.leases[0], also=guard.leases[1:])
                await self._ask(work.to, "ReleaseLease", request, work.deadline)
        except KvmeshError as error:
            for key in keys:
                if not work.done[key].source:
                    work.note(key, cause=f"the copy at {old.store_id} stays: {error.message}")
        return again

    async def _guard(self, work: _Work, keys: Sequence[bytes]) -> _Guard:
        """Leases the blocks that the receiver has; the leases are left to expire. Raises KvmeshError."""
        guard = _Guard([], [], lease_clock() + GUARD_MS / 1000)
        if not keys:
            return guard
        told = await self._ask(work.to, "Exists", pb.ExistsRequest(keys=b"".join(keys)), work.deadline)
        by_layout: dict[str, list[bytes]] = {}
        masks = dict(zip(keys, told.groups, strict=False))  # of a model of several cache groups
        for key, tier, at in zip(keys, told.tiers, told.layout, strict=True):
            if tier:
                by_layout.setdefault(told.layouts[at], []).append(key)
        for layout, some in by_layout.items():
            groups = bytes(masks[key] for key in some) if family_of(layout) is not None else b""
            request = pb.LeaseRequest(
                reader="move",
                holder_incarnation=work.to.incarnation,
                keys=b"".join(some),
                lease_ms=GUARD_MS,
                layout=layout,
                groups=groups,
            )
            asked = lease_clock()
            answer = await self._ask(work.to, "Lease", request, work.deadline)
            if answer.lease_id and (not groups or answer.held_groups == groups):
                guard.keys.extend(key for key, here in zip(some, answer.held, strict=True) if here)
                guard.leases.append(answer.lease_id)
                guard.until = min(guard.until, asked + answer.lease_ms * 0.0009)
        return guard

    async def _pin(self, work: _Work, keys: Sequence[bytes]) -> list[bytes]:
        """Pins blocks hard at the receiver, and returns those that are. Raises KvmeshError."""
        request = pb.PinBlocksRequest(keys=b"".join(keys), kind=pb.PIN_KIND_HARD)
        answer = await self._ask(work.to, "Pin", request, work.deadline)
        pinned = [key for key, done in zip(keys, answer.done, strict=True) if done]
        for key in pinned:
            work.note(key, pinned=True)
        return pinned

    async def _let_go(
        self, work: _Work, old: Holder, keys: Sequence[bytes], until: float, *, pinned: bool
    ) -> dict[bytes, int]:
        """Lets `old` remove blocks. Returns why it has not removed some of them. `until` is when the guard ends;
        `pinned` keeps those that are pinned hard there. Raises KvmeshError."""
        if not keys:
            return {}
        request = pb.RemoveBlocksRequest(keys=b"".join(keys), spare_leased=True, spare_pinned=pinned)
        left_s = until - lease_clock()
        answer = await self._ask(old, "Remove", request, min(time.monotonic() + left_s, work.deadline))
        spared = dict(zip(keys, answer.spared, strict=True))
        for key, why in spared.items():
            if not why:
                work.note(key, source=old.store_id, cause="")
                self._hints.forget_holder(key, {old.store_id})
            else:
                in_use = "it is in use there" if why == LEASED else "it could not be pinned at its new place"
                work.note(key, cause=f"the copy at {old.store_id} stays: {in_use}")
        return {key: why for key, why in spared.items() if why}

    async def _ask(self, node: Holder, method: str, request: Message, deadline: float) -> Any:
        """Calls one node. Raises KvmeshError."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlinePassed("there is no time left for it")
        async with self._peers.use(node.address) as peer:
            return await peer.call(method, request, min(CALL_S, left_s))


# ── prefetches ───────────────────────────────────────────────────────────────────────────────────────


class Policy(enum.Enum):
    """Decides when a prefetch returns."""

    BEST_EFFORT = "best_effort"  # at once
    WAIT = "wait"  # when all is there that can be
    DEADLINE = "deadline"  # after its time, whatever is there by then; the rest is still copied


class Prefetcher:
    """Runs prefetches; it belongs to the event loop, and its owner must `close` it."""

    def __init__(self, peers: PeerPool, directory: Directory, hints: Hints, here: ReaderLocation) -> None:
        self._peers = peers
        self._directory = directory
        self._hints = hints
        self._here = here
        self._tasks: set[asyncio.Task[None]] = set()

    async def prefetch(self, keys: Sequence[bytes], policy: Policy, deadline: float) -> dict[bytes, bool]:
        """Returns which keys the near node has when this returns. Raises Unavailable when there is no near node."""
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

    def _near(self, pools: Sequence[PoolCandidate]) -> PoolCandidate:
        """Returns the pool node of this machine, else one at one of this host's addresses; of several, that with most
        room."""

        near = self._candidates(pools)
        if not near:
            raise Unavailable(f"no pool node on {self._here.node_id}: prefetch brings blocks to one on this machine")
        return min(near, key=lambda one: (self._distance(one), -one.free_bytes))

    def _candidates(self, pools: Sequence[PoolCandidate]) -> list[PoolCandidate]:
        return [one for one in pools if self._distance(one) < 2 and not one.draining]

    def _distance(self, one: PoolCandidate) -> int:
        return self._here.distance(Holder(one.store_id, one.address, one.incarnation, one.node_id))

    async def _pull(
        self, near: PoolCandidate, wanted: dict[bytes, list[Replica]], had: dict[bytes, bool], timeout_s: float
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
                if here:  # the master will be told soon
                    nearer = Replica(Holder(near.store_id, near.address, near.incarnation, near.node_id))
                    self._hints.learn(key, [nearer, *wanted[key]], now)

        await asyncio.gather(*map(some, portions(list(wanted))))

    async def close(self) -> None:
        """Stops waiting for copies under way; the node goes on by itself."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
