"""MLPs by columns over ranks that have different tokens: attention by context, the MLP by tensor, on the same ranks.

Along cp a rank computes some tokens of a step up to the end of attention. An MLP is shared by columns over cp and tp
(`parallel.MLP_AXES`), so all of these ranks need all tokens' inputs, and each needs the sum for its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvmesh.engine.models.blocks import FeedForward, Layer, RMSNorm
from kvmesh.engine.parallel import Group
from kvmesh.errors import InternalError


class SharedTokens:
    """Knows how many of the step's tokens each rank of cp computes: `counts`, set anew for each step."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.counts: Sequence[int] = ()


class GatheredFeedForward:
    """Gathers the tokens of all ranks of cp, computes `inner` of all of them, and keeps what is this rank's. The sum
    over the ranks is part of `inner`."""

    def __init__(self, inner: FeedForward, tokens: SharedTokens) -> None:
        self.inner, self.tokens = inner, tokens

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        group, counts = self.tokens.group, self.tokens.counts
        first = sum(counts[: group.rank])
        return self.inner(group.gather_rows(x, counts))[first : first + counts[group.rank]]

    def add_and_norm(
        self, residual: torch.Tensor, x: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `FeedForward`."""
        answer = self(x)
        if norm is not None:
            return norm.of_sum(residual, answer)
        total = residual + answer
        return total, total


def share_tokens(layers: Sequence[Layer], group: Group) -> SharedTokens | None:
    """Makes the MLPs of `layers` those of ranks that share the tokens of a step, over `group`. Returns None, and
    changes nothing, where that is one rank."""
    if group.size == 1:
        return None
    tokens = SharedTokens(group)
    for layer in layers:
        if not hasattr(layer, "mlp"):
            raise InternalError(f"{type(layer).__name__} has no MLP that ranks of cp could share")
        layer.mlp = GatheredFeedForward(layer.mlp, tokens)
    return tokens
