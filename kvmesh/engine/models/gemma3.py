"""Gemma 3, its language model: Gemma 2's layers with every query and key head normed before it is rotated; layers with
a window have a rope of their own (`ModelConfig.local_rope`), nothing is capped."""

from __future__ import annotations

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models.blocks import DecoderModel, HeadNorm, norm_weight
from kvmesh.engine.models.gemma2 import GemmaLayer
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights


def build(config: ModelConfig, weights: Weights) -> DecoderModel:
    layers = []
    for index in weights.layers:
        prefix = layer_prefix(index) + "self_attn."
        q, k = (norm_weight(weights, f"{prefix}{name}.weight") for name in ("q_norm", "k_norm"))
        layers.append(GemmaLayer(config, weights, index, HeadNorm(q, k, config)))
    return DecoderModel(config, weights, layers)
