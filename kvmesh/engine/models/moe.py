"""A mixture of experts in place of an MLP: a router chooses some experts for each token and weighs what they answer.

Each expert that any token has multiplies its own tokens (`models.experts`): at decode only the weights of chosen ones
are read. Every expert is cut by columns over the ranks, as a dense MLP is, so that all ranks have equal work whatever
the router chooses, or each rank has some experts whole where columns would be too few (`parallel.cuts_experts_whole`).
The router is whole at every rank, the shared expert cut by columns; the ranks' parts of all experts are summed at once.
Experts that lie over data-parallel ranks get their tokens from all of these (`models.dispatch`); a token is routed,
counted and has its shared expert at its own ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.config_experts import ExpertsConfig
from kvmesh.engine.expert_counts import ExpertCounts
from kvmesh.engine.models.blocks import MLP, RMSNorm, normed_by
from kvmesh.engine.models.dispatch import ExchangedExperts, exchanged
from kvmesh.engine.models.experts import GatedExpert, read_experts, read_shared
from kvmesh.engine.tensors import dense_prefix, expert_names, layer_prefix
from kvmesh.engine.weights import Weights
from kvmesh.errors import InternalError


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
        self.experts = exchanged(read_experts(config, weights, prefix), weights)
        self.shared, self.shared_gate = read_shared(config, weights, prefix), None
        if experts.shared_gate:
            self.shared_gate = _float32(weights, prefix + names.shared_gate)
        self.group = weights.mesh.mlp
        self.counts: ExpertCounts | None = None
        self.row = 0  # of this layer in `counts`

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
        chosen, shares = self.router(x)
        if self.counts is not None:
            self.counts.add(self.row, chosen)
        out = self.experts(x, chosen, shares)
        if self.shared is not None:
            out.add_(self._of_shared(self.shared, x))
        return self.group.all_reduce(out)

    def _of_shared(self, shared: GatedExpert, x: torch.Tensor) -> torch.Tensor:
        """Returns the shared expert's answer, gated where the model does so, float32 `[T, hidden_size]`."""
        answer = shared(x).float()
        if self.shared_gate is None:
            return answer
        return answer.mul_(functional.linear(x.float(), self.shared_gate).sigmoid())


def mlp_or_experts(config: ModelConfig, weights: Weights, layer: int) -> MLP | MoE:
    """Returns what stands at the place of the MLP in this layer."""
    if weights.config.has_experts(layer):
        return MoE(config, weights, layer)
    return MLP(config, weights, layer_prefix(layer) + dense_prefix(weights.config))


def count_choices(
    layers: Sequence[object], experts: ExpertsConfig, device: torch.device, first_layer: int = 0
) -> ExpertCounts:
    """Has those of a rank's layers that have experts count, from here on, how often each is chosen; the first is layer
    `first_layer` of the model. Raises InternalError where these are not the layers that have them."""
    own = range(first_layer, first_layer + len(layers))
    experts = replace(experts, layers=tuple(layer for layer in experts.layers if layer in own))
    counts = ExpertCounts(experts, device)
    blocks = {
        index: block
        for index, layer in enumerate(layers, first_layer)
        if isinstance(block := getattr(layer, "mlp", None), MoE)
    }
    if tuple(blocks) != experts.layers:
        raise InternalError(f"layers {list(blocks)} have experts, the configuration says {list(experts.layers)}")
    for row, block in enumerate(blocks.values()):
        block.counts, block.row = counts, row
    return counts


def exchanged_experts(layers: Sequence[object]) -> list[ExchangedExperts]:
    """Returns, in their order, those layers' experts that lie over several data-parallel ranks."""
    found = (getattr(getattr(layer, "mlp", None), "experts", None) for layer in layers)
    return [experts for experts in found if isinstance(experts, ExchangedExperts)]


def _float32(weights: Weights, name: str) -> torch.Tensor:
    """Reads a tensor of the router, which is float32 whatever the model computes in."""
    read = weights.view(name).to(weights.device, torch.float32, copy=True)
    weights.release(name)
    return read
