"""Phi-3: Llama's layers; its files join queries, keys and values, and gate and up (`ModelConfig.fused`)."""

from __future__ import annotations

from kvmesh.engine.models.llama import build

__all__ = ["build"]
