"""A live mesh on one machine → what makes a simulation of the same requests come out the same.

Instances report what their steps took *while others used the same cores*. Least squares give the form of these times
(services/conductor/costs/file.py). What they are alone, how much a request costs outside of steps and how steps scatter
is found by simulating the very requests that were observed, and moving one figure towards each measurement:

    figure               is moved until simulation and measurement agree on
    prefill_alone        mean time from a prompt's first step to the end of its last one
    decode_alone         mean time of a decode step
    between_s            a token interval but the first of a request: g in mean interval = g + h / intervals
    handoff_s            what the first one takes longer: h
    turn_s               mean TBT of a request (of its slowest tenth)
    door_s               mean TTFT
    rest_s               standard deviation of TTFT
    residuals            variance of log(step time / fitted time), of prefill and decode steps

This comes near, but figures move each other's measurements, a round is noisy, and a mean does not tell whether its
percentiles are met. So the search ends with a second one around where the first came closest (surface.py): all figures
and all of these means, and p50, p90, p99 of TTFT and TBT, at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev, pvariance

from kvmesh.errors import ConfigError
from kvmesh.quantiles import quantile
from kvmesh.services.conductor.costs.file import Costs
from kvmesh.services.conductor.costs.models import attention_pairs
from kvmesh.sim.config import SimConfig
from kvmesh.sim.fitting.observed import Observed
from kvmesh.sim.fitting.surface import better
from kvmesh.sim.host import HostModel, scattered
from kvmesh.sim.report.records import DONE, Record
from kvmesh.sim.run import run
from kvmesh.sim.workloads.workload import SimRequest

ROUNDS = 12
SEEDS = 2  # simulations of one round
PASSES = 2  # of the second search
MAX_FACTOR = 2.0  # of one figure, in one round
CALMER = 3  # rounds after which steps are half as long, then a third, ...
LEAST_S = 1e-6
ENOUGH = 20  # requests
SHARES = (0.5, 0.9, 0.99)
TIMES = ("ttft_s", "ttft_deviation_s", "tbt_s", "interval_s", "prefill_s", "step_s")


@dataclass(frozen=True)
class Targets:
    """In seconds, over requests and over decode steps; spreads are variances of log residuals."""

    ttft_s: float
    ttft_deviation_s: float
    tbt_s: float
    interval_s: float  # between two tokens, but the first two
    first_s: float  # that the first interval takes longer
    prefill_s: float
    step_s: float
    prefill_spread: float = 0.0
    decode_spread: float = 0.0
    ttft_at_s: tuple[float, ...] = ()  # at `SHARES` of the requests
    tbt_at_s: tuple[float, ...] = ()

    def measured(self) -> dict[str, float]:
        """All of it, each above 0 where it is known; `first_s` with the interval that it is on top of."""
        found = {name: float(getattr(self, name)) for name in (*TIMES, "prefill_spread", "decode_spread")}
        found["first_s"] = self.interval_s + self.first_s
        for name in ("ttft_at_s", "tbt_at_s"):
            found |= {f"{name}[{at}]": value for at, value in enumerate(getattr(self, name))}
        return found

    def off(self, targets: Targets) -> float:
        """How far the worst of the times is from what was measured: |log| of the ratio."""
        return max(abs(math.log(float(getattr(self, name)) / float(getattr(targets, name)))) for name in TIMES)


@dataclass
class Fit:
    """`rounds`: what the simulation gave in each of the first search. `found`: what it gives of `host`."""

    host: HostModel
    targets: Targets
    found: Targets
    rounds: list[Targets] = field(default_factory=list)


@dataclass(frozen=True)
class Residuals:
    """Step times over fitted times, as they were measured."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]


