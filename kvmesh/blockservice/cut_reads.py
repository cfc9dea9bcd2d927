"""Reads of blocks whose holder cuts them otherwise than we do: which rank of ours reads which runs of which of its
ranks. Pure. A block has arrived when every run of it has, at every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvmesh.kvcache.groups import GroupPlan
from kvmesh.ranks import protocol as m


@dataclass(frozen=True, slots=True)
class CutRead:
    """What rank `reader` of ours reads from rank `writer` of the holder: `sizes[i]` bytes at `offsets[i]` to
    `landing[i]`, a part of the block at position `blocks[i]`."""

    reader: int
    writer: int
    offsets: tuple[int, ...]
    landing: tuple[int, ...]
    sizes: tuple[int, ...]
    blocks: tuple[int, ...]


def cut_reads(plan: GroupPlan, offsets: Sequence[Sequence[int]], landing: Sequence[Sequence[int]]) -> list[CutRead]:
    """`offsets[writer][i]` is where the i-th block's shard begins in that segment, `landing[reader][i]` in ours."""
    found = []
    for reader, places in enumerate(landing):
        for writer in sorted(plan.marks(reader)):
            runs = [
                (offsets[writer][block] + source, place + target, size, block)
                for block, place in enumerate(places)
                for source, target, size in plan.runs(writer, reader, block)
            ]
            if runs:  # else others have the turns of these blocks
                found.append(CutRead(reader, writer, *zip(*runs, strict=True)))
    return found


def by_block(said: m.PullEnded | None, read: CutRead, blocks: int) -> m.PullEnded | None:
    """A rank's last word, its positions those of whole blocks: `arrived` are those of which nothing is missing here."""
    if said is None:
        return None
    missing = set(read.blocks) - _complete(said, read)
    return msgspec.structs.replace(said, arrived=tuple(at for at in range(blocks) if at not in missing))


def _complete(said: m.PullEnded, read: CutRead) -> set[int]:
    missing = set(range(len(read.blocks))) - set(said.arrived)
    return set(read.blocks) - {read.blocks[at] for at in missing}
