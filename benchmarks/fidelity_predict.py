"""From a live run to a prediction of another one, and how the two compare. Pure, for `benchmarks.fidelity`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from kvmesh.cli.load.load import LoadOutcome
from kvmesh.cli.load.report import intervals, tbt_s
from kvmesh.quantiles import quantile
from kvmesh.sim.config import SimConfig
from kvmesh.sim.fitting.calibrate import (
    Fit,
    Targets,
    calibrate,
    of_intervals,
    of_ttfts,
    percentiles_of,
    residuals_of,
    targets_of,
)
from kvmesh.sim.fitting.mesh_fit import MeshFit, config_of, costs_of
from kvmesh.sim.fitting.observed import Observed
from kvmesh.sim.host import HostModel
from kvmesh.sim.report.records import DONE, Record
from kvmesh.sim.run import run
from kvmesh.sim.workloads.workload import SimRequest

SHARES = (50, 90, 99)
FIGURES = tuple((what, share) for what in ("TTFT", "TBT") for share in SHARES)
SEEDS = 9
WITHIN = 0.15

Percentiles = dict[tuple[str, int], float]  # (what, percentile) → seconds


def of_outcomes(outcomes: Iterable[LoadOutcome]) -> Percentiles:
    """As the client saw it, by the definitions of `kvmesh replay`."""
    done = [one for one in outcomes if one.ok]
    return _percentiles([one.ttft_s for one in done], [found for one in done if (found := tbt_s(one)) is not None])


def of_records(records: Iterable[Record]) -> Percentiles:
    """The same of a simulation."""
    done = [one for one in records if one.outcome == DONE]
    return _percentiles([one.ttft_s for one in done], [one.tbt_s for one in done if not math.isnan(one.tbt_s)])


def _percentiles(ttfts: Sequence[float], tbts: Sequence[float]) -> Percentiles:
    rising = {"TTFT": sorted(ttfts), "TBT": sorted(tbts)}
    return {(what, share): quantile(rising[what], share / 100) for what, share in FIGURES}


def seen_by_client(targets: Targets, outcomes: Iterable[LoadOutcome]) -> Targets:
    """What the fit is held against: the client's figures in place of decode's. Its clock starts when it begins to send,
    and its tokens come through the gateway."""
    done = [one for one in outcomes if one.ok]
    tbts = [found for one in done if (found := tbt_s(one)) is not None]
    mean_s, deviation_s = of_ttfts([one.ttft_s for one in done])
    gaps = [found for one in done if (found := intervals(one))]
    interval_s, first_s = of_intervals([(len(one), fmean(one)) for one in gaps])
    return replace(
        targets,
        ttft_s=mean_s,
        ttft_deviation_s=deviation_s,
        tbt_s=fmean(tbts),
        interval_s=interval_s,
        first_s=first_s,
        ttft_at_s=percentiles_of([one.ttft_s for one in done]),
        tbt_at_s=percentiles_of(tbts),
    )


def fitted(
    observed: Observed,
    outcomes: Sequence[LoadOutcome],
    requests: Sequence[SimRequest],
    cores: float,
    progress: Callable[[int, int], None],
) -> tuple[SimConfig, MeshFit, Fit]:
    """The mesh as a simulation has it, what a file of it holds, and how the search went."""
    costs = costs_of(observed)
    residuals = residuals_of(observed, costs)
    targets = seen_by_client(targets_of(observed, residuals), outcomes)
    config = config_of(observed, MeshFit(costs, HostModel(cores=cores)))
    fit = calibrate(config, requests, targets, residuals, progress=progress)
    return replace(config, host=fit.host), MeshFit(costs, fit.host), fit


def predicted(config: SimConfig, requests: Sequence[SimRequest], seeds: int = SEEDS) -> list[Percentiles]:
    """Of free-running simulations, one a seed: nothing of a live run of these requests goes in."""
    found = []
    for seed in range(seeds):
        records: list[Record] = []
        run(replace(config, seed=seed), requests, sink=records.append)
        found.append(of_records(records))
    return found


@dataclass(frozen=True)
class Row:
    """One percentile, in seconds. `error`: of the prediction, of the live runs' median."""

    what: str
    share: int
    live_s: float
    least_s: float
    most_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.live_s - 1

    @property
    def kept(self) -> bool:
        """Within the 15% that are asked for."""
        return abs(self.error) <= WITHIN

    @property
    def inside(self) -> bool:
        """As one of the live runs might have been."""
        return self.least_s <= self.predicted_s <= self.most_s


def compared(lives: Sequence[Percentiles], predictions: Sequence[Percentiles]) -> list[Row]:
    """Medians over runs and over seeds."""
    rows = []
    for figure in FIGURES:
        live = [one[figure] for one in lives]
        middle = median(one[figure] for one in predictions)
        rows.append(Row(*figure, median(live), min(live), max(live), middle))
    return rows
