"""How far decode reads what its own lower tiers have of a prompt. Pure.

It begins when the request is placed, beside the queue and the computing at prefill, and its landing waits for it; what
it does not read, prefill pushes. Reading pays as far as it hides there, or while the wires are slower than the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.conductor.domain import Schedule
from services.conductor.placing.decodes import DecodeChoice
from services.conductor.placing.prefills import DEAR_S, DEAR_SHARE, PrefillChoice, cut
from services.conductor.prefixes.fetch_plan import FetchPlanner, FetchSegment
from services.conductor.prefixes.index import PrefixPlace


@dataclass(slots=True)
class DecodeLoad:
    """`tail_s`: from the end of computing at prefill to the last byte. `legs`: what decode reads in `load_s`, up to
    block `until`. `limit`: it is not to read from there on; None: whatever it finds."""

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
    """`place`: decode's blocks in the survey; `first`: the prompt block before which decode has all, or pulls it.
    `slo_s`: for the TTFT without waiting for room at decode."""
    if not place.lower or not (ways := planner.sources(place, others=False)):
        return DecodeLoad(prefill.tail_s)
    model = decode.instance.model
    whole = (request.prompt_tokens - 1) // model.block_tokens
    own = PrefixPlace(place.sealed, 0, place.lower)
    segments, end = planner.plan(own, decode.instance.node_id, first, whole, ways) if first < whole else ((), 0)
    if not segments:
        return DecodeLoad(prefill.tail_s)
    block_bytes = model.block_tokens * model.kv_bytes_per_token

    def load_s(until: int) -> float:
        return planner.load_s(cut(segments, until), block_bytes)[0]

    def tail_s(until: int) -> float:
        """Pushes begin when the landing is there, and hide behind what is computed from then on."""
        late_s = max(0.0, load_s(until) - prefill.start_s)
        pushed = max(0, request.prompt_tokens - until * model.block_tokens) * model.kv_bytes_per_token
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
