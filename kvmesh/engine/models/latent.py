"""DeepSeek's latent attention as a block: from a layer's input to queries and latent rows, and back out.

As in `blocks`, attention itself is not here: `project` answers what the step's plan (`kvmesh.engine.attention.latent`)
norms, rotates, writes and attends to with the layer's `up`, and `out` takes the heads' answers, `[T, H * V]`. Heads are
this rank's; what leads to latent rows is whole at every rank, so that each has the same rows in its pages.
"""

from __future__ import annotations

import torch

from kvmesh.engine.attention.latent import UpProjection
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.config_latent import LatentConfig
from kvmesh.engine.linear import Linear
from kvmesh.engine.models.blocks import DecoderModel, RMSNorm
from kvmesh.engine.parallel import Cut
from kvmesh.engine.rope import Rotation
from kvmesh.engine.weights import Weights
from kvmesh.errors import InternalError

NORM_EPS = 1e-6  # of the norms of ranks: transformers' modules do not read rms_norm_eps for them


class LatentAttention:
    """Has the matrices of one layer's latent attention. The angles that it is given are of `latent.rope` elements."""

    latent: LatentConfig
    sinks: torch.Tensor | None = None

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        assert config.latent is not None
        self.latent = latent = config.latent
        self.heads = config.heads
        heads, width = weights.config.heads, latent.nope + latent.rope
        by_head = Cut(0, ((heads, width),))
        down = [prefix + "kv_a_proj_with_mqa"]
        if latent.query_rank:  # queries and latents come out of one product
            down.insert(0, prefix + "q_a_proj")
            self.query_norm = RMSNorm(weights(prefix + "q_a_layernorm.weight"), NORM_EPS)
            self.query = Linear(weights, [prefix + "q_b_proj"], False, by_head)
        else:
            self.query = Linear(weights, [prefix + "q_proj"], False, by_head)
        self.down = Linear(weights, down, latent.bias)
        self.latent_norm = weights(prefix + "kv_a_layernorm.weight")
        up = weights(prefix + "kv_b_proj.weight", cut=Cut(0, ((heads, latent.nope + latent.value),)))
        self.up = UpProjection(up.view(self.heads, -1, latent.latent), latent.nope)
        self.out = Linear(weights, [prefix + "o_proj"], latent.bias, Cut(1, ((heads, latent.value),)))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Computes `[T, hidden_size]` → `[T, H * (nope + rope) + latent + rope]`: a token's queries, then its row,
        to both of which `rotation` is still to be done."""
        sizes = self.latent
        down = self.down(x)
        if sizes.query_rank:
            x = self.query_norm(down[:, : sizes.query_rank].contiguous())
        return torch.cat((self.query(x), down[:, sizes.query_rank :]), -1)

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
        """Returns what rows and the parts with position go through: the norm of latents, and the rotation of those of
        the queries and of the one that the keys share."""
        return Rotation(self.heads + 1, cos, sin, self.latent_norm, NORM_EPS)


def up_projections(model: DecoderModel) -> tuple[UpProjection, ...]:
    """Returns those of each layer. Raises InternalError where a layer has no latent attention."""
    found = tuple(layer.attention.up for layer in model.layers if isinstance(layer.attention, LatentAttention))
    if len(found) < len(model.layers):
        raise InternalError(f"{len(found)} of {len(model.layers)} layers have latent attention")
    return found
