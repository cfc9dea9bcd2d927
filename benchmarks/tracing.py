"""What traces cost: throughput and CPU per token of one mesh that traces everything, of one that keeps 1% of traces,
and of one that traces nothing.

The three meshes run beside each other, and each is loaded in turn, in another order every round; the idle ones only
beat. Requests are short (few tokens, a tiny model), so that what does not depend on tokens weighs most: real requests
pay less. The cost is the median of the rounds' own ratios to the mesh without traces, with its interval at 95%. Beside
that, what the spans of a request cost the thread that makes them.

    python -m benchmarks.tracing --json benchmarks/results/tracing.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry.context import Context

from benchmarks import progress
from benchmarks.mesh import ROOT, Round, run_mesh
from benchmarks.turns import interval
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.telemetry import setup, spans

SIDES: dict[str, dict[str, Any]] = {
    "nothing": {"trace_dir": ""},
    "1%": {"trace_sample": 0.01},
    "everything": {"trace_sample": 1.0},
}
BASE = "nothing"


def start(stack: contextlib.ExitStack, flags: dict[str, Any], args: argparse.Namespace) -> Mesh:
    """Starts a mesh, which stops with `stack`; it is not ready yet."""
    run_dir = stack.enter_context(tempfile.TemporaryDirectory())
    blocks = 8 * args.concurrency
    settings = MeshSettings(
        model=str(ROOT / "examples" / "demo-model"), http_port=0, grpc_port=0, run_dir=run_dir, threads=1,
        flags={"*": {"num_pages": blocks, "num_extents": blocks, **flags}}, log_level="warning",
    )  # fmt: skip
    return stack.enter_context(Mesh(settings))


def measure(meshes: dict[str, Mesh], args: argparse.Namespace) -> dict[str, list[Round]]:
    """Returns the rounds of each mesh, those of one place in the lists from the same turn."""
    rng = random.Random(args.seed)
    found: dict[str, list[Round]] = {name: [] for name in meshes}
    order = list(meshes)
    for n in range(args.rounds + 1):
        for name in order:
            work = [
                ([rng.randrange(20, 250) for _ in range(args.prompt_tokens)], args.max_tokens)
                for _ in range(args.requests)
            ]
            one = asyncio.run(run_mesh(meshes[name], work, args.concurrency))
            if n:  # the first round warms all
                found[name].append(one)
        order = order[1:] + order[:1]
        progress.tell(f"round {n} of {args.rounds}")
    progress.tell("")
    return found


def span_costs(rounds: int, count: int = 2_000) -> dict[str, list[float]]:
    """Returns the CPU time in µs, of this thread, of one request of a root span and four below it: traced nowhere, held
    in case it fails, and kept (without writing it, which another thread does)."""
    seconds: dict[str, list[float]] = {name: [] for name in ("nothing", "held", "kept")}
    for _ in range(rounds):
        for name, samples in seconds.items():
            with tempfile.TemporaryDirectory() as folder:
                limits = setup.TelemetryLimits(trace_sample=float(name == "kept"))
                trace_dir = "" if name == "nothing" else folder
                telemetry = setup.start(
                    "decode", "d", trace_dir=trace_dir, otlp_endpoint="", log_level="error", limits=limits
                )
                before = time.thread_time()
                for _ in range(count):
                    root = spans.begin("root", Context(), {"kvmesh.request_id": "r", "kvmesh.attempt": 0})
                    for n in range(4):
                        attributes: dict[str, spans.Value] = {"kvmesh.request_id": "r", "kvmesh.blocks": n}
                        spans.record("child", spans.context_of(root), 1, 2, attributes)
                    spans.finish(root)
                samples.append(1e6 * (time.thread_time() - before) / count)
                telemetry.shutdown()
    return {name: told(samples) for name, samples in seconds.items()}


def told(values: Sequence[float]) -> list[float]:
    """Returns the median and its interval."""
    return [statistics.median(values), *interval(values)]


def compare(rounds: dict[str, list[Round]]) -> dict[str, dict[str, list[float]]]:
    """Returns, of each mesh, its figures and those that are relative to the mesh without traces."""
    figures = {
        name: {
            "requests_per_s": [len(one.samples) / one.wall_s for one in some],
            "cpu_us_per_token": [
                1e6 * sum(one.cpu_s.values()) / sum(sample.tokens for sample in one.samples) for one in some
            ],
            "ttft_p50_ms": [statistics.median(sample.ttft for sample in one.samples) for one in some],
        }
        for name, some in rounds.items()
    }
    found: dict[str, dict[str, list[float]]] = {}
    for name, some in figures.items():
        found[name] = {what: told(values) for what, values in some.items()}
        if name != BASE:
            for what, values in some.items():
                pairs = zip(values, figures[BASE][what], strict=True)
                found[name][f"{what}_ratio"] = told([value / base for value, base in pairs])
    return found


def show(found: dict[str, dict[str, list[float]]]) -> None:
    for name, figures in found.items():
        for what, (middle, low, high) in figures.items():
            print(f"{name:>10}  {what:<24} {middle:10.3f}  [{low:.3f}, {high:.3f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=64, help="in a round")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="also write the results here")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        meshes = {name: start(stack, flags, args) for name, flags in SIDES.items()}
        for mesh in meshes.values():
            mesh.wait_ready(180)
        time.sleep(2)  # registration reaches the gateways; not part of what is measured
        found = compare(measure(meshes, args))
    show(found)
    costs = span_costs(args.rounds)
    show({name: {"us_of_5_spans": figures} for name, figures in costs.items()})
    if args.json:
        meta = {"machine": platform.machine(), "cpus": os.cpu_count(), "args": vars(args) | {"json": ""}}
        Path(args.json).write_text(json.dumps({**meta, "results": found, "us_of_5_spans": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
