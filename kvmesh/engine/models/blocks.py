"""What the families are built of. Plain classes over plain tensors: no autograd, no module call overhead.

Shapes: T tokens of the step, H query heads, K KV heads, D head_dim. Heads are this rank's, as is everything in the
`config` that blocks are built with (`parallel.share_of`); `weights.config` is the whole model's. Attention itself is
not here: a layer makes `qkv [T, H + 2K, D]`, the step's `attend` rotates queries and keys, writes K and V into pages
and answers `[T, H * D]`, and what a layer does after it goes on from there, up to the norm that the next layer begins
with. So all that depends on the number of tokens alone, but the rotation, lies between two calls of `attend`
(`kvmesh.engine.pieces`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from kvmesh.engine import ops
from kvmesh.engine.cache_memory import StateBackend, StateMemory
from kvmesh.engine.config import AttentionSpec, ModelConfig
from kvmesh.engine.kernels import kernels_for
from kvmesh.engine.linear import Linear
from kvmesh.engine.matrix import Matrix, read_matrix
from kvmesh.engine.parallel import MLP_AXES, Cut, share
from kvmesh.engine.rope import RotaryEmbedding, Rotation
from kvmesh.engine.stages import Stage
from kvmesh.engine.tensors import EMBED, HEAD, NORM, layer_prefix
from kvmesh.engine.weights import Weights
from kvmesh.errors import InternalError

Attend = Callable[..., torch.Tensor]  # of (layer, qkv, rotation); of a layer with states (layer, its inputs, None)
Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin of one rope, `[T, 1, rotary dim]`


def norm_weight(weights: Weights, name: str) -> torch.Tensor:
    """Returns what the norm `name` multiplies by: its weight, or 1 + the weight in float32 where the family's norms do
    so."""
    weight = weights(name)
    return weight.float() + 1.0 if weights.config.norm_adds_one else weight


class RMSNorm:
    """Divides by the root mean square. With a float32 weight and a narrower input, the product is rounded to the
    input's dtype (Gemma's order)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def of_sum(
        self, residual: torch.Tensor, x: torch.Tensor, inner: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns residual + x, or residual + inner(x), and that sum normed (`ops.add_rms_norm`)."""
        return ops.add_rms_norm(residual, x, self.weight, self.eps, None if inner is None else inner.weight)


def normed_by(norm: RMSNorm | None, x: torch.Tensor) -> torch.Tensor:
    """Returns `x` normed, or itself without a norm."""
    return x if norm is None else norm(x)


class HeadNorm:
    """Norms each query and key head over head_dim, with one weight for the queries and one for the keys."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, config: ModelConfig) -> None:
        self.weight = torch.cat((q.expand(config.heads, -1), k.expand(config.kv_heads, -1)))


class RowNorm:
    """Norms all query heads of a token at once, and all its key heads, by the mean square over all ranks' heads. Means
    and products are float32, rounded once. `q` and `k` are the weights of this rank's heads, `[H * D]` and `[K * D]`,
    float32."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, config: ModelConfig, weights: Weights) -> None:
        model, self.group = weights.config, weights.mesh.tp
        self.weights, self.eps = (q, k), config.rms_norm_eps
        copies = self.group.size * config.kv_heads // model.kv_heads  # of each key head, among all ranks
        counts = (model.heads * model.head_dim, copies * model.kv_heads * model.head_dim)
        self.counts = torch.tensor(counts, dtype=torch.float32, device=weights.device)

    @classmethod
    def of(cls, config: ModelConfig, weights: Weights, prefix: str) -> RowNorm:
        """Reads `q_norm` and `k_norm`, this rank's part."""
        size, model = config.head_dim, weights.config
        q = weights(prefix + "q_norm.weight", cut=Cut(0, ((model.heads, size),)))
        k = weights(prefix + "k_norm.weight", cut=Cut(0, ((model.kv_heads, size),)))
        return cls(q.float(), k.float(), config, weights)

    def __call__(self, qkv: torch.Tensor) -> None:
        """Changes the queries and keys of `qkv [T, (H + 2K) * D]` in place."""
        queries, keys = (len(weight) for weight in self.weights)
        parts = qkv[:, :queries], qkv[:, queries : queries + keys]
        squares = torch.stack([part.float().square().sum(-1) for part in parts], -1)
        scales = (self.group.all_reduce(squares) / self.counts + self.eps).rsqrt()
        for part, weight, scale in zip(parts, self.weights, scales.unbind(-1), strict=True):
            part.copy_(part.float() * scale[:, None] * weight)


class Attention:
    """Has the matrices of one layer's attention. `turns_neighbours`: in the checkpoint rope turns pairs of neighbours;
    here they lie half a head apart."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        prefix: str,
        head_norm: HeadNorm | None,
        row_norm: RowNorm | None = None,
        query_parts: int = 1,  # of a head: what the query matrix makes of it, in heads' sizes
        turns_neighbours: bool = False,
    ) -> None:
        self.rotated_heads = config.heads + config.kv_heads
        self.heads = self.rotated_heads + config.kv_heads
        self.head_dim = config.head_dim
        self.norm_weight = None if head_norm is None else head_norm.weight
        self.row_norm = row_norm
        self.eps = config.rms_norm_eps
        model, size = weights.config, config.head_dim
        heads = Cut(0, ((model.heads, query_parts * size), (model.kv_heads, size), (model.kv_heads, size)))
        names = ("qkv_proj",) if config.fused else ("q_proj", "k_proj", "v_proj")
        order = self._order() if turns_neighbours else None
        self.qkv = Linear(weights, [prefix + name for name in names], config.qkv_bias, heads, order)
        self.sinks = None  # float32 `[H]`
        if config.sinks:
            self.sinks = weights(prefix + "sinks", cut=Cut(0, ((model.heads, 1),))).float()
        self.out = Linear(weights, [prefix + "o_proj"], config.o_bias, Cut(1, ((model.heads, size),)))

    def _order(self) -> torch.Tensor:
        """Returns the outputs of queries and keys with the first of each pair before all second ones, then the
        values."""
        outputs = torch.arange(self.heads * self.head_dim).view(self.heads, self.head_dim)
        turned = outputs[: self.rotated_heads]
        return torch.cat((torch.cat((turned[:, ::2], turned[:, 1::2]), 1), outputs[self.rotated_heads :])).flatten()

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `qkv [T, H + 2K, D]`, to which `rotation` is still to be done."""
        joined = self.qkv(x)
        if self.row_norm is not None:
            self.row_norm(joined)
        return joined.view(-1, self.heads, self.head_dim)

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
        """Returns what queries and keys go through, with the angles of the layer's own rope."""
        return Rotation(self.rotated_heads, cos, sin, self.norm_weight, self.eps)


class AttentionBlock(Protocol):
    """Is what a layer has around attention: the product into it, the rotation, and the product out of it."""

    out: Linear
    sinks: torch.Tensor | None  # float32 `[H]`

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what the step's `attend` takes of `x [T, hidden_size]`."""

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
        """Returns what queries and keys go through, with the angles of the layer's own rope."""


class MLP:
    """Computes down(act(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        inner = (weights.config.intermediate_size, 1)
        names = ("gate_up_proj",) if config.fused else ("gate_proj", "up_proj")
        self.gate_up = Linear(
            weights, [prefix + name for name in names], config.mlp_bias, Cut(0, (inner, inner), MLP_AXES)
        )
        self.down = Linear(weights, [prefix + "down_proj"], config.mlp_bias, Cut(1, (inner,), MLP_AXES))
        self.activation = config.activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._inner(x))

    def add_and_norm(
        self, residual: torch.Tensor, x: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Linear`."""
        return self.down.add_and_norm(residual, self._inner(x), norm)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return ops.gated(self.gate_up(x), self.activation)


class FeedForward(Protocol):
    """Is what a layer does after attention: an MLP or experts; x is `[T, hidden_size]`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns its answer, in a new tensor."""

    def add_and_norm(
        self, residual: torch.Tensor, x: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns residual + its answer, in a new tensor or in `residual` itself, and the same normed (as it is without
        a norm)."""


class Layer(Protocol):
    """Is one decoder layer. Its `attention` projects what `input_norm` makes of the residual, or the residual."""

    @property
    def attention(self) -> AttentionBlock: ...

    @property
    def input_norm(self) -> RMSNorm | None: ...

    def after(
        self, x: torch.Tensor, attended: torch.Tensor, following: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the layer's answer of the residual `x [T, hidden_size]`, in a new tensor or in `x` itself, and of
        `attended [T, H * D]`. Returns it, and what the `following` layer's `input_norm` makes of it (itself without
        one): where the last addition is no part of a matrix product it is part of this norm."""


class DecoderLayer:
    def __init__(
        self, config: ModelConfig, weights: Weights, index: int, attention: AttentionBlock, mlp: FeedForward
    ) -> None:
        prefix = layer_prefix(index)
        self.attention: AttentionBlock = attention
        self.mlp = mlp
        self.input_norm = RMSNorm(weights(prefix + "input_layernorm.weight"), config.rms_norm_eps)
        self.post_norm = RMSNorm(weights(prefix + "post_attention_layernorm.weight"), config.rms_norm_eps)

    def after(
        self, x: torch.Tensor, attended: torch.Tensor, following: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, normed = self.attention.out.add_and_norm(x, attended, self.post_norm)
        return self.mlp.add_and_norm(x, normed, following)


class DecoderModel:
    """Is the whole model: embedding, layers, norm, head; or what one stage of a pipeline has of it, whose layers count
    from `first_layer` of the model."""

    norm: RMSNorm  # of the last stage, as the head is
    head: Matrix

    def __init__(self, config: ModelConfig, weights: Weights, layers: Sequence[Layer]) -> None:
        self.config = config
        # Between two attentions the host looks at no values: of experts, where kernels multiply.
        self.capturable = config.experts is None or kernels_for(weights.device.type, "experts") is not None
        self.layers, self.first_layer = layers, weights.layers.start
        self.stage = Stage(weights.mesh, config.hidden_size, weights.dtype, weights.device)
        self.embed = read_matrix(weights, [EMBED]) if self.stage.first and weights.reads_ends else None
        self.embed_scale = float(torch.tensor(config.embedding_scale).to(weights.dtype))  # rounded as transformers does
        self.rope = RotaryEmbedding(config.rope, config.rotated_dim, weights.dtype, weights.device)
        self.local_rope: Callable[[torch.Tensor], Angles] = self.rope
        if config.local_rope is not None:
            self.local_rope = RotaryEmbedding(config.local_rope, config.head_dim, weights.dtype, weights.device)
        self.group = weights.mesh.mlp
        self.words = [len(share(config.vocab_size, rank, self.group.size)) for rank in range(self.group.size)]
        if self.stage.last and weights.reads_ends:
            self.norm = RMSNorm(norm_weight(weights, NORM), config.rms_norm_eps)
            self.head = self._head(weights)

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """One spec for each of this rank's layers, with its sinks."""
        specs = self.config.attention[self.first_layer : self.first_layer + len(self.layers)]
        if not self.config.sinks:
            return specs
        return tuple(replace(spec, sinks=layer.attention.sinks) for spec, layer in zip(specs, self.layers, strict=True))

    def _head(self, weights: Weights) -> Matrix:
        """Returns this rank's part of the output matrix. It is tied to the embedding only where the checkpoint brings
        no head of its own or the very same one (as transformers does)."""
        own = share(self.config.vocab_size, self.group.rank, self.group.size)
        tied = self.config.tie_word_embeddings and HEAD in weights
        if HEAD not in weights or (tied and torch.equal(weights.view(HEAD), weights.view(EMBED))):
            name, part = EMBED, None if self.embed is None else self.embed.part(own)
        else:
            name, part = HEAD, None
        return part or read_matrix(weights, [name], Cut(0, ((self.config.vocab_size, 1),), MLP_AXES))

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Computes int64 `[T]`, `[T]` → `[T, hidden_size]` after the last layer, before the final norm. A stage of a
        pipeline goes on from what the one before it sends."""
        x, *angles = self.embedded(token_ids, positions)
        normed = normed_by(self.input_norm(0), x)
        for index in range(len(self.layers)):
            x, normed = self.layer(index, x, normed, angles, attend)
        return x

    def embedded(self, token_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Angles, Angles]:
        """Returns what the first layer starts from, and the angles of layers without a window and of those with one
        (the same tensors where the model has one rope)."""
        angles = self.rope(positions)
        local = angles if self.local_rope is self.rope else self.local_rope(positions)
        if self.embed is None:
            return self.stage.receive(len(token_ids)), angles, local
        x = self.embed.rows(token_ids)
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        return x, angles, local

    def layer(
        self, index: int, x: torch.Tensor, normed: torch.Tensor, angles: Sequence[Angles], attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes one layer, attention included, of the residual and of what the layer's `input_norm` made of it;
        `angles` as of `embedded`. Returns both for the next layer."""
        layer = self.layers[index]
        qkv = layer.attention.project(normed)
        return layer.after(x, attend(index, qkv, self.rotation(index, angles)), self.input_norm(index + 1))

    def rotation(self, index: int, angles: Sequence[Angles]) -> Rotation:
        """Returns what the queries and keys of a layer go through; `angles` as of `embedded`."""
        return self.layers[index].attention.rotation(*angles[bool(self.config.windows[self.first_layer + index])])

    def input_norm(self, index: int) -> RMSNorm | None:
        """Returns the norm that a layer begins with; None where it begins with none, and behind the last, whose answer
        is normed where logits are asked for (`logits`), or at the next stage."""
        return self.layers[index].input_norm if index < len(self.layers) else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Computes `[rows, hidden_size]` → `[rows, vocab_size]`, float32, the same bytes at every rank."""
        logits = self.group.all_gather(self.head.logits(self.norm(hidden)), self.words)
        if self.config.logit_divisor != 1.0:
            logits = logits / self.config.logit_divisor
        cap = self.config.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    def state_backend(self, memory: StateMemory) -> StateBackend:
        """Returns what computes the model's layers with states over `memory`; only of a model that has such."""
        raise InternalError(f"{self.config.architecture} has no layers with states")
