"""What a model keeps of its tokens, group by group of layers, and which of it a prefix needs (ADR 0037).

Layers that keep the same thing in the same shape are a *cache group*. One *object* is stored for each (block key,
group): `[layers of the group, planes, heads, tokens, dim]`, of which a rank has a cut. A *cut* of a prompt, c, is how
many of its blocks are taken from a cache; the token at position c * block_tokens is then computed first.

Blocks are counted from the prompt's first, held blocks are bitsets of them, sizes are bytes. Pure: no torch here.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.errors import ConfigError
from kvmesh.kvcache.layout import ShardLayout, plan

MAX_GROUPS = 8  # of a model: a mask of groups is one byte
_SNAPSHOT_BLOCKS = (8, 16, 32, 64, 128)  # the last one bounds a prompt's chunks: 8,192 tokens in blocks of 64


class CacheKind(enum.IntEnum):
    """What a group keeps."""

    ALL = 1  # every token
    WINDOW = 2  # the last tokens that a token sees, itself included
    CHUNK = 3  # the tokens since the last multiple of a number
    STATE = 4  # a state of constant size: snapshots of it


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """One layer's shape for one token, or of one state: `[planes, heads, dim]` elements of `dtype` ("": the dtype that
    the instance keeps KV in)."""

    planes: int
    heads: int
    dim: int
    dtype: str = ""

    def __post_init__(self) -> None:
        for name in ("planes", "heads", "dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cache layout: {name}={getattr(self, name)} must be at least 1", field=name)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of a model that keep the same. `keep` is the window's or the chunk's tokens, or the blocks between two
    snapshots of a state; 0 for ALL. What an `optional` group lacks costs something, never a hit."""

    name: str
    layers: tuple[int, ...]  # of the model, ascending
    layout: CacheLayout
    kind: CacheKind = CacheKind.ALL
    keep: int = 0
    optional: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("cache group: name is empty", field="name")
        if not self.layers or self.layers[0] < 0 or list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(
                f"cache group {self.name}: layers={self.layers} must be ascending numbers", field="layers"
            )
        if (self.keep < 1) != (self.kind is CacheKind.ALL) or self.keep < 0:
            wanted = "0" if self.kind is CacheKind.ALL else "at least 1"
            raise ConfigError(f"cache group {self.name}: keep={self.keep} must be {wanted}", field="keep")


class GroupPages(NamedTuple):
    """Pages, extents or offsets of one group: `ids[i]` is of block `first + i`; -1 where the block has none."""

    group: int
    first: int
    ids: tuple[int, ...]


def check_groups(groups: Sequence[CacheGroup]) -> None:
    """Raises ConfigError unless these can be the groups of one model."""
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise ConfigError(f"cache_groups: {len(groups)} groups, there must be 1 to {MAX_GROUPS}", field="cache_groups")
    if len({group.name for group in groups}) < len(groups):
        raise ConfigError(f"cache_groups: a name stands twice in {[g.name for g in groups]}", field="cache_groups")
    if all(group.optional for group in groups):
        raise ConfigError("cache_groups: all are optional", field="cache_groups")


def is_single(groups: Sequence[CacheGroup]) -> bool:
    """Says whether a block is one object that every later token needs, as it was before there were groups."""
    return len(groups) == 1 and groups[0].kind is CacheKind.ALL and not groups[0].optional


def snapshot_blocks(kept: CacheGroup, layers: int, states: Iterable[CacheLayout]) -> int:
    """Returns how many blocks lie between two snapshots of the states of `layers` layers: the fewest whose KV, of group
    `kept`, weighs as much as one snapshot, so that snapshots at most double a prefix, but at most 128. Elements count 2
    bytes, or 4 in float32, and blocks 64 tokens, whatever an instance has: objects of one model are the same at all."""
    of_layer = sum(shape.planes * shape.heads * shape.dim * (4 if shape.dtype == "float32" else 2) for shape in states)
    one = layers * of_layer
    block = 64 * 2 * len(kept.layers) * kept.layout.planes * kept.layout.heads * kept.layout.dim
    return next((blocks for blocks in _SNAPSHOT_BLOCKS if blocks * block >= one), _SNAPSHOT_BLOCKS[-1])


