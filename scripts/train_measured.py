"""Train the checkpoints that speculation is measured with: a small GLM-4.5 whose layers are dense, with its MTP head,
and a model of a sixth of its size and the same vocabulary that drafts for it.

The head is layer `num_hidden_layers` of the files, as in those of GLM-4.5 and DeepSeek-V3: from the normed answer of
the last layer at token i and the embedding of token i + 1 it tells token i + 2. It is trained beside the model, as the
paper on DeepSeek-V3 does (section 2.2, with one depth and its loss times 0.3), and its loss reaches the model.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from typing import NamedTuple, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from scripts.demo_qwen3 import RMSNorm
from scripts.measured_texts import KINDS, held_out, tokenizer_text, trained_on
from scripts.train_demo import Recipe, encode_chat, optimizers_of, save, train_tokenizer

HEAD_DIM, ROTATED, THETA = 32, 16, 1e4
HEAD_LOSS = 0.3  # what the head's loss counts beside the model's


class Sizes(NamedTuple):
    """What one of the models is made of."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    mtp: bool  # with an MTP head


MODEL = Sizes(192, 3, 6, 2, 432, mtp=True)
DRAFT = Sizes(96, 2, 3, 1, 256, mtp=False)

CONFIG: dict[str, object] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "glm4_moe",
    "partial_rotary_factor": ROTATED / HEAD_DIM,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"partial_rotary_factor": ROTATED / HEAD_DIM, "rope_theta": THETA, "rope_type": "default"},
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_qk_norm": True,
}


def config_of(sizes: Sizes) -> dict[str, object]:
    """Return config.json, but for tokens."""
    return CONFIG | {
        "first_k_dense_replace": sizes.layers + 1,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "num_nextn_predict_layers": int(sizes.mtp),
    }


class Attention(nn.Module):
    """Grouped-query attention with normed heads, of which a part rotates."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, self.heads, self.kv_heads = sizes.hidden, sizes.heads, sizes.kv_heads
        self.q_proj = nn.Linear(hidden, self.heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(self.heads * HEAD_DIM, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Attend causally over the whole sequence."""
        batch, length, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).view(batch, length, self.heads, HEAD_DIM)).transpose(1, 2))
        k = rotate(self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, HEAD_DIM)).transpose(1, 2))
        v = self.v_proj(x).view(batch, length, self.kv_heads, HEAD_DIM).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return mixed


def rotate(x: Tensor) -> Tensor:
    """Turn the first ROTATED elements of each head by its position, in halves."""
    inv = THETA ** (-torch.arange(0, ROTATED, 2).float() / ROTATED)
    angles = torch.outer(torch.arange(x.shape[-2]).float(), inv)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    half = ROTATED // 2
    first, second, rest = x[..., :half], x[..., half:ROTATED], x[..., ROTATED:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down_proj = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(sizes), MLP(sizes)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(sizes.hidden), RMSNorm(sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention, then the feed-forward layer, each on a residual path."""
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class SharedHead(nn.Module):
    """The norm before the output matrix, which is the model's."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden)


class HeadBlock(Block):
    """The MTP head: a layer of its own behind the two norms and the matrix that joins what they answer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        hidden = sizes.hidden
        self.enorm, self.hnorm, self.shared_head = RMSNorm(hidden), RMSNorm(hidden), SharedHead(hidden)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def ahead(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return what the output matrix is given, of hidden states and the embeddings of the tokens after them."""
        out: Tensor = self.shared_head.norm(
            self(self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1)))
        )
        return out


class Glm4(nn.Module):
    """The decoder with tied embeddings, and its head, if it has one, as one layer more."""

    def __init__(self, vocab: int, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(vocab, sizes.hidden)
        blocks = [Block(sizes) for _ in range(sizes.layers)]
        self.layers = nn.ModuleList([*blocks, HeadBlock(sizes)] if sizes.mtp else blocks)
        self.norm = RMSNorm(sizes.hidden)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=sizes.hidden**-0.5 * (0.05 if small else 1.0))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute `[B, L]` → logits of tokens 1 to L, and those of the head of tokens 2 to L: `[B, L, V]` and
        `[B, L - 1, V]`, None without a head."""
        x = embedded = self.embed_tokens(ids)
        for layer in self.layers[: self.sizes.layers]:
            x = layer(x)
        hidden = self.norm(x)
        logits = functional.linear(hidden, self.embed_tokens.weight)
        if not self.sizes.mtp:
            return logits, None
        ahead = cast(HeadBlock, self.layers[self.sizes.layers]).ahead(embedded[:, 1:], hidden[:, :-1])
        return logits, functional.linear(ahead, self.embed_tokens.weight)


def recipe_of(sizes: Sizes, out: Path, steps: int) -> Recipe:
    """Return how a model of these sizes is trained."""
    return Recipe(lambda vocab: Glm4(vocab, sizes), lambda *_: None, config_of(sizes), out, steps)


MEASURED = Path("examples/measured-model")
RECIPES = {"model": recipe_of(MODEL, MEASURED, 400), "draft": recipe_of(DRAFT, Path("examples/measured-draft"), 500)}


def windows(tokenizer: Tokenizer, rng: random.Random, rows: int, length: int) -> Tensor:
    """Return int64 `[rows, length + 1]`: each row begins a chat, and goes on with others."""
    made = []
    for _ in range(rows):
        ids: list[int] = []
        while len(ids) <= length:
            ids += encode_chat(tokenizer, trained_on(rng))[0]
        made.append(ids[: length + 1])
    return torch.tensor(made)


def losses(model: Glm4, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss of the model and of its head, 0 without one, over windows."""
    logits, ahead = model(ids[:, :-1])
    own = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    if ahead is None:
        return own, torch.zeros(())
    return own, functional.cross_entropy(ahead.float().flatten(0, 1), ids[:, 2:].flatten())


