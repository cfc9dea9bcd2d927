"""Gemma 2: attention and MLP are normed before and after, by 1 + weight; scores and logits are capped, every other
layer sees a window, the embedding is scaled (all but the layer's shape is in `ModelConfig`)."""

from __future__ import annotations

import torch

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models.blocks import MLP, Attention, DecoderModel, HeadNorm, RMSNorm, norm_weight
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights


class GemmaLayer:
    """Is a decoder layer that norms what attention and the MLP answer once more before it joins the residual."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int, head_norm: HeadNorm | None = None) -> None:
        prefix = layer_prefix(index)
        self.attention = Attention(config, weights, prefix + "self_attn.", head_norm)
        self.mlp = MLP(config, weights, prefix + "mlp.")
        self.input_norm, self.after_attention, self.before_mlp, self.after_mlp = (
            RMSNorm(norm_weight(weights, f"{prefix}{name}_layernorm.weight"), config.rms_norm_eps)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )

    def after(
        self, x: torch.Tensor, attended: torch.Tensor, following: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, normed = self.before_mlp.of_sum(x, self.attention.out(attended), self.after_attention)
        answer = self.mlp(normed)
        if following is None:
            x = self.after_mlp(answer).add_(x)
            return x, x
        return following.of_sum(x, answer, self.after_mlp)


def build(config: ModelConfig, weights: Weights) -> DecoderModel:
    return DecoderModel(config, weights, [GemmaLayer(config, weights, index) for index in weights.layers])
