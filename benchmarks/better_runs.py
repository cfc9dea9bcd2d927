"""Runs of benchmarks/better.py, each once: a pool of processes, and a file that keeps what was made."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.better_policies import Policy, config
from benchmarks.paper_setup import Case, Parameters, summary_of, synthetic_of
from kvmesh.errors import ConfigError
from kvmesh.sim.config import SimConfig
from kvmesh.sim.run import run
from kvmesh.sim.workloads.synthetic import synthetic
from kvmesh.sim.workloads.workload import Reading, SimRequest, mooncake

Row = dict[str, Any]
SHARES = (0.0, *(n / 20 for n in range(1, 20)), 0.97, 0.99, 0.995, 1.0)  # of requests: "ttft_s" in a row


@dataclass(frozen=True)
class Task:
    """One run. `part`: "first" or "second" half of the trace, caches cold at its beginning, or "synthetic"."""

    policy: Policy
    part: str
    speed: float
    admission: str
    seed: int = 1

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return f"{self.part} x{self.speed:g} {self.admission} seed={self.seed} {self.policy.name}"


@dataclass(frozen=True)
class Scatter:
    """Step times that conductors do not know; see `SimConfig`."""

    noise: float = 0.0
    spread: float = 0.0
    unknown: bool = False  # they begin with their priors

    def changed(self, config: SimConfig) -> SimConfig:
        """The same, so: with heartbeats as live, which are all that conductors then learn from."""
        if self == Scatter():
            return config
        return replace(
            config,
            noise=self.noise,
            spread=self.spread,
            profiled=not self.unknown,
            heartbeat_s=min(config.heartbeat_s, 0.2),
        )


@dataclass(frozen=True)
class Inputs:
    """`half`: requests of each half of the trace."""

    parameters: Parameters
    trace: Path
    half: int
    scatter: Scatter = Scatter()

    def told(self) -> dict[str, Any]:
        """What rows depend on, as JSON."""
        told = {
            "parameters": json.loads(json.dumps(self.parameters.told())),
            "trace": self.trace.name,
            "half": self.half,
        }
        return told if self.scatter == Scatter() else told | {"scatter": asdict(self.scatter)}


def requests_of(inputs: Inputs, task: Task) -> Iterator[SimRequest]:
    """The workload."""
    at = inputs.parameters
    if task.part == "synthetic":
        count = min(at.synthetic.requests, inputs.half)
        return synthetic(synthetic_of(at, Case(speed=task.speed), count), task.seed)
    skip = inputs.half if task.part == "second" else 0
    block = at.engine.block_tokens
    return mooncake(inputs.trace, Reading(block_tokens=block, speed=task.speed, skip=skip, limit=inputs.half))


def simulate(inputs: Inputs, task: Task) -> Row:
    """One run as a row of the table."""
    began = time.process_time()
    summary = summary_of(inputs.parameters)
    run(
        inputs.scatter.changed(config(inputs.parameters, task.policy, task.admission, task.seed)),
        requests_of(inputs, task),
        sink=summary.add,
    )
    return {
        "requests": summary.requests,
        "refused": summary.outcomes.get("refused", 0),
        "mean_s": round(summary.mean("ttft_s"), 3),
        **{f"p{round(100 * q)}_s": round(summary.quantile("ttft_s", q), 3) for q in (0.5, 0.9, 0.99)},
        "ttft_s": [round(summary.quantile("ttft_s", q), 3) for q in SHARES],
        "max_s": round(summary.quantile("ttft_s", 1.0), 1),
        "goodput": round(next(iter(summary.goodput.values())), 4),
        "hit_rate": round(summary.hit_rate, 4),
        "prefill_gpu_s": round(summary.prefill_gpu_s, 1),
        "ttft_error": round(summary.quantile("ttft_error", 0.5), 3),
        "cpu_s": round(time.process_time() - began, 1),
    }


class Runs:
    """Rows by key. With a file they are kept there as they come, so that what was cut short goes on."""

    def __init__(self, inputs: Inputs, file: Path | None, jobs: int, say: Callable[[str], None]) -> None:
        """ConfigError: the file is none of ours. Rows of another set-up are not taken."""
        self._inputs, self._file, self._jobs, self._say = inputs, file, jobs, say
        self.rows: dict[str, Row] = {}
        if file is not None and file.exists():
            self.rows = kept(file, inputs)

    def get(self, tasks: Sequence[Task]) -> list[Row]:
        """Each task's row, in their order."""
        missing = {task.key: task for task in tasks if task.key not in self.rows}
        if missing:
            self._make(list(missing.values()))
        return [self.rows[task.key] for task in tasks]

    def _make(self, tasks: list[Task]) -> None:
        began, done = time.monotonic(), 0
        with ProcessPoolExecutor(self._jobs, mp_context=get_context("spawn")) as pool:
            left = {pool.submit(simulate, self._inputs, task): task for task in tasks}
            while left:
                for one in wait(left, return_when=FIRST_COMPLETED).done:
                    task, row, done = left.pop(one), one.result(), done + 1
                    self.rows[task.key] = row
                    self.write({})
                    took = f"{done}/{len(tasks)}, {time.monotonic() - began:.0f} s"
                    self._say(f"{took}: {task.key}: mean {row['mean_s']}, P90 {row['p90_s']}, good {row['goodput']}")

    def write(self, more: dict[str, Any]) -> None:
        """To the file, with what was concluded."""
        if self._file is not None:
            made = {"inputs": self._inputs.told(), **more, "rows": self.rows}
            written = self._file.with_suffix(".new")
            written.write_text(json.dumps(made, indent=1) + "\n")
            written.replace(self._file)  # whole, whenever this ends


def kept(file: Path, inputs: Inputs) -> dict[str, Row]:
    """What was made before from the same inputs."""
    try:
        made = json.loads(file.read_text())
        rows: dict[str, Row] = made["rows"] if made["inputs"] == inputs.told() else {}
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(f"json={str(file)!r}: {err}", field="json") from None
    return rows
