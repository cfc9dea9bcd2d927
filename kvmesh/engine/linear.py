"""The matrix products of a model: one class, whatever multiplies underneath."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kvmesh.engine.weights import Weights


class Linear:
    """One matrix, or several of one input joined along the output."""

    def __init__(self, weights: Weights, names: Sequence[str], bias: bool) -> None:
        self.weight = weights(*(f"{name}.weight" for name in names))
        self.bias = weights(*(f"{name}.bias" for name in names)) if bias else None
        self.transposed = self.weight.t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + linear(x), the sum inside the matrix product."""
        out = torch.addmm(residual, x, self.transposed)
        return out if self.bias is None else out.add_(self.bias)
