"""Qwen3 MoE: Qwen3's attention, with experts in place of the MLP in all layers or in those that the config says."""

from __future__ import annotations

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models.blocks import Attention, DecoderLayer, DecoderModel, HeadNorm
from kvmesh.engine.models.moe import mlp_or_experts
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights


def build(config: ModelConfig, weights: Weights) -> DecoderModel:
    return DecoderModel(config, weights, [build_layer(config, weights, index) for index in weights.layers])


def build_layer(config: ModelConfig, weights: Weights, index: int) -> DecoderLayer:
    attention = Attention(config, weights, layer_prefix(index) + "self_attn.", _head_norm(config, weights, index))
    return DecoderLayer(config, weights, index, attention, mlp_or_experts(config, weights, index))


def _head_norm(config: ModelConfig, weights: Weights, index: int) -> HeadNorm | None:
    if not config.qk_norm:
        return None
    q, k = (weights(f"{layer_prefix(index)}self_attn.{name}.weight") for name in ("q_norm", "k_norm"))
    return HeadNorm(q, k, config)
