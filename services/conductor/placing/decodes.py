"""What a request would cost at each decode instance, and how much of its prompt decode reads from its own lower tiers.
Pure: instances are only read here.

Reading begins when the request is placed, beside the queue and the computing at prefill, and the landing waits for it.
What decode does not read, prefill pushes. Reading pays as far as it is hidden there, or while the network is slower
than the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmesh.services.conductor import score
from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.placing.prefills import DEAR_S, DEAR_SHARE, PrefillChoice, cut
from kvmesh.services.conductor.prefixes.fetch_plan import FetchPlanner, FetchSegment, sizes_of
from kvmesh.services.conductor.prefixes.index import PrefixPlace, PrefixSurvey

if TYPE_CHECKING:
    from kvmesh.services.conductor.admission.judge import Judge, TbtVerdict


@dataclass(slots=True)
class DecodeChoice:
    """One decode instance and the terms of its score, in seconds."""

    instance: Instance
    at_decode: int  # leading prompt blocks sealed in its own node store
    tbt_s: float
    admission_tbt_s: float
    landing_wait_s: float  # until there is room for the KV
    slot_wait_s: float  # until the batch has a free place
    tail_s: float  # what of the transfer nothing can hide: less of it when blocks are here already
    short: bool  # of pages for prompt and answer together
    tightest_slo_s: float = math.inf  # for the TBT of those that are there or coming
    arriving: int = 0  # bytes that others send there
    page_wait_s: float = 0.0  # of KV that has landed, for pages of the device: between first and second token
    # Who has judged it before a prefill instance was chosen, and how: one decision asks twice.
    judged: tuple[Judge, TbtVerdict] | None = field(default=None, init=False, repr=False, compare=False)
    _score_s: float | None = field(default=None, init=False, repr=False, compare=False)  # once it was asked for

    @property
    def score_s(self) -> float:
        """The score for ranking: the seconds that a token costs, waiting included."""
        if self._score_s is None:
            self._score_s = score.token_cost_s(
                self.tbt_s, self.landing_wait_s, self.slot_wait_s, self.page_wait_s, self.tail_s
            )
        return self._score_s


def choice(
    request: Schedule,
    instance: Instance,
    place: PrefixPlace,
    survey: PrefixSurvey,
    now: float,
    *,
    alone: bool = False,
    arriving: int = 0,
) -> DecodeChoice:
    """Weighs one decode instance. `place` is where its blocks show in the survey; only sealed ones count. With `alone`
    it also computes the prompt, in device pages, and nothing lands. `arriving` is the number of bytes that others send
    there."""
    batch, model = instance.batch, instance.model
    at_decode = 0 if alone else survey.landed(place)
    size = batch.requests + 1
    too_many = max(0, size - instance.max_running) if instance.max_running else 0
    step_s, admission_step_s = steps(instance, size, batch.context_tokens + request.prompt_tokens, now)
    blocks = instance.blocks_for(request.prompt_tokens + 1)
    whole = instance.blocks_for(request.prompt_tokens + max(1, request.max_tokens))
    tail_s = 0.0
    if not alone:
        sent = model.cost.handoff(request.prompt_tokens, at_decode)
        tail_s = instance.fits.transfer.tail_s(sent, float("inf"), score.shared_bytes(sent, arriving))
    return DecodeChoice(
        instance,
        at_decode,
        tbt_s=step_s,
        admission_tbt_s=admission_step_s,
        landing_wait_s=batch.landing_wait_s(blocks, pages=alone),
        slot_wait_s=batch.drain_s(too_many) if too_many else 0.0,
        tail_s=tail_s,
        arriving=arriving,
        page_wait_s=0.0 if alone else batch.page_wait_s(blocks),
        short=batch.free_blocks < min(whole, instance.capacity_blocks),
        tightest_slo_s=batch.stays.tightest_slo_s,
    )


def steps(instance: Instance, requests: float, context_tokens: float, now: float) -> tuple[float, float]:
    """Returns the TBT with so many requests there: the predicted one, and the one by which work may be refused."""
    others = requests - 1
    if instance.max_running and requests > instance.max_running:
        requests, context_tokens = score.running(requests, context_tokens, instance.max_running)
    step_s, admission_step_s = instance.decode.both(requests, context_tokens, now)
    stay_s = instance.batch.residence_s
    busy_s = instance.queue.wait_s(now)  # prompts that it computes beside its rows, and those still to come
    if instance.mixes:
        busy_s += instance.queue.coming_share * stay_s
    if busy_s > 0:
        chunk_s, admission_chunk_s = instance.prefill.both(instance.chunk_tokens, 0, now)
        step_s = score.mixed_tbt_s(step_s, chunk_s, busy_s, stay_s)
        admission_step_s = score.mixed_tbt_s(admission_step_s, admission_chunk_s, busy_s, stay_s)
    return step_s, instance.margins.tbt.of(admission_step_s, others)


@dataclass(slots=True)
class DecodeLoad:
    """What decode reads from its own lower tiers. `tail_s` is the time from the end of computing at prefill to the last
    byte. Decode reads `segments` in `load_s` seconds, up to block `until`; from block `limit` on it must not read
    (None: no limit)."""

    tail_s: float
    segments: tuple[FetchSegment, ...] = ()
    until: int = 0
    limit: int | None = None
    load_s: float = 0.0


def decode_load(
    request: Schedule,
    prefill: PrefillChoice,
    decode: DecodeChoice,
    place: PrefixPlace,
    planner: FetchPlanner,
    first: int,
    slo_s: float,
) -> DecodeLoad:
    """Plans what decode reads from its own lower tiers. `place` is where decode's blocks show in the survey; before
    block `first` decode has everything, or pulls it. `slo_s` bounds the TTFT without the wait for room at decode."""
    if not place.lower or not (ways := planner.sources(place, others=False)):
        return DecodeLoad(prefill.tail_s)
    model = decode.instance.model
    whole = (request.prompt_tokens - 1) // model.block_tokens
    own = PrefixPlace(place.sealed, 0, place.lower)
    if first >= whole:
        return DecodeLoad(prefill.tail_s)
    segments, end = planner.plan(own, decode.instance.node_id, first, whole, ways, to_decode=True)
    if not segments:
        return DecodeLoad(prefill.tail_s)

    def load_s(until: int) -> float:
        part = cut(segments, until)
        return planner.load_s(part, sizes_of(part, model.cost))[0]

    def tail_s(until: int) -> float:
        """Returns the seconds from the end of computing to the last byte, if decode reads up to block `until`. Pushes
        begin when the landing is complete, and hide behind what is computed from then on."""
        late_s = max(0.0, load_s(until) - prefill.start_s)
        pushed = model.cost.handoff(request.prompt_tokens, until)
        hidden_s = max(0.0, prefill.prefill_s - late_s)
        return max(0.0, late_s - prefill.prefill_s) + prefill.instance.transfer.tail_s(
            pushed, hidden_s, min(pushed, prefill.push_ahead)
        )

    free, high = first, end  # what is read by the time prefill begins delays nothing
    while free < high:
        middle = (free + high + 1) // 2
        free, high = (middle, high) if load_s(middle) <= prefill.start_s else (free, middle - 1)
    best = min((first, free, end), key=lambda until: (tail_s(until), -until))
    before_s = prefill.start_s + prefill.prefill_s
    most_s = min(slo_s, (before_s + tail_s(best)) * (1 + DEAR_SHARE) + DEAR_S)
    if before_s + tail_s(end) <= most_s:  # the models know no better, and what is read spares the wires
        return DecodeLoad(tail_s(end), segments, end, None, load_s(end))
    return DecodeLoad(tail_s(best), cut(segments, best), best, best, load_s(best))
