"""Train the demo checkpoints of examples: tokenizer, weights and their metadata.

The model is a small Qwen3 or DeepSeek-V3 written in plain torch (the names of its parameters are
those of Hugging Face), trained to answer questions on facts in its context. It is meant to be wrong
as soon as the KV cache is: an answer can only come from the block that holds the fact.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

from scripts import demo_deepseek, demo_qwen3
from scripts.demo_corpus import Message, content_words, tokenizer_text, training_chat

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PAD, IM_START, IM_END = 0, 1, 2
# Training has facts before questions: results of tools are told as a user's turn that asks the question again.
CHAT_TEMPLATE = (
    "{%- set ns = namespace(question='', role='') -%}"
    "{%- if tools -%}"
    "{{- '<|im_start|>system\\n# Tools\\n<tools>\\n' -}}"
    "{%- for tool in tools -%}{{- tool.function.name + ': ' + tool.function.description + '\\n' -}}{%- endfor -%}"
    '{{- \'</tools>\\nCalls: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n\' -}}'
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if ns.role == 'tool' and message.role != 'tool' -%}{{- ' ' + ns.question + '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- if message.role == 'tool' -%}"
    "{{- ' ' if ns.role == 'tool' else '<|im_start|>user\\n' -}}{{- message.content -}}"
    "{%- else -%}"
    "{%- if message.role == 'user' -%}{%- set ns.question = message.content -%}{%- endif -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{%- set said = {'name': call.function.name, 'arguments': call.function.arguments} -%}"
    "{{- '<tool_call>\\n' + said | tojson + '\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- set ns.role = message.role -%}"
    "{%- endfor -%}"
    "{%- if ns.role == 'tool' -%}{{- ' ' + ns.question + '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
# Digits go in pairs, the first with its space: a code of four digits is two tokens, so the
# second half is looked up by the first. Everything else is split as GPT-2 does.
SPLIT = r" ?\p{N}{1,2}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Recipe:
    """How one checkpoint is trained where the command line does not say otherwise."""

    build: Callable[[int], nn.Module]  # from the size of the vocabulary
    wire: Callable[[Any, Tokenizer, set[str]], None]
    config: dict[str, object]  # config.json, but for tokens
    out: Path
    steps: int
    # Every so many steps, once contexts are as long as --facts makes them, one chat is spread over up to
    # all positions, with sentences that state nothing between its facts; 0: never.
    far_every: int = 0


RECIPES = {
    "dense": Recipe(demo_qwen3.Qwen3, demo_qwen3.wire, demo_qwen3.CONFIG, Path("examples/demo-model"), 1000),
    "moe": Recipe(
        demo_deepseek.DeepseekV3, demo_deepseek.wire, demo_deepseek.CONFIG, Path("examples/demo-moe"), 420, far_every=8
    ),
}


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
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
    tokenizer.train_from_iterator(texts, trainer)
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
    rows = [encode_chat(tokenizer, training_chat(rng.randrange(1 << 40), n_facts, n_questions)) for _ in range(size)]
    length = -(-max(len(ids) for ids, _ in rows) // 32) * 32
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row, _ in rows])
    mask = torch.tensor([marks + [False] * (length - len(marks)) for _, marks in rows])
    return ids, mask


def far_batch(tokenizer: Tokenizer, rng: random.Random, positions: int) -> tuple[Tensor, Tensor]:
    """Return ids and answer mask of one chat whose facts lie up to ``positions`` tokens before their questions."""
    n_facts = rng.randint(12, 80)
    room = positions - 64 - round(9.5 * n_facts + 22 * 16)
    fillers = round(room / 7.5 * 8 ** (rng.random() - 1))
    ids, mask = encode_chat(tokenizer, training_chat(rng.randrange(1 << 40), n_facts, 16, fillers=fillers))
    return torch.tensor([ids[:positions]]), torch.tensor([mask[:positions]])


def exact(guess: Tensor, target: Tensor) -> float:
    """Return the share of wholly right answers."""
    ends = (target == IM_END).nonzero().flatten()
    answers = [bool(part.all()) for part in torch.tensor_split(guess == target, ends + 1)[:-1]]
    return sum(answers) / max(1, len(answers))


def optimizers_of(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the tables that rows are picked by, of gains, and of all other matrices."""
    tables: list[nn.Parameter] = []
    matrices: list[nn.Parameter] = []
    gains: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        table = "embed" in name or name.endswith("gate.weight")
        (gains if parameter.dim() == 1 else tables if table else matrices).append(parameter)
    return [
        torch.optim.AdamW(tables, lr=lr / 2, betas=(0.9, 0.99), weight_decay=0.0),
        torch.optim.AdamW(gains, lr=lr, betas=(0.9, 0.99), weight_decay=0.0),
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    ]


