"""MiniMax M2: experts chosen by sigmoid and correction in every layer; queries and keys are normed over all heads at
once, and a part of each head rotates."""

from __future__ import annotations

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models.blocks import Attention, DecoderLayer, DecoderModel, RowNorm
from kvmesh.engine.models.moe import mlp_or_experts
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights


def build(config: ModelConfig, weights: Weights) -> DecoderModel:
    layers = []
    for index in weights.layers:
        own = layer_prefix(index) + "self_attn."
        attention = Attention(config, weights, own, None, RowNorm.of(config, weights, own))
        layers.append(DecoderLayer(config, weights, index, attention, mlp_or_experts(config, weights, index)))
    return DecoderModel(config, weights, layers)