def residuals_of(observed: Observed, costs: Costs) -> Residuals:
    """Returns how the times of all samples scatter about the fitted ones. ConfigError: there are too few."""
    prefills = [
        s.duration_s
        / costs.prefill.at(
            s.computed_tokens + s.beside_tokens,
            attention_pairs(s.computed_tokens, s.cached_tokens) + s.beside_pairs,
            max(1, s.steps),
        )
        for s in observed.prefills.values()
        if s.computed_tokens > 0 and s.duration_s > 0
    ]
    rows = [
        s.duration_s / costs.decode_step.at(s.batch, s.context_tokens)
        for s in observed.rows
        if s.batch > 0 and s.duration_s > 0
    ]
    for name, values in (("prompts", prefills), ("decode steps", rows)):
        if len(values) < ENOUGH:
            raise ConfigError(f"decision log: {len(values)} {name}: at least {ENOUGH} are needed", field="decisions")
    return Residuals(tuple(prefills), tuple(rows))


def targets_of(observed: Observed, residuals: Residuals) -> Targets:
    """Returns the measurements that a simulation shall meet, as decode has seen them."""
    done = [observed.outcomes[name] for name in observed.done()]
    answers = [one for one in done if one.output_tokens > 1]
    prefills = list(observed.prefills.values())
    if len(answers) < ENOUGH or len(prefills) < ENOUGH:
        why = f"at least {ENOUGH} answers of two tokens are needed"
        raise ConfigError(f"decision log: {len(answers)} answers: {why}", field="decisions")
    return Targets(
        *of_ttfts([one.ttft_s for one in done]),
        fmean(one.tbt_s for one in answers),
        *of_intervals([(one.output_tokens - 1, one.mean_tbt_s) for one in answers]),
        fmean(one.duration_s for one in prefills),
        fmean(one.duration_s for one in observed.rows),
        _spread(residuals.prefill),
        _spread(residuals.decode),
        percentiles_of([one.ttft_s for one in done]),
        percentiles_of([one.tbt_s for one in answers]),
    )


