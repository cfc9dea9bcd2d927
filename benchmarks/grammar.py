"""What a grammar costs a decode step: TBT with and without, and the masks alone.

    python -m benchmarks.grammar [--rows 16] [--context 256] [--pairs 30] [--threads 2] [--json FILE]

A random model of Qwen3-0.6B's shape and vocabulary in bfloat16 over pages of noise, as a CPU rank runs it: its tokens
are read before the next step. Steps with and without a grammar take turns, greedy and drawn at temperature 1; the cost
is the median of each pair's own ratio, with the interval of the median at 95% from the order of the pairs. The rows
begin their answers anew when they have ended. `mask` is the time of one row's mask, tokens taken in included, on one
thread with nothing beside it. The grammar is that of a JSON schema: `bounded`, all of whose strings have a greatest
length, which masks are dearest for, and `free`, the same without those bounds.

The tokenizer is a byte-level BPE of as many tokens as Qwen's, trained on the Python files of this machine and kept in
the cache: no file of a real one is needed. The first run takes a minute or two for it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.qwen_shape import QWEN3_06B, VOCAB
from benchmarks.progress import tell

BLOCK_TOKENS, WARM = 64, 3
TOKENS, CORPUS_BYTES = 151_643, 24 << 20
END = "<|im_end|>"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 80},
        "kind": {"enum": ["question", "order", "complaint", "other"]},
        "people": {
            "type": "array",
            "minItems": 2,
            "maxItems": 6,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "age": {"type": "integer", "minimum": 0, "maximum": 150},
                    "mail": {"type": "string", "pattern": "^[a-z0-9.]{1,20}@[a-z0-9]{1,20}\\.(com|org)$"},
                },
                "required": ["name", "age", "mail"],
                "additionalProperties": False,
            },
        },
        "score": {"type": "number"},
        "urgent": {"type": "boolean"},
    },
    "required": ["title", "kind", "people", "score", "urgent"],
    "additionalProperties": False,
}


def tokenizer_folder() -> Path:
    """The folder of the tokenizer, which is made at the first call."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "kvmesh" / "bench-bpe-151k"
    if not (folder / "tokenizer.json").exists():
        tell("training a tokenizer")
        _train(folder)
    return folder


