"""Mistral and Ministral: Llama's layers; all of them, or those that `layer_types` names, see a window only
(`ModelConfig.windows`)."""

from __future__ import annotations

from kvmesh.engine.models.llama import build

__all__ = ["build"]
