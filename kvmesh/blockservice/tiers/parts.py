"""A node's tiers below DRAM have one part for each layout of shards; this module says where each lies on the disk.

<ssd_path>/rank-0/                  an instance's only part
<ssd_path>/rank-0/<layout's hash>/  a pool node's: one for each layout; and one for each cache group of an instance's
                                    model that has several, in the cut of its ranks
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.blockservice.object_family import PartLayout, part_of
from kvmesh.blockservice.partitions import Partition
from kvmesh.blockservice.tiers.brain import Contents, Promotion, ReadTime, WriteBehind
from kvmesh.errors import ConfigError
from kvmesh.kvcache.size_classes import BYTES
from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import Tier
from kvmesh.ranks import protocol as m
from kvmesh.ranks.tier_sizes import largest_block
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import store_pb2 as pb_store
from kvmesh.tiers.ssd.folder import identity_of
from kvmesh.tiers.ssd.sketch import FrequencySketch

log = logging.getLogger(__name__)

MAX_BLOCKS = 64  # blocks in one operation of the write-behind
MAX_BYTES = 32 << 20
SKETCH_KEYS = 1 << 17
MAX_NOTED, USED_KEYS = 1 << 16, 4096  # keys that wait at most; keys in one message, some 10 ms for a rank
MIXED_BYTES, MIXED_SHARE = 16 << 20, 64  # the largest block of "bytes" in a tier: so large, or this part of the tier


@dataclass(frozen=True)
class TierSettings:
    """What `--ssd-*` or `--object-*` say. `capacity_bytes` is for all ranks and layouts together; 0 means as much as
    there is. `layouts` 0 is an instance, which has one layout and a folder without a name for it, or those of its
    model's cache groups. `url` is that of an
    object store; `path` has no meaning then. `below` is another tier, which gets blocks that this one evicts and that
    were used `demote_uses` times."""

    path: Path
    capacity_bytes: int
    offload_percent: int
    staging_percent: int
    layouts: int = 0
    url: str = ""
    below: TierSettings | None = None
    demote_uses: int = 1

    @property
    def chain(self) -> list[TierSettings]:
        """This tier and all below it, the fastest first."""
        return [self, *(self.below.chain if self.below is not None else ())]

    @property
    def opens_later(self) -> bool:
        """Whether removals of an earlier incarnation may be unknown to what is opened in this one: an object store
        keeps layouts that nobody has asked for yet."""
        return bool(self.layouts) and any(each.url for each in self.chain)

    @property
    def tier(self) -> Tier:
        return Tier.OBJECT if self.url else Tier.SSD

    @property
    def said(self) -> str:
        """The settings as the user gave them, for messages."""
        if self.url:
            return f"object_url={self.url!r}"
        return f"ssd_path={str(self.path)!r}, ssd_capacity_mb={self.capacity_bytes >> 20}"


@dataclass(eq=False)
class Health:
    """`failing` says why a tier is passed over for now; "" if it is not."""

    failing: str = ""


@dataclass(eq=False)
class TierPart:
    """Describes one layout's blocks in one tier. `shard_bytes` is 0 for layout "bytes", whose blocks differ in size."""

    number: int
    layout: str
    shard_bytes: int
    contents: Contents
    opened: asyncio.Future[str]  # done when every rank has opened it: why it is not in use, "" when it is
    tier: Tier = Tier.SSD
    sketch: FrequencySketch = field(default_factory=lambda: FrequencySketch(SKETCH_KEYS))
    health: Health = field(default_factory=Health)  # of the tier
    largest: int = MIXED_BYTES  # bytes of the largest block that it can hold
    unopened: set[int] = field(default_factory=set)  # ranks that have not opened it
    stats: dict[int, m.TierStats] = field(default_factory=dict)  # rank → its last report
    reads: ReadTime = field(default_factory=ReadTime)
    writing: dict[bytes, None] = field(default_factory=dict)
    staging: dict[bytes, asyncio.Task[None]] = field(default_factory=dict)  # read for others' leases
    missing: bool = False  # it was not opened, since a disk is full, read-only or broken
    tells: bool = False  # its ranks are told what is used in memory, which decides what they move to the next tier
    noted: dict[bytes, None] = field(default_factory=dict)  # keys used since the ranks were told
    promoted: int = 0  # blocks that stayed in DRAM after they were read from here

    def __post_init__(self) -> None:
        self.kept: PartLayout | None = part_of(self.layout)  # what objects it keeps; None if a block is one object

    @property
    def ready(self) -> bool:
        """Whether the part takes operations."""
        open_ = self.opened.done() and not self.opened.cancelled() and not self.opened.result()
        return open_ and not self.health.failing

    @property
    def why_not(self) -> str:
        """Why the part is not in use, or slower than it could be."""
        if not self.opened.done():
            return "being recovered"
        said = (stats.why_not for stats in self.stats.values())
        return self.opened.result() or self.health.failing or "; ".join(dict.fromkeys(filter(None, said)))

    def note(self, keys: Iterable[bytes]) -> None:
        """Notes that a request uses these blocks."""
        for key in keys:
            self.sketch.add(key)
            if self.tells and len(self.noted) < MAX_NOTED:
                self.noted[key] = None

    def take_used(self) -> tuple[bytes, bytes] | None:
        """Returns (keys, uses) of some blocks of this tier that were used in memory; None if there are none."""
        some = list(itertools.islice(self.noted, USED_KEYS))
        for key in some:
            del self.noted[key]
        here = [key for key in some if key in self.contents]
        return (b"".join(here), bytes(map(self.sketch.estimate, here))) if here else None


