"""Qwen3-0.6B's shape (a checkpoint of 1.2 GB), and the least that its steps must read and multiply."""

from __future__ import annotations

from benchmarks.limits import Work
from benchmarks.peers.random_model import ModelShape

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 151936, 1024, 3072, 28, 16, 8, 128
LINEAR_WEIGHTS = LAYERS * (HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER)
HEAD_WEIGHTS = VOCAB * HIDDEN
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
QWEN3_06B = ModelShape(
    "qwen3-0.6b",
    "Qwen3",
    LAYERS,
    VOCAB,
    {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
)


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
