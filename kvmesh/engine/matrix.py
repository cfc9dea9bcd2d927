"""A weight matrix in the form that its device multiplies fastest; one copy of it, for products, rows and head alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from kvmesh.engine.cpu import native
from kvmesh.engine.parallel import Cut
from kvmesh.engine.weights import Weights

LANES = 32  # outputs that a packed weight holds side by side (kvmesh/engine/cpu/linear.cpp)


class Matrix(Protocol):
    """Is a matrix `[outputs, inputs]` in some form; x is `[rows, inputs]` of the same dtype."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x @ matrix.T + bias `[rows, outputs]`."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns residual + x @ matrix.T, in a new tensor or in `residual` itself, which nobody reads afterwards."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x @ matrix.T in float32."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the matrix's rows of these int64 ids `[T]`: `[T, inputs]`."""

    def part(self, rows: range) -> Matrix | None:
        """Returns these outputs alone, over the same memory; None where the form does not allow it."""


class DenseMatrix:
    """Is a matrix as torch has it: any dtype, any device."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.transposed = weight, weight.t()

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.linear(x, self.weight, bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if residual.is_cuda:  # in place: else the residual is copied first, which takes as long as a small product
            return residual.addmm_(x, self.transposed)
        return torch.addmm(residual, x, self.transposed)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight).float()

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight)

    def part(self, rows: range) -> DenseMatrix:
        return DenseMatrix(self.weight[rows.start : rows.stop])


class PackedMatrix:
    """Is a bfloat16 matrix on a CPU, packed for its bf16 dot product: kvmesh/engine/cpu/linear.cpp has the layout. Sums
    are float32 in one order whatever the number of rows, and are rounded once; a residual is added to the rounded
    product."""

    def __init__(self, packed: torch.Tensor, outputs: int, inputs: int) -> None:
        self.packed, self.outputs, self.inputs = packed, outputs, inputs

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor]) -> PackedMatrix:
        """Makes one matrix of several `[outputs, inputs]` one under the other, with any strides between rows."""
        packed = torch.ops.kvmesh.pack.default([part.to(torch.bfloat16) for part in parts])
        return cls(packed, sum(part.shape[0] for part in parts), parts[0].shape[1])

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = torch.ops.kvmesh.linear.default(x, self.packed, self.outputs, bias, None, False)
        return out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.kvmesh.linear.default(x, self.packed, self.outputs, None, residual, False)
        return out

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.kvmesh.linear.default(x, self.packed, self.outputs, None, None, True)
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.kvmesh.packed_rows.default(self.packed, ids, self.outputs, self.inputs)
        return out

    def part(self, rows: range) -> PackedMatrix | None:
        if rows.start % LANES:
            return None
        panels = self.packed[rows.start // LANES : -(-rows.stop // LANES)]
        return PackedMatrix(panels, len(rows), self.inputs)


def matrix_of(weights: Weights, parts: Sequence[torch.Tensor]) -> Matrix:
    """Makes one matrix of several `[outputs, inputs]` over the file mapping, of any strides, joined along their
    outputs."""
    own = [part.to(weights.dtype).contiguous() for part in parts]
    if weights.device.type == "cpu" and weights.dtype == torch.bfloat16 and native.loaded():
        return PackedMatrix.of(own)
    return DenseMatrix(torch.cat(own).to(weights.device))


def read_matrix(weights: Weights, names: Sequence[str], cut: Cut | None = None) -> Matrix:
    """Reads the matrices joined along their outputs, this rank's part of them."""
    if weights.device.type == "cpu" and weights.dtype == torch.bfloat16 and native.loaded():
        packed = PackedMatrix.of(weights.parts(*names, cut=cut))
        weights.release(*names)
        return packed
    return DenseMatrix(weights(*names, cut=cut))
