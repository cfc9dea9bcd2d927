"""Each matrix product of Qwen3-0.6B's shape in bfloat16: ours, torch's, and what the machine can do at most.

    python -m benchmarks.engine_ops [--threads 2] [--rounds 3]

For few rows what counts is the weights' bytes a second, for many the FLOP a second; both come with their share of the
limit, which is measured in the same round with as many threads. The sides take turns within every round; the figure is
the best round's of each, as whoever else uses the machine only ever takes time. Every product walks over enough copies
of its weight to find none in a cache. About a minute.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.limits import Limits, measure
from kvmesh.engine.cpu import native
from kvmesh.engine.matrix import DenseMatrix, Matrix, PackedMatrix

SHAPES = {
    "qkv": (4096, 1024),
    "o": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
    "head": (151936, 1024),
}
ROWS = (1, 4, 16, 64, 512, 2048)
HEAD_ROWS = 64  # only tokens that are sampled need logits
COLD_BYTES = 96 << 20  # more than the caches hold
TURN_S = 0.02


def copies(outputs: int, inputs: int) -> int:
    return max(1, COLD_BYTES // (outputs * inputs * 2))


def seconds(matrices: Sequence[Matrix], x: torch.Tensor) -> float:
    """One product's, over all copies as often as a turn allows."""
    started, passes = time.perf_counter(), 0
    while passes == 0 or time.perf_counter() - started < TURN_S:
        for matrix in matrices:
            matrix.multiply(x)
        passes += 1
    return (time.perf_counter() - started) / passes / len(matrices)


def row(name: str, rows: int, took: dict[str, float], limits: Limits) -> str:
    outputs, inputs = SHAPES[name]
    nbytes, flop = outputs * inputs * 2, 2 * rows * outputs * inputs
    least = max(nbytes / max(limits.read_bytes_s, 1.0), flop / max(limits.bf16_flops, 1.0))
    cells = [
        f"{side} {nbytes / s / 1e9:5.1f} GB/s {flop / s / 1e9:6.0f} GFLOP/s {least / s:4.0%}"
        for side, s in took.items()
    ]
    return f"{name:8} {rows:5}  " + "  |  ".join(cells)


def run(threads: int, rounds: int, say: Callable[[str], None]) -> None:
    torch.set_num_threads(threads)
    if why := native.why_not():
        say(f"no C++ operators ({why}): torch alone")
    best: dict[tuple[str, int], dict[str, float]] = {}
    limits = Limits(0.0, 0.0)
    for name, (outputs, inputs) in SHAPES.items():
        weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16) for _ in range(copies(outputs, inputs))]
        sides: dict[str, list[Matrix]] = {"torch": [DenseMatrix(weight) for weight in weights]}
        if not why:
            sides["ours"] = [PackedMatrix.of([weight]) for weight in weights]
        for _ in range(rounds):
            now = measure(threads)
            limits = Limits(max(limits.read_bytes_s, now.read_bytes_s), max(limits.bf16_flops, now.bf16_flops))
            for rows in ROWS:
                if name == "head" and rows > HEAD_ROWS:
                    continue
                x = torch.randn(rows, inputs, dtype=torch.bfloat16)
                for side, matrices in sides.items():
                    took = seconds(matrices[: 1 if rows > HEAD_ROWS else None], x)
                    cell = best.setdefault((name, rows), {})
                    cell[side] = min(took, cell.get(side, took))
    say(f"limits: read {limits.read_bytes_s / 1e9:.1f} GB/s, bf16 {limits.bf16_flops / 1e9:.0f} GFLOP/s")
    say(f"{'matrix':8} {'rows':>5}  rates, and the share of the limit that binds")
    for (name, rows), took_by in best.items():
        say(row(name, rows, took_by, limits))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with torch.inference_mode():
        run(args.threads, args.rounds, print)


if __name__ == "__main__":
    main()
