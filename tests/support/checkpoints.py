"""Tiny Hugging Face checkpoints made on the spot: random weights, odd shapes, a tokenizer that can be served.

Weights are scaled so that attention looks at few tokens (wrong KV shows) and the best logits stand well apart
(greedy choices do not hang on rounding).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
}
GEMMAS = ("gemma2", "gemma3_text")
TOKENIZER_IDS = 256 + len(SPECIALS)  # the smallest vocabulary that the tokenizer fits in

ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}

DEEPSEEK_YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}

# Odd shapes on purpose: GQA ratios 1, 4 and 7, head_dim other than hidden / heads, each rope scaling in both spellings,
# tied and untied, vocabularies that are no multiple of 64, one file and several.
ZOO: dict[str, dict[str, Any]] = {
    "qwen3-gqa1-tied": {
        "family": "qwen3",
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 24,
        "tie_word_embeddings": True,
        "vocab_size": 301,
    },
    "qwen3-gqa4-yarn": {
        "family": "qwen3",
        "num_attention_heads": 8,
        "hidden_size": 48,
        "rope": "yarn",
        "shards": 3,
        "num_hidden_layers": 3,
        "max_position_embeddings": 512,
    },
    "qwen3-bias-linear": {
        "family": "qwen3",
        "attention_bias": True,
        "rope": "linear",
        "vocab_size": 277,
        "head_dim": 10,
    },
    "qwen2-gqa7-yarn-parameters": {
        "family": "qwen2",
        "num_attention_heads": 14,
        "hidden_size": 84,
        "head_dim": 12,
        "vocab_size": 389,
        "max_position_embeddings": 384,
        "rope": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 3.0,
                "original_max_position_embeddings": 128,
                "attention_factor": 1.2,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
            }
        },
    },
    "qwen2-gqa4-tied": {
        "family": "qwen2",
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "shards": 2,
        "head_dim": 14,
    },
    "llama-gqa7-linear": {
        "family": "llama",
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "hidden_size": 56,
        "head_dim": 20,
        "attention_bias": True,
        "mlp_bias": True,
        "rope": "linear",
    },
    "llama-gqa4-llama3": {
        "family": "llama",
        "num_key_value_heads": 1,
        "rope": "llama3",
        "tie_word_embeddings": True,
        "vocab_size": 500,
    },
    "llama-gqa2-llama3-parameters": {
        "family": "llama",
        "head_dim": 18,
        "shards": 4,
        "rope": {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 4.0,
                "low_freq_factor": 1.5,
                "high_freq_factor": 5.0,
                "original_max_position_embeddings": 32,
            }
        },
    },
}

# One for each way in which a family attends: windows of all layers, of some, by the old keys and the new; soft caps;
# ropes by layer type in both spellings; longrope with an original context that short prompts pass.
FAMILY_ZOO: dict[str, dict[str, Any]] = {
    "llama2": {"family": "llama", "num_key_value_heads": 4, "attention_bias": True, "hidden_size": 48, "head_dim": 12},
    "llama3": ZOO["llama-gqa2-llama3-parameters"],
    "mistral": {"family": "mistral", "sliding_window": 24},
    "mistral-some": {
        "family": "mistral",
        "sliding_window": 17,
        "layer_types": ["full_attention", "sliding_attention"],
        "num_attention_heads": 8,
    },
    "qwen2": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen3": {
        "family": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 33,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2": {
        "family": "gemma2",
        "sliding_window": 16,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 12.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "family": "gemma3_text",
        "sliding_window": 19,
        "sliding_window_pattern": 3,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 20,
        "rope": "linear",
        "rope_theta": 100_000.0,
        "rope_local_base_freq": 500.0,
        "tie_word_embeddings": True,
    },
    "gemma3-parameters": {
        "family": "gemma3_text",
        "sliding_window": 16,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        "rope": {
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 20_000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            }
        },
    },
    "phi3": {
        "family": "phi3",
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 64,
        "pad_token_id": 256,
        "partial_rotary_factor": 0.75,
        "rope": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 2.0],
            "long_factor": [1.0, 1.5, 3.0, 6.0, 7.5, 8.0],
        },
    },
    "phi3-window": {"family": "phi3", "pad_token_id": 256, "sliding_window": 24, "num_key_value_heads": 1},
    "granite": {
        "family": "granite",
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 0.6,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.8,
        "logits_scaling": 2.5,
        "tie_word_embeddings": True,
    },
    "olmo3": {
        "family": "olmo3",
        "sliding_window": 21,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "rope_theta": 20_000.0,
        "rope": "yarn",
        "pad_token_id": 256,
    },
    "qwen3_moe": {
        "family": "qwen3_moe",
        "num_hidden_layers": 4,
        "mlp_only_layers": [2],
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": False,
        "shards": 2,
    },
    "qwen3_moe-normed": {
        "family": "qwen3_moe",
        "decoder_sparse_step": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": 25,
    },
    "mixtral": {"family": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 30},
    "glm4_moe": {
        "family": "glm4_moe",
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "head_dim": 24,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 0.7,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "minimax_m2": {
        "family": "minimax_m2",
        "num_attention_heads": 6,
        "num_local_experts": 9,
        "num_experts_per_tok": 3,
        "intermediate_size": 40,
        "rotary_dim": 8,
    },
    "deepseek_v2": {
        "family": "deepseek_v2",
        "num_hidden_layers": 3,
        "q_lora_rank": None,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "n_routed_experts": 9,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.3,
        "rope": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v2-groups": {
        "family": "deepseek_v2",
        "num_attention_heads": 8,
        "q_lora_rank": 28,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 4,
        "v_head_dim": 16,
        "n_routed_experts": 12,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
    },
    "deepseek_v3": {
        "family": "deepseek_v3",
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "q_lora_rank": 30,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 10,
        "v_head_dim": 12,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 0.9,
        "num_nextn_predict_layers": 0,
        "shards": 3,
        "rope": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "kimi_k2": {
        "family": "deepseek_v3",
        "num_attention_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 16,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.4,
        "num_nextn_predict_layers": 0,
        "attention_bias": True,
    },
    "gpt_oss": {
        "family": "gpt_oss",
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "head_dim": 24,
        "sliding_window": 21,
        "attention_bias": True,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "intermediate_size": 40,
        "rope": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 8.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            }
        },
    },
    # Chunks that no page ends with, and steps of the queries' growth, end between the 83rd and the 96th token too.
    "llama4": {
        "family": "llama4_text",
        "num_hidden_layers": 4,
        "attention_chunk_size": 29,
        "no_rope_layers": [1, 0, 1, 1],
        "floor_scale": 11,
        "attn_scale": 0.4,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 5,
        "intermediate_size": 40,
        "intermediate_size_mlp": 96,
        "rope": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama4-plain": {
        "family": "llama4_text",
        "num_key_value_heads": 4,
        "attention_chunk_size": 32,
        "no_rope_layer_interval": 2,
        "attn_temperature_tuning": False,
        "use_qk_norm": False,
        "attention_bias": True,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
    },
}


def make_checkpoint(
    path: str | Path,
    *,
    family: str = "qwen3",
    seed: int = 0,
    shards: int = 1,
    tokenizer: bool = True,
    dtype: torch.dtype = torch.float32,
    rope: str | dict[str, Any] = "default",
    vocab_size: int = 331,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 16,
    tie_word_embeddings: bool = False,
    max_position_embeddings: int = 2048,
    **config: Any,
) -> Path:
    """Write a checkpoint folder and return its path. `rope` names an entry of ROPE or is the parameters themselves
    (a dict with the key "rope_parameters" is merged into config.json as it is, in transformers 5's spelling);
    `config` adds or overrides any key of config.json. The same arguments give the same bytes."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    scaling = ROPE[rope] if isinstance(rope, str) else rope
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if "rope_parameters" in scaling:
        del raw["rope_theta"]
        raw |= scaling
    elif scaling:
        raw["rope_scaling"] = scaling
    raw |= config
    if "kv_lora_rank" in raw:
        raw |= {"head_dim": raw["qk_rope_head_dim"], "num_key_value_heads": num_attention_heads}
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    tensors = {name: tensor.to(dtype) for name, tensor in _tensors(raw, seed).items()}
    _save(folder, tensors, shards)
    if tokenizer:
        save_tokenizer(folder, vocab_size, max_position_embeddings)
    return folder


def _tensors(raw: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    family, hidden, inner = raw["model_type"], raw["hidden_size"], raw["intermediate_size"]
    d = raw["head_dim"]
    q, kv = raw["num_attention_heads"] * d, raw["num_key_value_heads"] * d
    llama4 = family == "llama4_text"
    attention_bias, mlp_bias = raw.get("attention_bias", False), raw.get("mlp_bias", False)
    offset = 1.0 if family in GEMMAS else 0.0  # their norms multiply by 1 + weight
    tensors: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, gain: float, bias: bool) -> None:
        tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)
        if bias:
            tensors[f"{name}.bias"] = torch.randn(rows, generator=generator) * 0.3

    def norm(name: str, size: int, gain: float = 1.0) -> None:
        tensors[f"{name}.weight"] = gain * (1 + 0.2 * torch.randn(size, generator=generator)) - offset

    def join(name: str, parts: list[str]) -> None:
        tensors[f"{name}.weight"] = torch.cat([tensors.pop(f"{part}.weight") for part in parts])

    def gated(prefix: str, names: tuple[str, str, str], columns: int, bias: bool) -> None:
        gate, up, down = names
        matrix(prefix + gate, columns, hidden, 1.0, bias)
        matrix(prefix + up, columns, hidden, 1.0, bias)
        matrix(prefix + down, hidden, columns, 1.0, bias)

    embed = 0.3 if family in GEMMAS else 1.0  # they multiply it by sqrt(hidden)
    tensors["model.embed_tokens.weight"] = torch.randn(raw["vocab_size"], hidden, generator=generator) * embed
    for i in range(raw["num_hidden_layers"]):
        attention = f"model.layers.{i}.self_attn."
        mlp = f"model.layers.{i}.{'feed_forward' if llama4 else 'mlp'}."
        if family != "olmo3":
            norm(f"model.layers.{i}.input_layernorm", hidden)
        norm(f"model.layers.{i}.post_attention_layernorm", hidden, 5.0 if family in GEMMAS else 1.0)
        qkv_bias = True if family == "qwen2" else attention_bias
        if "kv_lora_rank" in raw:
            heads, nope, wide = raw["num_attention_heads"], raw["qk_nope_head_dim"], raw["v_head_dim"]
            rank, latent, turned = raw["q_lora_rank"], raw["kv_lora_rank"], raw["qk_rope_head_dim"]
            if rank:
                matrix(attention + "q_a_proj", rank, hidden, 1.5, attention_bias)
                norm(attention + "q_a_layernorm", rank)
            name = "q_b_proj" if rank else "q_proj"
            matrix(attention + name, heads * (nope + turned), rank or hidden, 1.8, False)
            matrix(attention + "kv_a_proj_with_mqa", latent + turned, hidden, 1.5, attention_bias)
            norm(attention + "kv_a_layernorm", latent)
            matrix(attention + "kv_b_proj", heads * (nope + wide), latent, 1.8, False)
            matrix(attention + "o_proj", hidden, heads * wide, 2.0, attention_bias)
        else:
            matrix(attention + "q_proj", q, hidden, 1.5, qkv_bias)
            matrix(attention + "k_proj", kv, hidden, 1.5, qkv_bias)
            matrix(attention + "v_proj", kv, hidden, 2.0, qkv_bias)
            matrix(attention + "o_proj", hidden, q, 2.0, attention_bias and family not in ("qwen2", "glm4_moe"))
        experts = _experts_of(raw, i)
        if family == "gpt_oss":
            tensors[attention + "sinks"] = 2 * torch.randn(raw["num_attention_heads"], generator=generator)
            tensors |= _stacked(mlp, raw, generator, biased=True)
        elif llama4 and (i + 1) % raw.get("interleave_moe_layer_step", 1) == 0:
            tensors |= _stacked(mlp, raw, generator, biased=False)
            gated(mlp + "shared_expert.", GATED, inner, False)
        elif llama4:
            gated(mlp, GATED, raw["intermediate_size_mlp"], False)
        elif experts is None:
            gated(mlp, GATED, inner, family in ("llama", "granite") and mlp_bias)
        else:
            block, names, correction = experts
            count, width = raw[EXPERTS[family]], raw.get("moe_intermediate_size", inner)
            matrix(f"model.layers.{i}.{block}gate", count, hidden, 1.5, False)
            if correction:  # as large as the differences of scores: it changes the choice, and would change weights
                drawn = torch.randn(count, generator=generator)
                tensors[f"model.layers.{i}.{correction}"] = 0.3 * drawn
            for n in range(count):
                gated(f"model.layers.{i}.{block}experts.{n}.", names, width, False)
            if raw.get("n_shared_experts"):
                gated(mlp + "shared_experts.", GATED, width * raw["n_shared_experts"], False)
        if family in GEMMAS:
            norm(f"model.layers.{i}.pre_feedforward_layernorm", hidden)
            norm(f"model.layers.{i}.post_feedforward_layernorm", hidden, 3.0)
        if family == "phi3":
            join(attention + "qkv_proj", [attention + name for name in ("q_proj", "k_proj", "v_proj")])
            join(mlp + "gate_up_proj", [mlp + name for name in ("gate_proj", "up_proj")])
        if family == "olmo3":
            norm(f"model.layers.{i}.post_feedforward_layernorm", hidden)
        if family in ("qwen3", "gemma3_text", "qwen3_moe") or raw.get("use_qk_norm"):
            norm(attention + "q_norm", d, 1.4)
            norm(attention + "k_norm", d, 1.4)
        if family in ("olmo3", "minimax_m2"):
            norm(attention + "q_norm", q, 1.4)
            norm(attention + "k_norm", kv, 1.4)
    norm("model.norm", hidden)
    if not raw["tie_word_embeddings"]:
        matrix("lm_head", raw["vocab_size"], hidden, 4.0, False)
    return tensors


