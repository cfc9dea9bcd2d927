"""Qwen3-Next: three layers of four are gated DeltaNet over a state of constant size, each fourth attends to everything
and gates what its heads answer. Norms multiply by 1 + weight; experts have a shared one with a gate beside them.

A layer of linear attention gives the step's `attend` a `DeltaInputs` in place of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kvmesh.engine import ops
from kvmesh.engine.attention.delta import DeltaInputs, DeltaStates
from kvmesh.engine.cache_memory import StateMemory
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.linear import Linear
from kvmesh.engine.models.blocks import Angles, Attend, Attention, DecoderModel, HeadNorm, RMSNorm, norm_weight
from kvmesh.engine.models.moe import mlp_or_experts
from kvmesh.engine.parallel import Cut, share
from kvmesh.engine.tensors import layer_prefix
from kvmesh.engine.weights import Weights


class GatedAttention(Attention):
    """Is attention whose query matrix makes a gate beside each head's query: the head's answer is multiplied by its
    sigmoid."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        q, k = (norm_weight(weights, f"{prefix}{name}.weight") for name in ("q_norm", "k_norm"))
        super().__init__(config, weights, prefix, HeadNorm(q, k, config), query_parts=2)
        self.queries = config.heads

    def project_gated(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `qkv [T, H + 2K, D]`, as `project` does, and the gates `[T, H * D]`."""
        tokens, size = len(x), self.head_dim
        q, kv = torch.split(self.qkv(x).view(tokens, -1, size), [2 * self.queries, self.heads - self.queries], 1)
        q = q.view(tokens, self.queries, 2, size)
        return torch.cat((q[:, :, 0], kv), 1), q[:, :, 1].reshape(tokens, -1)


class DeltaNet:
    """Has the matrices of one layer of gated DeltaNet. The checkpoint orders the joined projections by key head, and so
    are channels here, the convolution's too: a rank's share of heads is one run of rows."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        own, model = config.delta, weights.config.delta
        assert own is not None and model is not None
        self.own, self.eps = own, config.rms_norm_eps
        values = model.repeats * model.value_dim
        self.joined = Linear(
            weights, [prefix + "in_proj_qkvz"], False, Cut(0, ((model.key_heads, model.width + values),))
        )
        self.gates = Linear(weights, [prefix + "in_proj_ba"], False, Cut(0, ((model.key_heads, 2 * model.repeats),)))
        self.out = Linear(weights, [prefix + "out_proj"], False, Cut(1, ((model.value_heads, model.value_dim),)))
        self.norm = weights(prefix + "norm.weight")
        heads = share(model.key_heads, weights.mesh.tp.rank, weights.mesh.tp.size)
        # The file has the channels of all queries, of all keys, of all values: [channels, 1, kernel].
        file = weights(prefix + "conv1d.weight").squeeze(1)
        sizes = [model.key_heads * size for size in (model.key_dim, model.key_dim, values)]
        by_head = [part.view(model.key_heads, -1, model.kernel) for part in torch.split(file, sizes)]
        own_heads = torch.cat(by_head, 1)[heads.start : heads.stop]
        self.weight = own_heads.permute(2, 0, 1).float().contiguous()  # [kernel, K, W]
        by_value_head = Cut(0, ((model.value_heads, 1),))
        self.rates = -weights(prefix + "A_log", cut=by_value_head).float().exp()
        self.bias = weights(prefix + "dt_bias", cut=by_value_head).float()

    def project(self, x: torch.Tensor) -> tuple[DeltaInputs, torch.Tensor]:
        """Returns what attention is given, and the gates of its answer, `[T * V, value dim]`."""
        own, tokens = self.own, len(x)
        joined = self.joined(x).view(tokens, own.key_heads, -1)
        mixed, gate = joined[..., : own.width], joined[..., own.width :]
        rate, decay = self.gates(x).view(tokens, own.key_heads, 2, own.repeats).unbind(2)
        log_decay = self.rates * functional.softplus(decay.reshape(tokens, -1).float() + self.bias)
        rate = rate.reshape(tokens, -1).sigmoid().float()
        return DeltaInputs(mixed, self.weight, log_decay, rate, own.key_dim), gate.reshape(-1, own.value_dim)

    def gated(self, answer: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Norms each head's answer and multiplies it by silu of its gate: `[T, V * value dim]`."""
        normed = ops.rms_norm(answer.view(-1, self.own.value_dim), self.norm, self.eps)
        return normed.float().mul_(functional.silu(gate.float())).to(answer.dtype).view(answer.shape)


class Qwen3NextLayer:
    """Is one layer of either kind."""

    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        assert config.delta is not None
        prefix = layer_prefix(index)
        self.mixer: DeltaNet | GatedAttention
        if index in config.delta.layers:
            self.mixer = DeltaNet(config, weights, prefix + "linear_attn.")
        else:
            self.mixer = GatedAttention(config, weights, prefix + "self_attn.")
        self.mlp = mlp_or_experts(config, weights, index)
        self.input_norm, self.post_norm = (
            RMSNorm(norm_weight(weights, f"{prefix}{name}_layernorm.weight"), config.rms_norm_eps)
            for name in ("input", "post_attention")
        )

    @property
    def attention(self) -> Attention:
        """The attention of a layer that has KV."""
        assert isinstance(self.mixer, Attention)
        return self.mixer

    def after(
        self, x: torch.Tensor, attended: torch.Tensor, following: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, normed = self.mixer.out.add_and_norm(x, attended, self.post_norm)
        return self.mlp.add_and_norm(x, normed, following)


class Qwen3Next(DecoderModel):
    """Is the whole model. Its steps are not captured."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.own_layers = [Qwen3NextLayer(config, weights, index) for index in weights.layers]
        super().__init__(config, weights, self.own_layers)
        self.capturable = False  # gates lie between a layer's two halves, where pieces keep none

    def layer(
        self, index: int, x: torch.Tensor, normed: torch.Tensor, angles: Sequence[Angles], attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer, mixer = self.own_layers[index], self.own_layers[index].mixer
        if isinstance(mixer, DeltaNet):
            inputs, gate = mixer.project(normed)
            attended = mixer.gated(attend(index, inputs, None), gate)
        else:
            qkv, gate = mixer.project_gated(normed)
            attended = attend(index, qkv, self.rotation(index, angles)) * gate.sigmoid()
        return layer.after(x, attended, self.input_norm(index + 1))

    def state_backend(self, memory: StateMemory) -> DeltaStates:
        return DeltaStates(memory)


def build(config: ModelConfig, weights: Weights) -> DecoderModel:
    return Qwen3Next(config, weights)
