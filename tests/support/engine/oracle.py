"""Sampling the slow way, one row at a time in numpy and float64: what docs/reference/sampling.md says, word by word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvmesh.engine.batch import SampleParams
from kvmesh.engine.sampling.noise import uniform

Floats = npt.NDArray[np.float64]


def adjusted(
    logits: Sequence[float], p: SampleParams, prompt: Sequence[int] = (), answer: Sequence[int] = ()
) -> Floats:
    """Bias, then repetition, frequency and presence penalty."""
    x = np.array(logits, np.float64)
    for token, bias in p.logit_bias:
        x[token] += bias
    for token in set(prompt) | set(answer):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(answer):
        x[token] -= p.frequency_penalty * list(answer).count(token) + p.presence_penalty
    return x


def probabilities(x: Floats, p: SampleParams) -> Floats:
    """What is left after temperature, min_p, top_k and top_p, each of what the one before left; ties go together."""
    share = np.exp((x - x.max()) / p.temperature)
    share /= share.sum()
    share[share < p.min_p * share.max()] = 0
    if 0 < p.top_k < len(x):
        share[share < np.sort(share)[-p.top_k]] = 0
    if p.top_p < 1:
        ordered = np.sort(share)[::-1]
        reached = np.flatnonzero(np.cumsum(ordered) >= p.top_p * ordered.sum())
        share[share < (ordered[reached[0]] if len(reached) else 0)] = 0
    chosen: Floats = share / share.sum()
    return chosen


def token(x: Floats, p: SampleParams) -> int:
    """The best one, or the first whose cumulative probability is beyond the noise."""
    if p.temperature == 0:
        return int(np.argmax(x))
    reached = np.cumsum(probabilities(x, p))
    return int(np.flatnonzero(reached > uniform(p.seed, p.answered + p.token_index) * reached[-1])[0])
