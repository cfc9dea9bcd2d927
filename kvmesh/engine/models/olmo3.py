"""Olmo 3: attention and the MLP are given the residual as it is, and what they answer is normed; queries and keys are
normed over all heads at once. Three layers of four see a window, with a rope of their own."""

from __future__ import annotations

import torch

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.models.blocks import MLP, Attention, DecoderModel, RMSNorm, RowNorm, normed_by
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights


class Olmo3Layer:
    """Is a decoder layer that norms answers only, before they join the residual."""

    input_norm = None

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        prefix = layer_prefix(index)
        own = prefix + "self_attn."
        self.attention = Attention(config, weights, own, None, RowNorm.of(config, weights, own))
        self.mlp = MLP(config, weights, prefix + "mlp.")
        self.after_attention, self.after_mlp = (
            RMSNorm(weights(f"{prefix}{name}_layernorm.weight"), config.rms_norm_eps)
            for name in ("post_attention", "post_feedforward")
        )

    def after(
        self, x: torch.Tensor, attended: torch.Tensor, following: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.after_attention(self.attention.out(attended))
        x = x + self.after_mlp(self.mlp(x))
        return x, normed_by(following, x)


def build(config: ModelConfig, weights: Weights) -> DecoderModel:
    return DecoderModel(config, weights, [Olmo3Layer(config, weights, index) for index in weights.layers])
