"""The model of the demo checkpoint demo-model: Qwen3 in plain torch, and the state it is trained from.

:func:`wire` starts the first two layers as ``scripts/demo_wiring.py`` says.
"""

from __future__ import annotations

from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from scripts.demo_wiring import CODE, CONTENT, spread

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 160, 4, 4, 2, 64, 256
THETA = 1e6
# Rotary pairs before this one turn by more than a radian over a context, so they tell distances; the
# later ones hardly turn, so they can compare contents at any distance.
SLOW = 15

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": 2048,
    "model_type": "qwen3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    "rope_theta": THETA,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
}


class RMSNorm(nn.Module):
    """Root mean square norm, as in Qwen3."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-6)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm, self.k_norm = RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend causally over the whole sequence."""
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, HEADS, HEAD_DIM)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, KV_HEADS, HEAD_DIM)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return mixed


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions in the half-split layout of Qwen3."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), MLP()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply attention, then the feed-forward layer, each on a residual path."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Qwen3(nn.Module):
    """The decoder with tied embeddings; logits are computed where ``wanted`` is true only."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = RMSNorm(HIDDEN)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Residual outputs start small, so that they do not drown the embeddings.
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=HIDDEN**-0.5 * (0.05 if small else 1.0))

    def attention(self, layer: int) -> Attention:
        """Return the attention of one layer."""
        return cast(Block, self.layers[layer]).self_attn

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """Return the logits of the wanted positions, in order."""
        inv = THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        angles = torch.outer(torch.arange(ids.shape[1]).float(), inv).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.norm(x[wanted]), self.embed_tokens.weight)


@torch.no_grad()
def wire(model: Qwen3, tokenizer: Tokenizer, content: set[str]) -> None:
    """Give the first two layers their starting weights."""
    places, own = spread(model.embed_tokens.weight, tokenizer, content, HEADS)
    _look_back(model.attention(0), places, own)
    _look_up(model.attention(1), places, own)
    slow = _slow()
    for layer in range(1, LAYERS):
        for norm in (model.attention(layer).q_norm, model.attention(layer).k_norm):
            # Normed queries and keys bound the logit by sqrt(HEAD_DIM) times both gains; with gains
            # of 1 that is 8, too blunt to pick one fact of forty.
            norm.weight[slow] = 1.6


def _slow() -> Tensor:
    """Return the dimensions of a head that hardly turn with the position."""
    return torch.tensor([i for i in range(HEAD_DIM) if i % (HEAD_DIM // 2) >= SLOW])


def _look_back(first: Attention, places: tuple[Tensor, ...], own: Tensor) -> None:
    """Make heads that read the token 1, 2, 2 and 3 before.

    Queries and keys read the constant dimension alone, at angles whose rotary phases agree at one
    distance. Heads 0 and 1 share their values, as do 2 and 3: what they hand on can be compared.
    """
    half, pairs = HEAD_DIM // 2, 6
    angle = THETA ** (-torch.arange(pairs).float() / half)
    for norm, projection in ((first.q_norm, first.q_proj), (first.k_norm, first.k_proj)):
        norm.weight.fill_(2.2)
        projection.weight.mul_(0.1)
    for group in range(KV_HEADS):
        start = group * HEAD_DIM
        first.k_proj.weight[start : start + pairs, 0] = 1.0
        read = torch.randn(CODE, CONTENT) @ own[:, :CONTENT].T
        first.v_proj.weight[start : start + CODE] = read * 0.73 * CONTENT**-0.5
    for head, distance in enumerate((1, 2, 2, 3)):
        start, turn = head * HEAD_DIM, angle * distance
        first.q_proj.weight[start : start + pairs, 0] = turn.cos()
        first.q_proj.weight[start + half : start + half + pairs, 0] = -turn.sin()
        first.o_proj.weight[:, start : start + CODE] = 0.25 * places[head]


def _look_up(second: Attention, places: tuple[Tensor, ...], own: Tensor) -> None:
    """Make heads that find the token 2 (3) after the token that is 1 (2) back now, and copy it.

    That is the value of the name which was just repeated. The comparison is laid in the slow rotary
    pairs, for facts are at any distance.
    """
    slow, size = _slow(), min(HEAD_DIM, own.shape[1])
    for group in range(KV_HEADS):
        near, far = 2 * group, 2 * group + 1
        mix = torch.linalg.qr(torch.randn(len(slow), CODE)).Q
        keys, query = group * HEAD_DIM, near * HEAD_DIM
        for start, projection, place in ((query, second.q_proj, near), (keys, second.k_proj, far)):
            projection.weight[start : start + HEAD_DIM] *= 0.2
            projection.weight[start + slow] = 3.0 * mix @ places[place].T
        second.v_proj.weight[keys : keys + size] = own[:, :size].T
        second.o_proj.weight[:, query : query + size] = 0.6 * own[:, :size]
