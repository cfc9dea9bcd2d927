"""The conductor before engines of others, simulated, beside session hash and plain routers, on agents and on a trace.

The engines are coupled instances in virtual time (`kvmesh sim run --coupled N --coupled-mode chunked`), each with a
prefix cache that is too small for its share of all sessions; for the trace it is as large as the device holds. What
places differs, all else is the same: the product's conductor, which believes what engines hold or is told, its policy
`session_hash`, turns, and the fewest requests. Conductors begin with their priors and hear what `kvmesh serve external`
tells. Nobody is refused, unless `--admission` says so. A figure is the median of the seeds; the file has all.

    python -m benchmarks.engines_sim --trace conversation_trace.jsonl --json benchmarks/results/engines-sim.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import progress
from benchmarks.equal_cores import TRACE
from kvmesh.cli.sim import build
from kvmesh.cli.sim.options import Options
from kvmesh.sim.report.sketch import tidy
from kvmesh.sim.report.summary import Summary
from kvmesh.sim.run import run

# Who places: the simulator's routing, and the conductor's policy.
MODES = {
    "conductor": ("conductor", "kvcache"),
    "conductor, exact": ("conductor-exact", "kvcache"),
    "session hash": ("conductor", "session_hash"),
    "round robin": ("round-robin", "kvcache"),
    "least loaded": ("least-loaded", "kvcache"),
}
LONG = 8  # times the SLOs of agents has the trace: its prompts are that much longer
FIGURES: Mapping[str, tuple[Callable[[Summary], float], str]] = {
    "TTFT p50, ms": (lambda told: 1000 * told.quantile("ttft_s", 0.5), "{:.0f}"),
    "TTFT p90, ms": (lambda told: 1000 * told.quantile("ttft_s", 0.9), "{:.0f}"),
    "TBT p90, ms": (lambda told: 1000 * told.quantile("tbt_s", 0.9), "{:.0f}"),
    "whole request p50, ms": (lambda told: 1000 * told.quantile("e2e_s", 0.5), "{:.0f}"),
    "whole request p90, ms": (lambda told: 1000 * told.quantile("e2e_s", 0.9), "{:.0f}"),
    "prompt tokens found cached": (lambda told: told.hit_rate, "{:.3f}"),
    "requests within both SLOs": (lambda told: told.goodput[told.tbt_slos_s[-1]], "{:.3f}"),
    "error of predicted TTFT, p50": (lambda told: told.quantile("ttft_error", 0.5), "{:.3f}"),
    "refused": (lambda told: told.outcomes["refused"] / max(1, told.requests), "{:.3f}"),
    "share of the busiest engine": (lambda told: told.busiest("coupled"), "{:.3f}"),
}


def loads(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What is asked: options of `kvmesh sim run`."""
    agents = f"{args.sessions}x{args.turns},applications=4,system=4000:0,user=1000:0.8:16000,output=200:0.5:2000"
    slo = {"slo_ttft": 1000 * args.slo_ttft_s, "tbt_slos": f"{1000 * args.slo_tbt_s:g}"}
    kept = {"kv_tokens": args.kv_tokens, "block_tokens": args.block_tokens, **slo}
    return {
        "agents": {"sessions": f"{agents},start_s={args.start_s},think_s={args.think_s}", **kept},
        "paced agents": {"sessions": f"{agents},start_s={3 * args.start_s},think_s={4 * args.think_s}", **kept},
        "short agents": {
            "sessions": f"{args.sessions}x{args.turns},applications=4,system=320:0,user=100:0.8:1600,output=60:0.5:600,"
            f"start_s={args.start_s},think_s={args.think_s}",
            "kv_tokens": args.kv_tokens // 10,
            "block_tokens": 16,
            **slo,
        },
        "trace": {
            "trace": args.trace,
            "requests": args.requests,
            "speed": args.speed,
            "block_tokens": 512,
            "slo_ttft": 1000 * LONG * args.slo_ttft_s,
            "tbt_slos": f"{1000 * LONG * args.slo_tbt_s:g}",
        },
    }


def served(load: Mapping[str, Any], mode: str, seed: int, args: argparse.Namespace) -> Summary:
    """One run."""
    routing, policy = MODES[mode]
    options = Options(
        **load,
        gpu=args.gpu,
        gpus=1,
        model=args.model,
        coupled=args.engines,
        coupled_mode="chunked",
        chunk_tokens=args.chunk_tokens,
        routing=routing,
        policy=policy,
        admission=args.admission,
        unknown=True,
        seed=seed,
    )
    summary = Summary(ttft_slo_s=options.slo_ttft / 1000, tbt_slos_s=options.tbt_bounds_s)
    run(build.config_of(options), build.load_of(options), sink=summary.add)
    return summary


def shown(load: str, found: Mapping[str, Sequence[Mapping[str, float | None]]]) -> str:
    """The table of one load: a line a figure, a column a mode."""
    lines = [f"{load:<28}" + "".join(f"{mode:>18}" for mode in found)]
    for name, (_, form) in FIGURES.items():
        known = [[value for one in runs if (value := one[name]) is not None] for runs in found.values()]
        cells = [form.format(statistics.median(values)) if values else "-" for values in known]
        lines.append(f"{name:>28}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="agents/paced agents/short agents/trace", help="which, apart by /")
    parser.add_argument("--modes", default="/".join(MODES), help="likewise")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=48)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--start-s", type=float, default=20.0)
    parser.add_argument("--think-s", type=float, default=4.0)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--kv-tokens", type=int, default=75_000, help="of an engine, for agents")
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--block-tokens", type=int, default=64, help="likewise")
    parser.add_argument("--admission", default="off")
    parser.add_argument("--slo-ttft-s", type=float, default=0.25)
    parser.add_argument("--slo-tbt-s", type=float, default=0.05)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    asked, results = loads(args), dict[str, Any]()
    for load in args.loads.split("/"):
        seeds = 1 if load == "trace" else args.seeds  # it is the same again
        found: dict[str, list[dict[str, float | None]]] = {mode: [] for mode in args.modes.split("/")}
        began = time.monotonic()
        for seed in range(seeds):
            for mode, runs in found.items():
                progress.tell(f"{load}, seed {seed}: {mode}")
                summary = served(asked[load], mode, seed, args)
                runs.append({name: tidy(figure(summary)) for name, (figure, _) in FIGURES.items()})
        progress.tell("")
        results[load] = found
        print(f"{load}: {summary.requests} requests, {seeds} seeds, {time.monotonic() - began:.0f} s")
        print(shown(load, found), "\n", flush=True)
    if args.json is not None:
        setup = {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"setup": setup, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
