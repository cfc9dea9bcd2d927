"""Granite: Llama's layers; what attention and the MLP answer is scaled before it joins the residual, and so are
embedding, scores and logits (all but the residual's scale is in `ModelConfig`)."""

from __future__ import annotations

import torch

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models.blocks import MLP, Attention, DecoderModel, RMSNorm, normed_by
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights


class GraniteLayer:
    """Is a decoder layer whose two answers are multiplied by `residual_scale`."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        prefix = layer_prefix(index)
        self.attention = Attention(config, weights, prefix + "self_attn.", head_norm=None)
        self.mlp = MLP(config, weights, prefix + "mlp.")
        self.input_norm = RMSNorm(weights(prefix + "input_layernorm.weight"), config.rms_norm_eps)
        self.post_norm = RMSNorm(weights(prefix + "post_attention_layernorm.weight"), config.rms_norm_eps)
        self.residual_scale = config.residual_scale

    def after(
        self, x: torch.Tensor, attended: torch.Tensor, following: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention.out(attended) * self.residual_scale
        x = x + self.mlp(self.post_norm(x)) * self.residual_scale
        return x, normed_by(following, x)


def build(config: ModelConfig, weights: Weights) -> DecoderModel:
    return DecoderModel(config, weights, [GraniteLayer(config, weights, index) for index in weights.layers])
