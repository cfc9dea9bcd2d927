"""Copies that others order: this node pulls blocks into its own memory and seals them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmesh.blockservice.partitions import Partition, Partitions, holder
from kvmesh.blockservice.peers import PeerPool
from kvmesh.blockservice.pulls import Pulls
from kvmesh.blockservice.removal_applier import RemovalApplier
from kvmesh.blockservice.removals import Watch
from kvmesh.blockservice.tiers.tiering import Tiering
from kvmesh.errors import InvalidRequest, KvmeshError, Overloaded
from kvmesh.kvcache.size_classes import BYTES, size_class
from kvmesh.kvcache.sources import Pulled, PullJob, PullRange
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.transfer import TrafficClass

log = logging.getLogger(__name__)

CALL_S = 1.0  # a holder that has not answered by then what it has is passed over
ROOM_SHARE = 0.5  # the part of its caller's time that a copy waits at most for the tier below to take blocks
NS = 1_000_000_000


@dataclass(frozen=True)
class CopyRequest:
    """What is to be copied. `layout` "" takes blocks in their holders' layouts, if these fit here; `shard_bytes` has no
    meaning then, nor for layout "bytes". With `pins`, a block that its holder has pinned hard is pinned hard here, or
    not sealed; that needs layout "" or "bytes"."""

    keys: tuple[bytes, ...]
    ranges: tuple[PullRange, ...]
    layout: str
    shard_bytes: int
    timeout_ms: int
    traffic_class: int = TrafficClass.BACKGROUND
    pins: bool = False


@dataclass
class _Group:
    """Gathers blocks that go to one partition."""

    layout: str
    shard_bytes: int
    keys: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    pinned: set[bytes] = field(default_factory=set)


class Copies:
    """Makes all such copies of one process. `freed` is called when memory may have become free."""

    def __init__(
        self,
        partitions: Partitions,
        pulls: Pulls,
        peers: PeerPool,
        removals: RemovalApplier,
        tiering: Tiering | None,
        freed: Callable[[], None],
    ) -> None:
        self._partitions = partitions
        self._pulls = pulls
        self._peers = peers
        self._removals = removals
        self._tiering = tiering
        self._freed = freed
        self._tickets = itertools.count(-1, -1)  # brains count upwards

    async def pull(self, wish: CopyRequest) -> bytes:
        """Copies blocks and returns one byte for each key: 1 if it is held here now. A block that could not be had is
        simply not held; a block that is removed meanwhile is not sealed. Raises InvalidRequest, or Overloaded when
        nothing of it fits here."""
        deadline_ns = time.monotonic_ns() + wish.timeout_ms * 1_000_000
        watch = self._removals.watch()
        try:
            if wish.layout not in ("", BYTES):  # else the holders know how long each block is
                group = _Group(wish.layout, wish.shard_bytes, list(wish.keys))
                await self._fetch(group, wish, watch, deadline_ns)
            else:
                groups = await self._found(wish, deadline_ns)
                ends = await asyncio.gather(
                    *(self._fetch(group, wish, watch, deadline_ns) for group in groups), return_exceptions=True
                )
                for group, end in zip(groups, ends, strict=True):
                    if isinstance(end, InvalidRequest):  # blocks of another model do not fit here
                        log.info("not copied, layout %r: %s", group.layout, end)
                    elif isinstance(end, BaseException):
                        raise end
        finally:
            self._removals.unwatch(watch)
            self._partitions.settle()
            self._freed()
        return bytes(holder(self._partitions, wish.layout, key) is not None for key in wish.keys)

    async def _found(self, wish: CopyRequest, deadline_ns: int) -> list[_Group]:
        """Asks the holders, in order, for the layouts and sizes of the blocks, and groups the blocks by them."""
        groups: dict[tuple[str, int], _Group] = {}
        open_ = [key for key in wish.keys if holder(self._partitions, wish.layout, key) is None]
        for source in wish.ranges:
            left_s = (deadline_ns - time.monotonic_ns()) / NS
            if not open_ or left_s <= 0:
                break
            try:
                async with self._peers.use(source.address) as peer:
                    request = pb.ExistsRequest(keys=b"".join(open_), layout=wish.layout, want_pinned=wish.pins)
                    answer = await peer.call("Exists", request, min(left_s, CALL_S))
                rows = list(zip(open_, answer.tiers, answer.nbytes, answer.layout, strict=True))
                hard = {key for key, pinned in zip(open_, answer.pinned, strict=False) if pinned}
                told = [(key, answer.layouts[at], size) for key, tier, size, at in rows if tier and size]
            except (KvmeshError, ValueError, IndexError) as error:
                log.info("asking %s what it has: %s", source.instance_id, error)
                continue
            for key, layout, size in told:
                shard = size_class(size) if layout == BYTES else size
                group = groups.setdefault((layout, shard), _Group(layout, shard))
                group.keys.append(key)
                if layout == BYTES:
                    group.sizes.append(size)
                if key in hard:
                    group.pinned.add(key)
            known = {key for key, _, _ in told}
            open_ = [key for key in open_ if key not in known]
        return list(groups.values())

    async def _fetch(self, group: _Group, wish: CopyRequest, watch: Watch, deadline_ns: int) -> None:
        """Copies what is missing and seals it. Raises InvalidRequest or Overloaded."""
        partition = await self._room(group, deadline_ns)
        keys = [key for key in group.keys if not watch.gone(key)]
        sizes = dict(zip(group.keys, group.sizes, strict=False))
        begun = {
            key: extent for key, extent in zip(keys, partition.store.begin(keys), strict=True) if extent is not None
        }
        timeout_ms = (deadline_ns - time.monotonic_ns()) // 1_000_000
        if not begun or timeout_ms < 1:
            for key in begun:
                partition.store.abandon(key)
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        at = {key: i for i, key in enumerate(group.keys)}
        job = PullJob(
            next(self._tickets),
            tuple(at[key] for key in begun),
            tuple(begun),
            tuple(begun.values()),
            tuple(PullRange(r.instance_id, r.address, r.incarnation, 0, len(group.keys), r.tier) for r in wish.ranges),
            timeout_ms,
            traffic_class=wish.traffic_class,
            sizes=tuple(sizes[key] for key in begun) if sizes else (),
        )

        def pulled(said: Pulled) -> None:
            arrived = set(said.arrived)
            for i, key in enumerate(job.keys):
                if i in arrived and not watch.gone(key) and self._may_seal(group, partition, key):
                    partition.store.seal(key, sizes.get(key))
                    if key in group.pinned:
                        partition.store.pin_hard([key])
                else:
                    partition.store.abandon(key)
            if not done.done():
                done.set_result(None)

        self._pulls.start(job, partition, pulled)
        await done

    def _may_seal(self, group: _Group, partition: Partition, key: bytes) -> bool:
        """Whether the block may be sealed: not so if it must be pinned and too much is pinned here already."""
        try:
            if key in group.pinned:
                self._partitions.may_pin(1, partition.shard_bytes)
        except Overloaded as error:
            log.info("not copied, as it is pinned where it is: %s", error.message)
            return False
        return True

    async def _room(self, group: _Group, deadline_ns: int) -> Partition:
        def room() -> Partition:
            missing = sum(holder(self._partitions, group.layout, key) is None for key in group.keys)
            return self._partitions.room(group.layout, group.shard_bytes, missing)

        partition = room()
        if self._tiering is not None:
            wait_s = ROOM_SHARE * (deadline_ns - time.monotonic_ns()) / NS
            await self._tiering.room(partition, len(group.keys), wait_s)
            partition = room()  # again: the first one may have been given up meanwhile
            self._tiering.follow(partition)
        return partition
