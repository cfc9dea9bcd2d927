"""How a step's time grows with batch and context, and where it goes: Python, matrix products, attention, the rest.

    python -m benchmarks.engine_growth [--threads 2] [--quick] [--json FILE]

A random model of Qwen3-0.6B's shape in bfloat16, with the native operators and with torch's path alone
(KVMESH_NATIVE=0, what the engine did before it had them), each in a process of its own, in turns. The contexts are not
computed: pages hold noise, which costs what KV costs. `limit` is the roofline of the step (benchmarks/limits.py): its
weights and KV read once at the measured bandwidth, or its products at the measured rate, whichever takes longer.

The profile is torch's, on the calling thread: an operator's own time counts for its kind, and what of the step is
inside no operator at all is Python's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.limits import Limits, measure
from benchmarks.peers.qwen_shape import QWEN3_06B, VOCAB, chunk_work, decode_work
from benchmarks.progress import tell

BATCHES, CONTEXTS = (1, 4, 16, 64), (128, 1024, 4096)
QUICK = ((1, 16), (128, 1024))
CHUNK, STARTS = 512, (0, 1536, 7680)  # prefill: a chunk of so many tokens after so many
BLOCK_TOKENS, STEPS, WARM = 64, 5, 2
MAX_PAGES = 64 * (1024 // BLOCK_TOKENS + 1)  # requests of longer contexts share pages: each is read as often as asked
PROFILED = ((1, 128), (16, 1024), (64, 128))
KINDS = (
    ("attention", ("attention", "attend", "index_select", "index_put", "scaled_dot", "write_kv")),
    ("products", ("linear", "mm", "matmul", "gemm", "mkldnn")),
    ("sampling", ("max", "isfinite", "item", "argmax", "topk", "_local_scalar")),
)


class Engine:
    """The runner over pages full of noise."""

    def __init__(self, threads: int) -> None:
        import torch

        from kvmesh.engine.checkpoint import open_checkpoint
        from kvmesh.engine.runner import Runner, shard_layout

        torch.set_num_threads(threads)
        opened = open_checkpoint(QWEN3_06B.checkpoint())
        layout = shard_layout(opened.config, "bfloat16", BLOCK_TOKENS)
        pages = torch.empty((MAX_PAGES, *layout.shape), dtype=torch.bfloat16).normal_(std=0.1)
        self.runner = Runner(opened, "bfloat16", "cpu", BLOCK_TOKENS, pages)

    def rows(self, batch: int, context: int) -> list[Any]:
        from kvmesh.engine.batch import DecodeInput, SampleParams

        need = context // BLOCK_TOKENS + 1
        return [
            DecodeInput(
                (7919 * i) % VOCAB,
                context,
                tuple((i * need + j) % MAX_PAGES for j in range(need)),
                SampleParams(),
            )
            for i in range(batch)
        ]

    def step(self, rows: list[Any]) -> float:
        started = time.perf_counter()
        self.runner.decode(rows)
        return time.perf_counter() - started

    def timed(self, batch: int, context: int) -> float:
        """Median seconds of a step at this context; positions stay, so that steps are equal."""
        rows = self.rows(batch, context)
        for _ in range(WARM):
            self.step(rows)
        return statistics.median(self.step(rows) for _ in range(STEPS))

    def chunk(self, start: int) -> float:
        """Median seconds of one prefill chunk whose prefix is in pages."""
        from kvmesh.engine.batch import PrefillInput, SampleParams

        pages = tuple(range((start + CHUNK) // BLOCK_TOKENS))
        item = PrefillInput([(7919 * i) % VOCAB for i in range(CHUNK)], start, pages, SampleParams())
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            self.runner.prefill([item])
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def profile(self, batch: int, context: int) -> dict[str, float]:
        """Seconds of one step by kind; "python" is what lies inside no operator."""
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiler

        rows = self.rows(batch, context)
        self.step(rows)
        with profiler(activities=[ProfilerActivity.CPU]) as seen:
            wall = self.step(rows)
        found = dict.fromkeys([kind for kind, _ in KINDS] + ["elementwise"], 0.0)
        for entry in seen.key_averages():
            name = entry.key.lower()
            kind = next((k for k, words in KINDS if any(word in name for word in words)), "elementwise")
            found[kind] += entry.self_cpu_time_total * 1e-6
        found["python"] = max(0.0, wall - sum(found.values()))
        found["wall"] = wall
        return found


def side(threads: int, quick: bool) -> None:
    """One process of one path: prints its figures as JSON."""
    engine = Engine(threads)
    batches, contexts = QUICK if quick else (BATCHES, CONTEXTS)
    steps = {f"{b} {c}": engine.timed(b, c) for b in batches for c in contexts}
    chunks = {str(start): engine.chunk(start) for start in (STARTS[:2] if quick else STARTS)}
    profiles = {f"{b} {c}": engine.profile(b, c) for b, c in PROFILED if not quick or b < 64}
    print(json.dumps({"steps": steps, "chunks": chunks, "profiles": profiles}))


def run(native: bool, threads: int, quick: bool) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    env.pop("KVMESH_NATIVE", None)
    if not native:
        env["KVMESH_NATIVE"] = "0"
    command = [sys.executable, "-m", "benchmarks.engine_growth", "--side", "--threads", str(threads)]
    done = subprocess.run(
        command + ["--quick"] * quick, env=env, capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise SystemExit(f"{'native' if native else 'torch'} path: {done.stderr.strip()[-800:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each path; the better of each point counts")
    parser.add_argument("--quick", action="store_true", help="few points")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side(args.threads, args.quick)
        return
    seen: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    limits: list[Limits] = []
    for round_ in range(args.rounds):
        for native in (True, False):
            tell(f"round {round_ + 1} of {args.rounds}: {'native' if native else 'torch'}")
            limits.append(measure(args.threads))
            seen[native].append(run(native, args.threads, args.quick))
    tell("")
    limit = Limits(max(x.read_bytes_s for x in limits), max(x.bf16_flops for x in limits))
    report(seen[True], seen[False], limit, args.threads)
    if args.json:
        found = {"threads": args.threads, "limits": vars_of(limit), "native": seen[True], "torch": seen[False]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def vars_of(limit: Limits) -> dict[str, float]:
    return {"read_bytes_s": limit.read_bytes_s, "bf16_flops": limit.bf16_flops}


def report(native: list[dict[str, Any]], torch: list[dict[str, Any]], limit: Limits, threads: int) -> None:
    print(
        f"decode step of Qwen3-0.6B's shape, bfloat16, {threads} threads, ms; "
        f"read {limit.read_bytes_s / 1e9:.1f} GB/s, bfloat16 {limit.bf16_flops / 1e12:.2f} TFLOP/s"
    )
    print(f"{'batch':>6}{'context':>9}{'native':>10}{'torch':>10}{'ratio':>8}{'limit':>10}{'of limit':>10}")
    for point in native[0]["steps"]:
        batch, context = map(int, point.split())
        ours = min(side["steps"][point] for side in native)
        before = min(side["steps"][point] for side in torch)
        least = decode_work(batch, context).seconds(limit)
        print(
            f"{batch:6}{context:9}{ours * 1e3:10.1f}{before * 1e3:10.1f}{before / ours:7.2f}x"
            f"{least * 1e3:10.1f}{least / ours:10.0%}"
        )
    print(f"\nprefill of {CHUNK} tokens, ms")
    print(f"{'after':>6}{'native':>19}{'torch':>10}{'ratio':>8}{'limit':>10}{'of limit':>10}")
    for start in native[0]["chunks"]:
        ours, before = (min(side["chunks"][start] for side in sides) for sides in (native, torch))
        least = chunk_work(int(start), CHUNK).seconds(limit)
        line = f"{start:>6}{ours * 1e3:19.1f}{before * 1e3:10.1f}{before / ours:7.2f}x"
        print(f"{line}{least * 1e3:10.1f}{least / ours:10.0%}")
    print("\nwhere one step goes, ms")
    kinds = [*(kind for kind, _ in KINDS), "elementwise", "python", "wall"]
    print(f"{'batch':>6}{'context':>9}  {'path':8}" + "".join(f"{kind:>13}" for kind in kinds))
    for point in native[0]["profiles"]:
        for name, sides in (("native", native), ("torch", torch)):
            best = min((s["profiles"][point] for s in sides), key=lambda p: p["wall"])
            batch, context = point.split()
            print(f"{batch:>6}{context:>9}  {name:8}" + "".join(f"{best[kind] * 1e3:13.2f}" for kind in kinds))


if __name__ == "__main__":
    main()
