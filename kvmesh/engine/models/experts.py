"""The experts of one layer at one rank, in the form that its device multiplies fastest: one C++ operator over all of
them where a CPU has it (kvmesh/engine/cpu/experts.cpp), kernels over tokens sorted on the device on a GPU
(kvmesh/engine/kernels/experts.py), a loop elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, Protocol

import torch

from kvmesh.engine import ops
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.config_experts import ExpertsConfig
from kvmesh.engine.cpu import native
from kvmesh.engine.kernels import kernels_for
from kvmesh.engine.matrix import LANES, Matrix, matrix_of, read_matrix
from kvmesh.engine.parallel import MLP_AXES, Cut, ExpertShare, expert_share
from kvmesh.engine.tensors import expert_names
from kvmesh.engine.weights import Weights


@dataclass(frozen=True, slots=True)
class ExpertGate:
    """Says how gate and up of an expert meet: act(gate) * up, or clamped (`ops.clamped_swiglu`) with `swiglu` of
    (alpha, limit)."""

    activation: str
    swiglu: tuple[float, float] | None = None

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        """Computes `[rows, 2 n]`, gate and up side by side → `[rows, n]`."""
        return ops.gated(both, self.activation) if self.swiglu is None else ops.clamped_swiglu(both, *self.swiglu)


class Experts(Protocol):
    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of what the experts chosen for each token answer, this rank's part: `x [T,
        hidden_size]`, experts int64 and their weights float32 `[T, chosen]` → float32 `[T, hidden_size]`."""


