"""What placing a request costs: each formula once, for one instance or for all of them at once. Pure.

Amounts are floats, or numpy columns with a value an instance; operations and their order are the same, so both give the
same bits. Seconds, unless something else is said. `placing/` weighs single instances by it exactly (below FEW
instances a plain loop over all of them), `candidates/bounds.py` all instances at once, leaving out the terms that only
weighing knows and that are never negative. `kvmesh/native/rows.cpp` repeats what the bounds need of it, bit by bit:
tests/conductor/candidates/test_compiled.py.

    TTFT        max(queue, fetch) + prompt + tail              `ttft_s`
    prefill     TTFT + stall + others                          `prompt_cost_s`: who computes the prompt
    decode      TBT + waiting for room + tail                  `token_cost_s`: who decodes
    placement   TTFT + stall + others + answer + handoff       `placement_cost_s`: a pair, or one instance

Not here, since each says it in one way alone: how long queues are (loads/), what nearness is worth
(placing/affinity.py), by how much predictions are exceeded (admission/margins.py). An old fit fades by Python's power
of 0.5 for one instance and by numpy's for many, which differ in their last bit: `faded_s` is told the share.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

SLOWEST = 0.1  # of a request's token intervals, whose mean is its TBT
# Row-seconds that count as much as a second of the new request's TTFT: nobody's waiting is worth more.
STALL_WEIGHT = 1.0
HIDDEN_SHARE = 15 / 16  # of a transfer, that computing can hide: its layers but the last
TAIL_SHARE = 1 - HIDDEN_SHARE
COUNTED_TOKENS = 32  # of an answer, that a placement's cost counts

Amount = Any  # a float, or a column of floats
_Column = np.ndarray


def most(one: Amount, other: Amount) -> Amount:
    """Returns the greater amount, element by element for columns."""
    if one.__class__ is _Column or other.__class__ is _Column:
        return np.maximum(one, other)
    return one if one >= other else other


def least(one: Amount, other: Amount) -> Amount:
    """Returns the lesser amount, element by element for columns."""
    if one.__class__ is _Column or other.__class__ is _Column:
        return np.minimum(one, other)
    return one if one <= other else other


# ── what work takes ───────────────────────────────────────────────────────────────────────────────


class FittedTerms(Protocol):
    """The coefficients of a fitted model (costs/fit.py)."""

    @property
    def a(self) -> Amount: ...
    @property
    def b(self) -> Amount: ...
    @property
    def c(self) -> Amount: ...
    @property
    def d(self) -> Amount: ...
    @property
    def knee(self) -> Amount: ...


def fitted_s(model: FittedTerms, x1: Amount, x2: Amount, n: Amount = 1.0) -> Amount:
    """Returns a·n + b·x1 + c·x2 + d·max(0, x1 - knee) in seconds. A plain float 0 as `d` says that there is no knee."""
    seconds, d = model.a * n + model.b * x1 + model.c * x2, model.d
    if d.__class__ is float and not d:
        return seconds
    return seconds + d * most(0.0, x1 - model.knee)


def faded_s(fitted: Amount, prior: Amount, left: Amount) -> Amount:
    """Returns what admission goes by: a fit that is slower than its prior fades towards the prior. `left` (0 to 1) of
    the fit still counts."""
    return most(least(fitted, prior), fitted * left)


def attention_pairs(computed: Amount, cached: Amount) -> Amount:
    """Returns the number of (query, key) pairs of `computed` tokens after `cached` ones: the sum of (cached + i)."""
    return computed * (computed + 2 * cached) / 2


def shared_bytes(nbytes: Amount, here: Amount = 0, there: Amount = 0) -> Amount:
    """Returns by how many bytes `nbytes` are delayed at the busier of the two ends: bytes that are expected to be sent
    before them."""
    return least(nbytes, most(here, there))


def fetch_s(own_s: Amount, others_s: Amount, pull_s: Amount) -> Amount:
    """Returns the seconds until all that is fetched has arrived: holders read (`others_s`) before they send (`pull_s`),
    and the reader's own tiers are read meanwhile (`own_s`)."""
    return most(own_s, others_s + pull_s)


