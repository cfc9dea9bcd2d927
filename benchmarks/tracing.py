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
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from opentelemetry.context import Context

from benchmarks import sides
from kvmesh.telemetry import setup, spans

SIDES: dict[str, dict[str, Any]] = {
    "nothing": {"trace_dir": ""},
    "1%": {"trace_sample": 0.01},
    "everything": {"trace_sample": 1.0},
}
BASE = "nothing"


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
    return {name: sides.told(samples) for name, samples in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sides.add_load_arguments(parser)
    args = parser.parse_args()
    found = sides.compare(sides.rounds_of({name: {"flags": flags} for name, flags in SIDES.items()}, args), BASE)
    sides.show(found)
    costs = span_costs(args.rounds)
    sides.show({name: {"us_of_5_spans": figures} for name, figures in costs.items()})
    if args.json:
        meta = {"machine": platform.machine(), "cpus": os.cpu_count(), "args": vars(args) | {"json": ""}}
        Path(args.json).write_text(json.dumps({**meta, "results": found, "us_of_5_spans": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
