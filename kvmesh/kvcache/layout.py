"""How one stored shard of a block lies in memory, and which slices carry one layout into another.

A shard is one contiguous span `[layers, planes, kv_heads, tokens, head_dim]` of the layers, heads and tokens that one
rank owns; of the two planes 0 is K, 1 is V. An MLA latent is one plane of one "head" as wide as latent and rope
together, the same at every rank. A layer of a shard is one slice; a run of heads of one layer's K or V is one slice as
well, so ranks with other head counts are served by runs, not by single rows. Ranks that share a block's tokens with
others are served by a run for each head.

`plan` carries one shard into another; `kvmesh.kvcache.groups` plans N writer ranks and M reader ranks with it.

Sizes and offsets are bytes. No torch here: fronts and transfer plans use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvmesh.errors import ConfigError

MAX_TURNS = 1024  # as many as ranks of one instance
Run = tuple[int, int, int]  # (offset at the source, offset at the destination, length)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One rank's part of a block: layers [first_layer, first_layer + layers) and KV heads [first_head, first_head +
    kv_heads) of the model, with `itemsize` bytes an element. Where the model has several cache groups it is of the one
    numbered `group`, and layers count within that. Ranks that hold the same part are replicas.

    `block_tokens` are those of a whole block. Ranks that share a context take turns within it: of the `turns` equal
    parts of a block's tokens, in order, the one numbered `turn` lies here. With one turn all of them do."""

    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    itemsize: int
    first_layer: int = 0
    first_head: int = 0
    planes: int = 2  # K and V; 1 for a latent
    group: int = 0  # cache group of the model (cache_groups)
    turn: int = 0
    turns: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "block_tokens", "head_dim", "itemsize", "planes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"shard layout: {name}={getattr(self, name)} must be at least 1", field=name)
        for name in ("first_layer", "first_head", "group"):
            if getattr(self, name) < 0:
                raise ConfigError(f"shard layout: {name}={getattr(self, name)} must not be negative", field=name)
        if not 0 <= self.turn < self.turns <= MAX_TURNS:
            raise ConfigError(
                f"shard layout: turn={self.turn} of turns={self.turns} must lie in 0..turns - 1, turns in "
                f"1..{MAX_TURNS}",
                field="turn",
            )
        if self.block_tokens % self.turns:
            raise ConfigError(
                f"shard layout: turns={self.turns} must divide block_tokens={self.block_tokens}", field="turns"
            )

    @property
    def tokens(self) -> int:
        """The number of a block's tokens that lie here."""
        return self.block_tokens // self.turns

    @property
    def first_token(self) -> int:
        """The number, within a block, of the first token that lies here."""
        return self.turn * self.tokens

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The shape `[layers, planes, kv_heads, tokens, head_dim]`."""
        return (self.layers, self.planes, self.kv_heads, self.tokens, self.head_dim)

    @property
    def head_bytes(self) -> int:
        """The bytes of K or V of one head in one layer."""
        return self.tokens * self.head_dim * self.itemsize

    @property
    def layer_bytes(self) -> int:
        return self.planes * self.kv_heads * self.head_bytes

    @property
    def shard_bytes(self) -> int:
        """The bytes of one block at this rank."""
        return self.layers * self.layer_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of one of the tokens that lie here."""
        return self.shard_bytes // self.tokens

    def layer_slice(self, layer: int) -> tuple[int, int]:
        """Returns (offset, length) in bytes of local layer `layer` within the shard. Raises IndexError when there is no
        such layer."""
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} is outside 0..{self.layers - 1}")
        return layer * self.layer_bytes, self.layer_bytes

    def run_offset(self, layer: int, plane: int, head: int, token: int) -> int:
        """Returns the byte offset of one plane (0 for K, 1 for V) of one head from a token on; `layer` and `head` count
        over the whole model, `token` over the whole block."""
        local = ((layer - self.first_layer) * self.planes + plane) * self.kv_heads + head - self.first_head
        return local * self.head_bytes + (token - self.first_token) * self.head_dim * self.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """A cuboid of the model's KV of a block: layers [layer0, layer1), heads [head0, head1), tokens [token0, token1)."""

    layer0: int
    layer1: int
    head0: int
    head1: int
    token0: int
    token1: int

    def common(self, other: Part) -> Part:
        """Returns the intersection, which may be empty."""
        return Part(
            max(self.layer0, other.layer0),
            min(self.layer1, other.layer1),
            max(self.head0, other.head0),
            min(self.head1, other.head1),
            max(self.token0, other.token0),
            min(self.token1, other.token1),
        )

    @property
    def empty(self) -> bool:
        return self.layer0 >= self.layer1 or self.head0 >= self.head1 or self.token0 >= self.token1


def part_of(shard: ShardLayout) -> Part:
    """Returns the part of the model that this shard holds."""
    layer, head, token = shard.first_layer, shard.first_head, shard.first_token
    return Part(layer, layer + shard.layers, head, head + shard.kv_heads, token, token + shard.tokens)


def check_same_blocks(src: ShardLayout, dst: ShardLayout) -> None:
    """Raises ConfigError when the shapes of blocks differ, since such blocks need conversion and not slices, and when
    the two are of different cache groups, which have nothing in common."""
    for name in ("block_tokens", "head_dim", "itemsize", "planes", "group"):
        if getattr(src, name) != getattr(dst, name):
            raise ConfigError(
                f"shard layouts differ in {name}: source {getattr(src, name)}, destination {getattr(dst, name)}",
                field=name,
            )


def plan(src: ShardLayout, dst: ShardLayout) -> list[Run]:
    """Returns the slices `(src_offset, dst_offset, length)`, in bytes, that copy what both shards hold; offsets ascend
    and neighbours are joined.

    Equal layouts give one slice, the whole shard; shards with nothing in common give none. Raises ConfigError when
    block shapes differ (block_tokens, head_dim, itemsize or planes) or cache groups do.
    """
    check_same_blocks(src, dst)
    return runs_of(src, dst, [part_of(src).common(part_of(dst))])


def runs_of(src: ShardLayout, dst: ShardLayout, parts: Sequence[Part]) -> list[Run]:
    """Plans as `plan` does, for these parts only, which must not overlap and must lie in both shards."""
    parts = [part for part in parts if not part.empty]
    return joined(sorted(run for part in parts for run in _runs_of_part(src, dst, part)))


def _runs_of_part(src: ShardLayout, dst: ShardLayout, part: Part) -> Iterator[Run]:
    """Yields a run for each layer and plane where both sides have just these tokens, and else for each head."""
    tokens = part.token1 - part.token0
    wide = tokens == src.tokens == dst.tokens
    heads = part.head1 - part.head0 if wide else 1
    length = heads * tokens * src.head_dim * src.itemsize
    for layer in range(part.layer0, part.layer1):
        for plane in range(src.planes):
            for head in range(part.head0, part.head1, heads):
                at = (layer, plane, head, part.token0)
                yield src.run_offset(*at), dst.run_offset(*at), length


def joined(runs: Iterable[Run], longest: int = 0) -> list[Run]:
    """Joins runs that are adjacent on both sides, up to `longest` bytes (0: no limit). Each run is a work request, and
    few large ones cost less than many small ones."""
    out: list[Run] = []
    source = target = length = 0
    for a, b, more in runs:
        if length and a == source + length and b == target + length and (not longest or length + more <= longest):
            length += more
            continue
        if length:
            out.append((source, target, length))
        source, target, length = a, b, more
    if length:
        out.append((source, target, length))
    return out
