"""Fitted costs as plain data: fitted at once from what a mesh has reported, saved, read by a simulation. Pure.

The file is one JSON object (`Costs.to_json`), seconds throughout:

    {"kvmesh_costs": 1,
     "prefill":     {"a": 0.010, "b": 5e-5, "c": 2.5e-9, "d": 0, "knee": 0},
     "decode_step": {...}, "transfer": {...}, "pull": {...}, "ssd": {...}, "object": {...}}

    seconds = a·n + b·x1 + c·x2 + d·max(0, x1 - knee)

    of            x1                               x2                                      n
    prefill       computed tokens of all prompts   pairs: sum of computed·(computed        steps
                  in the step                      + 2·cached) / 2
    decode_step   rows of the batch                tokens of KV that are read              1
    transfer      bytes of one handoff             bytes before them on the same wires     1
    pull          bytes, and those before them     holders after the first                 1
    ssd, object   bytes, and those before them     -                                       1

A part that is missing keeps its prior (models.py), `d` and `knee` may be missing anywhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvmesh.errors import ConfigError
from kvmesh.kvcache.tiers import Tier
from kvmesh.services.conductor.costs import models as cost
from kvmesh.services.conductor.costs.fit import Coefficients, Sample, fit
from kvmesh.services.conductor.domain import DecodeSample, PrefillSample

VERSION = 1
_MARK = "kvmesh_costs"


@dataclass(frozen=True)
class Costs:
    """The fitted costs of one kind of instance."""

    prefill: Coefficients = cost.PREFILL_PRIOR
    decode_step: Coefficients = cost.DECODE_PRIOR
    transfer: Coefficients = cost.TRANSFER_PRIOR
    pull: Coefficients = cost.PULL_PRIOR
    ssd: Coefficients = cost.TIER_PRIORS[Tier.SSD]
    object: Coefficients = cost.TIER_PRIORS[Tier.OBJECT]

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object that the module's docstring describes."""
        return {_MARK: VERSION} | {one.name: getattr(self, one.name).to_json() for one in fields(self)}

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Costs:
        """Reads what `to_json` returned. Raises ConfigError, which names field and value."""
        if told.get(_MARK) != VERSION:
            raise ConfigError(f"{_MARK}={told.get(_MARK)!r}: must be {VERSION}", field=_MARK)
        names = {one.name for one in fields(cls)}
        if strange := sorted(set(told) - names - {_MARK}):
            raise ConfigError(f"{strange[0]}: no such part of fitted costs", field=strange[0])
        return cls(**{name: Coefficients.of_json(told[name], name) for name in names & set(told)})


def fit_prefill(samples: Iterable[PrefillSample], prior: Coefficients = cost.PREFILL_PRIOR) -> Coefficients:
    """Fits the prefill model to prompts reported by instances that do nothing else."""
    return fit((_prefill(s) for s in samples if s.computed_tokens > 0), prior, cost.PREFILL_ANCHORS)


def _prefill(s: PrefillSample) -> Sample:
    pairs = cost.attention_pairs(s.computed_tokens, s.cached_tokens) + s.beside_pairs
    return Sample(s.computed_tokens + s.beside_tokens, pairs, s.duration_s, max(1, s.steps))


def fit_decode_step(samples: Iterable[DecodeSample], prior: Coefficients = cost.DECODE_PRIOR) -> Coefficients:
    """Fits the decode model to reported steps."""
    told = (Sample(s.batch, s.context_tokens, s.duration_s) for s in samples if s.batch > 0)
    return fit(told, prior, cost.DECODE_ANCHORS, bends=True)


def fit_transfer(samples: Iterable[PrefillSample], prior: Coefficients = cost.TRANSFER_PRIOR) -> Coefficients:
    """Fits the bandwidth of pushes: all bytes over all seconds, without the tenth that is oddest at either end."""
    rated = [(s.transfer_s / s.transfer_bytes, s) for s in samples if s.transfer_bytes > 0 and s.transfer_s > 0]
    odd = len(rated) // 10
    kept = [s for _, s in sorted(rated, key=lambda one: one[0])[odd : len(rated) - odd]]
    if not kept:
        return prior
    each_s = sum(s.transfer_s for s in kept) / sum(s.transfer_bytes for s in kept)
    return Coefficients(0.0, each_s, each_s)


def fit_pull(pulls: Iterable[tuple[float, int, float]], prior: Coefficients = cost.PULL_PRIOR) -> Coefficients:
    """Fits the pull model to (bytes, holders, seconds), where bytes include those sent before. Pulls of similar size,
    or with more scatter than their sizes explain, show no slope; since bytes are never free, a byte then costs what it
    costs by the prior, or less where some pull was faster than that."""
    told = [Sample(nbytes, max(0, holders - 1), seconds) for nbytes, holders, seconds in pulls if nbytes > 0]
    found = fit(told, prior, cost.PULL_ANCHORS)
    sound = [s for s in told if s.sound]
    if found.b > 0 or not sound:
        return found
    byte_s = min(prior.b, *(s.seconds / s.x1 for s in sound))
    rest_s = [max(0.0, s.seconds - byte_s * s.x1 - found.c * s.x2) for s in sound]
    return Coefficients(statistics.median(rest_s), byte_s, found.c)


def fit_tier(reads: Iterable[tuple[float, float]], prior: Coefficients) -> Coefficients:
    """Fits the model of one lower tier to (bytes, seconds)."""
    told = (Sample(nbytes, 0.0, seconds) for nbytes, seconds in reads if nbytes > 0)
    anchors = tuple((float(1 << power), 0.0) for power in (16, 20, 24, 28))
    return fit(told, prior, anchors)


def fit_all(prefills: Iterable[PrefillSample], steps: Iterable[DecodeSample]) -> Costs:
    """Fits all models to what heartbeats of instances of one kind report. The sample of a pull that waited for nothing
    counts, too."""
    known = list(prefills)
    return Costs(
        fit_prefill(known),
        fit_decode_step(steps),
        fit_transfer(known),
        fit_pull((s.pull_bytes, 1, s.pull_s) for s in known),
    )
