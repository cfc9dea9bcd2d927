"""The model of the demo checkpoint demo-moe: DeepSeek-V3 in plain torch, and the state it is trained from.

Latent attention (all heads read one normed latent and one rotated key a token), a first layer whose
feed-forward part is dense, then layers of routed experts beside a shared one. :func:`wire` starts the
first two layers as ``scripts/demo_wiring.py`` says. Rotary dimensions tell distances and the others compare
contents, so what is looked up may be at any distance.
"""

from __future__ import annotations

from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from scripts.demo_qwen3 import RMSNorm
from scripts.demo_wiring import CODE, CONTENT, spread

HIDDEN, LAYERS, HEADS, INNER = 160, 4, 4, 256
LATENT, NOPE, ROPE, VALUE = 128, 32, 16, 32
EXPERTS, TOP, GROUPS, EXPERT_INNER, SCALING = 8, 2, 2, 64, 1.5
THETA = 1e4
# What the correction bias of an expert moves by in a step, towards equal use.
BALANCE = 1e-3

CONFIG: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "kv_lora_rank": LATENT,
    "max_position_embeddings": 8192,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": EXPERT_INNER,
    "n_group": GROUPS,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": TOP,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    "rope_theta": THETA,
    "routed_scaling_factor": SCALING,
    "tie_word_embeddings": True,
    "topk_group": 1,
    "use_cache": True,
    "v_head_dim": VALUE,
}


class LatentAttention(nn.Module):
    """Multi-head latent attention whose queries come from one whole matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(HIDDEN, LATENT + ROPE, bias=False)
        self.kv_a_layernorm = RMSNorm(LATENT)
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.o_proj = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend causally over the whole sequence."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, HEADS, NOPE + ROPE).transpose(1, 2)
        latent, turned = self.kv_a_proj_with_mqa(x).split([LATENT, ROPE], dim=-1)
        keys = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, HEADS, NOPE + VALUE).transpose(1, 2)
        shared = _rotate(turned.unsqueeze(1), cos, sin).expand(-1, HEADS, -1, -1)
        q = torch.cat((q[..., :NOPE], _rotate(q[..., NOPE:], cos, sin)), dim=-1)
        k = torch.cat((keys[..., :NOPE], shared), dim=-1)
        # Torch's fused attention wants values as wide as keys.
        v = functional.pad(keys[..., NOPE:], (0, NOPE + ROPE - VALUE))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)[..., :VALUE]
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return mixed


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to pairs that lie side by side, as DeepSeek's are; they come out half a width apart."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1).to(x.dtype)


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.up_proj = nn.Linear(HIDDEN, inner, bias=False)
        self.down_proj = nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Router(nn.Module):
    """Sigmoid router that picks by corrected scores, within the best group, and weighs by the scores themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))
        self.uses = torch.zeros(EXPERTS)  # of each expert in the last forward

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of the experts of each row, (rows, TOP) both."""
        with torch.autocast("cpu", enabled=False):
            scores = functional.linear(x.float(), self.weight.float()).sigmoid()
            with torch.no_grad():
                corrected = (scores + self.e_score_correction_bias).view(-1, GROUPS, EXPERTS // GROUPS)
                best = corrected.topk(2, dim=-1).values.sum(-1).argmax(-1, keepdim=True)
                other = torch.arange(GROUPS) != best
                picked = corrected.masked_fill(other.unsqueeze(-1), -torch.inf).flatten(1).topk(TOP, dim=-1).indices
                self.uses = torch.bincount(picked.flatten(), minlength=EXPERTS).float()
            weights = scores.gather(1, picked)
            return weights / (weights.sum(-1, keepdim=True) + 1e-20) * SCALING, picked


class MoE(nn.Module):
    """Routed experts beside a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.experts = nn.ModuleList(MLP(EXPERT_INNER) for _ in range(EXPERTS))
        self.shared_experts = MLP(EXPERT_INNER)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the experts of each token."""
        rows = x.reshape(-1, HIDDEN)
        weights, picked = self.gate(rows)
        out: Tensor = self.shared_experts(rows).float()
        for number, expert in enumerate(self.experts):
            row, place = (picked == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(rows[row]).float() * weights[row, place, None])
        return out.to(x.dtype).view(x.shape)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = LatentAttention(), MoE() if layer else MLP(INNER)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply attention, then the feed-forward layer, each on a residual path."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DeepseekV3(nn.Module):
    """The decoder with tied embeddings; logits are computed where ``wanted`` is true only."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, HIDDEN)
        self.layers = nn.ModuleList(Block(layer) for layer in range(LAYERS))
        self.norm = RMSNorm(HIDDEN)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Residual outputs start small, so that they do not drown the embeddings.
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5 * (0.05 if small else 1.0))

    def attention(self, layer: int) -> LatentAttention:
        """Return the attention of one layer."""
        return cast(Block, self.layers[layer]).self_attn

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """Return the logits of the wanted positions, in order."""
        angles = torch.outer(torch.arange(ids.shape[1]).float(), _frequencies())
        cos, sin = angles.cos(), angles.sin()
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.norm(x[wanted]), self.embed_tokens.weight)

    @torch.no_grad()
    def balance(self) -> None:
        """Move the routers' correction biases towards experts that the last forward used less than the others."""
        for module in self.modules():
            if isinstance(module, Router):
                module.e_score_correction_bias.add_((module.uses.mean() - module.uses).sign(), alpha=BALANCE)


