"""Checkpoints with random bfloat16 weights, made once in the cache: ${XDG_CACHE_HOME:-~/.cache}/kvmesh/bench-NAME.

Whole models are scaled down in their layers, and in the vocabulary by as much, so that the head keeps the share of a
step that it has in the whole model; every width, the experts and how many of them a token has stay.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Describes a model by the config that transformers has for its family."""

    name: str
    family: str  # the class of the config, without "Config"
    layers: int
    vocab: int
    values: dict[str, Any]

    def scaled(self, layers: int) -> ModelShape:
        return ModelShape(
            f"{self.name}-{layers}of{self.layers}",
            self.family,
            layers,
            -(-self.vocab * layers // self.layers // 64) * 64,
            self.values,
        )

    def checkpoint(self) -> Path:
        """Returns its folder, after making it where it is not there."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = cache / "kvmesh" / f"bench-{self.name}"
        if not (folder / "done").exists():
            self._make(folder)
            (folder / "done").touch()
        return folder

    def _make(self, folder: Path) -> None:
        import torch
        import transformers

        config = getattr(transformers, f"{self.family}Config")(
            vocab_size=self.vocab, num_hidden_layers=self.layers, **self.values
        )
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)  # float32 would take twice the memory on the way
        try:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        finally:
            torch.set_default_dtype(torch.float32)
        model.save_pretrained(folder)


QWEN3_30B = ModelShape(
    "qwen3-30b-a3b",
    "Qwen3Moe",
    48,
    151936,
    {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": False,
    },
)
DEEPSEEK_V2_LITE = ModelShape(
    "deepseek-v2-lite",
    "DeepseekV2",
    27,
    102400,
    {
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
    },
)
