"""The torch engine beside Hugging Face transformers: prefill of one prompt and decode steps of a batch, one thread.

    python -m benchmarks.engine [--model PATH] [--rounds 5]

Both load the same checkpoint in float32 and take the same token ids; they run in turn, round by round, so that a busy
machine slows both. Reported is the least CPU time of the calling thread over the rounds: what the work
costs, not what else the machine was doing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvmesh.engine.batch import DecodeInput, PrefillInput, SampleParams
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.runner import Runner, shard_layout

MODEL = Path(__file__).parents[1] / "examples" / "demo-model"
BLOCK_TOKENS = 64
DECODE_STEPS = 16
PREFILL_TOKENS = (64, 256, 1024)
DECODE_BATCHES = (1, 16, 64)
DECODE_CONTEXT = 200


class Ours:
    """The runner over pages of its own: request i holds pages [i * per_request, (i + 1) * per_request)."""

    def __init__(self, path: Path, requests: int, tokens: int) -> None:
        checkpoint = open_checkpoint(path)
        layout = shard_layout(checkpoint.config, "float32", BLOCK_TOKENS)
        per_request = -(-tokens // BLOCK_TOKENS)
        pages = torch.zeros(requests * per_request, *layout.shape)
        self.runner = Runner(checkpoint, "float32", "cpu", BLOCK_TOKENS, pages)
        self.pages = [tuple(range(i * per_request, (i + 1) * per_request)) for i in range(requests)]

    def prefill(self, prompt: list[int]) -> float:
        started = time.thread_time()
        self.runner.prefill([PrefillInput(prompt, 0, self.pages[0], SampleParams())])
        return time.thread_time() - started

    def decode(self, prompts: list[list[int]]) -> float:
        rows = []
        for prompt, pages in zip(prompts, self.pages, strict=False):
            [first] = self.runner.prefill([PrefillInput(prompt, 0, pages, SampleParams())])
            assert first is not None
            rows.append(DecodeInput(first.token_id, len(prompt), pages, SampleParams()))
        started = time.thread_time()
        for _ in range(DECODE_STEPS):
            for row, token in zip(rows, self.runner.decode(rows), strict=True):
                row.token_id = token.token_id
                row.position += 1
        return (time.thread_time() - started) / DECODE_STEPS


class Theirs:
    """transformers' model called directly (without `generate`, whose bookkeeping is not the model's)."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        ids = torch.tensor([prompt])
        started = time.thread_time()
        self.model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
        return time.thread_time() - started

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]]) -> float:
        out = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        started = time.thread_time()
        for _ in range(DECODE_STEPS):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            token.tolist()
            out = self.model(token, None, None, out.past_key_values, use_cache=True)  # by place: its name differs
        return (time.thread_time() - started) / DECODE_STEPS


def best(rounds: int, ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[float, float]:
    """The least of each over interleaved rounds, after one that warms up."""
    ours(), theirs()
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return min(a for a, _ in pairs), min(b for _, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="Hugging Face folder (default: the demo model)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds; the best of each side counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ours = Ours(args.model, max(DECODE_BATCHES), max(*PREFILL_TOKENS, DECODE_CONTEXT + DECODE_STEPS + 1))
    theirs = Theirs(args.model)
    rng = np.random.default_rng(0)
    vocab = ours.runner.config.vocab_size

    print(f"{args.model.name}, float32, one thread, CPU ms, best of {args.rounds}")
    print(f"{'':28}{'kvmesh':>10}{'transformers':>14}{'ratio':>8}")
    for tokens in PREFILL_TOKENS:
        prompt = rng.integers(0, vocab, tokens).tolist()
        times = best(args.rounds, partial(ours.prefill, prompt), partial(theirs.prefill, prompt))
        report(f"prefill {tokens} tokens", *times)
    for batch in DECODE_BATCHES:
        prompts = rng.integers(0, vocab, (batch, DECODE_CONTEXT)).tolist()
        times = best(args.rounds, partial(ours.decode, prompts), partial(theirs.decode, prompts))
        report(f"decode step, batch {batch}", *times)


def report(what: str, ours: float, theirs: float) -> None:
    print(f"{what:28}{ours * 1e3:10.2f}{theirs * 1e3:14.2f}{theirs / ours:7.2f}x")


if __name__ == "__main__":
    main()
