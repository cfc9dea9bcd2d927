"""The matrix products of a model: one class, whatever multiplies underneath."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvmesh.engine.matrix import matrix_of, read_matrix
from kvmesh.engine.parallel import SOLO, Cut
from kvmesh.engine.weights import Weights

if TYPE_CHECKING:
    from kvmesh.engine.models.blocks import RMSNorm


class Linear:
    """Multiplies by one matrix, or by several of one input joined along the output.

    `cut` says how the ranks share it. Cut along the output, each rank answers its own part; cut along the input, each
    multiplies its part of the input, the products are summed over the ranks, and the bias is added once, to the sum.
    `order` int64 `[outputs]`: which of this rank's outputs each one is of those that the checkpoint has."""

    def __init__(
        self,
        weights: Weights,
        names: Sequence[str],
        bias: bool,
        cut: Cut | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        self.group = SOLO if cut is None else weights.mesh.group(*cut.over)
        self.summed = cut is not None and cut.axis == 1 and self.group.size > 1
        files = [f"{name}.weight" for name in names]
        if order is None:
            self.matrix = read_matrix(weights, files, cut)
        else:
            self.matrix = matrix_of(weights, [torch.cat(weights.parts(*files, cut=cut))[order]])
            weights.release(*files)
        biased = cut if cut is None or cut.axis == 0 else None
        self.bias = weights(*(f"{name}.bias" for name in names), cut=biased) if bias else None
        if order is not None and self.bias is not None:
            self.bias = self.bias[order.to(self.bias.device)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.summed:
            return self.matrix.multiply(x, self.bias)
        out = self.group.all_reduce(self.matrix.multiply(x))
        return out if self.bias is None else out.add_(self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns residual + linear(x); the sum is made inside the matrix product where no other rank has a part in
        it."""
        if self.summed:
            return self(x).add_(residual)
        out = self.matrix.add_to(residual, x)
        return out if self.bias is None else out.add_(self.bias)

    def add_and_norm(
        self, residual: torch.Tensor, x: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what `add_to` does, and the same normed (as it is without a norm). The addition is part of the norm
        where it is not part of the matrix product."""
        if self.summed and norm is not None:
            return norm.of_sum(residual, self(x))
        total = self.add_to(residual, x)
        return total, total if norm is None else norm(total)
