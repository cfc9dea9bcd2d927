"""DeepSeek V2, V3 and R1, and Kimi K2, which is V3 in other sizes: latent attention in every layer; the first layers
are dense, the others have experts (`config_experts`: chosen by softmax, or by sigmoid and correction, within groups)
and one that every token has. The head that predicts one token more is in `mtp`."""

from __future__ import annotations

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models.blocks import DecoderLayer, DecoderModel
from kvmesh.engine.models.latent import LatentAttention
from kvmesh.engine.models.moe import mlp_or_experts
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights


def build(config: ModelConfig, weights: Weights) -> DecoderModel:
    return DecoderModel(config, weights, [build_layer(config, weights, index) for index in weights.layers])


def build_layer(config: ModelConfig, weights: Weights, index: int) -> DecoderLayer:
    attention = LatentAttention(config, weights, layer_prefix(index) + "self_attn.")
    return DecoderLayer(config, weights, index, attention, mlp_or_experts(config, weights, index))
