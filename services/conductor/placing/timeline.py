"""A request's life as it is laid out on arrival: when its KV moves, and what is expected to happen when. Pure.

When prefill begins to fetch depends on its queue:

    short   at once: the request would wait for its blocks.
    long    later, so that blocks fetched do not lie in the receiver's extents while others are computed, and do not
            fill the wires while somebody needs his own at once. With a margin, though: the pull begins when what is
            left of the queue is FETCH_SHARE times the predicted pull and MARGIN_S more. That is never later than the
            predicted start less the predicted pull, so by the prediction nothing is lost.

The prefill service keeps the other half of the promise: when the turn comes sooner than that, so does the pull.
KV computed by prefill is pushed layer by layer as it comes to be; what decode fetches itself, it fetches at once.
"""

from __future__ import annotations

from kvmesh.services.conductor.domain import PredictedLife
from kvmesh.services.conductor.placing.placement import PlacementChoice

FETCH_SHARE = 2.0  # pulls often take twice as long as predicted, rarely longer
MARGIN_S = 0.25
MIN_DELAY_S = 0.25  # what is shorter is not worth a timer
MAX_DELAY_S = 60.0  # blocks may leave their holder meanwhile


def pull_after_s(choice: PlacementChoice) -> float:
    """Returns for how many seconds prefill delays its pull; 0 when the pull begins at once, or there is none."""
    p = choice.prefill
    if not p.segments:
        return 0.0
    delay_s = min(MAX_DELAY_S, p.queue_s - FETCH_SHARE * p.fetch_s - MARGIN_S)
    return delay_s if delay_s >= MIN_DELAY_S else 0.0


def life(choice: PlacementChoice, output_tokens: int, delay_s: float) -> PredictedLife:
    """Returns the predicted course of a request, in seconds from now. `delay_s` is what `pull_after_s` returned,
    `output_tokens` the predicted length of the answer."""
    p, d = choice.prefill, choice.decode
    fetched_s = delay_s + p.fetch_s if p.segments else 0.0
    start_s = max(p.queue_s, fetched_s)
    prefilled_s = start_s + p.prefill_s
    first_s = prefilled_s + p.tail_s + d.landing_wait_s
    return PredictedLife(
        pull_start_s=delay_s,
        fetched_s=fetched_s,
        prefill_start_s=start_s,
        prefill_end_s=prefilled_s,
        first_token_s=first_s,
        end_s=first_s + d.slot_wait_s + max(0, output_tokens - 1) * d.tbt_s,
        output_tokens=output_tokens,
    )
