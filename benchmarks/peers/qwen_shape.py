"""A checkpoint of Qwen3-0.6B's shape with random bfloat16 weights, made once in the cache (1.2 GB)."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.limits import Work

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 151936, 1024, 3072, 28, 16, 8, 128
LINEAR_WEIGHTS = LAYERS * (HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER)
HEAD_WEIGHTS = VOCAB * HIDDEN
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2


def prefill_work(tokens: int) -> Work:
    """The least that one prompt costs: all weights read once, two FLOP a weight and token, causal attention, the head
    once."""
    return chunk_work(0, tokens)


def chunk_work(start: int, tokens: int) -> Work:
    """... that a chunk of so many tokens after `start` others costs, whose KV is read once."""
    attention = 4 * LAYERS * HEADS * HEAD_DIM * tokens * (start + tokens / 2)  # q·k and p·v, two FLOP each
    nbytes = 2 * (LINEAR_WEIGHTS + HEAD_WEIGHTS) + start * KV_BYTES_PER_TOKEN
    return Work(nbytes, 2 * LINEAR_WEIGHTS * tokens + attention + 2 * HEAD_WEIGHTS)


def decode_work(batch: int, context: int) -> Work:
    """... that one step of `batch` requests costs: all weights and each request's KV read once."""
    attention = 4 * LAYERS * HEADS * HEAD_DIM * context * batch
    nbytes = 2 * (LINEAR_WEIGHTS + HEAD_WEIGHTS) + batch * context * KV_BYTES_PER_TOKEN
    return Work(nbytes, 2 * batch * (LINEAR_WEIGHTS + HEAD_WEIGHTS) + attention)


def checkpoint() -> Path:
    """Its folder: ${XDG_CACHE_HOME:-~/.cache}/kvmesh/bench-qwen3-0.6b."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "kvmesh" / "bench-qwen3-0.6b"
    if not (folder / "done").exists():
        _make(folder)
        (folder / "done").touch()
    return folder


def _make(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_id=151645,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
