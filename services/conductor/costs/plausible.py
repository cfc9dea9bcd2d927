"""Which measurements in a heartbeat are plausible; the others are ignored, whoever sends them. Pure.

Every member's samples affect all instances (through the models of its kind, and the estimate of other conductors'
work), so a member that miscounts or lies must not change these without bound. A time above MAX_SAMPLE_S, or more than
MAX_SEEN times longer or shorter than on a good device of this kind, teaches nothing. Times up to a minute are always
plausible, since a process may pause.
"""

from __future__ import annotations

from kvmesh.services.conductor.costs.models import (
    DECODE_PRIOR,
    MAX_SEEN,
    PREFILL_PRIOR,
    PULL_PRIOR,
    TRANSFER_PRIOR,
    attention_pairs,
)
from kvmesh.services.conductor.domain import DecodeSample, PrefillSample

MAX_SAMPLE_S = 3600.0
MAX_PAUSE_S = 60.0


def plausible_prefill(s: PrefillSample) -> bool:
    """Says whether a prompt can have been computed, handed over and fetched in these times; a time of 0 was not
    measured."""
    pairs = attention_pairs(s.computed_tokens, s.cached_tokens) + s.beside_pairs
    return (
        s.chunks <= min(s.steps, max(1, s.computed_tokens))
        and _near(s.duration_s, PREFILL_PRIOR.at(s.computed_tokens + s.beside_tokens, pairs, s.steps))
        and _near(s.transfer_s, TRANSFER_PRIOR.at(s.transfer_bytes, 0))
        and _near(s.pull_s, PULL_PRIOR.at(s.pull_bytes, 0))
    )


def plausible_decode(s: DecodeSample) -> bool:
    """Says whether a decode step can have taken this time."""
    return _near(s.duration_s, DECODE_PRIOR.at(s.batch, s.context_tokens))


def _near(seconds: float, usual_s: float) -> bool:
    most_s = min(MAX_SAMPLE_S, max(MAX_PAUSE_S, usual_s * MAX_SEEN))
    return not seconds or usual_s / MAX_SEEN <= seconds <= most_s
