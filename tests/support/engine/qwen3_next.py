"""Tiny random checkpoints of Qwen3-Next, written by transformers, whose states and gates matter to every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
    "max_position_embeddings": 512,
    "mlp_only_layers": [1],
    "full_attention_interval": 3,
    "eos_token_id": 258,
}


def make_qwen3_next(
    path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, gain: float = 4.0, **config: Any
) -> Path:
    """Writes a checkpoint whose logits are about as large as `gain`."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(seed)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL | config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_(torch.linspace(-4.0, 0.5, len(weight)))  # some heads remember, some forget
            elif weight.dim() == 1:  # norms, dt_bias
                weight.add_(torch.randn(weight.shape) * 0.2)
            elif "conv1d" in name:
                weight.normal_(0.0, 0.6)
            else:
                weight.normal_(0.0, (gain if name.startswith("lm_head") else 1.3) * weight.shape[-1] ** -0.5)
    model.to(dtype).save_pretrained(path)
    return path
