"""Qwen3: Llama's layers with every query and key head normed before it is rotated."""

from __future__ import annotations

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models.blocks import MLP, Attention, DecoderLayer, DecoderModel, HeadNorm
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights


def build(config: ModelConfig, weights: Weights) -> DecoderModel:
    layers = []
    for index in weights.layers:
        prefix = layer_prefix(index)
        q, k = (weights(f"{prefix}self_attn.{name}.weight") for name in ("q_norm", "k_norm"))
        attention = Attention(config, weights, prefix + "self_attn.", HeadNorm(q, k, config))
        layers.append(DecoderLayer(config, weights, index, attention, MLP(config, weights, prefix + "mlp.")))
    return DecoderModel(config, weights, layers)
