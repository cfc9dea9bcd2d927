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
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            RMSNorm(norm_weight(weights, f"{prefix}{name}_layernorm.weight"), config.rms_norm_eps)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )

    def before(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.attention.project(self.before_attention(x), cos, sin)

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + self.after_attention(self.attention.out(attended))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


def build(config: ModelConfig, weights: Weights) -> DecoderModel:
    return DecoderModel(config, weights, [GemmaLayer(config, weights, index) for index in range(config.layers)])