class GatedExpert:
    """Is one expert's part at this rank: its answers have to be summed over the ranks. `bias` is of the joined gate and
    up, `down_bias` the whole one, at the one rank that adds it."""

    def __init__(
        self,
        gate: ExpertGate,
        gate_up: Matrix,
        down: Matrix,
        bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        self.gate, self.gate_up, self.down, self.bias, self.down_bias = gate, gate_up, down, bias, down_bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.multiply(self.gate(self.gate_up.multiply(x, self.bias)), self.down_bias)


class LoopedExperts:
    """Sorts tokens by expert and has each of its experts, number `first` and the following, that has any multiply its
    own: the host looks at how many."""

    def __init__(self, experts: list[GatedExpert], scale_input: bool, first: int = 0) -> None:
        self.experts, self.scale_input, self.first = experts, scale_input, first

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        own = chosen.flatten()
        order = own.argsort(stable=True)
        tokens = order // chosen.shape[1]
        scales = weights.flatten()[order, None]
        out = torch.zeros_like(x, dtype=torch.float32)
        end = 0
        for number, count in enumerate(own.bincount(minlength=len(self.experts)).tolist(), -self.first):
            at, end = end, end + count
            if count and 0 <= number < len(self.experts):
                rows, scale, expert = tokens[at:end], scales[at:end], self.experts[number]
                given = x[rows]
                if self.scale_input:
                    answer = expert((given.float() * scale).to(x.dtype)).float()
                else:
                    answer = expert(given).float().mul_(scale)
                out.index_add_(0, rows, answer)
        return out


class PackedExperts:
    """Has the bfloat16 weights of all experts, or of those that are this rank's `own`, `inner` columns of each, in two
    packed tensors, which one operator multiplies by. Where the loop rounds products to bfloat16, this rounds only what
    `down` is given."""

    KINDS = ("silu", "gelu_tanh")

    def __init__(
        self, experts: ExpertsConfig, inner: int, hidden: int, gate: ExpertGate, own: range | None = None
    ) -> None:
        own = range(experts.count) if own is None else own
        self.first, self.count, self.inner, self.scale_input = own.start, len(own), inner, experts.scale_input
        self.kind = self.KINDS.index(gate.activation) if gate.swiglu is None else len(self.KINDS)
        self.alpha, self.limit = gate.swiglu or (0.0, 0.0)
        self.filling = torch.zeros(LANES, hidden, dtype=torch.bfloat16)  # rows behind the last of gate and of up
        self.down_filling = self.filling.new_zeros(-hidden % LANES, inner)
        columns, outputs = -(-inner // LANES) * LANES, hidden + len(self.down_filling)
        self.gate_up = torch.ops.kvmesh.pack_room.default(self.count * 2 * columns, hidden)
        self.down = torch.ops.kvmesh.pack_room.default(self.count * outputs, inner)
        self.bias = self.filling.new_zeros(self.count, 2 * inner) if experts.biases else None
        self.down_bias = self.filling.new_zeros(self.count, hidden) if experts.biases else None

    def read(self, index: int, parts: ExpertParts) -> None:
        """Packs number `index` of these experts: gate and up by turns of LANES columns."""
        dtype = torch.bfloat16
        gate, up, down = (part.to(dtype).contiguous() for part in (parts.gate, parts.up, parts.down))
        turns = []
        for at in range(0, self.inner, LANES):
            for half in (gate, up):
                turns.append(half[at : at + LANES])
                turns.append(self.filling[: LANES - len(turns[-1])])
        count = len(self.gate_up) // self.count
        torch.ops.kvmesh.pack_into.default(self.gate_up[index * count : (index + 1) * count], turns)
        count = len(self.down) // self.count
        torch.ops.kvmesh.pack_into.default(self.down[index * count : (index + 1) * count], [down, self.down_filling])
        if self.bias is not None and parts.bias is not None:
            self.bias[index] = parts.bias
        if self.down_bias is not None and parts.down_bias is not None:
            self.down_bias[index] = parts.down_bias

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.kvmesh.experts.default(
            x,
            chosen,
            weights,
            self.gate_up,
            self.down,
            self.count,
            self.first,
            self.inner,
            self.bias,
            self.down_bias,
            self.kind,
            self.alpha,
            self.limit,
            self.scale_input,
        )
        return out


class StackedExperts:
    """Has the weights of this rank's experts in two tensors on a GPU, which kernels multiply by: the host looks at no
    values."""

    def __init__(
        self,
        kernels: ModuleType,
        weights: Weights,
        experts: ExpertsConfig,
        own: ExpertShare,
        hidden: int,
        gate: ExpertGate,
    ) -> None:
        def room(*shape: int) -> torch.Tensor:
            return torch.zeros(len(own.experts), *shape, dtype=weights.dtype, device=weights.device)

        inner = len(own.columns)
        self.kernels, self.scale_input = kernels, experts.scale_input
        self.first, self.total = own.experts.start, experts.count
        self.kind = kernels.CLAMPED if gate.swiglu else kernels.GELU if gate.activation == "gelu_tanh" else kernels.SILU
        self.swiglu = gate.swiglu or (0.0, 0.0)
        self.gate_up, self.down = room(2 * inner, hidden), room(hidden, inner)
        self.bias = room(2 * inner) if experts.biases else None
        self.down_bias = room(hidden) if experts.biases else None

    def read(self, index: int, parts: ExpertParts) -> None:
        inner = len(parts.gate)
        self.gate_up[index, :inner].copy_(parts.gate)
        self.gate_up[index, inner:].copy_(parts.up)
        self.down[index].copy_(parts.down)
        if self.bias is not None and parts.bias is not None:
            self.bias[index].copy_(parts.bias)
        if self.down_bias is not None and parts.down_bias is not None:
            self.down_bias[index].copy_(parts.down_bias)

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.kernels.experts(
            x,
            chosen,
            weights,
            self.gate_up,
            self.down,
            self.bias,
            self.down_bias,
            self.kind,
            self.swiglu,
            self.scale_input,
            self.first,
            self.total,
        )
        return out


class ExpertParts(NamedTuple):
    """One expert's tensors at this rank, over the file mapping: gate and up `[inner, hidden_size]`, down `[hidden_size,
    inner]`, any strides; biases of gate and up joined, and of down where the expert is whole or at the first rank."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def read_experts(config: ModelConfig, weights: Weights, prefix: str) -> Experts:
    """Reads this rank's part of the experts of a layer."""
    experts = weights.config.experts
    assert experts is not None
    gate = ExpertGate(config.activation, experts.swiglu)
    own = expert_share(experts, weights.mesh, weights.experts_cut)
    made: PackedExperts | StackedExperts | None = None
    if weights.device.type == "cpu" and weights.dtype == torch.bfloat16 and native.loaded():
        made = PackedExperts(experts, len(own.columns), config.hidden_size, gate, own.experts)
    elif (kernels := kernels_for(weights.device.type, "experts")) is not None:
        made = StackedExperts(kernels, weights, experts, own, config.hidden_size, gate)
    if made is not None:
        for index, parts in enumerate(_parts(weights, experts, own, prefix)):
            made.read(index, parts)
        return made
    looped = []
    for parts in _parts(weights, experts, own, prefix):
        gate_up, down = matrix_of(weights, [parts.gate, parts.up]), matrix_of(weights, [parts.down])
        biases = [
            bias if bias is None else bias.to(weights.device, weights.dtype) for bias in (parts.bias, parts.down_bias)
        ]
        looped.append(GatedExpert(gate, gate_up, down, *biases))
    return LoopedExperts(looped, experts.scale_input, own.experts.start)


def read_shared(config: ModelConfig, weights: Weights, prefix: str) -> GatedExpert | None:
    """Reads this rank's part of the expert that every token of a layer has, if there is one."""
    experts = weights.config.experts
    assert experts is not None
    if not experts.shared_inner:
        return None
    gate, up, down = (prefix + name for name in expert_names(weights.config).shared)
    inner = (experts.shared_inner, 1)
    gate_up = read_matrix(weights, [gate, up], Cut(0, (inner, inner), MLP_AXES))
    return GatedExpert(ExpertGate(config.activation), gate_up, read_matrix(weights, [down], Cut(1, (inner,), MLP_AXES)))


def _parts(weights: Weights, experts: ExpertsConfig, own: ExpertShare, prefix: str) -> Iterator[ExpertParts]:
    """Yields this rank's experts of a layer in their order; what was read is given back, and nothing of others' experts
    is read."""
    names, columns = expert_names(weights.config), own.columns
    if experts.stacked is None:
        for index in own.experts:
            files = [prefix + name for name in names.expert(index)]
            gate, up = (weights.view(name, columns) for name in files[:2])
            outputs = range(weights.checkpoint.info(files[2]).shape[0])
            yield ExpertParts(gate, up, weights.view(files[2], outputs, columns))
            weights.release(*files)
        return
    files = [prefix + name for name in names.stacked]
    biased = [f"{name}_bias" for name in files if experts.biases]
    adds = columns.start == 0 or len(columns) == experts.inner
    for index in own.experts:
        one = range(index, index + 1)
        inputs = range(weights.checkpoint.info(files[0]).shape[1])
        gate, up = (half[0].T for half in _gate_and_up(weights, experts, files[0], columns, one, inputs))
        bias = down_bias = None
        if biased:
            bias = torch.cat([half[0] for half in _gate_and_up(weights, experts, biased[0], columns, one)])
            down_bias = weights.view(biased[1], one)[0].clone() if adds else None
        yield ExpertParts(gate, up, weights.view(files[1], one, columns)[0].T, bias, down_bias)
    weights.release(*files, *biased)


def _gate_and_up(
    weights: Weights, experts: ExpertsConfig, name: str, columns: range, *lead: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns these columns of gate and of up, which lie in one stacked tensor along the axis after those of `lead`."""
    first, end = columns.start, columns.stop
    if experts.stacked == "by_turns":
        both = weights.view(name, *lead, range(2 * first, 2 * end))
        return both[..., ::2], both[..., 1::2]
    gate, up = (weights.view(name, *lead, range(at + first, at + end)) for at in (0, experts.inner))
    return gate, up
