"""A mixture of experts in place of an MLP: a router chooses some experts for each token and weighs what they answer.

Tokens are sorted by expert, and each expert that has any multiplies its own: at decode only the weights of chosen
experts are read. Every expert is cut by columns over the ranks, as a dense MLP is, so that all ranks have equal work
whatever the router chooses; the ranks' parts of all experts are summed at once. Counting the tokens of each expert is a
look at values by the host, so a model of experts is not captured (`DecoderModel.capturable`).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kvmesh.engine import ops
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.config_experts import ExpertsConfig
from kvmesh.engine.matrix import Matrix, matrix_of, read_matrix
from kvmesh.engine.models.blocks import MLP, RMSNorm, normed_by
from kvmesh.engine.parallel import Cut, share
from kvmesh.engine.tensors import dense_prefix, expert_names, layer_prefix
from kvmesh.engine.weights import Weights


class Router:
    """Chooses experts. Logits are products in float32 of the matrix `weight [experts, hidden_size]`, whole at every
    rank, and so are scores; `correction` and `bias` (of the logits) are float32 `[experts]`."""

    def __init__(
        self,
        experts: ExpertsConfig,
        weight: torch.Tensor,
        correction: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        self.experts, self.weight, self.correction, self.bias = experts, weight, correction, bias

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes `[T, hidden_size]` → experts int64 and their weights float32, both `[T, chosen]`."""
        logits = functional.linear(x.float(), self.weight, self.bias)
        if self.experts.score == "softmax_of_chosen":
            best = logits.topk(self.experts.chosen, -1)
            return best.indices, best.values.softmax(-1) * self.experts.scale
        scores = logits.softmax(-1) if self.experts.score == "softmax" else logits.sigmoid()
        choice = scores if self.correction is None else scores + self.correction
        if self.experts.groups > 1:
            choice = self._within_best_groups(choice)
        chosen = choice.topk(self.experts.chosen, -1).indices
        weights = scores.gather(1, chosen)
        if self.experts.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
        return chosen, weights * self.experts.scale

    def _within_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Returns `choice [T, experts]` with -inf for the experts of all but the best groups."""
        grouped = choice.view(len(choice), self.experts.groups, -1)
        best = grouped.topk(1 if self.experts.group_score == "best" else 2, -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.topk(self.experts.groups_kept, -1).indices, True)
        return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


class MoE:
    """Computes the weighted sum of what a token's experts answer, and what the shared expert does. Sums over experts
    are float32."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        experts = weights.config.experts
        assert experts is not None
        names, prefix = expert_names(weights.config), layer_prefix(layer)
        correction = _float32(weights, prefix + names.correction) if experts.correction else None
        bias = _float32(weights, prefix + names.router + ".bias") if experts.router_bias else None
        self.router = Router(experts, _float32(weights, prefix + names.router + ".weight"), correction, bias)
        self.experts = _read_experts(config, weights, prefix)
        self.scale_input = experts.scale_input
        self.shared = self.shared_gate = None
        if experts.shared_inner:
            gate, up, down = (prefix + name for name in names.shared)
            inner = (experts.shared_inner, 1)
            gate_up = read_matrix(weights, [gate, up], Cut(0, (inner, inner)))
            self.shared = _GatedExpert(config, gate_up, read_matrix(weights, [down], Cut(1, (inner,))))
        if experts.shared_gate:
            self.shared_gate = _float32(weights, prefix + names.shared_gate)
        self.group = weights.group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._summed(x).to(x.dtype)

    def add_and_norm(
        self, residual: torch.Tensor, x: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns residual + its answer, and the same normed (as it is without a norm)."""
        total = self._summed(x).add_(residual).to(x.dtype)
        return total, normed_by(norm, total)

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        """Computes `[T, hidden_size]` → float32 `[T, hidden_size]`, summed over experts and ranks."""
        chosen, weights = self.router(x)
        own = chosen.flatten()
        order = own.argsort(stable=True)
        tokens = order // chosen.shape[1]
        sorted_weights = weights.flatten()[order, None]
        out = torch.zeros_like(x, dtype=torch.float32) if self.shared is None else self._of_shared(self.shared, x)
        first = 0
        for expert, count in enumerate(own.bincount(minlength=len(self.experts)).tolist()):
            if count:
                rows, scale = tokens[first : first + count], sorted_weights[first : first + count]
                given = x[rows]
                if self.scale_input:
                    answer = self.experts[expert]((given.float() * scale).to(x.dtype)).float()
                else:
                    answer = self.experts[expert](given).float().mul_(scale)
                out.index_add_(0, rows, answer)
                first += count
        return self.group.all_reduce(out)

    def _of_shared(self, shared: _GatedExpert, x: torch.Tensor) -> torch.Tensor:
        """Returns the shared expert's answer, gated where the model does so, float32 `[T, hidden_size]`."""
        answer = shared(x).float()
        if self.shared_gate is None:
            return answer
        return answer.mul_(functional.linear(x.float(), self.shared_gate).sigmoid())


class _GatedExpert:
    """Is one expert's part at this rank: its answers have to be summed over the ranks. `bias` is of the joined gate and
    up, `down_bias` the whole one, at the one rank that adds it."""

    def __init__(
        self,
        config: ModelConfig,
        gate_up: Matrix,
        down: Matrix,
        bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        swiglu: tuple[float, float] | None = None,
    ) -> None:
        self.gate_up, self.down, self.bias, self.down_bias = gate_up, down, bias, down_bias
        self.activation, self.swiglu = config.activation, swiglu

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up.multiply(x, self.bias)
        inner = ops.gated(both, self.activation) if self.swiglu is None else ops.clamped_swiglu(both, *self.swiglu)
        return self.down.multiply(inner, self.down_bias)


def _read_experts(config: ModelConfig, weights: Weights, prefix: str) -> list[_GatedExpert]:
    """Reads this rank's part of every expert of a layer."""
    experts, names = weights.config.experts, expert_names(weights.config)
    assert experts is not None
    inner = (experts.inner, 1)
    if experts.stacked is None:
        read = []
        for index in range(experts.count):
            gate, up, down = (prefix + name for name in names.expert(index))
            gate_up = read_matrix(weights, [gate, up], Cut(0, (inner, inner)))
            read.append(_GatedExpert(config, gate_up, read_matrix(weights, [down], Cut(1, (inner,)))))
        return read
    files = [prefix + name for name in names.stacked]
    gates_ups, downs = (weights.view(name).transpose(1, 2) for name in files)  # [experts, outputs, inputs]
    biases: list[tuple[torch.Tensor | None, torch.Tensor | None]] = [(None, None)] * experts.count
    own = share(experts.inner, weights.group.rank, weights.group.size)
    columns = slice(own.start, own.stop)
    if experts.biases:
        both, last = (weights.view(name + "_bias").to(weights.dtype) for name in files)
        biases = []
        for of_both, of_down in zip(both, last, strict=True):
            joined = torch.cat([part[columns] for part in _gate_and_up(experts, of_both)]).to(weights.device)
            biases.append((joined, of_down.to(weights.device, copy=True) if weights.group.rank == 0 else None))
    read = []
    for both, down, (bias, down_bias) in zip(gates_ups, downs, biases, strict=True):
        gate_up = matrix_of(weights, [part[columns] for part in _gate_and_up(experts, both)])
        read.append(
            _GatedExpert(config, gate_up, matrix_of(weights, [down[:, columns]]), bias, down_bias, experts.swiglu)
        )
    weights.release(*files, *(f"{name}_bias" for name in files if experts.biases))
    return read


def _gate_and_up(experts: ExpertsConfig, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes gate and up `[inner, ...]` of one stacked expert apart."""
    if experts.stacked == "by_turns":
        return joined[::2], joined[1::2]
    gate, up = joined.chunk(2)
    return gate, up


def mlp_or_experts(config: ModelConfig, weights: Weights, layer: int) -> MLP | MoE:
    """Returns what stands at the place of the MLP in this layer."""
    experts = weights.config.experts
    if experts is not None and layer in experts.layers:
        return MoE(config, weights, layer)
    return MLP(config, weights, layer_prefix(layer) + dense_prefix(weights.config))


def _float32(weights: Weights, name: str) -> torch.Tensor:
    """Reads a tensor of the router, which is float32 whatever the model computes in."""
    read = weights.view(name).to(weights.device, torch.float32, copy=True)
    weights.release(name)
    return read