class FollowedPartition:
    """Keeps one partition of DRAM and what is decided of its blocks; it is forgotten with the partition. `part` is the
    part in the first tier below, `parts` are those in all tiers."""

    def __init__(self, partition: Partition, parts: Sequence[TierPart], offload_percent: int) -> None:
        self.partition = partition
        self.parts = parts
        self.part = part = parts[0]
        most = max(1, min(MAX_BLOCKS, MAX_BYTES // partition.shard_bytes))
        self.behind = WriteBehind(offload_percent, most)
        self.promotion = Promotion(part.sketch)
        self.writes = 0  # write operations under way
        self.wanted = 0  # blocks that are about to come, and wait for room
        self.woken = False
        self.progress = asyncio.Event()  # set when some write has ended

    def __contains__(self, key: object) -> bool:
        """Returns whether any tier has this block."""
        return any(key in part.contents for part in self.parts)

    def takes(self, key: bytes) -> bool:
        """Whether the first tier could ever hold this block of the partition."""
        if self.partition.shard_bytes <= self.part.largest:
            return True
        (size,) = self.partition.store.sizes([key])
        return (size or self.partition.shard_bytes) <= self.part.largest


def make_part(
    settings: TierSettings, health: Health, number: int, layout: str, shard_bytes: int, ranks: int
) -> TierPart:
    """Returns a part that is not opened yet."""
    opened = asyncio.get_running_loop().create_future()
    kept = part_of(layout)
    contents = Contents(ranks, None if kept is None else kept.group)
    part = TierPart(number, layout, shard_bytes, contents, opened, settings.tier, health=health)
    part.unopened.update(range(ranks))
    part.tells = settings.below is not None
    with contextlib.suppress(ConfigError):  # a rank reports the error when the part is opened
        part.largest = largest_block(opening(settings, part, 0, ranks))
    return part


def home(partition: Partition) -> tuple[str, int]:
    """Returns layout and shard_bytes of the part that keeps the partition's blocks: all sizes of "bytes" share one."""
    mixed = partition.layout.startswith(f"{BYTES}/")
    return (BYTES, 0) if mixed else (partition.layout, partition.shard_bytes)


def opening(settings: TierSettings, part: TierPart, rank: int, ranks: int) -> m.TierOpen:
    """Returns the order to a rank to open the part."""
    owner = identity(part.layout, part.shard_bytes)
    if settings.url:
        room = part.shard_bytes or MIXED_BYTES
        owner = f"{owner} rank {rank}/{ranks}"
        return m.TierOpen(part.tier, part.number, settings.url, owner, 0, room, not part.shard_bytes)
    path = Path(f"rank-{rank}")
    if settings.layouts or part.kept is not None:
        path /= hashlib.sha256(identity(part.layout, part.shard_bytes).encode()).hexdigest()[:32]
    capacity = int(settings.capacity_bytes // ranks // max(settings.layouts, 1) * _share(settings, part))
    room = part.shard_bytes or min(MIXED_BYTES, capacity // MIXED_SHARE)
    below = settings.below.tier if settings.below is not None else 0
    mixed = not part.shard_bytes
    return m.TierOpen(part.tier, part.number, str(path), owner, capacity, room, mixed, int(below), settings.demote_uses)


def _share(settings: TierSettings, part: TierPart) -> float:
    """Returns which share of an instance's space is this part's: groups share it as they fill it with long prompts."""
    if settings.layouts or part.kept is None:
        return 1
    stored = part.kept.family.stored_bytes
    return stored[part.kept.group] / sum(stored)


def identity(layout: str, shard_bytes: int) -> str:
    """Returns the identity that a part's folder is marked with."""
    return f"{shard_bytes} {layout}"


def layouts_found(settings: TierSettings) -> list[tuple[str, int]]:
    """Returns (layout, shard_bytes) of a pool node's folders. If there are too many, those used longest ago are
    removed: what is not in use is told of no removal, and must not come back. It blocks. Raises OSError."""
    if settings.url:
        return []  # an object store has no such list: its part of a layout opens with the first block in memory
    home = settings.path / "rank-0"
    if not home.is_dir():
        return []
    folders = sorted((entry for entry in os.scandir(home) if entry.is_dir()), key=lambda e: -e.stat().st_mtime_ns)
    kept: list[tuple[str, int]] = []
    for folder in folders:
        size, _, layout = (identity_of(Path(folder.path)) or "").partition(" ")
        if not (size.isdecimal() and layout):
            continue  # not a folder of a tier
        if len(kept) < settings.layouts and layout not in dict(kept):
            kept.append((layout, int(size)))
        else:
            log.warning("ssd_layouts=%d: %s goes, with blocks of %r", settings.layouts, folder.path, layout)
            shutil.rmtree(folder.path)
    return kept


class OwnTier:
    """Implements `sources.LowerTiers` for an instance. `parts()` returns the parts of its layout, or of its model's
    cache groups, in tiers that answer, the fastest first; `note` is told which blocks requests use."""

    def __init__(
        self,
        parts: Callable[[], Sequence[TierPart]],
        ref: Callable[[], pb_common.InstanceRef],
        note: Callable[[Iterable[bytes]], None],
    ) -> None:
        self._parts = parts
        self._ref = ref
        self._note = note

    def holds(self, key: bytes) -> bool:
        """See `LowerTiers`; of a block with several objects, one of them is enough."""
        return any(key in part.contents for part in self._parts())

    def ranges(self, keys: Sequence[bytes]) -> tuple[PullRange, ...]:
        """See `LowerTiers`: one range for each run of blocks in each tier, of which the same groups are there; a reader
        that fails at one tier tries the next."""
        own = self._ref()
        where = (own.instance_id, own.address, own.incarnation)
        found: list[PullRange] = []
        for tier, of_tier in itertools.groupby(self._parts(), lambda part: part.tier):
            parts = list(of_tier)

            def there(at: tuple[int, bytes], parts: list[TierPart] = parts) -> int:
                """Returns the mask of the block's objects that are there."""
                mask = 0
                for part in parts:
                    mask |= (at[1] in part.contents) << (part.contents.group or 0)
                return mask

            for mask, run in itertools.groupby(enumerate(keys), there):
                if mask:
                    blocks = [block for block, _ in run]
                    groups = mask if parts[0].kept is not None else 0
                    found.append(PullRange(*where, blocks[0], len(blocks), tier, groups))
        return tuple(found)

    def note(self, keys: Sequence[bytes]) -> None:
        """See `LowerTiers`."""
        self._note(keys)


def counters_of(settings: TierSettings, parts: Sequence[TierPart]) -> pb.TierCounters:
    """Returns the counters of all parts together; read times are those of the slowest part."""
    stats = [stats for part in parts for stats in part.stats.values()]
    reads = [(p.reads.read_ns, p.reads.bytes_per_s) for p in parts if p.reads.bytes_per_s]
    read_ns, bytes_per_s = min(reads, key=lambda read: read[1], default=(0, 0))
    return pb.TierCounters(
        tier=settings.tier.value,  # type: ignore[arg-type]
        capacity_bytes=settings.capacity_bytes,
        used_bytes=sum(s.used_bytes for s in stats),
        blocks=sum(len(part.contents) for part in parts),
        hits=sum(s.hits for s in stats),
        misses=sum(s.misses for s in stats),
        written_bytes=sum(s.written_bytes for s in stats),
        read_bytes=sum(s.read_bytes for s in stats),
        evicted=sum(s.evicted for s in stats),
        promoted=sum(part.promoted for part in parts),
        demoted=sum(s.demoted for s in stats),
        dropped=sum(s.dropped for s in stats),
        read_ns=read_ns,
        bytes_per_s=bytes_per_s,
        why_not="; ".join(dict.fromkeys(part.why_not for part in parts if part.why_not)),
    )


def usage_of(told: pb.TierCounters) -> pb_store.TierUsage:
    """Returns the same counters as master and conductor get them."""
    return pb_store.TierUsage(
        tier=told.tier,
        capacity_bytes=told.capacity_bytes,
        used_bytes=told.used_bytes,
        blocks=told.blocks,
        read_ns=told.read_ns,
        bytes_per_s=told.bytes_per_s,
    )
