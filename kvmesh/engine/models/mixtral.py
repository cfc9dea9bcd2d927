"""Mixtral: Llama's layers, each with experts in place of the MLP."""

from __future__ import annotations

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models.blocks import Attention, DecoderLayer, DecoderModel
from kvmesh.engine.models.moe import mlp_or_experts
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights


def build(config: ModelConfig, weights: Weights) -> DecoderModel:
    layers = []
    for index in weights.layers:
        attention = Attention(config, weights, layer_prefix(index) + "self_attn.", head_norm=None)
        layers.append(DecoderLayer(config, weights, index, attention, mlp_or_experts(config, weights, index)))
    return DecoderModel(config, weights, layers)
