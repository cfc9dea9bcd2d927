"""Copies that others order: this node pulls blocks into its own memory and seals them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.blockservice.object_family import GroupPlace, ObjectFamily, family_of
from kvmesh.blockservice.partitions import Partition, Partitions, holder
from kvmesh.blockservice.peers import PeerPool
from kvmesh.blockservice.pulls import Pulls
from kvmesh.blockservice.removal_applier import RemovalApplier
from kvmesh.blockservice.removals import Watch
from kvmesh.blockservice.tiers.tiering import Tiering
from kvmesh.errors import InvalidRequest, KvmeshError, Overloaded
from kvmesh.kvcache.cache_groups import GroupPages
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
    not sealed; that needs layout "" or "bytes".

    Of a model of several cache groups `layout` is "" or the text of its family, and `groups` has one mask a key: which
    objects of it; b"": all that there are."""

    keys: tuple[bytes, ...]
    ranges: tuple[PullRange, ...]
    layout: str
    shard_bytes: int
    timeout_ms: int
    traffic_class: int = TrafficClass.BACKGROUND
    pins: bool = False
    groups: bytes = b""


@dataclass(frozen=True)
class CopiesHeld:
    """What is here after a copy: `held` has one byte for each key, 1 if all that was to be copied of it is sealed here;
    `groups` one mask, if one of the keys belongs to a model of several cache groups."""

    held: bytes
    groups: bytes = b""


