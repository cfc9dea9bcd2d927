"""Plans between rank groups: which of N writer ranks sends which runs of a block to which of M reader ranks.

Both sides cut the model's layers and heads, and the tokens of a block, as they like (TP, PP, TP over more ranks than
there are heads, a latent that every rank holds, contexts that ranks share: `ShardLayout.turns`). The cuts of all ranks
make a grid; each of its cells that a reader holds is sent to it by exactly one writer that holds it:

    owners of a cell        team of a reader                        who sends block b
    ranks that hold it  ─▶  those of them that serve this reader ─▶ team[b % len(team)]

Owners that hold the same are shared out among the readers that need it, so that every writer sends about as much and a
reader hears of as few writers as that allows; where a team has several, they take turns by block, because a turn of
whole blocks keeps runs long and the last layer of a prompt leaves from all of them at once.

A reader waits for an end mark of every writer of its teams, one from each, whatever rails the bytes took (ADR 0001); a
writer whose turn never came marks all the same, as it cannot know how many blocks somebody else was told of.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import lcm

from kvmesh.errors import ConfigError
from kvmesh.kvcache.layout import Part, Run, ShardLayout, check_same_blocks, part_of, runs_of

MAX_CACHED = 4096
MAX_CELLS = 65_536  # of one reader's grid


@dataclass(frozen=True, slots=True)
class WriterShare:
    """The part of one reader's shard that one writer sends: `parts` of every block b with b % turns == turn."""

    writer: int
    turn: int
    turns: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class GroupPlan:
    """Which writer sends what to which reader; `plan_group` makes it. `duties[reader]` covers each cell of that
    reader's shard once, for every block. Offsets of runs are relative to the beginning of the two shards."""

    writers: tuple[ShardLayout, ...]
    readers: tuple[ShardLayout, ...]
    duties: tuple[tuple[WriterShare, ...], ...]
    _cache: dict[tuple[int, int, int, int, int], tuple[Run, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def marks(self, reader: int) -> frozenset[int]:
        """Returns the writers whose end marks this reader waits for, and for which it opens and fences windows."""
        return frozenset(duty.writer for duty in self.duties[reader])

    def targets(self, writer: int) -> tuple[int, ...]:
        """Returns the readers that this writer sends bytes and an end mark to."""
        return tuple(reader for reader in range(len(self.readers)) if writer in self.marks(reader))

    def runs(self, writer: int, reader: int, block: int = 0, layer0: int = 0, layer1: int = -1) -> tuple[Run, ...]:
        """Returns what this writer sends to this reader of block number `block` of the prompt, of the writer's local
        layers [layer0, layer1) (-1: to the last); ascending, with neighbours joined."""
        source = self.writers[writer]
        layer1 = source.layers if layer1 < 0 else layer1
        turns = lcm(*(duty.turns for duty in self.duties[reader] if duty.writer == writer))
        key = (writer, reader, block % turns, layer0, layer1)
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            first = source.first_layer
            window = replace(part_of(source), layer0=first + layer0, layer1=first + layer1)
            parts = [
                part.common(window)
                for duty in self.duties[reader]
                if duty.writer == writer and block % duty.turns == duty.turn
                for part in duty.parts
            ]
            found = self._cache[key] = tuple(runs_of(source, self.readers[reader], parts))
        return found


@lru_cache(maxsize=64)
def plan_group(writers: tuple[ShardLayout, ...], readers: tuple[ShardLayout, ...]) -> GroupPlan:
    """Plans the transfer between two rank groups. Raises ConfigError when block shapes differ (see `plan`), or when no
    writer holds something that a reader needs."""
    if not writers or not readers:
        raise ConfigError("a group transfer needs writers and readers", field="writers" if not writers else "readers")
    for shard in (*writers, *readers):
        check_same_blocks(writers[0], shard)
    needs = [_needs(writers, shard, reader) for reader, shard in enumerate(readers)]
    wanted: dict[tuple[int, ...], list[int]] = defaultdict(list)  # owners → readers that need what they hold
    for reader, cells in enumerate(needs):
        for owners in cells:
            wanted[owners].append(reader)
    duties: list[list[WriterShare]] = [[] for _ in readers]
    for owners, sharers in wanted.items():
        for k, reader in enumerate(sharers):
            team = _team(owners, k, len(sharers))
            parts = tuple(needs[reader][owners])
            for turn, writer in enumerate(team):
                duties[reader].append(WriterShare(writer, turn, len(team), parts))
    return GroupPlan(writers, readers, tuple(tuple(mine) for mine in duties))


def _team(owners: Sequence[int], k: int, sharers: int) -> Sequence[int]:
    """Returns the owners that serve the k-th of `sharers` readers. With enough owners each is in one team; else each
    reader has one owner, evenly distributed."""
    n = len(owners)
    if n <= sharers:
        at = k * n // sharers
        return owners[at : at + 1]
    return owners[k * n // sharers : (k + 1) * n // sharers]


def _needs(writers: tuple[ShardLayout, ...], target: ShardLayout, reader: int) -> dict[tuple[int, ...], list[Part]]:
    """Returns the cells of one reader's shard of a block by the writers that hold them; adjacent cells of one layer
    range are joined."""
    wanted, held = part_of(target), [part_of(shard) for shard in writers]
    overlaps = [wanted, *(part for one in held if not (part := one.common(wanted)).empty)]
    layers = sorted({cut for part in overlaps for cut in (part.layer0, part.layer1)})
    heads = sorted({cut for part in overlaps for cut in (part.head0, part.head1)})
    tokens = sorted({cut for part in overlaps for cut in (part.token0, part.token1)})
    if (cells := len(layers) * len(heads) * len(tokens)) > MAX_CELLS:
        raise ConfigError(f"cuts of {len(writers)} writers make {cells} cells, at most {MAX_CELLS}", field="writers")
    found: dict[tuple[int, ...], list[Part]] = defaultdict(list)
    for edges in itertools.product(pairwise(layers), pairwise(heads), pairwise(tokens)):
        cell = Part(*itertools.chain(*edges))
        owners = tuple(i for i, part in enumerate(held) if part.common(cell) == cell)
        if not owners:
            of = f" at tokens {cell.token0}..{cell.token1 - 1} of a block" if len(tokens) > 2 else ""
            raise ConfigError(
                f"no writer holds layers {cell.layer0}..{cell.layer1 - 1} of heads {cell.head0}..{cell.head1 - 1}{of}, "
                f"which reader {reader} needs",
                field="writers",
            )
        found[owners].append(cell)
    return found