def _frequencies() -> Tensor:
    """Return the radians a position that each rotary pair turns by."""
    return THETA ** (-torch.arange(0, ROPE, 2).float() / ROPE)


# Logits that each rotary pair adds where its phases agree: the fast pairs tell neighbours apart, which takes most, and
# the others the places whose fast phases agree by chance, up to thousands of tokens away.
AGREE = torch.tensor([14.0, 8.0, 6.0, 5.0, 4.0, 3.0, 3.0, 3.0])
STEADY = LATENT - 1  # element of a latent that is large and the same for all tokens, so that its norm hardly varies


@torch.no_grad()
def wire(model: DeepseekV3, tokenizer: Tokenizer, content: set[str]) -> None:
    """Give the first two layers their starting weights."""
    table = model.embed_tokens.weight
    places, own = spread(table, tokenizer, content, 4)
    # Keys are not normed: were some tokens longer than others, the constant dimension that the first heads read
    # would be shorter in them.
    table[:, 1:] *= 1.1 / table[:, 1:].norm(dim=1, keepdim=True)
    _look_back(model.attention(0), places, own)
    _look_up(model.attention(1), places, own)


def _look_back(first: LatentAttention, places: tuple[Tensor, ...], own: Tensor) -> None:
    """Make heads that read the token 1, 2, 2 and 3 before.

    Queries and the shared rotated key read the constant dimension alone, at angles whose rotary phases agree
    at one distance. Heads 0 and 1 share their values, as do 2 and 3: what they hand on can be compared.
    """
    constant, root = 3.3, (NOPE + ROPE) ** 0.5  # of the normed stream; what scores are divided by
    latent, keys, query = first.kv_a_proj_with_mqa.weight, first.kv_b_proj.weight, first.q_proj.weight
    key_gain = 2.0
    for pair in (0, 1):
        read = torch.randn(CODE, CONTENT) @ own[:, :CONTENT].T
        latent[pair * CODE : (pair + 1) * CODE] = read * CONTENT**-0.5
    _steady(latent, 4.0)
    latent[LATENT:] *= 0.1
    latent[LATENT::2, 0] = key_gain
    for head, distance in enumerate((1, 2, 2, 3)):
        start, turn = head * (NOPE + ROPE), _frequencies() * distance
        query[start : start + NOPE + ROPE] *= 0.1
        gain = AGREE * root / (constant**2 * key_gain)
        query[start + NOPE : start + NOPE + ROPE : 2, 0] = gain * turn.cos()
        query[start + NOPE + 1 : start + NOPE + ROPE : 2, 0] = -gain * turn.sin()
        values, pair = head * (NOPE + VALUE) + NOPE, head // 2
        keys[values : values + CODE] = torch.eye(LATENT)[pair * CODE : (pair + 1) * CODE]
        first.o_proj.weight[:, head * VALUE : head * VALUE + CODE] = 0.27 * places[head]


def _look_up(second: LatentAttention, places: tuple[Tensor, ...], own: Tensor) -> None:
    """Make heads that find the token 2 (3) after the token that is 1 (2) back now, and copy it.

    That is the value of the name which was just repeated. Two heads look alike and copy half of it each.
    """
    latent, keys, query = second.kv_a_proj_with_mqa.weight, second.kv_b_proj.weight, second.q_proj.weight
    size = min(2 * VALUE, own.shape[1])
    copied = 2 * CODE  # where the token itself begins in the latent
    latent[copied : copied + size] = own[:, :size].T
    _steady(latent, 4.0)
    for pair in (0, 1):
        near, far = places[2 * pair], places[2 * pair + 1]
        latent[pair * CODE : (pair + 1) * CODE] = far.T
        for half in (0, 1):
            head = 2 * pair + half
            mix = torch.linalg.qr(torch.randn(NOPE, CODE)).Q
            start, key, out = head * (NOPE + ROPE), head * (NOPE + VALUE), head * VALUE
            query[start : start + NOPE + ROPE] *= 0.2
            query[start : start + NOPE] = 2.0 * mix @ near.T
            keys[key : key + NOPE] = 2.0 * mix @ torch.eye(LATENT)[pair * CODE : (pair + 1) * CODE]
            first, last = half * VALUE, min((half + 1) * VALUE, size)
            keys[key + NOPE : key + NOPE + last - first] = torch.eye(LATENT)[copied + first : copied + last]
            second.o_proj.weight[:, out : out + last - first] = 0.6 * own[:, first:last]


def _steady(latent: Tensor, gain: float) -> None:
    """Let the last element of a latent read the constant dimension alone."""
    latent[STEADY] = 0.0
    latent[STEADY, 0] = gain