def derive_groups(
    windows: Sequence[int], kv_heads: int, head_dim: int, planes: int = 2, chunks: Sequence[int] = ()
) -> tuple[CacheGroup, ...]:
    """Returns the groups of a model whose layers keep K and V alike (or a latent: one plane) and differ in what they
    see: the last `windows[layer]` tokens or, of a layer that has none, those since the last multiple of
    `chunks[layer]`; 0 for all, as is () of chunks. The group of all comes first, then windows, then chunks, the longest
    first of each. Raises ConfigError when there are too many."""
    layout = CacheLayout(planes=planes, heads=kv_heads, dim=head_dim)
    kept: dict[tuple[CacheKind, int], list[int]] = {}
    for layer, window in enumerate(windows):
        chunk = chunks[layer] if chunks and not window else 0
        kind = CacheKind.WINDOW if window else CacheKind.CHUNK if chunk else CacheKind.ALL
        kept.setdefault((kind, window or chunk), []).append(layer)
    found = []
    for kind, keep in sorted(kept, key=lambda of: (of[0], -of[1])):
        name = f"{kind.name.lower()}{keep or ''}"
        found.append(CacheGroup(name, tuple(kept[kind, keep]), layout, kind, keep))
    check_groups(found)
    return tuple(found)


# ── objects and the cuts that ranks have of them ─────────────────────────────────────────────────────


def object_shard(group: CacheGroup, block_tokens: int, itemsize: int, number: int = 0) -> ShardLayout:
    """Returns the layout of the whole object of group `number`, with `itemsize` bytes an element. Its layers count
    within the group."""
    shape, tokens = group.layout, 1 if group.kind is CacheKind.STATE else block_tokens
    return ShardLayout(len(group.layers), shape.heads, tokens, shape.dim, itemsize, planes=shape.planes, group=number)


def rank_shard(
    group: CacheGroup, layers: range, heads: range, block_tokens: int, itemsize: int, number: int = 0
) -> ShardLayout | None:
    """Returns the cut of a rank that has these layers of the model and these heads of the group; None when it has no
    layer of the group. Raises ConfigError when the group has no such heads."""
    first, end = (bisect_left(group.layers, layer) for layer in (layers.start, layers.stop))
    if first >= end:
        return None
    whole = object_shard(group, block_tokens, itemsize, number)
    if not 0 <= heads.start < heads.stop <= whole.kv_heads:
        raise ConfigError(f"cache group {group.name}: heads {heads} of {whole.kv_heads}", field="heads")
    return ShardLayout(
        end - first, len(heads), whole.block_tokens, whole.head_dim, itemsize, first, heads.start, whole.planes, number
    )


def byte_ranges(cut: ShardLayout, whole: ShardLayout) -> tuple[tuple[int, int], ...]:
    """Returns which bytes of the object a cut is, as (offset, length): ascending, neighbours joined. The cut has them
    in this order, back to back. Raises ConfigError when the two are not of one group."""
    return tuple((offset, length) for _, offset, length in plan(cut, whole))


# ── what a prefix needs ──────────────────────────────────────────────────────────────────────────────


def first_seen(group: CacheGroup, position: int) -> int:
    """Returns the first token that the one at `position` sees in this group's layers. A state is not seen by tokens."""
    if group.kind is CacheKind.WINDOW:
        return max(0, position - group.keep + 1)
    return position - position % group.keep if group.kind is CacheKind.CHUNK else 0


