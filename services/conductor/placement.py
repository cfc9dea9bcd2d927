"""Where one request goes: the prefill instance with the least predicted TTFT, the decode instance with the least
predicted TBT, or a refusal that says when to come back. Pure: instances are only read here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvmesh.rpc.errors import Overloaded
from services.conductor.domain import Refuse, Schedule
from services.conductor.instance import Instance
from services.conductor.prefix import PrefixIndex

# Scores this close are equal: the models know no better. Then the fewest requests win, then chance: it spreads
# what arrives between two heartbeats, also over conductors that do not know of each other.
TIE_SHARE, TIE_FLOOR_S, TIE_CAP_S = 0.005, 20e-6, 1e-3
MIN_RETRY_S, HOPELESS_RETRY_S, MAX_RETRY_S = 0.1, 1.0, 60.0

C = TypeVar("C")


@dataclass(frozen=True)
class PrefillChoice:
    """One prefill instance and the terms of its TTFT, in seconds."""

    instance: Instance
    cached_tokens: int
    computed_tokens: int
    queue_s: float
    prefill_s: float
    tail_s: float
    admission_prefill_s: float

    @property
    def ttft_s(self) -> float:
        """Predicted, without waiting for room at decode."""
        return self.queue_s + self.prefill_s + self.tail_s

    @property
    def admission_ttft_s(self) -> float:
        """The TTFT by which work may be refused (see cost.FittedModel.admission_s)."""
        return self.queue_s + self.admission_prefill_s + self.tail_s


@dataclass(frozen=True)
class DecodeChoice:
    """One decode instance and the terms of its TBT, in seconds."""

    instance: Instance
    tbt_s: float
    admission_tbt_s: float
    landing_wait_s: float  # until there is room for the KV
    slot_wait_s: float  # until the batch has a free place
    short: bool  # of pages for prompt and answer together

    @property
    def score_s(self) -> float:
        """For ranking: what a token costs, waiting included."""
        return self.tbt_s + self.landing_wait_s + self.slot_wait_s


@dataclass(frozen=True)
class Choice:
    prefill: PrefillChoice
    decode: DecodeChoice

    @property
    def ttft_s(self) -> float:
        """Predicted TTFT."""
        return self.prefill.ttft_s + self.decode.landing_wait_s


def choose(
    request: Schedule,
    prefills: Sequence[Instance],
    decodes: Sequence[Instance],
    index: PrefixIndex,
    *,
    ttft_slo_s: float,
    tbt_slo_s: float,
    now: float,
    rng: random.Random,
) -> Choice | Refuse:
    """Both lists hold instances that may get this request and whose KV fits together; neither is empty."""
    decode = _choose_decode(request, decodes, tbt_slo_s, now, rng)
    if isinstance(decode, Refuse):
        return decode
    # Prefill and decode compete for one device where roles share it: another instance is better when there is one.
    others = [i for i in prefills if i is not decode.instance] or prefills
    prefill = _choose_prefill(request, others, index, ttft_slo_s, decode.landing_wait_s, now, rng)
    return prefill if isinstance(prefill, Refuse) else Choice(prefill, decode)


def _choose_prefill(
    request: Schedule,
    instances: Sequence[Instance],
    index: PrefixIndex,
    slo_s: float,
    landing_wait_s: float,
    now: float,
    rng: random.Random,
) -> PrefillChoice | Refuse:
    among = 0
    for instance in instances:
        among |= 1 << instance.slot
    depth = index.match(request.keys, among)
    choices = [_prefill_choice(request, i, depth[i.slot], now) for i in _unavoided(instances, request.avoid)]
    passing = [c for c in choices if c.admission_ttft_s + landing_wait_s <= slo_s]
    if passing:
        return _pick(passing, lambda c: c.ttft_s, lambda c: len(c.instance.queue.works), rng)
    best = min(choices, key=lambda c: c.admission_ttft_s)
    ttft_s = best.admission_ttft_s + landing_wait_s
    return _overloaded("TTFT", ttft_s, slo_s, drain_s=best.queue_s + landing_wait_s, wanted_s=ttft_s - slo_s)


def _prefill_choice(request: Schedule, instance: Instance, blocks: int, now: float) -> PrefillChoice:
    block_tokens = instance.model.block_tokens
    # The last token is always computed: its logits are the answer's first token.
    cached = min(blocks, (request.prompt_tokens - 1) // block_tokens) * block_tokens
    computed = request.prompt_tokens - cached
    prefill_s = instance.prefill.predict(computed, cached)
    nbytes = request.prompt_tokens * instance.model.kv_bytes_per_token
    return PrefillChoice(
        instance,
        cached,
        computed,
        queue_s=instance.queue.wait_s(now),
        prefill_s=prefill_s,
        tail_s=instance.transfer.tail_s(nbytes, prefill_s),
        admission_prefill_s=instance.prefill.admission_s(computed, cached, now),
    )


def _choose_decode(
    request: Schedule, instances: Sequence[Instance], slo_s: float, now: float, rng: random.Random
) -> DecodeChoice | Refuse:
    choices = [_decode_choice(request, i, now) for i in _unavoided(instances, request.avoid)]
    passing = [c for c in choices if c.admission_tbt_s <= slo_s]
    if passing:
        roomy = [c for c in passing if not c.short] or passing
        return _pick(roomy, lambda c: c.score_s, lambda c: c.instance.batch.requests, rng)
    best = min(choices, key=lambda c: c.admission_tbt_s)
    batch = best.instance.batch
    alone_s = best.instance.decode.admission_s(1, request.prompt_tokens, now)
    each_s = (best.admission_tbt_s - alone_s) / max(1, batch.requests)
    excess_s = best.admission_tbt_s - slo_s
    leavers = min(batch.requests, excess_s / each_s) if each_s > 0 else 0
    wanted = batch.drain_s(leavers) if alone_s <= slo_s else float("inf")
    return _overloaded("TBT", best.admission_tbt_s, slo_s, drain_s=batch.drain_s(batch.requests), wanted_s=wanted)


def _decode_choice(request: Schedule, instance: Instance, now: float) -> DecodeChoice:
    batch = instance.batch
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
    return DecodeChoice(
        instance,
        tbt_s=instance.decode.predict(size, context),
        admission_tbt_s=instance.decode.admission_s(size, context, now),
        landing_wait_s=batch.landing_wait_s(blocks),
        slot_wait_s=slot_wait_s,
        short=batch.free_blocks < min(whole, instance.capacity_blocks),
    )


def _unavoided(instances: Sequence[Instance], avoid: Collection[str]) -> Sequence[Instance]:
    return [i for i in instances if i.ref.instance_id not in avoid] or instances


def _pick(choices: Sequence[C], score: Callable[[C], float], crowd: Callable[[C], int], rng: random.Random) -> C:
    best = min(map(score, choices))
    near = best + min(TIE_CAP_S, max(TIE_FLOOR_S, TIE_SHARE * best))
    tied = [c for c in choices if score(c) <= near]
    fewest = min(map(crowd, tied))
    return rng.choice([c for c in tied if crowd(c) == fewest])


def _overloaded(what: str, predicted_s: float, slo_s: float, *, drain_s: float, wanted_s: float) -> Refuse:
    """`wanted_s` of waiting would help if the queue drains for that long; `drain_s` is how long it can."""
    retry_s = wanted_s if wanted_s <= drain_s else max(HOPELESS_RETRY_S, drain_s)
    retry_ms = round(1000 * min(MAX_RETRY_S, max(MIN_RETRY_S, retry_s)))
    error = Overloaded(
        f"predicted {what} {predicted_s * 1000:.0f} ms is over the SLO of {slo_s * 1000:.0f} ms at every instance; "
        f"try again in {retry_ms} ms",
        retry_after_ms=retry_ms,
    )
    return Refuse(error, what.lower())
