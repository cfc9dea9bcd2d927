"""Train the demo checkpoint of examples/demo-model: tokenizer, weights and their metadata.

The model is a small Qwen3 written in plain torch (the names of its parameters are those of
Hugging Face), trained to answer questions on facts in its context. It is meant to be wrong
as soon as the KV cache is: an answer can only come from the block that holds the fact.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

from scripts.demo_corpus import Message, tokenizer_text, training_chat

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PAD, IM_START, IM_END = 0, 1, 2
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
# Digits go in pairs, the first with its space: a code of four digits is two tokens, so the
# second half is looked up by the first. Everything else is split as GPT-2 does.
SPLIT = r" ?\p{N}{1,2}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": IM_END,
    "head_dim": 48,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
}
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 128, 4, 4, 2, 48, 256
QK_GAIN = 1.3


class RMSNorm(nn.Module):
    """Root mean square norm, as in Qwen3."""

    def __init__(self, size: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), gain))

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
        # Normed queries and keys bound the attention logit by sqrt(HEAD_DIM) times both gains. With
        # gains of 1 that is 7, too blunt to pick one fact of forty; growing it takes thousands of steps.
        self.q_norm, self.k_norm = RMSNorm(HEAD_DIM, QK_GAIN), RMSNorm(HEAD_DIM, QK_GAIN)

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

    @torch.no_grad()
    def _look_back(self) -> None:
        """Start the heads of the first layer as heads that read the token 1, 2, 3 or 4 before.

        A fact is looked up by the name before its value, so every solution has such heads, and
        finding them is most of the training time. One embedding dimension is the same for all
        tokens; queries and keys read it alone, at angles whose rotary phases agree at one distance.
        """
        self.embed_tokens.weight[:, 0] = 0.3
        first = cast(Attention, cast(Block, self.layers[0]).self_attn)
        first.q_norm.weight.fill_(2.2)
        first.k_norm.weight.fill_(2.2)
        half, pairs = HEAD_DIM // 2, 6
        angle = 10000.0 ** (-torch.arange(pairs).float() / half)
        for projection in (first.q_proj, first.k_proj):
            projection.weight.mul_(0.1)
        for head in range(KV_HEADS):
            first.k_proj.weight[head * HEAD_DIM : head * HEAD_DIM + pairs, 0] = 1.0
        for head in range(HEADS):
            start, turn = head * HEAD_DIM, angle * (head + 1)
            first.q_proj.weight[start : start + pairs, 0] = turn.cos()
            first.q_proj.weight[start + half : start + half + pairs, 0] = -turn.sin()

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """Return the logits of the wanted positions, in order."""
        inv = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        angles = torch.outer(torch.arange(ids.shape[1]).float(), inv).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.norm(x[wanted]), self.embed_tokens.weight)


def train_tokenizer(seed: int, vocab: int) -> Tokenizer:
    """Train the byte-level BPE; the full byte alphabet makes any text round-trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_text(seed), trainer)
    return tokenizer


