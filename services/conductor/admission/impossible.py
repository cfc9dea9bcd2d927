"""Requests whose SLO even an idle mesh could not meet: refused for that, not for load, with the least that it could
meet. Waiting would not help them, nor would more instances of the same kind. Pure.

Only measured figures say so (`Refuse.least_s`): a prior may be far slower than what is real. Nor is it said while an
instance that gets no work now might do better.
"""

from __future__ import annotations

import math

import numpy as np

from kvmesh.rpc.errors import InvalidRequest
from services.conductor.admission.context import AdmissionContext
from services.conductor.costs.fit import ENOUGH_SAMPLES
from services.conductor.costs.models import attention_pairs
from services.conductor.domain import Refuse, Schedule
from services.conductor.fleet.instance import Instance
from services.conductor.screening.fields import FEW, Field
from services.conductor.screening.fits import admitted

MAX_UNABLE = 16  # instances that get no work now: of more it is not known what they could do
WORDS = {
    "ttft": "no instance can serve this prompt faster than about {least} ms even when idle",
    "tbt": "no instance can make the tokens of this answer less than about {least} ms apart even when idle",
}


def for_all(request: Schedule, slo_s: float, refuse: Refuse, among: AdmissionContext, now: float) -> bool:
    """Whether what those who were weighed could not do within `slo_s`, nobody could. Not of a further attempt: whoever
    could do it may just have been lost."""
    unable = among.unable
    if request.attempt or len(unable) > MAX_UNABLE:
        return False
    if any(_might(i, request, refuse.reason, slo_s, now) for i in unable):
        return False
    if len(among.serving.view.columns) <= FEW:
        return True
    return _least_of_many_s(request, refuse.reason, among) > slo_s


def _least_of_many_s(request: Schedule, reason: str, among: AdmissionContext) -> float:
    """Only those of many were weighed that are the best as they are now: what any of them could do when idle, with the
    longest prefix that was found."""
    view = among.serving.view
    view.columns.settle()
    if reason == "ttft":
        computed = min((way.computed_tokens for way in among.prompts()), default=1)
        pairs = attention_pairs(computed, request.prompt_tokens - computed)
        pool = among.prefills.mask | (among.decodes.mask & view.columns.mask(Field.ALONE))
        each_s = admitted(view, Field.PREFILL, float(computed), pairs)[pool]
    else:
        each_s = admitted(view, Field.DECODE, 1.0, float(request.prompt_tokens))[among.decodes.mask]
    return float(np.min(each_s, initial=math.inf))


def refusal(request: Schedule, refuse: Refuse) -> Refuse:
    """Where the SLO is the request's own: it names the field, its value and the least. Where it is the operator's, who
    asked for nothing cannot ask for less: as before, without a turn."""
    slo_s = request.ttft_slo_s if refuse.reason == "ttft" else request.tbt_slo_s
    if not slo_s:
        return refuse
    why = WORDS[refuse.reason].format(least=math.ceil(refuse.least_s * 1000))
    return Refuse(InvalidRequest.of(f"{refuse.reason}_slo_ms", round(slo_s * 1000), why), "impossible", refuse.least_s)


def _might(instance: Instance, request: Schedule, reason: str, slo_s: float, now: float) -> bool:
    tokens, fits = request.prompt_tokens, instance.fits
    if reason == "ttft":
        if not instance.role.prefills or not instance.can_prefill(tokens):
            return False
        return len(fits.prefill.fit) < ENOUGH_SAMPLES or instance.prefill.admission_s(tokens, 0, now) <= slo_s
    if not instance.role.decodes or not instance.can_decode(tokens):
        return False
    return len(fits.decode.fit) < ENOUGH_SAMPLES or instance.decode.admission_s(1, tokens, now) <= slo_s
