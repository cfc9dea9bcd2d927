"""Gated DeltaNet as config.json of Qwen3-Next states it: layers that keep a state of constant size; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.engine.config_read import bad, integer
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout, snapshot_blocks

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Describes the `layers` with linear attention. Each key head serves a run of neighbouring value heads, as many
    for each. The convolution runs over queries, keys and values alike, `kernel` tokens wide."""

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], layers: int) -> DeltaConfig:
        """Reads config.json. Raises CheckpointError naming the first key that is wrong."""
        key_heads = integer(raw, "linear_num_key_heads", 16)
        value_heads = integer(raw, "linear_num_value_heads", 32)
        if value_heads % key_heads:
            raise bad("linear_num_value_heads", value_heads, f"must be a multiple of linear_num_key_heads={key_heads}")
        kernel = integer(raw, "linear_conv_kernel_dim", 4)
        if kernel < 2:
            raise bad("linear_conv_kernel_dim", kernel, "must be at least 2")
        return cls(
            _linear_layers(raw, layers),
            key_heads,
            value_heads,
            integer(raw, "linear_key_head_dim", 128),
            integer(raw, "linear_value_head_dim", 128),
            kernel,
        )

    @property
    def repeats(self) -> int:
        """The value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def width(self) -> int:
        """The channels of a key head: its query, its key and the values of its value heads, in this order."""
        return 2 * self.key_dim + self.repeats * self.value_dim

    def cache_groups(self, kept: CacheGroup) -> tuple[CacheGroup, CacheGroup]:
        """Returns the groups of the delta rule's states, float32, and of the last inputs of the convolutions, which are
        numbers of the model's own dtype. A rank's share of either is a run of heads. `kept` is the group of the other
        layers' K and V."""
        states = CacheLayout(planes=1, heads=self.value_heads, dim=self.key_dim * self.value_dim, dtype="float32")
        inputs = CacheLayout(planes=self.kernel - 1, heads=self.key_heads, dim=self.width)
        apart = snapshot_blocks(kept, len(self.layers), (states, inputs))
        return (
            CacheGroup("delta", self.layers, states, CacheKind.STATE, apart),
            CacheGroup("convolution", self.layers, inputs, CacheKind.STATE, apart),
        )


def _linear_layers(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    types = raw.get("layer_types")
    if types is None:
        interval = integer(raw, "full_attention_interval", 4)
        types = [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]
    if not isinstance(types, list) or any(name not in (LINEAR, FULL) for name in types):
        raise bad("layer_types", types, f"not supported; supported: a list of {LINEAR} and {FULL}")
    if len(types) != layers:
        raise bad("layer_types", types, f"must name num_hidden_layers={layers} layers")
    linear = tuple(layer for layer, name in enumerate(types) if name == LINEAR)
    if not 0 < len(linear) < layers:
        raise bad("layer_types", types, f"must name layers of {LINEAR} and of {FULL}")
    return linear
