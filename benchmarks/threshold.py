"""Is an adapted balancing threshold better than a fixed one? Algorithm 1 as printed (`always`: a prefix is fetched
whenever the best one is more than so many times the local one) and by predicted TTFT (`cheaper`), each with thresholds
that are fixed and with one that adapts, over wires from slow to fast, wires that change within a run, loads, and the
conversation trace. docs/reports/threshold.md has the results.

    python -m benchmarks.threshold --json benchmarks/results/threshold.json      # goes on where it was cut short
    python -m benchmarks.threshold --json benchmarks/results/threshold.json --docs docs/reports/threshold.md
    python -m benchmarks.threshold --only "slow for a third"                      # one case
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.better import TRACE
from benchmarks.paper_setup import PARAMETERS, Case, Parameters, config_of, read, summary_of
from benchmarks.progress import tell
from benchmarks.threshold_page import Row, filled, tables
from kvmesh.errors import ConfigError
from kvmesh.services.conductor.domain import Fetch
from kvmesh.services.conductor.settings import ThresholdMode
from kvmesh.sim.config import SimConfig, WireChange
from kvmesh.sim.run import run
from kvmesh.sim.workloads.synthetic import LengthDistribution, SyntheticConfig, synthetic
from kvmesh.sim.workloads.workload import Reading, SimRequest, mooncake

COMPARED = {"always": ("1", "2", "8", "adaptive"), "cheaper": ("1", "8", "adaptive")}  # thresholds by rule
TUNING_SEED, SEED = 1, 2  # constants were chosen by looking at the first; the second is reported
SKIPPED = 6000  # of the trace: its first half was looked at, too


@dataclass(frozen=True)
class Scene:
    """Where it is tried. `slow`: virtual seconds from and to which NICs carry `slow_share`."""

    name: str
    nic_gbps: float
    rate: float  # requests a second; of the trace: how many times as fast
    requests: int
    slow: tuple[float, float] = (0.0, 0.0)
    slow_share: float = 1.0
    slow_nodes: tuple[str, ...] = ()  # (): all
    burstiness: float = 1.0
    prefill: int = 8
    trace: bool = False


SCENES = (
    Scene("wires of 12 Gb/s", 12, 6, 1200),
    Scene("25 Gb/s", 25, 6, 1200),
    Scene("100 Gb/s, busy", 100, 10, 1500),
    Scene("12 + 4 nodes at 50 Gb/s, bursts", 50, 12, 1500, burstiness=3.0, prefill=12),
    Scene("100 Gb/s, 15 for a third, busy", 100, 10, 2400, (80, 160), 0.15),
    Scene("100 Gb/s, 10 for a third, little load", 100, 6, 2000, (120, 240), 0.1),
    Scene("100 Gb/s, half of the nodes 10 for a third", 100, 10, 2400, (80, 160), 0.1, ("p0", "p1", "p2", "p3")),
    Scene("conversation at 16 Gb/s", 16, 1, 1500, trace=True),
)


@dataclass(frozen=True)
class Task:
    """One run."""

    scene: Scene
    rule: str
    threshold: str
    seed: int

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return f"{self.scene.name} | {self.rule} {self.threshold} | seed={self.seed}"


def config(at: Parameters, task: Task) -> SimConfig:
    """The paper's set-up with this threshold."""
    scene = task.scene
    nodes = at.cluster.nodes
    base = config_of(at, Case(nic_gbps=scene.nic_gbps, prefill=scene.prefill, decode=nodes - scene.prefill))
    adapts = task.threshold == "adaptive"
    settings = replace(
        base.conductor,
        fetch=Fetch(task.rule),
        balancing_threshold=1.0 if adapts else float(task.threshold),
        threshold_mode=ThresholdMode.ADAPTIVE if adapts else ThresholdMode.FIXED,
        max_explained=0,
    )
    start, end = scene.slow
    wires = (WireChange(start, scene.slow_share, scene.slow_nodes), WireChange(end, 1.0)) if end else ()
    return replace(base, seed=task.seed, conductor=settings, wires=wires)


