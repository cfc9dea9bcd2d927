"""Qwen2: Llama's layers with biases on queries, keys and values (`ModelConfig.qkv_bias`)."""

from __future__ import annotations

from kvmesh.engine.models.llama import build

__all__ = ["build"]