@dataclass
class _Objects:
    """Gathers objects of one family: which are wanted of each key."""

    family: ObjectFamily
    masks: dict[bytes, int] = field(default_factory=dict)
    pinned: set[bytes] = field(default_factory=set)


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

    async def pull(self, wish: CopyRequest) -> CopiesHeld:
        """Copies blocks and returns what is here now. A block that could not be had is simply not held; a block that is
        removed meanwhile is not sealed. Raises InvalidRequest, or Overloaded when nothing of it fits here."""
        deadline_ns = time.monotonic_ns() + wish.timeout_ms * 1_000_000
        watch = self._removals.watch()
        named = family_of(wish.layout)
        groups: list[_Group | _Objects] = []
        try:
            if named is not None:
                every = (1 << len(named.groups)) - 1
                masks = wish.groups or bytes([every]) * len(wish.keys)
                groups = [_Objects(named, {key: mask & every for key, mask in zip(wish.keys, masks, strict=True)})]
                await self._fetch_objects(groups[0], wish, watch, deadline_ns)  # type: ignore[arg-type]
            elif wish.layout not in ("", BYTES):  # else the holders know how long each block is
                await self._fetch(_Group(wish.layout, wish.shard_bytes, list(wish.keys)), wish, watch, deadline_ns)
            else:
                groups = await self._found(wish, deadline_ns)
                ends = await asyncio.gather(
                    *(
                        self._fetch(group, wish, watch, deadline_ns)
                        if isinstance(group, _Group)
                        else self._fetch_objects(group, wish, watch, deadline_ns)
                        for group in groups
                    ),
                    return_exceptions=True,
                )
                for group, end in zip(groups, ends, strict=True):
                    layout = group.layout if isinstance(group, _Group) else group.family.text
                    if isinstance(end, InvalidRequest):  # blocks of another model do not fit here
                        log.info("not copied, layout %r: %s", layout, end)
                    elif isinstance(end, BaseException):
                        raise end
        finally:
            self._removals.unwatch(watch)
            self._partitions.settle()
            self._freed()
        return self._copied(wish, {g.family.text: g for g in groups if isinstance(g, _Objects)})

    def _copied(self, wish: CopyRequest, objects: dict[str, _Objects]) -> CopiesHeld:
        held, masks, grouped = bytearray(), bytearray(), bool(objects)
        for key in wish.keys:
            wanted = next((each for each in objects.values() if key in each.masks), None)
            found = holder(self._partitions, wish.layout, key)
            if wanted is None and (found is None or not found.family):
                held.append(found is not None)
                masks.append(found is not None)
                continue
            grouped = True
            family = wanted.family.text if wanted is not None else found.family if found is not None else ""
            masks.append(self._mask(family, key))
            held.append(bool(masks[-1]) and not (wanted is not None and wanted.masks[key] & ~masks[-1]))
        return CopiesHeld(bytes(held), bytes(masks) if grouped else b"")

    def _mask(self, family: str, key: bytes) -> int:
        """Returns which objects of a key are sealed here."""
        return sum(1 << part.group for part in self._partitions.family(family) if part.store.holds(key))

    def _lacks(self, wish: CopyRequest, key: bytes, mask: int) -> bool:
        """Whether something of a block may be missing here; `mask` says which objects are wanted, 0 all."""
        found = holder(self._partitions, wish.layout, key)
        if found is None or not found.family:
            return found is None
        family = family_of(found.family)
        wanted = mask or ((1 << len(family.groups)) - 1 if family is not None else 1)
        return bool(wanted & ~self._mask(found.family, key))

    async def _found(self, wish: CopyRequest, deadline_ns: int) -> list[_Group | _Objects]:
        """Asks the holders, in order, for the layouts and sizes of the blocks, and groups the blocks by them."""
        groups: dict[tuple[str, int], _Group] = {}
        objects: dict[str, _Objects] = {}
        asked = dict(zip(wish.keys, wish.groups, strict=False))
        open_ = [key for key in wish.keys if self._lacks(wish, key, asked.get(key, 0))]
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
                masks = dict(zip(open_, answer.groups, strict=False))
            except (KvmeshError, ValueError, IndexError) as error:
                log.info("asking %s what it has: %s", source.instance_id, error)
                continue
            for key, layout, size in told:
                if (family := family_of(layout)) is not None:
                    each = objects.setdefault(layout, _Objects(family))
                    each.masks[key] = masks.get(key, 0) & asked.get(key, 0xFF)
                    if key in hard:
                        each.pinned.add(key)
                    continue
                shard = size_class(size) if layout == BYTES else size
                group = groups.setdefault((layout, shard), _Group(layout, shard))
                group.keys.append(key)
                if layout == BYTES:
                    group.sizes.append(size)
                if key in hard:
                    group.pinned.add(key)
            known = {key for key, _, _ in told}
            open_ = [key for key in open_ if key not in known]
        return [*groups.values(), *objects.values()]

    async def _fetch(self, group: _Group, wish: CopyRequest, watch: Watch, deadline_ns: int) -> None:
        """Copies what is missing and seals it. Raises InvalidRequest or Overloaded."""
        partition = await self._room(group.layout, group.shard_bytes, group.keys, deadline_ns)
        keys = [key for key in group.keys if not watch.gone(key)]
        sizes = dict(zip(group.keys, group.sizes, strict=False))
        begun = {key: extent for key, extent in zip(keys, partition.begin(keys), strict=True) if extent is not None}
        timeout_ms = (deadline_ns - time.monotonic_ns()) // 1_000_000
        if not begun or timeout_ms < 1:
            for key in begun:
                partition.abandon(key)
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
                    partition.seal(key, sizes.get(key))
                    if key in group.pinned:
                        partition.store.pin_hard([key])
                else:
                    partition.abandon(key)
            if not done.done():
                done.set_result(None)

        self._pulls.start(job, partition, pulled)
        await done

    async def _fetch_objects(self, wanted: _Objects, wish: CopyRequest, watch: Watch, deadline_ns: int) -> None:
        """Copies the objects that are missing, of all groups in one pull, and seals each that arrives. Raises
        InvalidRequest or Overloaded."""
        places = self._partitions.groups_of(wanted.family.text)
        if not places:
            raise InvalidRequest.of("layout", wanted.family.text, "objects of this family are not kept here")
        missing: dict[int, list[bytes]] = {}
        for group, place in places.items():
            here = self._partitions.get(place.layout)
            asked = [key for key, mask in wanted.masks.items() if mask >> group & 1]
            missing[group] = [key for key in asked if here is None or not here.store.holds(key)]
        if self._tiering is not None:
            for group, place in places.items():
                with contextlib.suppress(InvalidRequest, Overloaded):  # it is asked for again below
                    if missing[group]:
                        await self._room(place.layout, place.shard_bytes, missing[group], deadline_ns)
        begun, parts, full = self._begin_objects(places, missing, watch)
        timeout_ms = (deadline_ns - time.monotonic_ns()) // 1_000_000
        keys = [key for key in wanted.masks if any(key in mine for mine in begun.values())]
        if not keys or timeout_ms < 1:
            for group, mine in begun.items():
                for key in mine:
                    parts[group].abandon(key)
            if not keys and full is not None:
                raise full
            return
        places_of = {
            group: GroupPages(group, 0, tuple(mine.get(key, -1) for key in keys)) for group, mine in begun.items()
        }
        job = PullJob(
            next(self._tickets),
            tuple(range(len(keys))),
            tuple(keys),
            (),
            tuple(PullRange(r.instance_id, r.address, r.incarnation, 0, len(keys), r.tier) for r in wish.ranges),
            timeout_ms,
            traffic_class=wish.traffic_class,
            groups=bytes(sum(1 << group for group, mine in begun.items() if key in mine) for key in keys),
            places=tuple(places_of.values()),
        )
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def pulled(said: Pulled) -> None:
            came = {keys[at]: mask for at, mask in zip(said.arrived, said.groups, strict=True)}
            for group, mine in begun.items():
                partition = parts[group]
                for key in mine:
                    good = came.get(key, 0) >> group & 1 and not watch.gone(key)
                    if good and self._may_seal(wanted, partition, key):
                        partition.seal(key)
                        if key in wanted.pinned:
                            partition.store.pin_hard([key])
                    else:
                        partition.abandon(key)
            if not done.done():
                done.set_result(None)

        self._pulls.start(job, parts, pulled)
        await done

    def _begin_objects(
        self, places: Mapping[int, GroupPlace], missing: Mapping[int, list[bytes]], watch: Watch
    ) -> tuple[dict[int, dict[bytes, int]], dict[int, Partition], InvalidRequest | Overloaded | None]:
        """Begins missing objects, in one turn of the loop, as a partition that holds nothing may be given up in the
        next. Returns what is begun of each group, where, and why some is not. A block whose anchor finds no room gets
        nothing in other groups either."""
        begun: dict[int, dict[bytes, int]] = {}
        parts: dict[int, Partition] = {}
        full: InvalidRequest | Overloaded | None = None
        for group, place in places.items():
            keys = [key for key in missing[group] if not watch.gone(key)]
            if group:
                keys = [key for key in keys if key not in missing[0] or key in begun.get(0, {})]
            if not keys:
                continue
            try:
                partition = self._partitions.room(place.layout, place.shard_bytes, len(keys))
            except (InvalidRequest, Overloaded) as error:  # what is begun of other groups goes on
                full = full or error
                continue
            extents = partition.begin(keys)
            parts[group] = partition
            begun[group] = {key: extent for key, extent in zip(keys, extents, strict=True) if extent is not None}
        return begun, parts, full

    def _may_seal(self, group: _Group | _Objects, partition: Partition, key: bytes) -> bool:
        """Whether the block may be sealed: not so if it must be pinned and too much is pinned here already."""
        try:
            if key in group.pinned:
                self._partitions.may_pin(1, partition.shard_bytes)
        except Overloaded as error:
            log.info("not copied, as it is pinned where it is: %s", error.message)
            return False
        return True

    async def _room(self, layout: str, shard_bytes: int, keys: Sequence[bytes], deadline_ns: int) -> Partition:
        def room() -> Partition:
            missing = sum(holder(self._partitions, layout, key) is None for key in keys)
            return self._partitions.room(layout, shard_bytes, missing)

        partition = room()
        if self._tiering is not None:
            wait_s = ROOM_SHARE * (deadline_ns - time.monotonic_ns()) / NS
            await self._tiering.room(partition, len(keys), wait_s)
            partition = room()  # again: the first one may have been given up meanwhile
            self._tiering.follow(partition)
        return partition
