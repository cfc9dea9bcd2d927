"""Parts of a node's tiers below DRAM: one for each layout of shards, and where each lies on the disk.

<ssd_path>/rank-0/                  an instance's only part
<ssd_path>/rank-0/<layout's hash>/  a pool node's: one for each layout
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.kvcache.size_classes import BYTES
from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.ssd.folder import identity_of
from kvmesh.kvcache.ssd.sketch import FrequencySketch
from kvmesh.kvcache.tiers import Tier
from kvmesh.node import messages as m
from kvmesh.node.partitions import Partition
from kvmesh.node.tier_brain import Contents, Promotion, ReadTime, WriteBehind
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import store_pb2 as pb_store

log = logging.getLogger(__name__)

MAX_BLOCKS = 64  # of one operation of the write-behind
MAX_BYTES = 32 << 20
SKETCH_KEYS = 1 << 17
MIXED_BYTES, MIXED_SHARE = 16 << 20, 64  # the largest block of "bytes" that goes below, and of all it may take


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """What `--ssd-*` or `--object-*` say. `capacity_bytes`: of all ranks and layouts together; 0: as much as there is.
    `layouts` 0: an instance, which has one and a folder without a name for it. `url`: of an object store; `path` is
    nothing then."""

    path: Path
    capacity_bytes: int
    offload_percent: int
    staging_percent: int
    layouts: int = 0
    url: str = ""

    @property
    def tier(self) -> Tier:
        """Which one it is."""
        return Tier.OBJECT if self.url else Tier.SSD

    @property
    def said(self) -> str:
        """As its user set it."""
        if self.url:
            return f"object_url={self.url!r}"
        return f"ssd_path={str(self.path)!r}, ssd_capacity_mb={self.capacity_bytes >> 20}"


@dataclass(eq=False)
class Part:
    """One layout's blocks in one tier. `shard_bytes` 0: they differ, the layout is "bytes"."""

    number: int
    layout: str
    shard_bytes: int
    contents: Contents
    opened: asyncio.Future[str]  # by every rank: why it is not in use, "" when it is
    tier: Tier = Tier.SSD
    sketch: FrequencySketch = field(default_factory=lambda: FrequencySketch(SKETCH_KEYS))
    unopened: set[int] = field(default_factory=set)  # ranks
    stats: dict[int, m.TierStats] = field(default_factory=dict)  # rank → its last word
    reads: ReadTime = field(default_factory=ReadTime)
    writing: dict[bytes, None] = field(default_factory=dict)
    staging: dict[bytes, asyncio.Task[None]] = field(default_factory=dict)  # read for others' leases
    promoted: int = 0  # by partitions that are gone

    @property
    def ready(self) -> bool:
        """Whether it takes operations."""
        return self.opened.done() and not self.opened.cancelled() and not self.opened.result()

    @property
    def why_not(self) -> str:
        """Why it is not in use, or slower than it could be."""
        if not self.opened.done():
            return "being recovered"
        said = (stats.why_not for stats in self.stats.values())
        return self.opened.result() or "; ".join(dict.fromkeys(filter(None, said)))

    def note(self, keys: Iterable[bytes]) -> None:
        """A request uses these."""
        for key in keys:
            self.sketch.add(key)


