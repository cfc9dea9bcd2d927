"""Tokens a second with and without drafts, by drafter and by kind of text, on this machine's CPU.

    python -m benchmarks.speculation --model examples/demo-model --rounds 30 --json benchmarks/results/speculation.json

One rank's steps (`kvmesh.ranks.worker.steps`), in this process, without services: `--batch` requests begin together and
each is answered with `--tokens` tokens. Every way answers the same prompts in turn, round by round; a ratio is the
median of the rounds' ratios, with the interval that holds the median of what they are drawn from in 95 of 100 cases.
All ways must say the same tokens, which is checked in each round (in bfloat16 two of a draft's logits may tie: those
rounds are counted and told).

On a machine that others use, too, look at processor time (of one thread: time without what the others took), and at
*again*, which is *off* once more.

Kinds of text: *repetitive* asks for a list again, greedily; *code* goes on with a file of functions that resemble each
other, greedily; *rollout* samples several answers to one prompt; *hostile* is a prompt of random tokens, answered at a
temperature at which nothing is to be foreseen. *asked-code*, *asked-chat* and *asked-rollout* are held-out chats of
those that `examples/measured-model` was trained on (`scripts.measured_texts`), another one each round, greedily. Where
the checkpoint has an MTP head, it drafts, too, and so does the model of `--draft-model`, which has the same tokenizer.

With `--layers` a copy of the model is measured that has so many layers: those behind its own compute as much as others
and add nothing, so that it says the same, and a step of its head is as small a part of its own as in a model of that
depth.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Template
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.turns import interval, ratios
from kvmesh.drafts.drafter import Drafter
from kvmesh.drafts.ngram import NgramDrafter
from kvmesh.drafts.speculator import MOST_DRAFT, Speculator
from kvmesh.drafts.suffix import SuffixDrafter
from kvmesh.engine.batch import PrefillInput, SampleParams
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.draft_model import ModelDrafter, check_draft_model
from kvmesh.engine.mtp import MtpDrafter
from kvmesh.engine.runner import Runner, shard_layout, torch_dtype
from kvmesh.kvcache.keys import pack_tokens
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.steps import Steps
from scripts.measured_texts import held_out

BLOCK = 16
ITEMS = ("apple", "river", "stone", "lamp", "cloud", "paper", "bridge", "garden")
RECORDS = "".join(f"- item {n}: {ITEMS[n % 8]}, price {n * 7 % 40}, stock {n * 3 % 20}\n" for n in range(12))
CODE = "".join(
    f"def get_{name}(self) -> int:\n    value = self._{name}\n    if value is None:\n        raise KeyError('{name}')\n"
    "    return value\n\n"
    for name in ITEMS
)
PROMPTS = {
    "repetitive": "Here is a list.\n" + RECORDS + "The same list once more.\n" + RECORDS,
    "code": CODE + CODE,
    "rollout": "Tell a short story about a lamp and a river.",
}
SAMPLED = {"rollout": 0.6, "hostile": 1.4}


class NoPusher:
    """Stands for what pushes KV of prompts: nothing is pushed."""

    def step_begins(self, items: Sequence[m.PrefillItem]) -> None:
        pass


@dataclass
class Bench:
    """One model, and what each way has made of it."""

    path: Path
    dtype: str
    tokens: int
    batch: int
    draft: Path | None = None
    prompts: list[list[int]] = field(default_factory=list)  # one a round, in turn
    temperature: float = 0.0
    said: dict[str, list[list[int]]] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)  # steps, tokens, drafted, kept
    seed: int = 0

    def __post_init__(self) -> None:
        checkpoint = self.checkpoint = open_checkpoint(self.path)
        layout = shard_layout(checkpoint.config, self.dtype, BLOCK)
        self.longest = checkpoint.config.max_context_tokens
        self.vocab = checkpoint.config.vocab_size
        self.row_pages = -(-(self.longest) // BLOCK)
        pages = torch.zeros(self.batch * self.row_pages, *layout.shape, dtype=torch_dtype(self.dtype))
        self.runner = Runner(checkpoint, self.dtype, "cpu", BLOCK, pages, mtp=checkpoint.has_mtp)

    @property
    def prompt(self) -> list[int]:
        return self.prompts[self.seed % len(self.prompts)]

    @property
    def ways(self) -> list[str]:
        lacks = [kind for kind, there in (("mtp", self.runner.mtp), ("draft", self.draft)) if there is None]
        return [name for name in WAYS if not any(kind in name for kind in lacks)]

    def run(self, way: str, speculators: dict[str, Speculator | None]) -> None:
        """Answers all requests of a round. A speculator lives as long as a rank does: it is kept from round to
        round."""
        if way not in speculators:
            drafters = [DRAFTERS[kind](self) for kind in WAYS[way]]
            speculators[way] = Speculator(drafters, MOST_DRAFT) if drafters else None
        messages: list[Any] = []
        pusher: Any = NoPusher()
        steps = Steps(self.runner, pusher, BLOCK, messages.append, speculator=speculators[way])
        for row in range(self.batch):
            pages = tuple(range(row * self.row_pages, (row + 1) * self.row_pages))
            seed = 1000 * self.seed + row
            params = SampleParams(temperature=self.temperature, seed=seed)
            [first] = self.runner.prefill([PrefillInput(self.prompt, 0, pages, params)])
            assert first is not None
            sampling = m.Sampling(self.temperature, 1.0, 0, seed)
            history = m.TokenHistory(pack_tokens(self.prompt), pack_tokens([first.token_id]))
            steps.join(
                m.Join(row, pages, len(self.prompt), first.token_id, 0, self.tokens, 0, (), sampling, said=history)
            )
        made: list[list[int]] = [[] for _ in range(self.batch)]
        while steps.has_work:
            steps.run(None, lambda: None)
        for step in messages:
            for token in step.tokens:
                made[token.handle].append(token.token_id)
        self.said[way] = made
        counts = self.counts.setdefault(way, [0, 0, 0, 0])
        counts[0] += sum(step.batch for step in messages)
        counts[1] += sum(len(step.tokens) for step in messages)
        counts[2] += sum(drafted for step in messages for _, drafted, _ in step.drafts)
        counts[3] += sum(kept for step in messages for _, _, kept in step.drafts)


HEAD_PAGES = 1024


def model_drafter(bench: Bench) -> ModelDrafter:
    """Returns what drafts by the model of --draft-model, with room for all requests."""
    assert bench.draft is not None
    checkpoint = open_checkpoint(bench.draft)
    check_draft_model(checkpoint, bench.checkpoint)
    layout = shard_layout(checkpoint.config, bench.dtype, BLOCK)
    pages = torch.zeros(bench.batch * bench.row_pages, *layout.shape, dtype=torch_dtype(bench.dtype))
    return ModelDrafter(Runner(checkpoint, bench.dtype, "cpu", BLOCK, pages), bench.vocab)


DRAFTERS: dict[str, Callable[[Bench], Drafter]] = {
    "ngram": lambda _: NgramDrafter(),
    "suffix": lambda _: SuffixDrafter(),
    "mtp": lambda bench: MtpDrafter(bench.runner, HEAD_PAGES),
    "draft": model_drafter,
}
WAYS: dict[str, tuple[str, ...]] = {
    "off": (),
    "again": (),  # off once more: what the machine alone makes of a ratio
    "ngram": ("ngram",),
    "suffix": ("suffix",),
    "mtp": ("mtp",),
    "mtp+ngram": ("mtp", "ngram"),
    "draft": ("draft",),
    "draft+ngram": ("draft", "ngram"),
    "draft+suffix": ("draft", "suffix"),
}


def deepened(path: Path, layers: int, folder: Path) -> Path:
    """Writes a copy of a checkpoint whose layers are dense, with layers behind its own that add zeros to the residual,
    and its head behind these."""
    raw = json.loads((path / "config.json").read_text())
    own, generator = raw["num_hidden_layers"], torch.Generator().manual_seed(0)
    tensors = {}
    for name, value in load_file(path / "model.safetensors").items():
        if name.startswith(f"model.layers.{own}."):
            name = name.replace(f"layers.{own}.", f"layers.{layers}.")
        tensors[name] = value
    for name, value in list(tensors.items()):
        for layer in range(own, layers) if name.startswith("model.layers.0.") else ():
            ends = name.endswith(("o_proj.weight", "down_proj.weight"))
            made = torch.zeros(value.shape) if ends else torch.randn(value.shape, generator=generator) * 0.05
            tensors[name.replace("layers.0.", f"layers.{layer}.")] = made.to(value.dtype)
    raw |= {"num_hidden_layers": layers, "first_k_dense_replace": layers + 1}
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((path / file).read_bytes())
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def held_out_prompts(path: Path, kind: str, count: int) -> list[list[int]]:
    """Returns chats that the measured model has not seen, up to their last answer."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    template = Template(json.loads((path / "tokenizer_config.json").read_text())["chat_template"])
    asked = [template.render(messages=chat[:-1], add_generation_prompt=True) for chat in held_out(kind, count)]
    return [tokenizer.encode(text).ids for text in asked]


