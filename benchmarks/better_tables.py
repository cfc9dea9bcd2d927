"""The tables of benchmarks/better.py: which runs they show, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.better_policies import BETTER, LINES, MAIN, PAPER, Policy, added, better_grid, paper_grid
from benchmarks.better_runs import Row, Task

TUNED_AT = (("off", 1.0), ("off", 2.0), ("predicted", 3.0))
SHOWN_AT = (("off", 1.0), ("off", 2.0), ("predicted", 2.0), ("predicted", 3.0))  # of the second half
PARTS_AT = (("off", 2.0),)  # what each part brings
SYNTHETIC_AT = (("off", 1.0), ("off", 2.0))
SEEDS = (1, 2)  # of the synthetic workload
TUNING_SEED = 3  # likewise

COLUMNS = ("mean_s", "p50_s", "p90_s", "p99_s", "goodput", "refused", "hit_rate", "prefill_gpu_s")
_HEAD = (
    "| | mean TTFT, s | | P50 | P90 | | P99 | goodput | refused | hit rate | prefill, node s |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Shown:
    """One table: runs by policy, the first of which the others are compared with."""

    title: str
    tasks: Mapping[str, Sequence[Task]]

    def markdown(self, rows: Mapping[str, Row]) -> str:
        """Means over seeds."""
        made = {name: mean([rows[task.key] for task in tasks]) for name, tasks in self.tasks.items()}
        base = next(iter(made.values()))
        return "\n".join([_HEAD, *(_line(name, row, base) for name, row in made.items())])


def tables(paper: Policy, better: Policy) -> list[Shown]:
    """All of them."""
    policies = added(paper, better)
    found = [_tuning()]
    for admission, speed in SHOWN_AT:
        names = policies if (admission, speed) in PARTS_AT else MAIN
        tasks = {name: [Task(policies[name], "second", speed, admission)] for name in names}
        found.append(Shown(f"Second half, {speed:g}x, admission {admission}", tasks))
    for admission, speed in SYNTHETIC_AT:
        tasks = {
            name: [Task(policies[name], "synthetic", speed, admission, seed) for seed in SEEDS]
            for name in (PAPER, LINES, BETTER)
        }
        found.append(Shown(f"Synthetic prefix trees, {speed:g}x, admission {admission}", tasks))
    return found


def _tuning() -> Shown:
    """The grids, where tuning decides most."""
    admission, speed = TUNED_AT[1]
    grid = [*paper_grid(), *better_grid()]
    tasks = {one.name: [Task(one, "first", speed, admission)] for one in grid}
    return Shown(f"First half, {speed:g}x, admission {admission}: the grids", tasks)


def mean(rows: Sequence[Row]) -> dict[str, float]:
    """Of several seeds."""
    return {name: sum(row[name] for row in rows) / len(rows) for name in COLUMNS}


def _line(name: str, row: Mapping[str, float], base: Mapping[str, float]) -> str:
    cells = (
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
    return f"| {name} | {' | '.join(cells)} |"


def _change(value: float, base: float) -> str:
    return "" if value == base else f"{100 * (value / base - 1):+.0f}%"
