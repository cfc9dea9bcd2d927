"""Llama: plain rotary attention; biases only where the config asks for them."""

from __future__ import annotations

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models.blocks import MLP, Attention, DecoderLayer, DecoderModel
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights


def build(config: ModelConfig, weights: Weights) -> DecoderModel:
    layers = []
    for index in weights.layers:
        prefix = layer_prefix(index)
        attention = Attention(config, weights, prefix + "self_attn.", head_norm=None)
        layers.append(DecoderLayer(config, weights, index, attention, MLP(config, weights, prefix + "mlp.")))
    return DecoderModel(config, weights, layers)
