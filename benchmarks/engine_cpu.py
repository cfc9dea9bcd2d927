"""The CPU engine beside vLLM and transformers: prefill, decode, memory, start-up, and the limits of the machine.

    python -m benchmarks.engine_cpu [--rounds 3] [--threads 2] [--base CHECKOUT] [--json FILE]

One random checkpoint of Qwen3-0.6B's shape in bfloat16, the same token ids, the same threads. Each engine lives in a
process of its own; they take turns at every point of every round (transformers, the slowest, in the first round only),
and who is not at work is stopped (SIGSTOP), so that its threads take nothing from the others. Rates are medians over
the rounds; ratios and shares are the median of each round's own, as the machine is not the same in all of them. Limits,
measured before and after each point with as many threads: read bandwidth (a pass over one GiB) and bfloat16 products
(registers only), for what a step must read and multiply at least; see `benchmarks.limits`.

With `--base`, kvmesh as it is in another checkout takes its turn as well. "cached" is the load that the mesh is for: a
prompt's last 256 tokens after 7,936 whose KV is there already; vLLM finds them by its prefix cache, which is on as it
is by default. Token ids differ from round to round, so it finds nothing else.

Start-up is from spawning a process to its first token. Before each start so much memory is touched and given back that
none has to wait for the hypervisor's.

vLLM comes from PyPI into an environment of its own in the cache (minutes, gigabytes); where it cannot be had the others
run without it and the reason is printed. Takes about twelve minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.limits import Limits, Work, measure
from benchmarks.peers import vllm_env
from benchmarks.peers.engine_process import Engine, SideSpec
from benchmarks.peers.link import PeerMissing
from benchmarks.peers.qwen_shape import LAYERS, QWEN3_06B, chunk_work, decode_work, prefill_work
from benchmarks.peers.random_model import ModelShape
from benchmarks.progress import tell
from benchmarks.turns import interval, over, ratios

PREFILL = (512, 2048, 8192)
CACHED = (7936, 256)  # tokens whose KV is there, and new ones after them: 8k together
BATCHES = (1, 4, 16, 64)
CONTEXT = 128  # tokens of each prompt before decode is timed
STEPS = {1: 16, 4: 12, 16: 8, 64: 6}
KV_BYTES = 2 << 30  # for every engine that has a pool of its own
STARTS = 3
START_BYTES = 6 << 30  # touched before a start: more than any engine takes
ONCE = ("transformers",)  # has its turn in the first round only


@dataclass
class Figures:
    """Of one engine: point → seconds of each round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    start_s: list[float] = field(default_factory=list)
    peak_bytes: float = 0.0

    def rate(self, point: str, tokens: float) -> float:
        """Tokens per second, median over the rounds."""
        return tokens / statistics.median(self.seconds[point])

    def times_faster(self, other: Figures, point: str) -> float:
        """Median of the rounds in which both had a turn."""
        return over(other.seconds[point], self.seconds[point])


def touch(nbytes: int) -> None:
    """Take so much memory, write to all of it, give it back."""
    held = bytearray(nbytes)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(held)), 1, nbytes)


class Point(NamedTuple):
    """What every engine is asked, how many passes over the weights and tokens that is, and the least of one pass."""

    name: str
    asked: dict[str, Any]
    passes: int
    tokens: int
    least: Work


Seen = dict[str, list[Limits]]  # point → the limits around it, round by round


def shape_of(args: argparse.Namespace) -> ModelShape:
    """Returns the model's shape, scaled down to so many layers."""
    return QWEN3_06B if args.layers == LAYERS else QWEN3_06B.scaled(args.layers)


