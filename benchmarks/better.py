"""Better than the paper's policy? Tuned on the first half of the conversation trace, reported on the second.

The paper's policy: Algorithm 1 as printed (fetching above a balancing threshold tuned by hand), queues first come first
served, roles fixed. Ours: lines by size with ageing, placement by what others lose, overtaking foreseen (see
services/conductor/loads/shortest_first.py, services/prefill/planner.py), roles that follow load (balance/roles.py).
Both are tuned on the first half by the same rule: the least geometric mean of mean TTFT over the runs of `TUNED_AT`;
ours among those that lose no goodput in any of these, nor time on a synthetic workload.
docs/reports/better.md has the results.

    python -m benchmarks.better --json benchmarks/results/better.json --jobs 2    # goes on where it was cut short
    python -m benchmarks.better --json benchmarks/results/better.json --docs docs/reports/better.md  # fills its tables
    python -m benchmarks.better --half 1500                                       # a quick look, a few minutes
    python -m benchmarks.better --only tune
    python -m benchmarks.better --tuned benchmarks/results/better.json --noise 0.3 --spread 0.1 --unknown \\
        --json benchmarks/results/better-noise.json    # the same policies, on machines that nobody knows: who wins then
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.better_page import figure, filled, read_rows, tuned
from benchmarks.better_policies import Policy, better_grid, paper_grid
from benchmarks.better_runs import Inputs, Row, Runs, Scatter, Task
from benchmarks.better_tables import TUNED_AT, TUNING_SEED, tables
from benchmarks.paper_setup import PARAMETERS, read
from kvmesh.errors import ConfigError
from kvmesh.sim.workloads.workload import mooncake

TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "conversation_trace.jsonl"
LOSS = 0.001  # of goodput: six requests of a half
LATER = 1.01  # times the mean TTFT on a synthetic workload


def main() -> int:
    """0: all was run."""
    options = _options()
    try:
        if options.docs is not None:
            _fill(options.docs, options.json)
        else:
            _run(options)
    except (ConfigError, OSError) as err:
        print(f"better: {err}", file=sys.stderr)
        return 2
    return 0


def _run(options: Any) -> None:
    half = options.half or sum(1 for _ in mooncake(options.trace)) // 2
    scatter = Scatter(options.noise, options.spread, options.unknown)
    inputs = Inputs(read(PARAMETERS), options.trace, half, scatter)
    runs = Runs(inputs, options.json, options.jobs, lambda text: print(text, file=sys.stderr, flush=True))
    paper, better = tune(runs) if options.tuned is None else tuned(options.tuned)
    print(f"paper's policy: {paper.name}\nbetter policy: {better.name}")
    if options.only != "tune":
        shown = tables(paper, better)[0 if options.tuned is None else 1 :]  # the first one shows how they were tuned
        runs.get([task for table in shown for tasks in table.tasks.values() for task in tasks])
        for table in shown:
            print(f"\n{table.title}\n\n{table.markdown(runs.rows)}")
    runs.write({"paper": paper.told(), "better": better.told()})


def _fill(page: Path, rows: Path | None) -> None:
    if rows is None:
        raise ConfigError("docs: needs json, the file to fill it from", field="json")
    made = read_rows(rows)
    page.write_text(filled(page.read_text(), made))
    (page.parent / "img" / "better.svg").write_text(figure(made))


def tune(runs: Runs) -> tuple[Policy, Policy]:
    """The best of each grid on the first half, with a look at a synthetic workload."""
    runs.get([task for one in (*paper_grid(), *better_grid()) for task in _first(one)])
    paper = best(paper_grid(), runs.rows, None)
    runs.get([_synthetic(one) for one in (paper, *better_grid())])
    return paper, best(better_grid(), runs.rows, paper)


def _first(policy: Policy) -> list[Task]:
    return [Task(policy, "first", speed, admission) for admission, speed in TUNED_AT]


def _synthetic(policy: Policy) -> Task:
    return Task(policy, "synthetic", 1.0, "off", TUNING_SEED)


def best(grid: Sequence[Policy], rows: Mapping[str, Row], against: Policy | None) -> Policy:
    """The one of the least mean TTFT, of those that are no worse than `against` in goodput and, without load, on a
    synthetic workload (if any is able to)."""

    def of(policy: Policy) -> list[Row]:
        return [rows[task.key] for task in _first(policy)]

    def is_able(policy: Policy) -> bool:
        if against is None:
            return True
        kept = all(a["goodput"] >= b["goodput"] - LOSS for a, b in zip(of(policy), of(against), strict=True))
        return kept and bool(rows[_synthetic(policy).key]["mean_s"] <= LATER * rows[_synthetic(against).key]["mean_s"])

    able = [one for one in grid if is_able(one)]
    return min(able or grid, key=lambda one: math.prod(row["mean_s"] for row in of(one)))


def _options() -> Any:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.better", description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--half", type=int, default=0, help="requests of each half; 0: half of the trace")
    parser.add_argument("--json", type=Path, help="rows are kept here as they are made, and used again")
    parser.add_argument("--docs", type=Path, help="a page whose tables are filled from --json; nothing is run")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", choices=("tune",))
    parser.add_argument("--tuned", type=Path, help="a file of rows: its policies are taken, and none are tuned")
    parser.add_argument("--noise", type=float, default=0.0, help="of step times: deviation of their logarithm")
    parser.add_argument("--spread", type=float, default=0.0, help="likewise of instances, each for good")
    parser.add_argument("--unknown", action="store_true", help="conductors begin with their priors")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
