"""How one stored shard of a block lies in memory, and which slices carry one layout into another.

A shard is one contiguous span `[layers, 2, kv_heads, block_tokens, head_dim]` (index 0 of the second axis is
K, 1 is V) of the layers and heads that one rank owns. A layer of it is one slice; a run of heads of one layer's
K or V is one slice as well, so ranks with other head counts are served by runs, not by single rows.

Sizes and offsets are bytes. No torch here: fronts and transfer plans use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.rpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One rank's part of a block: layers [first_layer, first_layer + layers) and KV heads [first_head, first_head +
    kv_heads) of the model, `itemsize` bytes an element."""

    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    itemsize: int
    first_layer: int = 0
    first_head: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "block_tokens", "head_dim", "itemsize"):
            if getattr(self, name) < 1:
                raise ConfigError(f"shard layout: {name}={getattr(self, name)} must be at least 1", field=name)
        for name in ("first_layer", "first_head"):
            if getattr(self, name) < 0:
                raise ConfigError(f"shard layout: {name}={getattr(self, name)} must not be negative", field=name)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """`[layers, 2, kv_heads, block_tokens, head_dim]`."""
        return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def head_bytes(self) -> int:
        """K or V of one head of one layer: the shortest run that a plan cuts."""
        return self.block_tokens * self.head_dim * self.itemsize

    @property
    def layer_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_bytes

    @property
    def shard_bytes(self) -> int:
        """One block of this rank."""
        return self.layers * self.layer_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.shard_bytes // self.block_tokens

    def layer_slice(self, layer: int) -> tuple[int, int]:
        """(offset, length) of local layer `layer` within the shard."""
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} is outside 0..{self.layers - 1}")
        return layer * self.layer_bytes, self.layer_bytes

    def run_offset(self, layer: int, kv: int, head: int) -> int:
        """Offset of K (`kv` 0) or V (`kv` 1) of one head; `layer` and `head` count over the whole model."""
        local = ((layer - self.first_layer) * 2 + kv) * self.kv_heads + head - self.first_head
        return local * self.head_bytes


def plan(src: ShardLayout, dst: ShardLayout) -> list[tuple[int, int, int]]:
    """Slices `(src_offset, dst_offset, length)` that copy what both shards own, offsets ascending, neighbours joined.

    Equal layouts give one slice, the whole shard; shards with nothing in common give none. Raises ConfigError when
    the blocks themselves differ (block_tokens, head_dim or itemsize): those need conversion, not slices."""
    for name in ("block_tokens", "head_dim", "itemsize"):
        if getattr(src, name) != getattr(dst, name):
            raise ConfigError(
                f"shard layouts differ in {name}: source {getattr(src, name)}, destination {getattr(dst, name)}",
                field=name,
            )
    layers = range(
        max(src.first_layer, dst.first_layer),
        min(src.first_layer + src.layers, dst.first_layer + dst.layers),
    )
    first = max(src.first_head, dst.first_head)
    heads = min(src.first_head + src.kv_heads, dst.first_head + dst.kv_heads) - first
    if heads <= 0:
        return []
    slices: list[tuple[int, int, int]] = []
    length = heads * src.head_bytes
    for layer in layers:
        for kv in (0, 1):
            a, b = src.run_offset(layer, kv, first), dst.run_offset(layer, kv, first)
            if slices and slices[-1][0] + slices[-1][2] == a and slices[-1][1] + slices[-1][2] == b:
                a, b, done = slices.pop()
                slices.append((a, b, done + length))
            else:
                slices.append((a, b, length))
    return slices
