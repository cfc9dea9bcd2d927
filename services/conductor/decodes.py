"""What a request would cost at each decode instance. Pure: instances are only read here."""

from __future__ import annotations

from dataclasses import dataclass

from services.conductor.domain import Schedule
from services.conductor.index import Place, Survey
from services.conductor.instance import Instance
from services.conductor.interference import mixed_tbt_s


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """One decode instance and the terms of its TBT, in seconds."""

    instance: Instance
    at_decode: int  # leading prompt blocks sealed in its own node store
    tbt_s: float
    admission_tbt_s: float
    landing_wait_s: float  # until there is room for the KV
    slot_wait_s: float  # until the batch has a free place
    tail_s: float  # what of the transfer nothing can hide: less of it when blocks are here already
    short: bool  # of pages for prompt and answer together

    @property
    def score_s(self) -> float:
        """For ranking: what a token costs, waiting included."""
        return self.tbt_s + self.landing_wait_s + self.slot_wait_s + self.tail_s


def choice(
    request: Schedule, instance: Instance, place: Place, survey: Survey, now: float, *, alone: bool = False
) -> DecodeChoice:
    """`place`: the instance's blocks in the survey; only sealed ones count. `alone`: it computes the prompt, too, in
    device pages, and nothing lands."""
    batch, model = instance.batch, instance.model
    at_decode = 0 if alone else survey.depth(Place(place.sealed))
    size = batch.requests + 1
    context = batch.context_tokens + request.prompt_tokens
    if instance.max_running and size > instance.max_running:
        # The others wait for a place and cost the step nothing.
        context *= instance.max_running / size
        slot_wait_s = batch.drain_s(size - instance.max_running)
        size = instance.max_running
    else:
        slot_wait_s = 0.0
    blocks = instance.blocks_for(request.prompt_tokens + 1)
    whole = instance.blocks_for(request.prompt_tokens + max(1, request.max_tokens))
    sent = max(0, request.prompt_tokens - at_decode * model.block_tokens) * model.kv_bytes_per_token
    step_s, admission_step_s = instance.decode.predict(size, context), instance.decode.admission_s(size, context, now)
    busy_s = instance.queue.wait_s(now)  # prompts that it computes beside its rows
    if busy_s > 0:
        chunk, stay_s = instance.chunk_tokens, batch.residence_s
        step_s = mixed_tbt_s(step_s, instance.prefill.predict(chunk, 0), busy_s, stay_s)
        chunk_s = instance.prefill.admission_s(chunk, 0, now)
        admission_step_s = mixed_tbt_s(admission_step_s, chunk_s, busy_s, stay_s)
    return DecodeChoice(
        instance,
        at_decode,
        tbt_s=step_s,
        admission_tbt_s=admission_step_s,
        landing_wait_s=batch.landing_wait_s(blocks, pages=alone),
        slot_wait_s=slot_wait_s,
        tail_s=0.0 if alone else instance.fits.transfer.tail_s(sent, float("inf")),
        short=batch.free_blocks < min(whole, instance.capacity_blocks),
    )
