"""GLM-4.5 to 4.7: the first layers are dense, the others have experts chosen by sigmoid and correction, and one that
every token has; a part of each head rotates; heads are normed where the config says so. The head that predicts one
token more is in `mtp`."""

from __future__ import annotations

from kvmesh.engine.models.qwen3_moe import build

__all__ = ["build"]