def tail_s(nbytes: Amount, ahead: Amount, bytes_per_s: Amount, prefill_s: Amount, share: float = TAIL_SHARE) -> Amount:
    """Returns the seconds between the end of prefill and the last byte, behind `ahead` bytes on the same network.
    Layers are sent while later ones are computed, except the last: at least the `share` that cannot hide remains."""
    whole = (nbytes + ahead) / bytes_per_s
    return most(whole - prefill_s, whole * share)


# ── a prompt beside rows (costs/interference.py) ──────────────────────────────────────────────────


def slower_s(rows: Amount, chunks: Amount, step_s: Amount) -> Amount:
    """Returns what the step time of running rows adds to a prompt of so many chunks, in seconds."""
    return chunks * step_s * (rows > 0)


def stall_s(rows: Amount, prompt_s: Amount) -> Amount:
    """Returns the row-seconds for which the running rows stand still."""
    return rows * prompt_s


def mixed_tbt_s(step_s: Amount, chunk_s: Amount, busy_s: Amount, stay_s: Amount) -> Amount:
    """Returns the TBT of a row that stays for `stay_s` seconds, during `busy_s` of which prompts are computed in the
    same steps."""
    return step_s + chunk_s * least(1.0, most(0.0, busy_s) / most(SLOWEST * stay_s, 1e-9))


# ── a batch ───────────────────────────────────────────────────────────────────────────────────────


def running(rows: Amount, context_tokens: Amount, limit: Amount) -> tuple[Amount, Amount]:
    """Returns the rows and context tokens of a step in which at most `limit` rows run; the other rows wait and cost the
    step nothing."""
    return least(rows, limit), context_tokens * least(1.0, limit / rows)


def drain_s(leavers: Amount, requests: Amount, stay_s: Amount) -> Amount:
    """Returns the seconds until `leavers` of the present `requests` have finished, at the usual length of stay."""
    return stay_s * leavers / most(1, requests)


def room_s(lacking: Amount, each: Amount, requests: Amount, stay_s: Amount) -> Amount:
    """Returns the seconds until `lacking` blocks are free, where a request holds `each` blocks; 0 where none is
    lacking."""
    return drain_s(most(1.0, lacking / most(1.0, each)), requests, stay_s) * (lacking > 0)


# ── costs ─────────────────────────────────────────────────────────────────────────────────────────


def ttft_s(queue_s: Amount, fetch_s: Amount, prefill_s: Amount, tail_s: Amount) -> Amount:
    """Returns the predicted TTFT without the wait for room at decode. Fetching goes on while others are served."""
    return most(queue_s, fetch_s) + prefill_s + tail_s


def judged_ttft_s(queue_s: Amount, yielding_s: Amount, fetch_s: Amount, prefill_s: Amount, tail_s: Amount) -> Amount:
    """Returns the TTFT, before margins, by which work may be refused: unlike `ttft_s` it leaves out queued work that
    yields. `prefill_s` is admission's own figure."""
    return most(queue_s - yielding_s, fetch_s) + prefill_s + tail_s


def prompt_cost_s(ttft_s: Amount, stall_s: Amount, others_s: Amount) -> Amount:
    """Returns the cost of computing a prompt, which is charged for what the running rows and the queue lose."""
    return ttft_s + STALL_WEIGHT * stall_s + others_s


def token_cost_s(tbt_s: Amount, landing_s: Amount, slot_s: Amount, page_s: Amount, tail_s: Amount) -> Amount:
    """Returns the score of a decode instance: what a token costs there, waiting included."""
    return tbt_s + landing_s + slot_s + page_s + tail_s


def answer_s(slot_s: Amount, tbt_s: Amount, max_tokens: int) -> Amount:
    """Returns the cost of an answer: the wait for a place in the batch, and its first tokens after the very first.
    `max_tokens` is 0 when the request has no limit."""
    return slot_s + min(max_tokens or COUNTED_TOKENS, COUNTED_TOKENS) * tbt_s


def placement_cost_s(
    ttft_s: Amount, stall_s: Amount, others_s: Amount, answer_s: Amount, handoff_s: float = 0.0
) -> Amount:
    """Returns the cost of a whole request on a pair, or on one instance (placing/placement.py)."""
    return ttft_s + (STALL_WEIGHT * stall_s + others_s) + answer_s + handoff_s
