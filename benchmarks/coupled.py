"""Coupled against disaggregated on equal cores: TTFT, TBT and goodput of one slice of a trace at rising rates.

*coupled-N* is one instance with two threads that computes prompts in chunks of N tokens beside its rows (256 is the
default), *1P+1D* a prefill and a decode instance with one thread each, with as much memory together
(`benchmarks.equal_cores`). All meshes are up all the time, those whose turn it is not are idle; gateway, conductor,
store master and this client share the cores with each. Each rate sends the same requests to all, one mesh after the
other in random order, at the trace's times, stretched so that the mean rate is right; every run has a salt of its own,
so that caches begin empty.

Rates are shares of what the first mesh does with eight requests at once, measured first, so that a table from another
machine reads the same. Goodput is told for several SLOs: TTFT and TBT within each of `--slacks` times what the best of
them takes for the p90 of requests that come one by one. TBT of a request: the mean of the longest tenth of its
token intervals (`kvmesh replay`). Nothing is refused.

    python -m benchmarks.coupled                                # about 8 minutes on two cores
    python -m benchmarks.coupled --quick
    python -m benchmarks.coupled --json benchmarks/results/coupled.json --rounds 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import progress
from benchmarks.equal_cores import TRACE, VOCAB, block_of, equal_meshes, make_model, slice_of
from kvmesh.cli.load import target
from kvmesh.cli.load.load import Generator, Job, LoadOutcome
from kvmesh.cli.load.report import LoadSlo, summarise
from kvmesh.sim.workloads.trace import Made, TokenMaker
from tests.support.mesh.harness import Running

TIMEOUT_S = 300.0
Told = dict[str, Any]


class Load:
    """One slice, to be sent to either mesh."""

    def __init__(self, meshes: dict[str, Running], made: Sequence[Made], block: int) -> None:
        self._targets = {name: target.find(one.http, None, None, None, None) for name, one in meshes.items()}
        maker = TokenMaker(VOCAB)
        self._prompts = [maker.prompt(one, block) for one in made]
        self._made = made
        self.names = list(meshes)

    def _jobs(self, count: int, rate: float | None) -> list[Job]:
        first = self._made[0].request.at_ms
        span_s = (self._made[count - 1].request.at_ms - first) / 1000
        stretch = (count - 1) / rate / span_s if rate and span_s else 0.0
        return [
            Job(
                index,
                lambda prompt=self._prompts[index]: prompt,  # type: ignore[misc]
                one.output_tokens,
                (one.request.at_ms - first) / 1000 * stretch if rate else None,
            )
            for index, one in enumerate(self._made[:count])
        ]

    async def send(self, name: str, count: int, *, rate: float | None = None, at_once: int = 0) -> Generator:
        """The first `count` requests to that mesh: at this rate, or so many at once."""
        generator = Generator(
            self._targets[name], salt=f"coupled-{secrets.token_hex(8)}", timeout_s=TIMEOUT_S, concurrency=at_once
        )
        await generator.run(self._jobs(count, rate))
        failed = [one for one in generator.results if not one.ok]
        if failed:
            raise SystemExit(f"{name}: {len(failed)} of {count} requests failed: {failed[0].code}: {failed[0].message}")
        return generator


async def unloaded(load: Load, count: int) -> dict[str, Told]:
    """Every mesh, one request at a time."""
    found = {}
    for name in load.names:
        await load.send(name, 4, at_once=1)  # warms threads and connections
        generator = await load.send(name, count, at_once=1)
        found[name] = summarise(generator.results, generator.wall_s, LoadSlo())
    return found


async def compare(
    load: Load, rates: Sequence[float], args: argparse.Namespace, slos: Sequence[LoadSlo], rng: random.Random
) -> list[Told]:
    """For each rate every mesh, `--rounds` times, all their outcomes together."""
    rows = []
    for rate in rates:
        count = min(args.requests, max(8, round(rate * args.seconds)))
        outcomes: dict[str, list[LoadOutcome]] = {name: [] for name in load.names}
        wall_s = dict.fromkeys(outcomes, 0.0)
        for n in range(args.rounds):
            for name in rng.sample(sorted(outcomes), len(outcomes)):
                generator = await load.send(name, count, rate=rate)
                outcomes[name] += generator.results
                wall_s[name] += generator.wall_s
                progress.tell(f"{rate:.2f} requests/s, round {n + 1}/{args.rounds}: {name}")
        told = {name: summarise(outcomes[name], wall_s[name], LoadSlo()) for name in outcomes}
        for name, found in told.items():
            found["goodput"] = [sum(map(slo.kept, outcomes[name])) / len(outcomes[name]) for slo in slos]
        rows.append({"rate": rate, "requests": count * args.rounds, **told})
    progress.tell("")
    return rows


def show(rows: Sequence[Told], slos: Sequence[LoadSlo], names: Sequence[str]) -> None:
    """A line for each rate and mesh, and goodput as bars."""
    columns = ("requests/s", "", "TTFT p50", "p90", "p99", "TBT p50", "p90", "p99", "tokens/s", "hits")
    print("".join(f"{name:>{10 if name else 13}}" for name in columns))
    for row in rows:
        for name in names:
            told = row[name]
            figures = [f"{told[key][p]:,.0f}" for key in ("ttft_ms", "tbt_ms") for p in ("p50", "p90", "p99")]
            last = [f"{told['throughput']['output_tokens_per_s']:.0f}", f"{told['hit_rate']:.0%}"]
            rate = f"{row['rate']:.2f}" if name == names[0] else ""
            print(f"{rate:>10}{name:>13}" + "".join(f"{word:>10}" for word in figures + last))
    print("times in ms")
    for n, slo in enumerate(slos):
        print(f"\ngoodput: TTFT <= {slo.ttft_ms:.0f} ms and TBT <= {slo.tbt_ms:.0f} ms, share of all requests")
        for row in rows:
            for name in names:
                share = row[name]["goodput"][n]
                rate = f"{row['rate']:.2f}/s" if name == names[0] else ""
                print(f"{rate:>10} {name:<12} {'#' * round(50 * share):<50} {share:.0%}")


async def run(args: argparse.Namespace, home: Path) -> Told:
    model = make_model(home / "model", layers=args.layers, hidden=args.hidden, context=args.context)
    made = slice_of(args.trace, args.requests, args.scale, args.context, args.max_output)
    args.requests = len(made)
    rng = random.Random(args.seed)
    coupled = {f"coupled-{chunk}": {"mixed_chunk_tokens": chunk} for chunk in args.chunks}
    async with equal_meshes(model, home, args.pages, coupled, dtype=args.dtype) as meshes:
        load = Load(meshes, made, block_of(args.scale))
        alone = await unloaded(load, args.calibration)
        ttft_ms, tbt_ms = (min(told[key]["p90"] for told in alone.values()) for key in ("ttft_ms", "tbt_ms"))
        slos = [LoadSlo(slack * ttft_ms, slack * tbt_ms) for slack in args.slacks]
        slos += [LoadSlo(args.slo_ttft, args.slo_tbt)] if args.slo_ttft and args.slo_tbt else []
        full = await load.send(load.names[0], args.calibration, at_once=8)
        most = len(full.results) / full.wall_s
        rows = await compare(load, [share * most for share in args.shares], args, slos, rng)
        for running in meshes.values():
            await running.settled()
    show(rows, slos, load.names)
    return {
        "slos_ms": [{"ttft": slo.ttft_ms, "tbt": slo.tbt_ms} for slo in slos],
        "closed_requests_per_s": most,
        "unloaded": alone,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=200, help="of the slice")
    parser.add_argument("--scale", default="1/16", help="of all lengths")
    parser.add_argument("--max-output", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--pages", type=int, default=1024, help="of each half, 16 tokens each")
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 64], help="of a coupled instance beside rows")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 runs on the CPU operators")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.4, 0.6, 0.8, 1.0], help="of the full rate")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--calibration", type=int, default=16, help="requests that tell SLOs and full rate")
    parser.add_argument("--slacks", type=float, nargs="+", default=[4.0, 12.0], help="of SLOs, over unloaded p90")
    parser.add_argument("--slo-ttft", type=float, default=0.0, help="of one more SLO, ms")
    parser.add_argument("--slo-tbt", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a smaller model, three rates, some seconds each")
    parser.add_argument("--json", default="", help="also write the results here")
    args = parser.parse_args()
    if args.quick:
        args.layers, args.hidden, args.seconds = 4, 256, 6.0
        args.shares, args.calibration = [0.3, 0.6, 0.9], 12
    with tempfile.TemporaryDirectory() as folder:
        told = asyncio.run(run(args, Path(folder)))
    if args.json:
        said = {"machine": platform.machine(), "cpus": os.cpu_count(), "args": vars(args) | {"trace": args.trace.name}}
        Path(args.json).write_text(json.dumps(said | told, indent=1) + "\n")


if __name__ == "__main__":
    main()
