"""Better than the paper's policy? Tuned on the first half of the conversation trace, reported on the second.

The paper's policy: Algorithm 1 as printed (fetching above a balancing threshold tuned by hand), queues first come first
served. Ours: lines by size with ageing, placement by what others lose, overtaking foreseen (see
services/conductor/loads/sizes.py, services/prefill/planner.py). Both are tuned on the first half by the same rule: the
least geometric mean of mean TTFT over the runs of `TUNED_AT`; ours among those that lose no goodput in any of these.
docs/better.md has the results.

    python -m benchmarks.better --json benchmarks/results/better.json --jobs 2    # goes on where it was cut short
    python -m benchmarks.better --half 1500                                       # a quick look, 4 minutes
    python -m benchmarks.better --only tune
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.better_policies import BETTER, MAIN, PAPER, Policy, added, better_grid, paper_grid
from benchmarks.better_runs import Inputs, Row, Runs, Task
from benchmarks.paper_setup import PARAMETERS, read
from kvmesh.rpc.errors import ConfigError
from kvmesh.sim.workload import mooncake

TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "conversation_trace.jsonl"
SPEEDS = (1.0, 2.0, 3.0)
ADMISSIONS = ("off", "predicted")
TUNED_AT = (("off", 1.0), ("off", 2.0), ("predicted", 2.0), ("predicted", 3.0))
SEEDS = (1, 2)  # of the second half, for the paper's policy and the better one
SYNTHETIC_SEEDS = (1, 2)
SYNTHETIC_AT = (("off", 1.0), ("off", 2.0), ("predicted", 2.0))
LOSS = 0.002  # of goodput, that is chance
SESSION_S = 1.0
WIDTH = 132


def main() -> int:
    """0: all was run."""
    options = _options()
    console = Console(width=WIDTH)
    try:
        inputs = Inputs(read(PARAMETERS), options.trace, options.half or sum(1 for _ in mooncake(options.trace)) // 2)
        runs = Runs(inputs, options.json, options.jobs, lambda text: print(text, file=sys.stderr, flush=True))
        paper, better = tune(runs)
    except ConfigError as err:
        print(f"better: {err}", file=sys.stderr)
        return 2
    console.print(f"paper's policy: {paper.name}\nbetter policy: {better.name}")
    if options.only != "tune":
        report(runs, console, paper, better)
    runs.write({"paper": paper.told(), "better": better.told()})
    return 0


def tune(runs: Runs) -> tuple[Policy, Policy]:
    """The best of each grid on the first half."""
    paper = _best(runs, paper_grid(), None)
    return paper, _best(runs, better_grid(paper), paper)


def _best(runs: Runs, grid: Sequence[Policy], against: Policy | None) -> Policy:
    def rows(policy: Policy) -> list[Row]:
        return runs.get([Task(policy, "first", speed, admission) for admission, speed in TUNED_AT])

    runs.get([Task(one, "first", speed, admission) for one in grid for admission, speed in TUNED_AT])
    least = [row["goodput"] - LOSS for row in rows(against)] if against is not None else [0.0] * len(TUNED_AT)
    able = [one for one in grid if all(r["goodput"] >= g for r, g in zip(rows(one), least, strict=True))]
    return min(able or grid, key=lambda one: math.prod(row["mean_s"] for row in rows(one)))


def report(runs: Runs, console: Console, paper: Policy, better: Policy) -> None:
    """All tables."""
    policies = added(paper, better)
    tasks = [
        Task(policy, "second", speed, admission, seed)
        for seed in SEEDS
        for name, policy in sorted(policies.items(), key=lambda one: one[0] not in MAIN)
        if seed in seeds_of(name)
        for speed in SPEEDS
        for admission in ADMISSIONS
    ]
    session = {name: policies[name] for name in MAIN}
    session["better, session affinity"] = replace(better, session_s=SESSION_S)
    invented = [
        Task(policy, "synthetic", speed, admission, seed)
        for admission, speed in SYNTHETIC_AT
        for policy in session.values()
        for seed in SYNTHETIC_SEEDS
    ]
    runs.get([*tasks[: len(MAIN) * len(SPEEDS) * len(ADMISSIONS)], *invented, *tasks])
    for speed in SPEEDS:
        for admission in ADMISSIONS:
            made = {
                name: runs.get([Task(p, "second", speed, admission, seed) for seed in seeds_of(name)])
                for name, p in policies.items()
            }
            _show(console, f"second half, {speed:g}x, admission {admission}", made)
    for admission, speed in SYNTHETIC_AT:
        made = {
            name: runs.get([Task(p, "synthetic", speed, admission, seed) for seed in SYNTHETIC_SEEDS])
            for name, p in session.items()
        }
        _show(console, f"synthetic prefix trees, {speed:g}x, admission {admission}", made)


def seeds_of(name: str) -> Sequence[int]:
    """Of the second half; where one policy stands against the other, chance shows."""
    return SEEDS if name in (PAPER, BETTER) else SEEDS[:1]


COLUMNS = ("mean_s", "p50_s", "p90_s", "p99_s", "goodput", "refused", "hit_rate", "prefill_gpu_s")


def _show(console: Console, title: str, made: dict[str, list[Row]]) -> None:
    """Means over seeds; change of mean and P90 against the paper's policy."""
    table = Table(title=title, title_justify="left")
    for name in (
        "policy",
        "mean TTFT s",
        "",
        "P50",
        "P90",
        "",
        "P99",
        "goodput",
        "refused",
        "hit rate",
        "prefill GPU s",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right")
    base = _mean(made[PAPER])
    for name, rows in made.items():
        row = _mean(rows)
        table.add_row(
            name,
            f"{row['mean_s']:.2f}",
            _change(row["mean_s"], base["mean_s"]),
            f"{row['p50_s']:.2f}",
            f"{row['p90_s']:.2f}",
            _change(row["p90_s"], base["p90_s"]),
            f"{row['p99_s']:.1f}",
            f"{row['goodput']:.3f}",
            f"{row['refused']:.0f}",
            f"{row['hit_rate']:.3f}",
            f"{row['prefill_gpu_s']:.0f}",
        )
    console.print(table)


def _mean(rows: Sequence[Row]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in COLUMNS}


def _change(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.0f}%" if base else ""


def _options() -> Any:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.better", description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--half", type=int, default=0, help="requests of each half; 0: half of the trace")
    parser.add_argument("--json", type=Path, help="rows are kept here as they are made, and used again")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=("tune",))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
