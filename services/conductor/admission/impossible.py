"""Requests whose SLO even an idle mesh could not meet. They are refused for that reason and not for load, and are told
the least that can be met. Waiting would not help them, nor would more instances of the same kind. Pure.

Only measured figures count (`Refuse.least_s`), because a prior may be far too slow. And the SLO must certainly be too
short: by more than a little, compared with the best that instances showed in the last minutes, and while no instance
that gets no work now might do better. An uncertain case is refused as for load.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from kvmesh.errors import InvalidRequest, Overloaded
from kvmesh.services.conductor.admission.context import AdmissionContext
from kvmesh.services.conductor.candidates.bounds import admitted
from kvmesh.services.conductor.candidates.fields import FEW, ColumnField
from kvmesh.services.conductor.costs.fit import ENOUGH_SAMPLES, Coefficients
from kvmesh.services.conductor.costs.models import attention_pairs
from kvmesh.services.conductor.domain import Refuse, Schedule
from kvmesh.services.conductor.fleet.instance import Instance

CERTAIN = 1.25  # times the SLO: what is nearer to it is left to the next measurement
KEPT, EVERY_S = 64, 5.0  # what was known in the last minutes
MAX_UNABLE = 16  # instances that get no work now: of more it is not known what they could do
WORDS = {
    "ttft": "no instance can serve this prompt faster than about {least} ms even when idle",
    "tbt": "no instance can make the tokens of this answer less than about {least} ms apart even when idle",
}


class BestSeen:
    """The best that instances of one model were known to do lately. A mesh whose instances share a machine is slow
    while it is busy, and its models take that for normal."""

    def __init__(self) -> None:
        self._known: deque[tuple[Coefficients, Coefficients]] = deque(maxlen=KEPT)
        self._seen_at = -math.inf

    def see(self, prefill: Instance, decode: Instance, now: float) -> None:
        """Remembers what is now known of these two instances."""
        if now - self._seen_at >= EVERY_S and _measured(prefill, "ttft") and _measured(decode, "tbt"):
            self._seen_at = now
            self._known.append((prefill.prefill.coefficients, decode.decode.coefficients))

    def prefill_s(self, computed: int, cached: int) -> float:
        """Returns the least known seconds of such a prompt; infinity when nothing is known."""
        pairs = attention_pairs(computed, cached)
        return min((prefill.at(computed, pairs) for prefill, _ in self._known), default=math.inf)

    def step_s(self, context_tokens: int) -> float:
        """Returns the least known seconds of a step with one row; infinity when nothing is known."""
        return min((decode.at(1, context_tokens) for _, decode in self._known), default=math.inf)


def least_s(
    request: Schedule, slo_s: float, refuse: Refuse, among: AdmissionContext, fastest: BestSeen, now: float
) -> float:
    """Returns the least that any instance could do, in seconds, if `slo_s` is certainly below it; else 0. For a further
    attempt it is 0, because the instance that could do it may just have been lost."""
    unable = among.unable
    if request.attempt or len(unable) > MAX_UNABLE:
        return 0.0
    if any(_might(i, request, refuse.reason, slo_s * CERTAIN, now) for i in unable):
        return 0.0
    if refuse.reason == "ttft":
        known_s = min((fastest.prefill_s(w.computed_tokens, w.cached_tokens) for w in among.prompts()), default=0.0)
    else:
        known_s = fastest.step_s(request.prompt_tokens)
    found = min(refuse.least_s, known_s)
    if len(among.serving.view.columns) > FEW:
        found = min(found, _least_of_many_s(request, refuse.reason, among))
    return found if found > slo_s * CERTAIN else 0.0


def _least_of_many_s(request: Schedule, reason: str, among: AdmissionContext) -> float:
    """Returns the least that any of many instances could do when idle, with the longest prefix that was found. Only the
    best of many were weighed, and only as they are now."""
    view = among.serving.view
    view.columns.settle()
    if reason == "ttft":
        computed = min((way.computed_tokens for way in among.prompts()), default=1)
        pairs = attention_pairs(computed, request.prompt_tokens - computed)
        pool = among.prefills.mask | (among.decodes.mask & view.columns.mask(ColumnField.ALONE))
        each_s = admitted(view, ColumnField.PREFILL, float(computed), pairs)[pool]
    else:
        each_s = admitted(view, ColumnField.DECODE, 1.0, float(request.prompt_tokens))[among.decodes.mask]
    return float(np.min(each_s, initial=math.inf))


def refusal(request: Schedule, refuse: Refuse, least_s: float) -> Refuse:
    """Returns the refusal of an impossible SLO. If the SLO is the request's own, the error names the field, its value
    and the least possible; if it is the operator's, the request cannot ask for less and is refused as for load, without
    a turn."""
    slo_s = request.ttft_slo_s if refuse.reason == "ttft" else request.tbt_slo_s
    least_ms = math.ceil(least_s * 1000)
    if not slo_s:
        text = f"{refuse.error.message}, and none can do better than about {least_ms} ms even when idle"
        error = Overloaded(text, retry_after_ms=refuse.error.retry_after_ms)
        return Refuse(error, refuse.reason, least_s)
    why = WORDS[refuse.reason].format(least=least_ms)
    return Refuse(InvalidRequest.of(f"{refuse.reason}_slo_ms", round(slo_s * 1000), why), "impossible", least_s)


def _measured(instance: Instance, reason: str) -> bool:
    fits, axes = instance.fits, instance.axes
    return len(fits.prefill(axes).fit if reason == "ttft" else fits.decode(axes).fit) >= ENOUGH_SAMPLES


def _might(instance: Instance, request: Schedule, reason: str, slo_s: float, now: float) -> bool:
    tokens = request.prompt_tokens
    if reason == "ttft":
        able = instance.role.prefills and instance.can_prefill(tokens)
        seconds = instance.prefill.admission_s(tokens, 0, now)
    else:
        able = instance.role.decodes and instance.can_decode(tokens)
        seconds = instance.decode.admission_s(1, tokens, now)
    return able and (seconds <= slo_s or not _measured(instance, reason))
