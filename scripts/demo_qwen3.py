"""The model of the demo checkpoint: Qwen3 in plain torch, and the state it is trained from.

A model this small spends most of its training on finding the two heads that every solution
has: one that reads the tokens just before, one that looks up what follows where the same
stood before. It starts here with rough ones (``_look_back`` and
``_look_up``), and training makes the rest of them.
"""

from __future__ import annotations

from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 128, 4, 4, 2, 64, 256
THETA = 1e6
# Rotary pairs before this one turn by more than a radian over a context, so they tell distances; the
# later ones hardly turn, so they can compare contents at any distance.
SLOW = 15
CODE = 24  # dimensions in which a head of the first layer hands on the token it reads


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
                std = 0.1 if name.startswith("embed") else HIDDEN**-0.5
                nn.init.normal_(parameter, std=std * (0.15 if small else 1.0))
        self._look_back()
        self._look_up()

    def _attention(self, layer: int) -> Attention:
        """Return the attention of one layer."""
        return cast(Block, self.layers[layer]).self_attn

    @torch.no_grad()
    def _look_back(self) -> None:
        """Start the heads of the first layer as heads that read the token 1, 2, 2 or 3 before.

        A fact is looked up by the name before its value, so every solution has such heads, and
        finding them is most of the training time. One embedding dimension is the same for all
        tokens; queries and keys read it alone, at angles whose rotary phases agree at one distance.
        """
        self.embed_tokens.weight[:, 0] = 0.3
        first = self._attention(0)
        first.q_norm.weight.fill_(2.2)
        first.k_norm.weight.fill_(2.2)
        half, pairs = HEAD_DIM // 2, 6
        angle = THETA ** (-torch.arange(pairs).float() / half)
        for projection in (first.q_proj, first.k_proj):
            projection.weight.mul_(0.1)
        first.v_proj.weight[:, 0] = 0.0
        for head in range(KV_HEADS):
            first.k_proj.weight[head * HEAD_DIM : head * HEAD_DIM + pairs, 0] = 1.0
        for head, distance in enumerate((1, 2, 2, 3)):
            start, turn = head * HEAD_DIM, angle * distance
            first.q_proj.weight[start : start + pairs, 0] = turn.cos()
            first.q_proj.weight[start + half : start + half + pairs, 0] = -turn.sin()

    @torch.no_grad()
    def _look_up(self) -> None:
        """Start the second layer with keys of the token 2 (3) before, queries of that 1 (2) before.

        Heads that share keys in the first layer share values there, so the two can be compared.
        The comparison is laid in the slow rotary pairs, for facts are at any distance. Gains stand
        above 1 in these: normed queries and keys bound the logit by sqrt(HEAD_DIM) times both
        gains, and 8 is too blunt to pick one fact of forty.
        """
        half = HEAD_DIM // 2
        slow = torch.tensor([i for i in range(HEAD_DIM) if i % half >= SLOW])
        for layer in range(1, LAYERS):
            for norm in (self._attention(layer).q_norm, self._attention(layer).k_norm):
                norm.weight[slow] = 1.6
        wrote, second = self._attention(0).o_proj.weight, self._attention(1)
        basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN)).Q
        places = basis[:, : HEADS * CODE].split(CODE, dim=1)  # where each first head writes what it reads
        for head, place in enumerate(places):
            wrote[:, head * HEAD_DIM : head * HEAD_DIM + CODE] = 0.25 * place
        for group in range(KV_HEADS):
            mix = torch.randn(len(slow), CODE) * 0.3
            near, far = 2 * group, 2 * group + 1
            second.q_proj.weight[near * HEAD_DIM + slow] = mix @ places[near].T
            second.k_proj.weight[group * HEAD_DIM + slow] = mix @ places[far].T

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
def alike(model: Qwen3, tokenizer: Tokenizer) -> None:
    """Start a word with and without its leading space from similar embeddings: it is one name."""
    vocab, table = tokenizer.get_vocab(), model.embed_tokens.weight
    for word, index in sorted(vocab.items()):
        spaced = vocab.get("\u0120" + word)
        if spaced is not None and len(word) > 1:
            table[index, 1:] = 0.8 * table[spaced, 1:] + 0.6 * table[index, 1:]
