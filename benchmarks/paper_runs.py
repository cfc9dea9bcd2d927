"""Runs of the simulator that figures need, each once, in a pool of processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from benchmarks.paper_setup import Case, Parameters, config_of, requests_of, summary_of
from kvmesh.sim.cluster import Cluster
from kvmesh.sim.report.records import DONE, Record
from kvmesh.sim.report.sketch import Sketch
from kvmesh.sim.run import System, run
from kvmesh.sim.workloads.workload import SimRequest

Told = dict[str, Any]  # of one run, plain JSON
BANDS = (1, 15, 100, 1_000)  # last ranks of blocks by use, whose copies are counted
EVERY_S = 0.5

_done: Synchronized[int] | None = None  # requests, over all processes


@dataclass(frozen=True)
class Inputs:
    """Of all runs. `limit`: so many requests of each workload; None: all."""

    parameters: Parameters
    trace: Path
    limit: int | None = None


@dataclass(frozen=True)
class Task:
    """All that a process needs."""

    inputs: Inputs
    case: Case


def simulate(task: Task, progress: Callable[[int], None] = lambda new: None) -> Told:
    """One run. `progress` hears how many requests more are done."""
    inputs, at, case = task.inputs, task.inputs.parameters, task.case
    summary, hot = summary_of(at), Hot(requests_of(at, case, inputs.trace, inputs.limit))
    told, landed = 0, Sketch()

    def ended(record: Record) -> None:
        summary.add(record)
        hot.ended(record)
        if record.outcome == DONE and record.kv_end_s == record.kv_end_s:
            landed.add(record.kv_end_s - record.at_s)

    def tell(_: float, done: int) -> None:
        nonlocal told
        progress(done - told)
        told = done

    began = time.monotonic()
    requests = hot.seen(requests_of(at, case, inputs.trace, inputs.limit))
    run(config_of(at, case), requests, sink=ended, samples=summary.sample, progress=tell, last=hot.last)
    return {
        "wall_s": round(time.monotonic() - began, 1),
        "requests": summary.requests,
        "outcomes": dict(summary.outcomes),
        "refused": dict(summary.refused),
        "failed": dict(summary.failed),
        "requests_per_s": round(summary.requests_per_s, 3),
        "ttft_s": _spread(summary.sketches["ttft_s"].to_json()),
        "landed_s": _spread(landed.to_json()),
        "tbt_s": _spread(summary.sketches["tbt_s"].to_json()),
        "queue_s": _spread(summary.sketches["queue_s"].to_json()),
        "ttft_error": _spread(summary.sketches["ttft_error"].to_json()),
        "capacity": [round(share, 4) for share in summary.goodput.values()],
        "hit_rate": round(summary.hit_rate, 4),
        "tokens": dict(summary.tokens),
        "prefill_gpu_s": round(summary.prefill_gpu_s, 1),
        "copies": hot.told(),
    }


def _spread(sketch: Mapping[str, Any]) -> Told:
    return {name: sketch[name] for name in ("mean", "p50", "p90", "p99")}


def bands(blocks: Sequence[tuple[int, int, int]]) -> list[Told]:
    """Of (uses, at the end, ever), by falling use."""
    found = []
    for first, last in pairwise((0, *BANDS)):
        if band := blocks[first:last]:
            uses, end, ever = (round(sum(column) / len(band), 3) for column in zip(*band, strict=True))
            found.append({"ranks": [first + 1, first + len(band)], "uses": uses, "end": end, "ever": ever})
    return found


class Hot:
    """Where the blocks are that a workload uses most."""

    def __init__(self, requests: Iterable[SimRequest]) -> None:
        uses = Counter(key for request in requests for key in request.keys)
        self._uses = dict(uses.most_common(BANDS[-1]))
        self._ever: dict[bytes, set[str]] = {key: set() for key in self._uses}
        self._at_end: dict[bytes, int] = {}
        self._under_way: dict[int, list[bytes]] = {}

    def seen(self, requests: Iterable[SimRequest]) -> Iterator[SimRequest]:
        """The same, as they arrive."""
        for request in requests:
            self._under_way[request.index] = [key for key in request.keys if key in self._uses]
            yield request

    def ended(self, record: Record) -> None:
        """Its prompt was computed at one instance, which then had all of its blocks."""
        for key in self._under_way.pop(record.index):
            if record.prefill:
                self._ever[key].add(record.prefill)

    def last(self, system: System) -> None:
        """Nothing comes any more."""
        if isinstance(system, Cluster):
            stores = [system.nodes[name].store for name in system.prefills]
            self._at_end = {key: sum(one.holds(key) for one in stores) for key in self._uses}

    def told(self) -> list[Told]:
        """Means of each band of ranks: uses, prefill instances that have a block at the end, and that ever had it."""
        blocks = [(uses, self._at_end.get(key, 0), len(self._ever[key])) for key, uses in self._uses.items()]
        return bands(blocks)


def simulate_all(
    inputs: Inputs, cases: Iterable[Case], jobs: int, progress: Callable[[int, int], None]
) -> dict[Case, Told]:
    """Each case once, `jobs` at a time. `progress` hears of requests and of runs done."""
    tasks = [Task(inputs, case) for case in dict.fromkeys(cases)]
    context = get_context("spawn")
    done = context.Value("q", 0)
    found: dict[Case, Told] = {}
    with ProcessPoolExecutor(jobs, context, initializer=_share, initargs=(done,)) as pool:
        left: dict[Future[Told], Case] = {pool.submit(_simulate, task): task.case for task in tasks}
        try:
            while left:
                ended, _ = wait(left, EVERY_S, FIRST_COMPLETED)
                for future in ended:
                    found[left.pop(future)] = future.result()
                progress(done.value, len(found))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def _share(done: Synchronized[int]) -> None:
    global _done
    _done = done


def _simulate(task: Task) -> Told:
    def add(new: int) -> None:
        if _done is not None:
            with _done.get_lock():
                _done.value += new

    return simulate(task, add)
