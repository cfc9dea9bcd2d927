"""Llama 4, its language model: layers with rope see a chunk, the others everything, with queries that grow with their
position; experts are given inputs scaled by the router, beside one that every token has.

Its rope turns neighbours. Rows of the projections are read in the order that brings pairs half a head apart, in queries
and keys alike, which leaves their products as they are. Queries and keys are normed after rope; since rope leaves their
length as it is, they are normed before it here, as other families' are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.config_positions import NopeConfig
from kvmesh.engine.models.blocks import Angles, Attention, DecoderLayer, DecoderModel, HeadNorm
from kvmesh.engine.models.moe import mlp_or_experts
from kvmesh.engine.rope import Rotation
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights


class QueryGrowth:
    """Computes what queries of layers without rope are multiplied by, in the form of a rope's angles."""

    def __init__(self, nope: NopeConfig, head_dim: int, dtype: torch.dtype) -> None:
        self.nope, self.head_dim, self.dtype = nope, head_dim, dtype

    def __call__(self, positions: torch.Tensor) -> Angles:
        """Computes the factors of `positions` int64 `[T]`, and zeros: both `[T, 1, head_dim]`."""
        steps = torch.floor((positions.float() + 1.0) / self.nope.step)
        factors = torch.log1p(steps) * self.nope.growth + 1.0
        cos = factors.to(self.dtype)[:, None, None].expand(-1, 1, self.head_dim).contiguous()
        return cos, torch.zeros_like(cos)


class Llama4Model(DecoderModel):
    """Is a model some of whose layers have no rope: the second angles are theirs."""

    def __init__(self, config: ModelConfig, weights: Weights, layers: Sequence[DecoderLayer]) -> None:
        super().__init__(config, weights, layers)
        if config.nope is not None:
            self.local_rope = QueryGrowth(config.nope, config.head_dim, weights.dtype)

    def rotation(self, index: int, angles: Sequence[Angles]) -> Rotation:
        if self.config.nope is None or self.first_layer + index not in self.config.nope.layers:
            return self.layers[index].attention.rotation(*angles[0])
        return Rotation(self.config.heads, *angles[1], None, self.config.rms_norm_eps)


def build(config: ModelConfig, weights: Weights) -> DecoderModel:
    one = torch.ones(config.head_dim, dtype=weights.dtype, device=weights.device)
    norm = HeadNorm(one, one, config) if config.qk_norm_plain else None
    nope = () if config.nope is None else config.nope.layers
    layers = []
    for index in weights.layers:
        roped = index not in nope
        prefix = layer_prefix(index) + "self_attn."
        attention = Attention(config, weights, prefix, norm if roped else None, turns_neighbours=roped)
        layers.append(DecoderLayer(config, weights, index, attention, mlp_or_experts(config, weights, index)))
    return Llama4Model(config, weights, layers)