def needed_blocks(group: CacheGroup, block_tokens: int, tokens: int) -> range:
    """Returns the blocks whose objects are needed to go on after `tokens` tokens; the last one may be filled in part.
    Of a state it is the block whose snapshot is the state after `tokens`, which must be whole blocks."""
    end = -(-tokens // block_tokens)
    if group.kind is CacheKind.STATE:
        if tokens % block_tokens:
            raise ValueError(f"tokens={tokens}: a snapshot lies at the end of a block of {block_tokens}")
        return range(max(0, end - 1), end)
    return range(first_seen(group, tokens) // block_tokens, end)


def freed_blocks(group: CacheGroup, block_tokens: int, tokens: int) -> int:
    """Returns how many leading blocks no token from position `tokens` on sees, so that their pages may go."""
    return 0 if group.kind is CacheKind.STATE else first_seen(group, tokens) // block_tokens


def snapshot_grid(groups: Sequence[CacheGroup], block_tokens: int) -> int:
    """Returns the tokens after whose multiples the chunks of a prompt end, so that each group's states can be kept
    there; 0 without such groups."""
    return block_tokens * math.gcd(*(group.keep for group in groups if group.kind is CacheKind.STATE))


def peak_blocks(group: CacheGroup, block_tokens: int, step_tokens: int) -> int | None:
    """Returns how many pages a request has at most while a step computes `step_tokens` of its tokens, if pages go as
    `freed_blocks` says; None for a group that keeps all. A state has its own slot and one for a snapshot."""
    if group.kind is CacheKind.ALL:
        return None
    if group.kind is CacheKind.STATE:
        return 2
    return -(-(group.keep + step_tokens - 2) // block_tokens) + 1


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest usable prefix, in blocks. `limits[g]` is the longest that group g alone allows; of an optional group
    it is told, too. `short` names the groups, by number, that lack something of the longest of these limits, and so
    why the hit is no longer; `gaps` the optional groups that lack something of the hit."""

    blocks: int
    limits: tuple[int, ...]
    short: tuple[int, ...]
    gaps: tuple[int, ...]


def longest_hit(groups: Sequence[CacheGroup], block_tokens: int, most: int, held: Sequence[int]) -> PrefixHit:
    """Returns the longest prefix of at most `most` blocks for which every group that is not optional has what it needs.
    Bit b of `held[g]` says that the object of block b in group g can be had. O(groups), in operations on bitsets, each
    window's logarithm and each chunk."""
    if len(held) != len(groups) or most < 0:
        raise ValueError(f"{len(held)} bitsets for {len(groups)} groups, most={most}")
    cuts = [_cuts(group, block_tokens, most, bits) for group, bits in zip(groups, held, strict=True)]
    common = _low(most + 1)
    for group, allowed in zip(groups, cuts, strict=True):
        if not group.optional:
            common &= allowed
    blocks = common.bit_length() - 1  # 0 is always among them
    limits = tuple(allowed.bit_length() - 1 for allowed in cuts)
    numbers = range(len(groups))
    longest = max(limits[g] for g in numbers if not groups[g].optional)
    short = tuple(g for g in numbers if not groups[g].optional and not cuts[g] >> longest & 1)
    gaps = tuple(g for g in numbers if groups[g].optional and not cuts[g] >> blocks & 1)
    return PrefixHit(blocks, limits, short, gaps)


def _low(count: int) -> int:
    return (1 << count) - 1


def _leading(bits: int) -> int:
    """Returns how many of the lowest bits are set without a gap."""
    return (~bits & (bits + 1)).bit_length() - 1


def _cuts(group: CacheGroup, block_tokens: int, most: int, held: int) -> int:
    """Returns the bitset of the cuts 0..most for which this group has what it needs."""
    held &= _low(most)
    if group.kind is CacheKind.ALL:
        return _low(min(_leading(held), most) + 1)
    if group.kind is CacheKind.STATE:
        return held << 1 | 1
    if group.kind is CacheKind.WINDOW:
        return _cuts_of_window(min(-(-(group.keep - 1) // block_tokens), most), most, held)
    cuts, at = 0, 0
    while at <= most:
        # Cuts from `at` on begin in one chunk: they need the blocks from `first` on.
        start = at * block_tokens // group.keep * group.keep
        first, end = start // block_tokens, min(most, (start + group.keep - 1) // block_tokens)
        reach = min(first + _leading(held >> first), end)
        cuts |= _low(reach + 1) & ~_low(at)
        at = end + 1
    return cuts


def _cuts_of_window(blocks: int, most: int, held: int) -> int:
    """Returns the cuts whose last `blocks` blocks are held; before the prompt's first block none is missing."""
    runs = held << blocks | _low(blocks)  # bit c + blocks - 1: the block before cut c
    length = 1  # bit i of `runs`: so many, from i on, are held
    if not blocks:
        return _low(most + 1)
    while length < blocks:
        step = min(length, blocks - length)
        runs &= runs >> step
        length += step
    return runs & _low(most + 1)


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────


def prefix_bytes(groups: Sequence[CacheGroup], block_tokens: int, itemsizes: Sequence[int], blocks: int) -> int:
    """Returns the bytes of all objects that a hit of so many blocks reads. `itemsizes` has one entry a group."""
    return sum(
        object_shard(group, block_tokens, size).shard_bytes
        * len(needed_blocks(group, block_tokens, blocks * block_tokens))
        for group, size in zip(groups, itemsizes, strict=True)
    )


def handoff_bytes(
    groups: Sequence[CacheGroup], block_tokens: int, itemsizes: Sequence[int], tokens: int, at_decode: int = 0
) -> int:
    """Returns the bytes that go to decode for a prompt of `tokens` tokens whose first `at_decode` blocks lie there in
    every group: whole pages, and a state as it is after the last token."""
    total = 0
    for group, size in zip(groups, itemsizes, strict=True):
        objects = 1
        if group.kind is not CacheKind.STATE:
            needed = needed_blocks(group, block_tokens, tokens)
            objects = len(range(max(needed.start, at_decode), needed.stop))
        total += objects * object_shard(group, block_tokens, size).shard_bytes
    return total
