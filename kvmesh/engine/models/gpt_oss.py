"""gpt-oss: biases everywhere, attention sinks, a window in every other layer, experts with clamped swiglu (all but the
layer's shape is in `ModelConfig`)."""

from __future__ import annotations

from kvmesh.engine.models.mixtral import build

__all__ = ["build"]
