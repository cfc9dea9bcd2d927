"""How fast `kvmesh sim run` is, and what memory it takes: a trace on 16 nodes, and a synthetic load on many.

    python -m benchmarks.sim_speed --trace conversation_trace.jsonl --json benchmarks/results/sim-speed.json
    python -m benchmarks.sim_speed --requests 1000000 --nodes 1000 --json sim-speed.json

Each run has a process of its own. CPU seconds are of that process, all of it: imports, building the nodes, reading or
making the requests, serving them, checking at the end that all came back. Memory is the process's resident set, read
each time that another hundredth of the requests is done. The file is written anew at every twentieth, so that it tells
how far a run came that somebody stops.

The synthetic load: sessions over the prefix trees of 2,000 applications; half of the nodes prefill, half decode;
`--rate` requests a second for each prefill node (2: about two thirds of their time is spent computing).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS, WRITTEN = 100, 20
APPLICATIONS, TURNS = 2_000, 4
DRAM_TOKENS = 1 << 19  # host memory for KV of each node, full before a tenth of a million requests is done
PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


def rss_mib() -> float:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / MIB


def peak_mib() -> float:
    """The most that it ever was."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Curve:
    """Progress of one run: a line on standard error, a point of the curve."""

    def __init__(self, name: str, total: int, write: Callable[[dict[str, Any]], None]) -> None:
        self.points: list[dict[str, float]] = []
        self._name, self._total, self._write = name, total, write
        self._next = 0

    def tell(self, at_s: float, done: int) -> None:
        """So many requests are done, at that virtual second."""
        if done * PARTS < self._next * self._total and done < self._total:
            return
        self._next = done * PARTS // self._total + 1
        point = {
            "done": done,
            "virtual_s": round(at_s, 1),
            "cpu_s": round(time.process_time(), 2),
            "rss_mib": round(rss_mib(), 1),
            "peak_mib": round(peak_mib(), 1),
        }
        self.points.append(point)
        print(
            f"{self._name}: {done / self._total:4.0%}  {done:,} of {self._total:,} requests, {at_s:,.0f} s of virtual "
            f"time, {point['cpu_s']:,.0f} s of CPU, {point['rss_mib']:,.0f} MiB",
            file=sys.stderr,
            flush=True,
        )
        if len(self.points) % (PARTS // WRITTEN) == 0:
            self._write(self.told(finished=False))

    def told(self, *, finished: bool) -> dict[str, Any]:
        """What is known so far."""
        last = self.points[-1] if self.points else {}
        done, cpu_s = last.get("done", 0), last.get("cpu_s", 0.0)
        marks = {f"{share}%": self._at(share) for share in (10, 50, 100)}
        return {
            "run": self._name,
            "finished": finished,
            "requests": self._total,
            "done": done,
            "cpu_s": cpu_s,
            "requests_per_cpu_s": round(done / cpu_s, 1) if cpu_s else 0.0,
            "ms_per_request": round(1000 * cpu_s / done, 3) if done else 0.0,
            "peak_mib": marks,
            "curve": self.points,
        }

    def _at(self, share: int) -> float | None:
        """Peak memory when so many percent were done."""
        return next((one["peak_mib"] for one in self.points if one["done"] * 100 >= share * self._total), None)


def serve(name: str, options: dict[str, Any], total: int, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """One run in this process."""
    from kvmesh.cli.sim import build as sim_build
    from kvmesh.cli.sim.options import Options
    from kvmesh.sim.run import run

    told = Options(**options)
    curve = Curve(name, total, write)
    began = time.monotonic()
    summary = run(sim_build.config_of(told), sim_build.requests_of(told), progress=curve.tell)
    curve.tell(summary.last_s, summary.requests)
    figures = summary.to_json()
    return {
        **curve.told(finished=True),
        "cpu_s": round(time.process_time(), 2),
        "wall_s": round(time.monotonic() - began, 2),
        "virtual_s": figures["duration_s"],
        "outcomes": figures["outcomes"],
        "hit_rate": figures["hit_rate"],
        "ttft_s": figures["ttft_s"],
        "prefill_busy": round(summary.prefill_gpu_s / (summary.duration_s * (told.prefill or 8)), 3),
        "options": told.told(),
    }


def _in_a_process(arguments: list[str]) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.sim_speed", "--here", *arguments], stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(child.stdout)
    return found


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="Mooncake's conversation trace, on 8 + 8 nodes.")
    parser.add_argument("--limit", type=int, default=0, help="The first N of the trace; 0: all.")
    parser.add_argument("--requests", type=int, default=0, help="Of the synthetic load; 0: without it.")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=2.0, help="Requests a second for each prefill node.")
    parser.add_argument("--json", type=Path, help="Where the figures go.")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.trace and not given.requests:
        parser.error("give --trace, --requests or both")
    runs: dict[str, dict[str, Any]] = {}
    if given.json and given.json.exists() and not given.here:
        runs = {one["run"]: one for one in json.loads(given.json.read_text())["runs"]}

    def write(told: dict[str, Any]) -> None:
        runs[told["run"]] = told
        if given.json:
            found = {"kind": "sim speed", "python": sys.version.split()[0], "runs": list(runs.values())}
            given.json.write_text(json.dumps(found, indent=1) + "\n")

    if given.trace:
        total = sum(1 for _ in given.trace.open())
        options: dict[str, Any] = {"trace": given.trace, "prefill": 8, "decode": 8}
        if 0 < given.limit < total:
            total = options["requests"] = given.limit
        _one("trace" if "requests" not in options else f"trace, {total:,} requests", options, total, write, given)
    if given.requests:
        half = given.nodes // 2
        load = f"rate={given.rate * half:g},applications={APPLICATIONS},turns={TURNS}"
        options = {"synthetic": load, "requests": given.requests, "prefill": half, "decode": half}
        options["dram_tokens"] = DRAM_TOKENS
        _one(f"{given.requests:,} requests, {given.nodes:,} nodes", options, given.requests, write, given)


def _one(
    name: str, options: dict[str, Any], total: int, write: Callable[[dict[str, Any]], None], given: argparse.Namespace
) -> None:
    if given.trace and given.requests:  # each in a process of its own
        own = ["--trace", str(given.trace), "--limit", str(given.limit)] if "trace" in options else _load(given)
        told = _in_a_process(own)
    else:
        told = serve(name, options, total, write if not given.here else lambda told: None)
    if given.here:
        print(json.dumps(told))
        return
    write(told)
    marks = ", ".join(f"{at}: {mib:,.0f}" for at, mib in told["peak_mib"].items() if mib is not None)
    cost = f"{told['requests_per_cpu_s']:,.0f} a second, {told['ms_per_request']:.2f} ms each"
    print(f"{name}: {told['done']:,} requests in {told['cpu_s']:,.1f} s of CPU ({cost}); peak MiB at {marks}")


def _load(given: argparse.Namespace) -> list[str]:
    return ["--requests", str(given.requests), "--nodes", str(given.nodes), "--rate", str(given.rate)]


if __name__ == "__main__":
    main()
