"""Shapes of well-known models: the fields of their published config.json (Hugging Face) that say what they cost."""

from __future__ import annotations

from typing import Any


def _dense(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, head_dim: int = 128, tied: bool = False
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


def _sparse(shape: dict[str, Any], experts: int, of_token: int, inner: int) -> dict[str, Any]:
    moe = {"num_experts": experts, "num_experts_per_tok": of_token, "moe_intermediate_size": inner}
    return {**shape, **moe}


def _deepseek(heads: int, experts: int, first_dense: int, vocab: int) -> dict[str, Any]:
    """DeepSeek-V3's architecture."""
    return {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": heads,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": first_dense,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": vocab,
    }


LLAMA3, QWEN3 = 128_256, 151_936  # vocabularies

PRESETS: dict[str, dict[str, Any]] = {
    "llama2-7b": _dense(32, 4096, 32, 32, 11008, 32_000),
    "llama3-8b": _dense(32, 4096, 32, 8, 14336, LLAMA3),
    "llama3-70b": _dense(80, 8192, 64, 8, 28672, LLAMA3),
    "llama3-405b": _dense(126, 16384, 128, 8, 53248, LLAMA3),
    "mixtral-8x7b": _sparse(_dense(32, 4096, 32, 8, 14336, 32_000), 8, 2, 14336),
    "mixtral-8x22b": _sparse(_dense(56, 6144, 48, 8, 16384, 32_768), 8, 2, 16384),
    "qwen3-0.6b": _dense(28, 1024, 16, 8, 3072, QWEN3, tied=True),
    "qwen3-1.7b": _dense(28, 2048, 16, 8, 6144, QWEN3, tied=True),
    "qwen3-4b": _dense(36, 2560, 32, 8, 9728, QWEN3, tied=True),
    "qwen3-8b": _dense(36, 4096, 32, 8, 12288, QWEN3),
    "qwen3-14b": _dense(40, 5120, 40, 8, 17408, QWEN3),
    "qwen3-32b": _dense(64, 5120, 64, 8, 25600, QWEN3),
    "qwen3-30b-a3b": _sparse(_dense(48, 2048, 32, 4, 6144, QWEN3), 128, 8, 768),
    "qwen3-235b-a22b": _sparse(_dense(94, 4096, 64, 4, 12288, QWEN3), 128, 8, 1536),
    "gemma2-9b": {
        **_dense(42, 3584, 16, 8, 14336, 256_000, head_dim=256, tied=True),
        "model_type": "gemma2",
        "sliding_window": 4096,
    },
    "falcon-7b": {  # one KV head
        "model_type": "falcon",
        "num_hidden_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "multi_query": True,
        "vocab_size": 65_024,
        "tie_word_embeddings": True,
    },
    "deepseek-v3": _deepseek(heads=128, experts=256, first_dense=3, vocab=129_280),
    "kimi-k2": _deepseek(heads=64, experts=384, first_dense=1, vocab=163_840),
}