def requests_of(at: Parameters, task: Task, trace: Path) -> Iterator[SimRequest]:
    """The trace from SKIPPED on, or agents: tools' instructions that many share, two levels of documents below them,
    questions. There is much that is held elsewhere, and most have a part of it, so that a threshold matters."""
    scene, block = task.scene, at.engine.block_tokens
    if scene.trace:
        skip = SKIPPED if task.seed == SEED else 0
        return mooncake(trace, Reading(block_tokens=block, speed=scene.rate, skip=skip, limit=scene.requests))
    made = SyntheticConfig(
        requests=scene.requests,
        rate=scene.rate,
        burstiness=scene.burstiness,
        block_tokens=block,
        applications=6,
        zipf=1.0,
        system=LengthDistribution(6_000, 0.5, 16_000),
        depth=2,
        branching=40,
        node=LengthDistribution(5_000, 0.7, 32_000),
        turns=2.0,
        think_s=30.0,
        user=LengthDistribution(600, 1.0, 32_000),
        output=LengthDistribution(145, 1.0, 8_000),
    )
    return synthetic(made, task.seed)


def simulate(at: Parameters, task: Task, trace: Path) -> Row:
    """One run as a row."""
    began, summary, pulled = time.process_time(), summary_of(at), 0
    changes = [0]

    def add(record: Any) -> None:
        nonlocal pulled
        summary.add(record)
        pulled += record.pulled_tokens

    def last(system: Any) -> None:
        changes[0] = system.brains.states[0].scheduling.threshold.changes

    run(config(at, task), requests_of(at, task, trace), sink=add, last=last)
    return {
        "mean_s": round(summary.mean("ttft_s"), 3),
        "p90_s": round(summary.quantile("ttft_s", 0.9), 3),
        "goodput": round(next(iter(summary.goodput.values())), 4),
        "hit_rate": round(summary.hit_rate, 4),
        "pulled_tokens": pulled,
        "prefill_gpu_s": round(summary.prefill_gpu_s, 1),
        "changes": changes[0],
        "cpu_s": round(time.process_time() - began, 1),
    }


def tasks(scenes: Sequence[Scene], seed: int) -> list[Task]:
    """All runs: every threshold by both rules."""
    return [
        Task(scene, rule, threshold, seed)
        for scene in scenes
        for rule, all_of in COMPARED.items()
        for threshold in all_of
    ]


def make(at: Parameters, wanted: Sequence[Task], trace: Path, file: Path | None, jobs: int) -> dict[str, Row]:
    """Rows by key; those that `file` has of the same set-up are not made again."""
    inputs = {
        "parameters": at.told(),
        "trace": trace.name,
        "scenes": {one.scene.name: asdict(one.scene) for one in wanted},
    }
    inputs = json.loads(json.dumps(inputs))
    rows = _kept(file, inputs)  # and `inputs` tells of the scenes of those
    missing = [one for one in wanted if one.key not in rows]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        started = [(one, pool.submit(simulate, at, one, trace)) for one in missing]
        for n, (one, future) in enumerate(started):
            tell(f"{n}/{len(missing)} {one.key}")
            rows[one.key] = future.result()
            if file is not None:
                written = file.with_suffix(".new")
                written.write_text(json.dumps({"inputs": inputs, "rows": rows}, indent=1) + "\n")
                written.replace(file)
    tell("")
    return rows


def _kept(file: Path | None, inputs: dict[str, Any]) -> dict[str, Row]:
    if file is None or not file.exists():
        return {}
    try:
        made = json.loads(file.read_text())
        told, rows = made["inputs"], made["rows"]
        if any(told[name] != inputs[name] for name in ("parameters", "trace")):
            return {}
        inputs["scenes"] = told["scenes"] | inputs["scenes"]
        same = {name for name, scene in inputs["scenes"].items() if told["scenes"].get(name) == scene}
        return {key: row for key, row in rows.items() if key.split(" | ")[0] in same}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigError(f"json={str(file)!r}: {err}", field="json") from None


def main() -> int:
    """0: all was run."""
    options = _options()
    scenes = [one for one in SCENES if options.only is None or one.name == options.only]
    try:
        if not scenes:
            raise ConfigError(f"only={options.only!r}: there are {', '.join(s.name for s in SCENES)}", field="only")
        wanted = tasks(scenes, options.seed)
        rows = make(read(PARAMETERS), wanted, options.trace, options.json, options.jobs)
    except (ConfigError, OSError) as err:
        print(f"threshold: {err}", file=sys.stderr)
        return 2
    shown = tables([s.name for s in scenes], COMPARED, rows, options.seed)
    if options.docs is not None:
        options.docs.write_text(filled(options.docs.read_text(), shown))
    else:
        print(shown)
    return 0


def _options() -> Any:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threshold", description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--json", type=Path, help="rows are kept here as they are made, and used again")
    parser.add_argument("--docs", type=Path, help="a page whose tables are filled")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=SEED, help=f"{TUNING_SEED}: what the constants were chosen by")
    parser.add_argument("--only", help="one case, by its name")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
