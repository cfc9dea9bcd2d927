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
from kvmesh.engine.matrix import Matrix, read_matrix
from kvmesh.engine.models.blocks import MLP, RMSNorm, normed_by
from kvmesh.engine.parallel import Cut
from kvmesh.engine.tensors import expert_names, layer_prefix
from kvmesh.engine.weights import Weights


class Router:
    """Chooses experts. Logits are products in float32 of the matrix `weight [experts, hidden_size]`, whole at every
    rank, and so are scores; `correction` is float32 `[experts]`."""

    def __init__(self, experts: ExpertsConfig, weight: torch.Tensor, correction: torch.Tensor | None = None) -> None:
        self.experts, self.weight, self.correction = experts, weight, correction

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes `[T, hidden_size]` → experts int64 and their weights float32, both `[T, chosen]`."""
        logits = functional.linear(x.float(), self.weight)
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
    """Computes the weighted sum of what a token's experts answer, and what the shared expert does; each is
    down(act(gate(x)) * up(x)). Sums over experts are float32."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int) -> None:
        experts = weights.config.experts
        assert experts is not None
        names, prefix = expert_names(weights.config), layer_prefix(layer)
        correction = _float32(weights, prefix + names.correction) if experts.correction else None
        self.router = Router(experts, _float32(weights, prefix + names.router), correction)
        self.experts = [
            _GatedExpert(config, weights, [prefix + name for name in names.expert(index)], experts.inner)
            for index in range(experts.count)
        ]
        self.shared = None
        if experts.shared_inner:
            self.shared = _GatedExpert(config, weights, [prefix + name for name in names.shared], experts.shared_inner)
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
        out = torch.zeros_like(x, dtype=torch.float32) if self.shared is None else self.shared(x).float()
        first = 0
        for expert, count in enumerate(own.bincount(minlength=len(self.experts)).tolist()):
            if count:
                rows = tokens[first : first + count]
                answer = self.experts[expert](x[rows]).float()
                out.index_add_(0, rows, answer.mul_(sorted_weights[first : first + count]))
                first += count
        return self.group.all_reduce(out)


class _GatedExpert:
    """Is one expert's part at this rank: its answers have to be summed over the ranks."""

    def __init__(self, config: ModelConfig, weights: Weights, names: list[str], inner: int) -> None:
        gate, up, down = names
        self.gate_up: Matrix = read_matrix(weights, [gate, up], Cut(0, ((inner, 1), (inner, 1))))
        self.down: Matrix = read_matrix(weights, [down], Cut(1, ((inner, 1),)))
        self.activation = config.activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.multiply(ops.gated(self.gate_up.multiply(x), self.activation))


def mlp_or_experts(config: ModelConfig, weights: Weights, layer: int) -> MLP | MoE:
    """Returns what stands at the place of the MLP in this layer."""
    experts = weights.config.experts
    if experts is not None and layer in experts.layers:
        return MoE(config, weights, layer)
    return MLP(config, weights, layer_prefix(layer) + "mlp.")


def _float32(weights: Weights, name: str) -> torch.Tensor:
    """Reads a tensor of the router, which is float32 whatever the model computes in."""
    read = weights.view(name).to(weights.device, torch.float32, copy=True)
    weights.release(name)
    return read