def _train(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        initial_alphabet=alphabet,
        min_frequency=1,
        special_tokens=[END],
        max_token_length=64,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    made = folder.with_name(f"{folder.name}.{os.getpid()}")
    made.mkdir(parents=True)
    tokenizer.save(str(made / "tokenizer.json"))
    if folder.exists():
        shutil.rmtree(made)
    else:
        made.rename(folder)


def _texts() -> Iterator[str]:
    left = CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if left <= 0:
            return
        text = path.read_text(errors="ignore")
        left -= len(text)
        yield text


def schema(bounded: bool) -> dict[str, Any]:
    """The schema with the bounds of its strings' lengths, or without."""
    made: dict[str, Any] = json.loads(json.dumps(SCHEMA))
    if not bounded:
        person = made["properties"]["people"]["items"]["properties"]
        for string in (made["properties"]["title"], person["name"]):
            del string["maxLength"]
        person["mail"]["pattern"] = "^[a-z0-9.]+@[a-z0-9]+\\.(com|org)$"
    return made


class Rows:
    """Rows of one kind, which decode token after token at one position."""

    def __init__(self, runner: Any, count: int, context: int, temperature: float, grammars: Any, text: str) -> None:
        self._runner, self._temperature = runner, temperature
        self._grammars, self._text = grammars, text
        need = context // BLOCK_TOKENS + 1
        self._pages = [tuple(range(row * need, (row + 1) * need)) for row in range(count)]
        self._context = context
        self._begun = 0
        self._params = [self._new() for _ in range(count)]
        self._tokens = [(7919 * row) % VOCAB for row in range(count)]
        self.ended = 0

    def _new(self) -> Any:
        from kvmesh.engine.batch import SampleParams

        self._begun += 1
        params = SampleParams(temperature=self._temperature, seed=self._begun)
        if self._text:
            params.grammar = self._grammars.begin(self._text, ())
        return params

    def step(self) -> float:
        """Seconds of one step."""
        from kvmesh.engine.batch import DecodeBatch, DecodeInput

        given = zip(self._tokens, self._pages, self._params, strict=True)
        batch = DecodeBatch.of([DecodeInput(token, self._context, pages, p) for token, pages, p in given])
        started = time.perf_counter()
        _, chosen = self._runner.step((), batch)
        took = time.perf_counter() - started
        assert not any(token.fault for token in chosen.scored.values()), chosen.scored
        self._tokens = chosen.token_ids.tolist()
        for row, token in enumerate(self._tokens):
            self._params[row].token_index += 1
            if self._text and token in self._grammars.eos:
                self._params[row] = self._new()
                self.ended += 1
        return took


def mask_seconds(grammars: Any, text: str, answers: int) -> list[float]:
    """Seconds of each mask of answers whose tokens are drawn from what is allowed."""
    import random

    import numpy as np

    from kvmesh.engine.sampling.grammar import mask_words

    rng, seconds = random.Random(1), []
    mask = np.empty(mask_words(VOCAB), np.int32)
    for _ in range(answers):
        grammar = grammars.begin(text, ())
        for _ in range(400):
            started = time.perf_counter()
            grammar.fill(mask)
            seconds.append(time.perf_counter() - started)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(allowed[rng.randrange(len(allowed))])
            if token in grammars.eos:
                break
            grammar.add(token)
    return seconds


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and its interval at 95%, by the binomial distribution of ranks."""
    ordered, n = sorted(values), len(values)
    reach = 1.96 * n**0.5 / 2
    low, high = max(0, int(n / 2 - reach)), min(n - 1, int(n / 2 + reach))
    return statistics.median(ordered), ordered[low], ordered[high]


def compared(name: str, sides: Sequence[Rows], count: int) -> dict[str, Any]:
    """Runs steps of rows without and with a grammar in turns; prints and returns seconds and cost."""
    for _ in range(WARM):
        for side in sides:
            side.step()
    pairs: list[tuple[float, float]] = []
    for pair in range(count):
        tell(f"{name} {pair + 1}/{count}")
        order = sides if pair % 2 else sides[::-1]
        took = {id(side): side.step() for side in order}
        pairs.append((took[id(sides[0])], took[id(sides[1])]))
    tell("")
    off, on = (interval([pair[at] for pair in pairs]) for at in (0, 1))
    cost = interval([with_grammar / without - 1 for without, with_grammar in pairs])
    print(
        f"{name}: TBT {off[0] * 1e3:.1f} [{off[1] * 1e3:.1f}, {off[2] * 1e3:.1f}] ms without, "
        f"{on[0] * 1e3:.1f} [{on[1] * 1e3:.1f}, {on[2] * 1e3:.1f}] with a grammar; "
        f"cost {cost[0]:+.1%} [{cost[1]:+.1%}, {cost[2]:+.1%}], {count} pairs",
        flush=True,
    )
    return {"off_s": off, "on_s": on, "cost": cost, "ended": sides[1].ended}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch
    from llguidance import LLMatcher
    from tokenizers import Tokenizer

    from kvmesh.engine.checkpoint import open_checkpoint
    from kvmesh.engine.runner import Runner, shard_layout
    from kvmesh.engine.sampling.grammar import GrammarCompiler

    torch.set_num_threads(args.threads)
    folder = tokenizer_folder()
    end = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(END)
    grammars = GrammarCompiler(folder, VOCAB, (end,))
    began = time.perf_counter()
    grammars.compile(LLMatcher.grammar_from_regex("a")).result()
    figures: dict[str, Any] = {"tokenizer_s": time.perf_counter() - began}
    print(f"tokenizer {figures['tokenizer_s'] * 1e3:.0f} ms, once")
    opened = open_checkpoint(QWEN3_06B.checkpoint())
    layout = shard_layout(opened.config, "bfloat16", BLOCK_TOKENS)
    count = args.rows * (args.context // BLOCK_TOKENS + 1)
    pages = torch.empty((count, *layout.shape), dtype=torch.bfloat16).normal_(std=0.1)
    runner = Runner(opened, "bfloat16", "cpu", BLOCK_TOKENS, pages)
    for kind in ("free", "bounded"):
        made = schema(kind == "bounded")
        text = LLMatcher.grammar_from_json_schema(made, overrides={"whitespace_flexible": False})
        began = time.perf_counter()
        grammars.compile(text).result()
        compile_s = time.perf_counter() - began
        masks = mask_seconds(grammars, text, 20)
        mask = {"median": statistics.median(masks), "mean": statistics.mean(masks)}
        mask |= {"p99": statistics.quantiles(masks, n=100)[98], "max": max(masks)}
        spread = ", ".join(f"{name} {value * 1e6:.0f}" for name, value in mask.items())
        print(
            f"{kind}: compiled in {compile_s * 1e3:.1f} ms; mask of a row and token, us: {spread} ({len(masks)} masks)"
        )
        figures[kind] = {"compile_s": compile_s, "mask_s": mask}
        for name, temperature in (("greedy", 0.0), ("drawn", 1.0)):
            sides = [Rows(runner, args.rows, args.context, temperature, grammars, one) for one in ("", text)]
            figures[kind][name] = compared(f"{kind}, {name}", sides, args.pairs)
    if args.json:
        told = {"rows": args.rows, "context": args.context, "threads": args.threads, "pairs": args.pairs} | figures
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