def _stacked(block: str, raw: dict[str, Any], generator: torch.Generator, biased: bool) -> dict[str, torch.Tensor]:
    """A router, and one tensor for each matrix of all experts."""
    count, hidden, inner = raw["num_local_experts"], raw["hidden_size"], raw["intermediate_size"]

    def drawn(*shape: int, gain: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * gain

    made = {
        block + "router.weight": drawn(count, hidden, gain=1.5 / hidden**0.5),
        block + "experts.gate_up_proj": drawn(count, hidden, 2 * inner, gain=hidden**-0.5),
        block + "experts.down_proj": drawn(count, inner, hidden, gain=inner**-0.5),
    }
    if biased:
        made[block + "router.bias"] = drawn(count, gain=0.3)
        made[block + "experts.gate_up_proj_bias"] = drawn(count, 2 * inner, gain=0.3)
        made[block + "experts.down_proj_bias"] = drawn(count, hidden, gain=0.3)
    return made


GATED = ("gate_proj", "up_proj", "down_proj")
EXPERTS = {  # key of their number
    "qwen3_moe": "num_experts",
    "mixtral": "num_local_experts",
    "glm4_moe": "n_routed_experts",
    "minimax_m2": "num_local_experts",
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
}


def _experts_of(raw: dict[str, Any], layer: int) -> tuple[str, tuple[str, str, str], str] | None:
    """What the files on the Hub call the block of experts, the matrices of one, and the correction ("": none); None
    where the layer is dense."""
    family = raw["model_type"]
    if family == "qwen3_moe":
        step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers", [])
        return None if layer in dense or (layer + 1) % step else ("mlp.", GATED, "")
    if family in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        correction = "" if family == "deepseek_v2" else "mlp.gate.e_score_correction_bias"
        return None if layer < raw.get("first_k_dense_replace", 0) else ("mlp.", GATED, correction)
    if family in ("mixtral", "minimax_m2"):
        correction = "block_sparse_moe.e_score_correction_bias" if family == "minimax_m2" else ""
        return "block_sparse_moe.", ("w1", "w3", "w2"), correction
    return None


def _save(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def save_tokenizer(folder: Path, vocab_size: int, max_length: int) -> None:
    """Byte-level BPE: ids 0..255 are the bytes, then SPECIALS, then merges up to `vocab_size`."""
    if vocab_size < TOKENIZER_IDS:
        raise ValueError(f"vocab_size={vocab_size}: the tokenizer needs at least {TOKENIZER_IDS}; pass tokenizer=False")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pairs = iter([(a, b) for a in letters for b in letters] + [("Ġ", a) for a in letters])
    while TOKENIZER_IDS + len(merges) < vocab_size and (pair := next(pairs, None)) is not None:
        vocab["".join(pair)] = TOKENIZER_IDS + len(merges)
        merges.append(pair)
    for i, special in enumerate(SPECIALS):
        vocab[special] = 256 + i
    built = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(list(SPECIALS))
    built.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))


def prompts(count: int, vocab_size: int, *, seed: int = 0, low: int = 5, high: int = 90) -> list[list[int]]:
    """Random prompts of mixed lengths in [low, high)."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(low, high)).tolist() for _ in range(count)]
