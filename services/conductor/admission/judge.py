"""Which load of a decode instance a request is judged by, in each mode of admission. Pure: instances are only read
here.

    OFF, BASELINE   none: decode itself may refuse, once the KV is there
    EARLY           the rows that run when the request arrives, and the request
    PREDICTED       all rows that will be there between its first token and its last: those that run and will not have
                    left, those that are on their way and will have come (FAST'25, early rejection based on prediction,
                    here for each instance instead of the whole pool, and for the request's whole stay)

The bound is the request's own TBT SLO. If rows that are already there have a tighter SLO, theirs is the bound, but
never one tighter than their model's default: no request can keep an instance for itself.

Rows of the batch lane yield: an interactive request is judged as if there were none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvmesh.services.conductor.domain import Lane, Schedule
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.loads.batch_forecast import NO_ROWS, BatchAt
from kvmesh.services.conductor.placing.decodes import DecodeChoice, steps
from kvmesh.services.conductor.score import SLOWEST
from kvmesh.services.conductor.settings import Mode

WAIT_STEPS = 12  # halvings of the time after which it would pass


@dataclass(slots=True)
class Slo:
    """What one request is held to, in seconds."""

    ttft_s: float
    tbt_s: float


@dataclass(slots=True)
class TbtVerdict:
    """The judgement on one decode instance: the TBT that is judged, and the most that it may be, in seconds."""

    tbt_s: float
    slo_s: float

    @property
    def passes(self) -> bool:
        return self.tbt_s <= self.slo_s


@dataclass(slots=True)
class Judge:
    """Judges decode instances for one request at one moment. `default_tbt_s` is the SLO of its model; `queue_s` is the
    expected wait for a prefill instance before one is chosen; `answer_tokens` is the predicted length."""

    mode: Mode
    request: Schedule
    slo: Slo
    default_tbt_s: float
    queue_s: float
    answer_tokens: float
    now: float

    def decode(self, choice: DecodeChoice, first_token_s: float | None = None) -> TbtVerdict:
        """Returns the verdict on a decode instance. `first_token_s` is the predicted TTFT. None means that no prefill
        instance is chosen yet; the request then passes if it would pass after the queue that the last request met, or
        after none."""
        if first_token_s is not None:
            return self._decode(choice, first_token_s)
        if choice.judged is None or choice.judged[0] is not self:
            choice.judged = self, self._decode(choice, None)
        return choice.judged[1]

    def _decode(self, choice: DecodeChoice, first_token_s: float | None) -> TbtVerdict:
        if self.mode in (Mode.OFF, Mode.BASELINE) or self.request.lane is Lane.BATCH:
            return TbtVerdict(choice.admission_tbt_s, math.inf)
        bound_s = min(self.slo.tbt_s, max(self._theirs_s(choice), self.default_tbt_s))
        if (
            not choice.page_wait_s and choice.admission_tbt_s <= bound_s
        ):  # even if all who are on their way were there at once
            return TbtVerdict(choice.admission_tbt_s, bound_s)
        if first_token_s is not None:
            return TbtVerdict(self.tbt_s(choice, first_token_s), bound_s)
        lead_s = self._lead_s(choice)
        leads = {lead_s, lead_s - self.queue_s}
        return TbtVerdict(min(self.tbt_s(choice, lead_s) for lead_s in leads), bound_s)

    def tbt_s(self, choice: DecodeChoice, lead_s: float, *, everybody: bool = False, more: float = 0.0) -> float:
        """Returns the TBT there if the request, and `more` like it, join the batch in `lead_s` seconds. `everybody`
        includes rows that yield."""
        rows = self._rows(choice, lead_s, everybody=everybody)
        with_it = rows.requests + 1 + more, rows.context_tokens + (1 + more) * self.request.prompt_tokens
        return steps(choice.instance, *with_it, self.now)[1] + self._late_s(choice, lead_s)

    def beside_s(self, choice: DecodeChoice, lead_s: float) -> tuple[float, float]:
        """Returns the TBT of interactive rows there without the batch lane, and with it and this request. Where there
        are no such rows, one as long as this request is assumed."""
        everybody = self._rows(choice, lead_s, everybody=True)
        others = self._rows(choice, lead_s, everybody=False)
        lane = max(0.0, everybody.requests - others.requests), everybody.context_tokens - others.context_tokens
        if others.requests < 1:
            others = BatchAt(1.0, float(self.request.prompt_tokens))
        with_it = others.requests + lane[0] + 1, others.context_tokens + lane[1] + self.request.prompt_tokens
        return steps(choice.instance, *others, self.now)[0], steps(choice.instance, *with_it, self.now)[0]

    def undisturbed_s(self, choice: DecodeChoice, lead_s: float) -> float:
        """Returns the TBT predicted for this request, which was just placed there, as if nothing of the batch lane were
        there."""
        batch = choice.instance.batch
        lane = batch.stays.yielding(self.now, self.now + lead_s)
        if not lane.requests:
            return choice.tbt_s
        prompt = self.request.prompt_tokens
        rows = max(0.0, batch.requests - 1 - lane.requests)
        context = max(0.0, batch.context_tokens - prompt - lane.context_tokens)
        seconds = choice.tbt_s
        for _ in range(2):  # were all faster, fewer of them would be there at once
            fewer = min(1.0, seconds / choice.tbt_s)
            with_it = rows * fewer + 1, context * fewer + prompt
            seconds = steps(choice.instance, *with_it, self.now)[0]
        return seconds

    def _late_s(self, choice: DecodeChoice, lead_s: float) -> float:
        """Returns what waiting for pages adds to the request's TBT: it lengthens one interval, the first, of the
        slowest tenth."""
        return max(0.0, choice.page_wait_s - lead_s) / max(1.0, SLOWEST * self.answer_tokens)

    def alone_s(self, instance: Instance) -> float:
        """Returns the request's TBT on this instance if nothing else ran there."""
        return instance.decode.admission_s(1, self.request.prompt_tokens, self.now)

    def wait_s(self, choice: DecodeChoice, bound_s: float, *, everybody: bool = False) -> float:
        """Returns the seconds after which the request would be within `bound_s` if no other came; infinity if never."""
        batch = choice.instance.batch
        if self.alone_s(choice.instance) > bound_s:
            return math.inf
        lead_s = self._lead_s(choice)
        if self.mode is Mode.EARLY and not everybody:
            running, _ = batch.running
            step_s = self.tbt_s(choice, lead_s) - self._late_s(choice, lead_s)
            each_s = (step_s - self.alone_s(choice.instance)) / max(1, running)
            excess_s = max(0.0, step_s - bound_s)
            leave_s = batch.drain_s(min(batch.requests, excess_s / each_s)) if each_s > 0 else 0.0
            return max(leave_s, choice.page_wait_s - lead_s)
        low, high = 0.0, max(batch.residence_s, batch.stays.longest_s(self.now))
        while self.tbt_s(choice, lead_s + high, everybody=everybody) > bound_s:
            low, high = high, 2 * high
            if high > 1e6:
                return math.inf
        for _ in range(WAIT_STEPS):
            middle = (low + high) / 2
            passes = self.tbt_s(choice, lead_s + middle, everybody=everybody) <= bound_s
            low, high = (low, middle) if passes else (middle, high)
        return high * _slower(choice)

    def _theirs_s(self, choice: DecodeChoice) -> float:
        """Returns the tightest TBT SLO of the rows there; the default where some are unknown."""
        batch = choice.instance.batch
        return choice.tightest_slo_s if batch.requests <= len(batch.stays) else self.default_tbt_s

    def _lead_s(self, choice: DecodeChoice) -> float:
        return self.queue_s + choice.instance.fits.known_prefill.predict(self.request.prompt_tokens, 0)

    def _rows(self, choice: DecodeChoice, lead_s: float, *, everybody: bool) -> BatchAt:
        """Returns the other rows that count."""
        batch, now = choice.instance.batch, self.now
        if self.mode is Mode.EARLY and not everybody:
            rows, at = BatchAt(*batch.running), now
        else:
            at = now + lead_s
            rows = batch.forecast(now, at, at + self.answer_tokens * choice.tbt_s)
        left_out = NO_ROWS if everybody else batch.stays.yielding(now, at)
        return BatchAt(
            max(0.0, rows.requests - left_out.requests), max(0.0, rows.context_tokens - left_out.context_tokens)
        )


def _slower(choice: DecodeChoice) -> float:
    """Returns how many times as slow the present rows are as was predicted when they were placed among fewer rows; they
    leave so much later."""
    works = choice.instance.batch.works.values()
    stays_s = [work.leaves_at - work.joins_at for work in works]
    predicted_s = sum(stays_s)
    if not 0 < predicted_s < math.inf:
        return 1.0
    return max(1.0, choice.tbt_s * sum(work.answer_tokens for work in works) / predicted_s)