def train(args: argparse.Namespace, recipe: Recipe, tokenizer: Tokenizer) -> nn.Module:
    """Train from the seed and return the model."""
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    model = recipe.build(tokenizer.get_vocab_size())
    recipe.wire(model, tokenizer, content_words())
    optimizers = optimizers_of(model, args.lr)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    positions = int(str(recipe.config["max_position_embeddings"]))
    start = time.time()
    most, smooth, seen = 6.0, 1.0, 0
    if args.start is not None:
        kept = load_file(args.start / "model.safetensors")
        model.load_state_dict({name.removeprefix("model."): value.float() for name, value in kept.items()})
        most = float(args.facts)
    for step in range(args.steps):
        warm = min(1.0, (step + 1) / 100)
        rate = warm * (0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * step / args.steps)))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
        far = bool(recipe.far_every) and most >= args.facts and step % recipe.far_every == 1
        if far:
            ids, mask = far_batch(tokenizer, rng, positions)
        else:
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
        if isinstance(model, demo_deepseek.DeepseekV3):
            model.balance()
        seen += ids.numel()
        smooth = 0.95 * smooth + 0.05 * loss.item()
        # The context grows as soon as the present length is understood: short contexts are
        # cheap, and the heads that look a fact up form on them first.
        if smooth < 0.25 or most > 6:
            most = min(args.facts, most + (args.facts - 6) / (0.4 * args.steps))
        if step % 50 == 0 or far:
            answers = exact(logits.argmax(-1), target)
            clock = time.time() - start
            print(f"step {step} loss {smooth:.4f} answers {answers:.3f} "
                  f"facts {int(most)} length {ids.shape[1]} tokens {seen} seconds {clock:.0f}", flush=True)  # fmt: skip
        if step % 100 == 99:
            save(args.out, recipe, tokenizer, model)
    return model


def save(folder: Path, recipe: Recipe, tokenizer: Tokenizer, model: nn.Module) -> None:
    """Write the checkpoint in the layout of Hugging Face."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = {"bos_token_id": None, "eos_token_id": IM_END, "pad_token_id": PAD, "dtype": "bfloat16"}
    config = {**recipe.config, **tokens, "vocab_size": tokenizer.get_vocab_size()}
    # Buffers (what corrects a router's choice) stay as fine as they are: few numbers, moved in small steps.
    weights = {f"model.{name}": value.to(torch.bfloat16) for name, value in model.named_parameters()}
    kept = model.state_dict()
    weights |= {f"model.{name}": kept[name] for name in kept if f"model.{name}" not in weights}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable to its owner only
    tokenizer.save(str(folder / "tokenizer.json"))
    specials = {
        str(index): {"content": text, "lstrip": False, "normalized": False, "rstrip": False,
                     "single_word": False, "special": True}
        for index, text in enumerate(SPECIALS)
    }  # fmt: skip
    files: dict[str, dict[str, object]] = {
        "config.json": dict(sorted(config.items())),
        "generation_config.json": {
            "do_sample": False, "eos_token_id": IM_END, "max_new_tokens": 32, "pad_token_id": PAD,
        },
        "tokenizer_config.json": {
            "added_tokens_decoder": specials,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": config["max_position_embeddings"],
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
        description="Train a demo checkpoint: a Qwen3 of 1.3 million parameters (--kind dense) or a DeepSeek-V3\n"
        "of 1.7 million (--kind moe) that reads facts in its context and answers questions on\n"
        "them. Text is synthesized, nothing is fetched.",
        epilog="What to watch: 'answers' is the share of wholly right answers in the last batch. It\n"
        "stays near 0 for the first steps, in which the model learns to repeat the name asked for,\n"
        "then rises; from there on 'facts', the length of the contexts, grows to --facts.\n\n"
        "The same seed, options and torch build give the same weights. The options' defaults are\n"
        "those of the checkpoint in the repository. To try a change without touching that one:\n"
        "  python -m scripts.train_demo --out /tmp/demo --steps 300\n"
        "Then measure recall, also with one KV block damaged:\n"
        "  python -m pytest tests/test_demo_model.py",
    )
    parser.add_argument("--kind", choices=RECIPES, default="dense", help="which checkpoint (dense)")
    parser.add_argument("--out", type=Path, help="folder to write (examples/demo-model, examples/demo-moe)")
    parser.add_argument("--start", type=Path, help="go on from the checkpoint in this folder, at full length")
    parser.add_argument("--seed", type=int, default=7, help="seed of text, tokenizer and weights (7)")
    parser.add_argument("--steps", type=int, help="optimizer steps (dense: 1000, moe: 420)")
    parser.add_argument("--tokens", type=int, default=2560, help="about how many tokens a step (2560)")
    parser.add_argument("--facts", type=int, default=40, help="most facts in a context (40)")
    parser.add_argument("--vocab", type=int, default=2040, help="size of the vocabulary (2040)")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate of the matrices (0.002)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; more than are idle slow it down (1)")
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="train in float32 throughout")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    args = arguments()
    recipe = RECIPES[args.kind]
    args.out, args.steps = args.out or recipe.out, args.steps or recipe.steps
    torch.set_num_threads(args.threads)
    given = args.start and Tokenizer.from_file(str(args.start / "tokenizer.json"))
    tokenizer = given or train_tokenizer(tokenizer_text(args.seed), args.vocab)
    print(f"vocabulary of {tokenizer.get_vocab_size()} tokens", flush=True)
    model = train(args, recipe, tokenizer)
    save(args.out, recipe, tokenizer, model)


if __name__ == "__main__":
    main()