def measure(bench: Bench, kind: str, rounds: int) -> dict[str, Any]:
    """Returns the figures of one kind of text."""
    noise = random.Random(7)
    if kind == "hostile":
        bench.prompts = [[noise.randrange(bench.vocab) for _ in range(200)]]
    elif kind.startswith("asked-"):
        bench.prompts = held_out_prompts(bench.path, kind.removeprefix("asked-"), rounds)
    else:
        ids = Tokenizer.from_file(str(bench.path / "tokenizer.json")).encode(PROMPTS[kind]).ids
        bench.prompts = [ids[-(bench.longest - bench.tokens - 1) :]]
    bench.temperature = SAMPLED.get(kind, 0.0)
    bench.said, bench.counts = {}, {}
    speculators: dict[str, Speculator | None] = {}
    seconds: dict[str, list[float]] = {name: [] for name in bench.ways}
    computed: dict[str, list[float]] = {name: [] for name in bench.ways}
    other = 0
    for turn in range(-1, rounds):  # the first is not timed
        bench.seed += 1
        at = turn % len(bench.ways)
        for name in [*bench.ways][at:] + [*bench.ways][:at]:  # each way is first as often as the others
            began, busy = time.perf_counter(), time.process_time()
            bench.run(name, speculators)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
                computed[name].append(time.process_time() - busy)
        other += sum(bench.said[name] != bench.said["off"] for name in bench.ways)
    if other and bench.dtype == "float32":
        raise SystemExit(f"{kind}: {other} answers differ from those without drafts")
    found: dict[str, Any] = {"prompt_tokens": len(bench.prompt), "answers_that_differ": other}
    answered = bench.batch * (bench.tokens - 1)
    for name in bench.ways:
        steps, tokens, drafted, kept = bench.counts[name]
        gains, busy_gains = ratios(seconds["off"], seconds[name]), ratios(computed["off"], computed[name])
        low, high = interval(gains)
        busy_low, busy_high = interval(busy_gains)
        found[name] = {
            "tokens_per_s": round(answered / statistics.median(seconds[name]), 1),
            "tokens_a_step": round(tokens / steps, 3),
            "drafted": drafted,
            "kept": kept,
            "ratio": round(statistics.median(gains), 3),
            "interval": [round(low, 3), round(high, 3)],
            "cpu_ratio": round(statistics.median(busy_gains), 3),
            "cpu_interval": [round(busy_low, 3), round(busy_high, 3)],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("examples/demo-model"))
    parser.add_argument("--draft-model", type=Path, help="model that drafts, of the same tokenizer")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", default=",".join((*PROMPTS, "hostile")))
    parser.add_argument("--layers", type=int, default=0, help="measure a copy that is so deep")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        path = deepened(options.model, options.layers, Path(scratch)) if options.layers else options.model
        bench = Bench(path, options.dtype, options.tokens, options.batch, options.draft_model)
        measure_all(bench, options)


def measure_all(bench: Bench, options: argparse.Namespace) -> None:
    """Measures each kind of text, prints the figures and writes them."""
    found: dict[str, Any] = {
        "model": options.model.name,
        "dtype": options.dtype,
        "tokens": options.tokens,
        "batch": options.batch,
        "layers": bench.runner.config.layers,
        "rounds": options.rounds,
        "threads": options.threads,
        "machine": platform.machine(),
        "numpy": np.__version__,
    }
    for kind in options.kinds.split(","):
        found[kind] = measure(bench, kind, options.rounds)
        for name in bench.ways:
            one = found[kind][name]
            print(
                f"{kind:13} {name:12} {one['tokens_per_s']:8.1f} tokens/s  {one['tokens_a_step']:5.2f} a step  "
                f"kept {one['kept']}/{one['drafted']}  x{one['ratio']:.2f} [{one['interval'][0]:.2f}, "
                f"{one['interval'][1]:.2f}]  by processor time x{one['cpu_ratio']:.3f} [{one['cpu_interval'][0]:.3f}, "
                f"{one['cpu_interval'][1]:.3f}]",
                flush=True,
            )
        print(f"{kind:13} answers that differ: {found[kind]['answers_that_differ']}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