class Followed:
    """One partition, and what is decided of its blocks. Forgotten with the partition."""

    def __init__(self, partition: Partition, part: Part, offload_percent: int) -> None:
        self.partition = partition
        self.part = part
        most = max(1, min(MAX_BLOCKS, MAX_BYTES // partition.shard_bytes))
        self.behind = WriteBehind(offload_percent, most)
        self.promotion = Promotion(part.sketch)
        self.writes = 0  # operations
        self.wanted = 0  # blocks that are about to come, and wait for room
        self.woken = False
        self.progress = asyncio.Event()  # some write has ended


def make_part(number: int, layout: str, shard_bytes: int, ranks: int, tier: Tier) -> Part:
    """Not opened yet."""
    opened = asyncio.get_running_loop().create_future()
    return Part(number, layout, shard_bytes, Contents(ranks), opened, tier, unopened=set(range(ranks)))


def home(partition: Partition) -> tuple[str, int]:
    """(layout, shard_bytes) of the part that keeps its blocks: all sizes of "bytes" share one."""
    mixed = partition.layout.startswith(f"{BYTES}/")
    return (BYTES, 0) if mixed else (partition.layout, partition.shard_bytes)


def opening(settings: TierSettings, part: Part, rank: int, ranks: int) -> m.TierOpen:
    """What a rank is told."""
    owner = identity(part.layout, part.shard_bytes)
    if settings.url:
        room = part.shard_bytes or MIXED_BYTES
        owner = f"{owner} rank {rank}/{ranks}"
        return m.TierOpen(part.tier, part.number, settings.url, owner, 0, room, not part.shard_bytes)
    path = settings.path / f"rank-{rank}"
    if settings.layouts:
        path /= hashlib.sha256(identity(part.layout, part.shard_bytes).encode()).hexdigest()[:32]
    capacity = settings.capacity_bytes // ranks // max(settings.layouts, 1)
    room = part.shard_bytes or min(MIXED_BYTES, capacity // MIXED_SHARE)
    return m.TierOpen(part.tier, part.number, str(path), owner, capacity, room, not part.shard_bytes)


def identity(layout: str, shard_bytes: int) -> str:
    """What the folder's blocks belong to."""
    return f"{shard_bytes} {layout}"


def layouts_found(settings: TierSettings) -> list[tuple[str, int]]:
    """(layout, shard_bytes) of a pool node's folders. Of more than there may be, those used longest ago are removed:
    what is not in use hears of no removal, and must not come back. Blocking. OSError."""
    if settings.url:
        return []  # an object store has no such list: a layout is opened with its first block in memory
    home = settings.path / "rank-0"
    if not home.is_dir():
        return []
    folders = sorted((entry for entry in os.scandir(home) if entry.is_dir()), key=lambda e: -e.stat().st_mtime_ns)
    kept: list[tuple[str, int]] = []
    for folder in folders:
        size, _, layout = (identity_of(Path(folder.path)) or "").partition(" ")
        if not (size.isdecimal() and layout):
            continue  # not ours
        if len(kept) < settings.layouts and layout not in dict(kept):
            kept.append((layout, int(size)))
        else:
            log.warning("ssd_layouts=%d: %s goes, with blocks of %r", settings.layouts, folder.path, layout)
            shutil.rmtree(folder.path)
    return kept


class OwnTier:
    """`kvmesh.kvcache.sources.Lower` of an instance."""

    def __init__(self, part: Part, ref: Callable[[], pb_common.InstanceRef]) -> None:
        self._part = part
        self._ref = ref

    def holds(self, key: bytes) -> bool:
        """See `Lower`."""
        return key in self._part.contents

    def ranges(self, keys: Sequence[bytes]) -> tuple[PullRange, ...]:
        """See `Lower`: one for each run of blocks."""
        own, there = self._ref(), self._part.contents
        where = (own.instance_id, own.address, own.incarnation)
        found: list[PullRange] = []
        for here, run in itertools.groupby(enumerate(keys), lambda at: at[1] in there):
            if here:
                blocks = [block for block, _ in run]
                found.append(PullRange(*where, blocks[0], len(blocks), self._part.tier))
        return tuple(found)

    def note(self, keys: Sequence[bytes]) -> None:
        """See `Lower`."""
        self._part.note(keys)


def counters_of(tier: Tier, settings: TierSettings, parts: Sequence[Part]) -> pb.TierCounters:
    """All parts together; a read is told as of the slowest."""
    stats = [stats for part in parts for stats in part.stats.values()]
    reads = [(p.reads.read_ns, p.reads.bytes_per_s) for p in parts if p.reads.bytes_per_s]
    read_ns, bytes_per_s = min(reads, key=lambda read: read[1], default=(0, 0))
    return pb.TierCounters(
        tier=tier.value,  # type: ignore[arg-type]
        capacity_bytes=settings.capacity_bytes,
        used_bytes=sum(s.used_bytes for s in stats),
        blocks=sum(len(part.contents) for part in parts),
        hits=sum(s.hits for s in stats),
        misses=sum(s.misses for s in stats),
        written_bytes=sum(s.written_bytes for s in stats),
        read_bytes=sum(s.read_bytes for s in stats),
        evicted=sum(s.evicted for s in stats),
        promoted=sum(part.promoted for part in parts),
        read_ns=read_ns,
        bytes_per_s=bytes_per_s,
        why_not="; ".join(dict.fromkeys(part.why_not for part in parts if part.why_not)),
    )


def usage_of(told: pb.TierCounters) -> pb_store.TierUsage:
    """The same for master and conductor."""
    return pb_store.TierUsage(
        tier=told.tier,
        capacity_bytes=told.capacity_bytes,
        used_bytes=told.used_bytes,
        blocks=told.blocks,
        read_ns=told.read_ns,
        bytes_per_s=told.bytes_per_s,
    )