@torch.no_grad()
def measure(model: Glm4, tokenizer: Tokenizer, kind: str, count: int = 24) -> dict[str, float]:
    """Measure one kind of held-out text: losses over its answers, how often the model tells the next token of the text,
    and how often the head tells what the model would (both greedy, after the tokens of the text)."""
    names = ("loss", "right", "head_loss", "accepted")
    sums = dict.fromkeys(names if model.sizes.mtp else names[:2], 0.0)
    tokens = 0
    for chat in held_out(kind, count):
        ids, mask = encode_chat(tokenizer, chat)
        row = torch.tensor([ids])
        logits, ahead = model(row[:, :-1])
        wanted = torch.tensor(mask)[2:]
        own, target = logits[0, 1:][wanted].float(), row[0, 2:][wanted]
        sums["loss"] += float(functional.cross_entropy(own, target, reduction="sum"))
        sums["right"] += int((own.argmax(-1) == target).sum())
        if ahead is not None:
            told = ahead[0][wanted].float()
            sums["head_loss"] += float(functional.cross_entropy(told, target, reduction="sum"))
            sums["accepted"] += int((own.argmax(-1) == told.argmax(-1)).sum())
        tokens += len(target)
    return {name: value / tokens for name, value in sums.items()}


def train(args: argparse.Namespace, recipe: Recipe, tokenizer: Tokenizer) -> Glm4:
    """Train from the seed until `steps` are over; the rate falls to nearly nothing by then."""
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    model = cast(Glm4, recipe.build(tokenizer.get_vocab_size()))
    optimizers = optimizers_of(model, args.lr)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    began = time.time()
    for step in range(args.steps):
        done = step / args.steps
        rate = min(1.0, (step + 1) / 40) * (0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * done)))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
        length = args.length if done > 0.75 else args.length // 2  # long contexts come last
        ids = windows(tokenizer, rng, max(1, args.tokens // length), length)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            own, head = losses(model, ids)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(own + HEAD_LOSS * head)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 25 == 0:
            clock = time.time() - began
            print(f"step {step} loss {own.item():.4f} head {head.item():.4f} seconds {clock:.0f}", flush=True)
        if step % 100 == 99:
            save(args.out, recipe, tokenizer, model)
    return model


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_measured",
        description="Train the checkpoints that speculation is measured with: a GLM-4.5 of 1.7 million parameters, all "
        "of its layers dense, with an MTP head (--kind model), or the one of 0.3 million that drafts for it (--kind "
        "draft), which takes that one's tokenizer. Texts are made from the seed, nothing is fetched; it takes ten "
        "minutes of one core, the small one two. The same seed, options and torch build give the same weights.",
    )
    parser.add_argument("--kind", choices=RECIPES, default="model", help="which checkpoint (model)")
    parser.add_argument("--out", type=Path, help="folder to write (examples/measured-model, examples/measured-draft)")
    parser.add_argument("--seed", type=int, default=7, help="seed of text, tokenizer and weights (7)")
    parser.add_argument("--steps", type=int, help="optimizer steps (model: 400, draft: 500)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a step (2048)")
    parser.add_argument("--length", type=int, default=768, help="tokens of a window, at the end (768)")
    parser.add_argument("--vocab", type=int, default=1024, help="size of the vocabulary (1024)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of the matrices (0.003)")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="train in float32 throughout")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    args = arguments()
    torch.set_num_threads(1)
    recipe = RECIPES[args.kind]
    args.out, args.steps = args.out or recipe.out, args.steps or recipe.steps
    if args.kind == "draft":
        tokenizer = Tokenizer.from_file(str(MEASURED / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(tokenizer_text(args.seed), args.vocab)
    model = train(args, recipe, tokenizer)
    save(args.out, recipe, tokenizer, model)
    for kind in KINDS:
        print(kind, " ".join(f"{name} {value:.3f}" for name, value in measure(model, tokenizer, kind).items()))


if __name__ == "__main__":
    main()