def ids_of(rng: random.Random, count: int, tokens: int, vocab: int) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(tokens)] for _ in range(count)]


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stopped children are ended on every way out
    model = shape_of(args).checkpoint()
    sides = {"kvmesh": SideSpec("kvmesh", sys.executable, Path(__file__).parents[1])}
    if args.base:
        sides["base"] = SideSpec("kvmesh", sys.executable, args.base.resolve())
    if not args.without_vllm:
        try:
            tell("environment of vLLM")
            sides["vllm"] = SideSpec("vllm", vllm_env.python())
        except PeerMissing as why:
            print(f"without vLLM: {why}", file=sys.stderr)
    if not args.without_transformers:
        sides["transformers"] = SideSpec("transformers", sys.executable)
    figures = {name: Figures() for name in sides}
    starts(figures, sides, model, args)
    engines: dict[str, Engine] = {}
    try:
        for name, side in sides.items():
            tell(f"start {name}")
            engines[name] = Engine(name, side, model, args.threads, KV_BYTES)
        seen = rounds(figures, engines, args)
        for name, engine in engines.items():
            figures[name].peak_bytes = engine.ask(do="memory")["peak_bytes"]
    finally:
        for engine in engines.values():
            engine.close()
    tell("")
    report(figures, seen, args)
    if args.json:
        args.json.write_text(json.dumps(as_json(figures, seen, args), indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which every engine has its turn (3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each engine (all cores)")
    parser.add_argument("--prefill", type=int, nargs="*", default=PREFILL, help="prompt lengths, in tokens")
    parser.add_argument("--no-cached", action="store_true", help="without the prompt whose KV is mostly there")
    parser.add_argument("--base", type=Path, help="another checkout of kvmesh, built, whose engine takes its turn")
    parser.add_argument("--without-transformers", action="store_true", help="which is slow")
    parser.add_argument("--without-vllm", action="store_true", help="with --base: ours alone, so that rounds are short")
    parser.add_argument("--starts", type=int, default=STARTS, help=f"start-ups of each engine ({STARTS})")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="decode batches, in requests")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"scale the model down ({LAYERS}): shorter rounds")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no round begins after so long (no limit)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()
    if args.base and not (args.base / "kvmesh").is_dir():
        parser.error(f"--base {args.base}: there is no kvmesh/ in it")
    return args


def starts(figures: dict[str, Figures], sides: dict[str, SideSpec], model: Path, args: argparse.Namespace) -> None:
    """From spawning the process to its first token, the files in the page cache."""
    for round_ in range(min(args.starts, args.rounds)):
        for name, side in sides.items():
            tell(f"start-up {round_ + 1}: {name}")
            touch(START_BYTES)
            engine = Engine(name, side, model, args.threads, KV_BYTES)
            try:
                figures[name].start_s.append(engine.start_s)
            finally:
                engine.close()


def points_of(args: argparse.Namespace, round_: int = 0) -> list[Point]:
    rng, vocab = random.Random(round_), shape_of(args).vocab
    found = [
        Point(f"prefill {n}", {"do": "prefill", "ids": ids_of(rng, 1, n, vocab)}, 1, n, prefill_work(n))
        for n in args.prefill
    ]
    if not args.no_cached:
        before, new = CACHED
        asked = {"do": "cached", "ids": ids_of(rng, 1, before + new, vocab), "before": before}
        found.append(Point(f"cached {new}", asked, 1, new, chunk_work(before, new)))
    for b in args.batches:
        steps = STEPS.get(b, 8)
        asked = {"do": "decode", "ids": ids_of(rng, b, CONTEXT, vocab), "steps": steps}
        found.append(Point(f"decode {b}", asked, steps, b * steps, decode_work(b, CONTEXT + steps // 2)))
    return found


def rounds(figures: dict[str, Figures], engines: dict[str, Engine], args: argparse.Namespace) -> Seen:
    """The limits around each point, round by round."""
    seen: Seen = {}
    ends = time.monotonic() + 60 * args.minutes
    for round_ in range(args.rounds):
        if round_ and time.monotonic() > ends:
            args.rounds = round_
            break
        for point in points_of(args, round_):
            before = measure(args.threads)
            turns = list(engines.items())
            for name, engine in turns if round_ % 2 else reversed(turns):  # who goes first has no advantage
                if round_ and name in ONCE:
                    continue
                tell(f"round {round_ + 1} of {args.rounds}: {point.name}: {name}")
                answer = engine.ask(**point.asked)
                figures[name].seconds.setdefault(point.name, []).append(answer["seconds"])
            after = measure(args.threads)
            seen.setdefault(point.name, []).append(better(before, after))
    return seen


def better(a: Limits, b: Limits) -> Limits:
    """What the machine can do at most: a disturbed measurement tells less."""
    return Limits(max(a.read_bytes_s, b.read_bytes_s), max(a.bf16_flops, b.bf16_flops))


def rows(figures: dict[str, Figures], seen: Seen, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One for each point: tokens per second of everybody, ratios, the share of the limit that ours attains."""
    found, scale = [], args.layers / LAYERS
    for point in points_of(args):
        limits = [point.least.seconds(limit) * point.passes * scale for limit in seen[point.name]]
        ours = figures["kvmesh"]
        found.append(
            {
                "point": point.name,
                "tokens_per_s": {name: f.rate(point.name, point.tokens) for name, f in figures.items()},
                "limit_tokens_per_s": point.tokens / statistics.median(limits),
                "share_of_limit": {name: over(limits, f.seconds[point.name]) for name, f in figures.items()},
                "times_faster_than": {
                    name: ours.times_faster(f, point.name) for name, f in figures.items() if name != "kvmesh"
                },
                "interval": {
                    name: interval(ratios(f.seconds[point.name], ours.seconds[point.name]))
                    for name, f in figures.items()
                    if name != "kvmesh"
                },
            }
        )
    return found


def median_of(seen: Seen) -> Limits:
    every = [limit for limits in seen.values() for limit in limits]
    return Limits(
        statistics.median(limit.read_bytes_s for limit in every), statistics.median(limit.bf16_flops for limit in every)
    )


def report(figures: dict[str, Figures], seen: Seen, args: argparse.Namespace) -> None:
    limits = median_of(seen)
    names = list(figures)
    print(
        f"Qwen3-0.6B's shape, {args.layers} layers, bfloat16, {args.threads} threads, "
        f"median of {args.rounds} rounds; tokens per second\n"
        f"limits: read {limits.read_bytes_s / 1e9:.1f} GB/s, bfloat16 {limits.bf16_flops / 1e12:.2f} TFLOP/s"
    )
    others = [name for name in names if name != "kvmesh"]
    head = "".join(f"{name:>14}" for name in names) + f"{'limit':>10}"
    head += "".join(f"{'/' + o + ' [95%]':>27}" for o in others)
    print(f"{'':14}{head}{'of limit':>10}")
    for row in rows(figures, seen, args):
        rates = row["tokens_per_s"]
        line = "".join(f"{rates[name]:14.1f}" for name in names) + f"{row['limit_tokens_per_s']:10.1f}"
        for o in others:
            low, high = row["interval"][o]
            line += f"{row['times_faster_than'][o]:10.3f}x [{low:.3f}, {high:.3f}]"
        print(f"{row['point']:14}{line}{row['share_of_limit']['kvmesh']:10.0%}")
    for what, unit, values in (
        ("start-up", "s", {name: statistics.median(f.start_s) for name, f in figures.items() if f.start_s}),
        ("peak memory", "GB", {name: f.peak_bytes / 1e9 for name, f in figures.items()}),
    ):
        if not values:
            continue
        line = "".join(f"{values[name]:12.2f}{unit:>2}" for name in names) + " " * 10
        print(f"{what:14}{line}" + "".join(f"{values[o] / values['kvmesh']:14.2f}x" for o in others))


def as_json(figures: dict[str, Figures], seen: Seen, args: argparse.Namespace) -> dict[str, Any]:
    limits = median_of(seen)
    return {
        "threads": args.threads,
        "layers": args.layers,
        "rounds": args.rounds,
        "limits": {"read_bytes_s": limits.read_bytes_s, "bf16_flops": limits.bf16_flops},
        "points": rows(figures, seen, args),
        "seconds": {name: f.seconds for name, f in figures.items()},
        "start_s": {name: f.start_s for name, f in figures.items()},
        "peak_bytes": {name: f.peak_bytes for name, f in figures.items()},
    }


if __name__ == "__main__":
    main()