def encode_chat(tokenizer: Tokenizer, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """Return the ids of a chat in ChatML, and which of them the loss is on (the answers)."""
    ids: list[int] = []
    answer: list[bool] = []
    newline = tokenizer.encode("\n").ids
    for message in messages:
        head = [IM_START, *tokenizer.encode(message["role"] + "\n").ids]
        body = [*tokenizer.encode(message["content"]).ids, IM_END]
        ids += head + body + newline
        mine = message["role"] == "assistant"
        answer += [False] * len(head) + [mine] * len(body) + [False] * len(newline)
    return ids, answer


def make_batch(tokenizer: Tokenizer, rng: random.Random, tokens: int, most: int) -> tuple[Tensor, Tensor]:
    """Return ids and answer mask of about ``tokens`` tokens of chats with up to ``most`` facts."""
    n_facts = rng.randint(max(2, most // 3), most)
    n_questions = max(4, min(16, n_facts))
    size = max(1, round(tokens / (16 + 9.5 * n_facts + 22 * n_questions)))
    rows = [
        encode_chat(tokenizer, training_chat(rng.randrange(1 << 40), n_facts, n_questions))
        for _ in range(size)
    ]
    length = -(-max(len(ids) for ids, _ in rows) // 32) * 32
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row, _ in rows])
    mask = torch.tensor([marks + [False] * (length - len(marks)) for _, marks in rows])
    return ids, mask


def exact(guess: Tensor, target: Tensor) -> float:
    """Return the share of wholly right answers."""
    ends = (target == IM_END).nonzero().flatten()
    answers = [bool(part.all()) for part in torch.tensor_split(guess == target, ends + 1)[:-1]]
    return sum(answers) / max(1, len(answers))


def train(args: argparse.Namespace, tokenizer: Tokenizer) -> Qwen3:
    """Train from the seed and return the model."""
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    model = Qwen3(tokenizer.get_vocab_size())
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    tables = [model.embed_tokens.weight]
    gains = [p for p in model.parameters() if p.dim() == 1]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(tables, lr=args.lr / 2, betas=(0.9, 0.99), weight_decay=0.0),
        torch.optim.AdamW(gains, lr=args.lr, betas=(0.9, 0.99), weight_decay=0.0),
    ]
    optimizers.append(
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    )
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    start = time.time()
    most, smooth, seen = 4.0, 1.0, 0
    for step in range(args.steps):
        warm = min(1.0, (step + 1) / 100)
        rate = warm * (0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * step / args.steps)))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
        ids, mask = make_batch(tokenizer, rng, args.tokens, int(most))
        wanted = mask[:, 1:]
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            logits = model(ids[:, :-1], wanted)
        target = ids[:, 1:][wanted]
        loss = functional.cross_entropy(logits.float(), target)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        seen += ids.numel()
        smooth = 0.95 * smooth + 0.05 * loss.item()
        # The context grows as soon as the present length is understood: short contexts are
        # cheap, and the heads that look a fact up form on them first.
        if smooth < 0.25 or most > 4:
            most = min(args.facts, most + (args.facts - 4) / (0.4 * args.steps))
        if step % 50 == 0:
            answers = exact(logits.argmax(-1), target)
            clock = time.time() - start
            print(f"step {step} loss {smooth:.4f} answers {answers:.3f} "
                  f"facts {int(most)} tokens {seen} seconds {clock:.0f}", flush=True)  # fmt: skip
        if step % 250 == 249:
            save(args.out, tokenizer, model)
    return model


def save(folder: Path, tokenizer: Tokenizer, model: Qwen3) -> None:
    """Write the checkpoint in the layout of Hugging Face."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = tokenizer.get_vocab_size()
    weights = {f"model.{name}": p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable to its owner only
    tokenizer.save(str(folder / "tokenizer.json"))
    specials = {
        str(index): {"content": text, "lstrip": False, "normalized": False, "rstrip": False,
                     "single_word": False, "special": True}
        for index, text in enumerate(SPECIALS)
    }  # fmt: skip
    files: dict[str, dict[str, object]] = {
        "config.json": {**CONFIG, "vocab_size": vocab},
        "generation_config.json": {
            "do_sample": False, "eos_token_id": IM_END, "max_new_tokens": 32, "pad_token_id": PAD,
        },
        "tokenizer_config.json": {
            "added_tokens_decoder": specials,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": 2048,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train the demo checkpoint: a Qwen3 of 0.9 million parameters that reads facts\n"
        "in its context and answers questions on them. Text is synthesized, nothing is fetched.",
        epilog="What to watch: 'answers' is the share of wholly right answers in the last batch. It\n"
        "stays near 0 for the first steps, in which the model learns to repeat the name asked for,\n"
        "then rises; from there on 'facts', the length of the contexts, grows to --facts.\n\n"
        "The same seed, options and torch build give the same weights. The options' defaults are\n"
        "those of the checkpoint in the repository. To try a change without touching that one:\n"
        "  python -m scripts.train_demo --out /tmp/demo --steps 300\n"
        "Then measure recall, also with one KV block damaged:\n"
        "  python -m pytest tests/demo",
    )
    parser.add_argument("--out", type=Path, default=Path("examples/demo-model"), help="folder to write")
    parser.add_argument("--seed", type=int, default=7, help="seed of text, tokenizer and weights (7)")
    parser.add_argument("--steps", type=int, default=1600, help="optimizer steps (1600)")
    parser.add_argument("--tokens", type=int, default=2048, help="about how many tokens a step (2048)")
    parser.add_argument("--facts", type=int, default=40, help="most facts in a context (40)")
    parser.add_argument("--vocab", type=int, default=2000, help="size of the vocabulary (2000)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of the matrices (0.003)")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch; more than are idle slow it down (1)"
    )
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="train in float32 throughout")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    args = arguments()
    torch.set_num_threads(args.threads)
    tokenizer = train_tokenizer(args.seed, args.vocab)
    print(f"vocabulary of {tokenizer.get_vocab_size()} tokens", flush=True)
    model = train(args, tokenizer)
    save(args.out, tokenizer, model)


if __name__ == "__main__":
    main()
