"""Whole models with experts and latents on a CPU, beside transformers and vLLM: prefill, decode, memory.

    python -m benchmarks.models_cpu [--models qwen3-30b-a3b deepseek-v2-lite] [--layers 4] [--rounds 3] [--json FILE]

Random weights in bfloat16 of two shapes, made once in the cache (5 and 4 GB at 4 layers): Qwen3-30B-A3B (128 experts of
which a token has 8, inner 768, hidden 2,048, 32 heads over 4 of KV) and DeepSeek-V2-Lite (latent attention, 64 experts
of which a token has 6 beside 2 shared ones, the first layer dense). Scaled down are the layers, and the vocabulary by
as much (`benchmarks.peers.random_model`).

Each engine lives in a process of its own with as many threads and is stopped while it is not asked. kvmesh meets one
peer after the other, so that two models at a time are in memory. Both take turns: at a prompt of 512 and of 2,048
tokens in each round, and at decode, where each holds the same prompts of 512 tokens and does a few steps a turn, five
turns a round. Ratios are the median of each turn's own, with the interval in which that median lies in 95 of 100 cases;
of fewer than six turns it is the least and the greatest ratio. Above 1, the peer takes longer. "CPU" is the ratio of
CPU times, of all threads: on a machine that others use it is the steadier figure, best with --threads 1, where no
thread waits for another.

transformers runs without what `generate` does around a step, with its default cache, and for each kind of step with the
fastest of its implementations of experts (grouped_mm, batched_mm for up to 4 tokens, eager), each tried before. vLLM
runs eagerly, with 1 GiB of KV, in the environment of `benchmarks.peers.vllm_env`; where it does not run a model, its
own last words are printed. "peak" is the most memory of a process since its start, loading included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine_cpu import ids_of
from benchmarks.limits import measure
from benchmarks.peers import vllm_env
from benchmarks.peers.engine_process import Engine, SideSpec
from benchmarks.peers.link import PeerMissing
from benchmarks.peers.random_model import DEEPSEEK_V2_LITE, QWEN3_30B, ModelShape
from benchmarks.progress import tell
from benchmarks.turns import interval, over, ratios

SHAPES = {shape.name: shape for shape in (QWEN3_30B, DEEPSEEK_V2_LITE)}
PEERS = ("transformers", "vllm")
PROMPTS, ROWS, CONTEXT = (512, 2048), (1, 4, 16), 512
STEPS = {1: 4, 4: 2}  # of a turn; one where more rows are asked
TURNS = 5  # of decode, each round
KV_BYTES = 1 << 30


@dataclass
class Pair:
    """Figures of this engine and of one peer: point → seconds of each turn, of a step where the point is decode."""

    ours: dict[str, list[float]] = field(default_factory=dict)
    theirs: dict[str, list[float]] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)  # which of its implementations the peer took
    cpu: dict[str, list[float]] = field(default_factory=dict)  # the peer's CPU time over ours

    def note(self, point: str, steps: int, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        self.ours.setdefault(point, []).append(ours["seconds"] / steps)
        self.theirs.setdefault(point, []).append(theirs["seconds"] / steps)
        self.by[point] = theirs["by"]
        self.cpu.setdefault(point, []).append(theirs["cpu_s"] / ours["cpu_s"])


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stopped children are ended on every way out
    sides = {"transformers": SideSpec("transformers", sys.executable)}
    if "vllm" in args.peers:
        try:
            tell("environment of vLLM")
            sides["vllm"] = SideSpec("vllm", vllm_env.python())
        except PeerMissing as why:
            print(f"without vLLM: {why}", file=sys.stderr)
    found = {}
    for name in args.models:
        found[name] = one_model(SHAPES[name].scaled(args.layers), {p: sides[p] for p in args.peers if p in sides}, args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS, help="tokens of prefill")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="requests of decode")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each engine (all cores)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    return parser.parse_args()


def one_model(shape: ModelShape, peers: dict[str, SideSpec], args: argparse.Namespace) -> dict[str, Any]:
    tell(f"checkpoint of {shape.name}")
    folder = shape.checkpoint()
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(
        f"{shape.name}: {shape.layers} layers, vocabulary {shape.vocab:,}, {weights / 1e9:.2f} GB of bfloat16 weights, "
        f"{args.threads} threads, {args.rounds} rounds",
        flush=True,
    )
    found: dict[str, Any] = {"layers": shape.layers, "vocab": shape.vocab, "weights_bytes": weights}
    with_ours = SideSpec("kvmesh", sys.executable, Path(__file__).parents[1])
    tell("start kvmesh")
    ours = Engine("kvmesh", with_ours, folder, args.threads, KV_BYTES)
    try:
        for name, side in peers.items():
            tell(f"start {name}")
            try:
                peer = Engine(name, side, folder, args.threads, KV_BYTES)
            except PeerMissing as why:
                print(f"without {name}: {why}", flush=True)
                found[name] = {"missing": str(why)}
                continue
            try:
                reads = [measure(args.threads).read_bytes_s]
                pair = meet(shape, name, ours, peer, args)
                reads.append(measure(args.threads).read_bytes_s)
                found[name] = report(name, pair, peer.ask(do="memory")["peak_bytes"], reads)
            except PeerMissing as why:
                print(f"without {name}: {why}", flush=True)
                found[name] = {"missing": str(why)}
            finally:
                peer.close()
        found["peak_bytes"] = ours.ask(do="memory")["peak_bytes"]
        print(f"peak of kvmesh {found['peak_bytes'] / 1e9:.2f} GB\n", flush=True)
    finally:
        ours.close()
    return found


def meet(shape: ModelShape, name: str, ours: Engine, peer: Engine, args: argparse.Namespace) -> Pair:
    pair = Pair()
    for point, steps, mine, other in turns(shape, name, ours, peer, args):
        pair.note(point, steps, mine, other)
    return pair


def turns(
    shape: ModelShape, name: str, ours: Engine, peer: Engine, args: argparse.Namespace
) -> Iterator[tuple[str, int, dict[str, Any], dict[str, Any]]]:
    """Yields what both have answered, turn by turn; who is first changes."""
    rng = random.Random(0)

    def both(first: int, **asked: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        if first % 2:
            theirs = peer.ask(**asked)
            return ours.ask(**asked), theirs
        return ours.ask(**asked), peer.ask(**asked)

    both(0, do="prefill", ids=ids_of(rng, 1, CONTEXT, shape.vocab))  # memory that is first touched, choices
    for tokens in args.prompts:
        for round_ in range(args.rounds):
            tell(f"{name}: prefill {tokens}: round {round_ + 1} of {args.rounds}")
            yield f"prefill {tokens}", 1, *both(round_, do="prefill", ids=ids_of(rng, 1, tokens, shape.vocab))
    for rows in args.rows:
        tell(f"{name}: decode {rows}")
        count, steps = TURNS * args.rounds, STEPS.get(rows, 1)
        both(0, do="hold", ids=ids_of(rng, rows, CONTEXT, shape.vocab), steps=count * steps)
        for turn in range(count):
            yield f"decode {rows}", steps, *both(turn, do="step", steps=steps)
        both(0, do="drop")


def report(name: str, pair: Pair, peak: float, reads: list[float]) -> dict[str, Any]:
    tell("")
    print(f"{'':14}{'kvmesh':>12}{name:>14}{'ratio':>8}{'CPU':>7}   interval of the ratio")
    points = {}
    for point, ours in pair.ours.items():
        theirs = pair.theirs[point]
        cpu = statistics.median(pair.cpu[point])
        low, high = interval(ratios(theirs, ours))
        ratio = over(theirs, ours)
        points[point] = {"ours_s": ours, "theirs_s": theirs, "ratio": ratio, "interval": [low, high], "cpu": cpu}
        kind, count = point.split()
        mine, other = statistics.median(ours), statistics.median(theirs)
        shown = (
            f"{int(count) / mine:12.0f}{int(count) / other:14.0f}"
            if kind == "prefill"
            else f"{mine * 1e3:12.1f}{other * 1e3:14.1f}"
        )
        by = f"  {pair.by[point]}" if pair.by[point] else ""
        print(
            f"{point:14}{shown}{ratio:7.2f}x{cpu:6.2f}x   {low:.2f} to {high:.2f} of {len(ours)}  "
            f"{'tokens/s' if kind == 'prefill' else 'ms a step'}{by}"
        )
    read = statistics.mean(reads)
    print(f"peak of {name} {peak / 1e9:.2f} GB; reading {read / 1e9:.1f} GB/s around it", flush=True)
    return {"points": points, "by": pair.by, "peak_bytes": peak, "read_bytes_s": read}


if __name__ == "__main__":
    main()
