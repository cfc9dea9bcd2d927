"""Which READs bring some blocks here: pure.

Small blocks that lie side by side at their holder come in one READ into staging and are copied out from there: a READ
of its own costs each block some microseconds, the copy moves its bytes once more. On the machine of benchmarks/results
the two meet at 64 KiB a block, over shm and tcp alike (`python -m benchmarks.store --only gather`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GATHER_BELOW = 64 << 10  # mean bytes of a block
GATHER_LEAST = 4  # blocks; fewer are not worth a copy
GATHER_MOST = 8 << 20  # bytes of one gathered READ


@dataclass(frozen=True, slots=True)
class Shard:
    """One block at its holder."""

    position: int  # in the caller's list
    offset: int  # in the holder's segment
    nbytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """One READ: [offset, offset + nbytes) of the holder's segment, in which these shards lie."""

    offset: int
    nbytes: int
    shards: tuple[Shard, ...]


def runs(shards: Sequence[Shard], most: int = GATHER_MOST) -> list[Run]:
    """READs that bring all of them, in order of their offsets: neighbours together, also across gaps that are small
    beside them (a block rarely fills its extent), up to `most` bytes each."""
    found: list[list[Shard]] = []
    end = 0
    for shard in sorted(shards, key=lambda one: one.offset):
        new_end = shard.offset + shard.nbytes
        last = found[-1] if found else None
        near = last is not None and 0 <= shard.offset - end <= last[-1].nbytes // 4
        if last is not None and near and new_end - last[0].offset <= most:
            last.append(shard)
        else:
            found.append([shard])
        end = new_end
    return [Run(r[0].offset, r[-1].offset + r[-1].nbytes - r[0].offset, tuple(r)) for r in found]


def plan(shards: Sequence[Shard]) -> tuple[list[Shard], list[Run]]:
    """(read straight to where they belong, read through staging)."""
    direct: list[Shard] = []
    gathered: list[Run] = []
    for run in runs([one for one in shards if one.nbytes < GATHER_BELOW]):
        if len(run.shards) >= GATHER_LEAST:
            gathered.append(run)
        else:
            direct += run.shards
    direct += (one for one in shards if one.nbytes >= GATHER_BELOW)
    return direct, gathered


def portions(runs_: Sequence[Run], most: int) -> list[list[Run]]:
    """In groups of at most `most` bytes, each of at least one READ: what is staged at a time."""
    groups: list[list[Run]] = []
    room = 0
    for run in runs_:
        if not groups or run.nbytes > room:
            groups.append([])
            room = most
        groups[-1].append(run)
        room -= run.nbytes
    return groups