def calibrate(
    config: SimConfig,
    requests: Sequence[SimRequest],
    targets: Targets,
    residuals: Residuals,
    *,
    rounds: int = ROUNDS,
    passes: int = PASSES,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Fit:
    """`config`: the mesh that was observed, with the fitted step times; its `host` is where the search begins.
    `requests`: those that were served. The same arguments give the same fit. `progress`: rounds and passes."""
    if config.host is None:
        raise ConfigError("host=None: a mesh that shares no host has nothing to calibrate", field="host")
    fit = _by_means(config, requests, targets, residuals, rounds, lambda done: progress(done, rounds + passes))

    def measure(host: HostModel, number: int) -> dict[str, float]:
        return simulated(replace(config, host=host), requests, (number,)).measured()

    for at in range(passes):
        fit.host = better(fit.host, targets.measured(), measure)
        progress(rounds + at + 1, rounds + passes)
    if passes:
        fit.found = simulated(replace(config, host=fit.host), requests)
    return fit


def _by_means(
    config: SimConfig,
    requests: Sequence[SimRequest],
    targets: Targets,
    residuals: Residuals,
    rounds: int,
    progress: Callable[[int], None],
) -> Fit:
    """The first search: one figure for each mean."""
    host = config.host
    assert host is not None and rounds > 0
    shares = {"prefill": 1.0, "decode": 1.0}  # powers of the measured residuals
    fit = Fit(host, targets, targets)
    best = math.inf
    for at in range(rounds):
        host = replace(
            host,
            prefill_residuals=scattered(residuals.prefill, shares["prefill"]),
            decode_residuals=scattered(residuals.decode, shares["decode"]),
        )
        seen = simulated(replace(config, host=host), requests)
        fit.rounds.append(seen)
        if (off := seen.off(targets)) < best:
            best, fit.host, fit.found = off, host, seen
        progress(at + 1)
        calm = 1 / (1 + at / CALMER)
        host = _moved(host, targets, seen, calm)
        for role in shares:
            wanted, found = getattr(targets, f"{role}_spread"), getattr(seen, f"{role}_spread")
            # The variance of a power goes with its square; what sharing adds is not ours to scatter.
            own = shares[role] ** 2 * wanted + calm * (wanted - found)
            shares[role] = math.sqrt(max(0.0, own) / wanted) if wanted > 0 else 0.0
    return fit


def simulated(config: SimConfig, requests: Sequence[SimRequest], seeds: Sequence[int] = range(SEEDS)) -> Targets:
    """Returns the same figures of a simulation, over a few seeds."""
    records: list[Record] = []
    logs: dict[str, list[float]] = {"prefill": [], "decode": []}
    steps_s: list[float] = []

    def step(role: str, usual_s: float, took_s: float) -> None:
        logs[role].append(took_s / usual_s)
        if role == "decode":
            steps_s.append(took_s)

    for seed in seeds:
        run(replace(config, seed=config.seed + seed), requests, sink=records.append, steps=step)
    done = [one for one in records if one.outcome == DONE]
    answers = [one for one in done if not math.isnan(one.tbt_s)]
    if not answers:
        raise ConfigError("the simulation answers nothing of what the log has: too little memory?", field="decisions")
    return Targets(
        *of_ttfts([one.ttft_s for one in done]),
        fmean(one.tbt_s for one in answers),
        *of_intervals([(one.output_tokens - 1, one.mean_tbt_s) for one in answers]),
        fmean(one.prefill_end_s - one.prefill_start_s for one in done),
        fmean(steps_s),
        _spread(logs["prefill"]),
        _spread(logs["decode"]),
        percentiles_of([one.ttft_s for one in done]),
        percentiles_of([one.tbt_s for one in answers]),
    )


def percentiles_of(values: Sequence[float]) -> tuple[float, ...]:
    """Returns the values at `SHARES`, linear between ranks. `values` is not empty."""
    rising = sorted(values)
    return tuple(quantile(rising, share) for share in SHARES)


def of_ttfts(ttfts: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return fmean(ttfts), pstdev(ttfts)


def of_intervals(requests: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """From (intervals, their mean) of each request: what an interval takes, and what the first one takes longer. Least
    squares of mean = g + h / intervals, each request counted as often as it has intervals. Not negative."""
    n = float(sum(count for count, _ in requests))
    x, xx = float(len(requests)), sum(1 / count for count, _ in requests)
    y, xy = sum(count * mean for count, mean in requests), sum(mean for _, mean in requests)
    below = n * xx - x * x
    first = max(0.0, (n * xy - x * y) / below) if below > 1e-12 * n * xx else 0.0
    return max(LEAST_S, (y - first * x) / n), first


def _spread(ratios: Sequence[float]) -> float:
    return pvariance([math.log(one) for one in ratios])


def _moved(host: HostModel, targets: Targets, seen: Targets, calm: float) -> HostModel:
    """Each figure towards its measurement; `calm` in (0, 1]: of the way, for figures move each other's measurements."""

    def factor(name: str) -> float:
        ratio = float(getattr(targets, name)) / float(getattr(seen, name))
        return float(min(MAX_FACTOR, max(1 / MAX_FACTOR, ratio**calm)))

    def shifted(value: float, name: str, share: float) -> float:
        missing = float(getattr(targets, name)) - float(getattr(seen, name))
        return max(0.0, value + calm * share * missing)

    return replace(
        host,
        prefill_alone=host.prefill_alone * factor("prefill_s"),
        decode_alone=host.decode_alone * factor("step_s"),
        between_s=shifted(host.between_s, "interval_s", 0.4),
        turn_s=shifted(host.turn_s, "tbt_s", 0.15),
        handoff_s=shifted(host.handoff_s, "first_s", 0.7),
        door_s=shifted(host.door_s, "ttft_s", 0.1),
        rest_s=shifted(host.rest_s, "ttft_deviation_s", 0.12),
    )
