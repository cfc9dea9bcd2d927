"""Where a decode step of a rank goes: Python and preparation, kernels, sampling, the reply.

    python -m benchmarks.engine_step [--shape toy|qwen] [--threads 2] [--steps 40] [--drawn] [--json FILE]

A real `Worker` in this process, driven as its rank's loop drives it, over pages of noise; rows join as the front lets
them join and are granted pages as they grow. `qwen` has Qwen3-0.6B's shape in bfloat16; `toy` as many layers, but so
narrow that what its layers take is nearly all Python and the operators' own calls: what a step costs a fast device.

Phases, medians in microseconds: `loop` (commands, chores), `plan` (page tables, positions), `layers`, `head`, `sample`,
`reply` (encode and send) and `rest`: Python of a step that is none of them (rows, checks, tokens, finishes).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.qwen_shape import LAYERS, QWEN3_06B, VOCAB

BATCHES = (1, 16, 64)
BLOCK_TOKENS, CONTEXT, WARM = 64, 128, 5
PHASES = ("loop", "plan", "layers", "head", "sample", "reply")
TOY_VOCAB = 2048


class Clock:
    """Nanoseconds of one step by phase."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PHASES, 0)

    def around(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            started = time.perf_counter_ns()
            try:
                return call(*args, **named)
            finally:
                self.spent[phase] += time.perf_counter_ns() - started

        return timed


class Rank:
    """A worker, the port that it answers through, and the front's end of it."""

    def __init__(self, path: Path, dtype: str, threads: int, steps: int, drawn: bool) -> None:
        from kvmesh.ranks import protocol as m
        from kvmesh.ranks.ipc import RankPort
        from kvmesh.ranks.worker.worker import Worker

        self.pages_a_row = (CONTEXT + BLOCK_TOKENS + steps + WARM) // BLOCK_TOKENS + 1
        ours, self._front = socket.socketpair()
        self._front.setblocking(False)
        self.clock = Clock()
        self._port = RankPort(ours)
        configure = m.Configure(
            instance_id="step",
            incarnation=1,
            rank=0,
            world_size=1,
            model_path=str(path),
            dtype=dtype,
            device="cpu",
            block_tokens=BLOCK_TOKENS,
            num_pages=max(BATCHES) * self.pages_a_row,
            num_extents=4,
            memory_bytes=0,
            threads=threads,
            max_context_tokens=0,
            transports=("shm",),
        )
        self.worker = worker = Worker(configure, self.clock.around("reply", self._port.send))
        worker.memory.pages.normal_(std=0.1)
        runner = worker._runner
        for owner, name, phase in (
            (runner.attention, "plan_mixed", "plan"),
            (runner.model, "hidden", "layers"),
            (runner.model, "logits", "head"),
            (runner._sampler, "prepare", "sample"),
            (runner._sampler, "choose", "sample"),
        ):
            setattr(owner, name, self.clock.around(phase, getattr(owner, name)))
        self.sampling = m.Sampling(0.8, 0.95, 40, 1) if drawn else m.Sampling(0.0, 1.0, 0, 1)

    def batch(self, rows: int, steps: int) -> list[dict[str, int]]:
        """Nanoseconds by phase of `steps` steps with as many rows."""
        from kvmesh.ranks import protocol as m

        worker, most = self.worker, steps + WARM + 2
        vocab = self.worker.ready().vocab_size
        for at in range(rows):
            pages = tuple(range(at * self.pages_a_row, (at + 1) * self.pages_a_row))
            context = CONTEXT + 7 * at % BLOCK_TOKENS
            worker.handle(m.Join(at, pages, context, 7919 * at % vocab, 0, most, 0, (vocab,), self.sampling))
        found = [self.step() for _ in range(steps + WARM)][WARM:]
        assert worker.rows == rows, "a row has ended"
        for at in range(rows):
            worker.handle(m.Leave(at))
        self._read()
        return found

    def step(self) -> dict[str, int]:
        clock, worker = self.clock, self.worker
        clock.spent = dict.fromkeys(PHASES, 0)
        started = time.perf_counter_ns()
        self._port.receive(0)
        worker.tick()
        assert worker.wants_step
        clock.spent["loop"] = time.perf_counter_ns() - started
        worker.step(None, lambda: None)
        whole = time.perf_counter_ns() - started
        self._read()
        return {**clock.spent, "rest": whole - sum(clock.spent.values()), "step": whole}

    def _read(self) -> None:
        """What the front would read."""
        try:
            while self._front.recv(1 << 20):
                pass
        except BlockingIOError:
            return


def toy(folder: Path) -> Path:
    """As many layers as Qwen3-0.6B has, 64 wide."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=TOY_VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=TOY_VOCAB - 1,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=("toy", "qwen"), default="toy")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--drawn", action="store_true", help="rows draw their tokens (temperature, top_p, top_k)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = toy(Path(folder)) if args.shape == "toy" else QWEN3_06B.checkpoint()
        rank = Rank(path, "bfloat16", args.threads, args.steps, args.drawn)
        names = (*PHASES, "rest", "step")
        seen: dict[str, dict[str, float]] = {}
        vocab = TOY_VOCAB if args.shape == "toy" else VOCAB
        print(f"{args.shape}, {LAYERS} layers, vocabulary {vocab}, {args.threads} threads: us of a decode step")
        print(f"{'rows':>5}" + "".join(f"{name:>10}" for name in names))
        for rows in BATCHES:
            steps = rank.batch(rows, args.steps)
            seen[str(rows)] = {name: statistics.median(step[name] for step in steps) / 1e3 for name in names}
            print(f"{rows:5}" + "".join(f"{seen[str(rows)][name]:10.0f}" for name in names), flush=True)
        rank.worker.close()
    if args.json:
        args.json.write_text(json.dumps({"shape": args.shape, "threads": args.threads, "us": seen}, indent=1) + "\n")


if __name__ == "__main__":
    main()
