"""From a checkpoint's bytes to torch tensors of the dtype and device that the engine runs in."""

from __future__ import annotations

import torch

from kvmesh.engine.checkpoint import Checkpoint

STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Weights:
    """Reads tensors of one checkpoint as `dtype` on `device`. Every tensor is copied out of the file mapping."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint.tensors

    def view(self, name: str) -> torch.Tensor:
        """The stored tensor, stored dtype, over the file mapping (CPU)."""
        info = self.checkpoint.tensors[name]
        flat = torch.frombuffer(self.checkpoint.raw(name), dtype=STORED[info.dtype])
        return flat.view(info.shape)

    def __call__(self, *names: str) -> torch.Tensor:
        """The tensor, or several joined along their first axis (one fused matrix)."""
        views = [self.view(name) for name in names]
        rows = sum(view.shape[0] for view in views)
        out = torch.empty((rows, *views[0].shape[1:]), dtype=self.dtype, device=self.device)
        at = 0
        for view in views:
            out[at : at + view.shape[0]].copy_(view)
            at += view.shape[0]
        return out
