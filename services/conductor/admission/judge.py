"""By which load of decode a request is judged, in each mode of admission. Pure: instances are only read here.

    OFF, BASELINE   none: decode itself may refuse, once the KV is there
    EARLY           the rows that run when the request arrives, and itself
    PREDICTED       all rows that will be there from its own first token to its last: those that run and will not have
                    left, those that are on their way and will have come (FAST'25, early rejection based on prediction,
                    for each instance instead of the whole pool, and for the request's whole stay)

The bound is the request's own TBT SLO; where that is laxer than what those have who are there already, theirs, but
none tighter than their model's default: nobody may keep an instance for himself.

Rows of the batch lane yield: a request of the interactive lane is judged as if there were none.
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
    """On one decode instance: the TBT that is judged, and what it may be at most. Seconds."""

    tbt_s: float
    slo_s: float

    @property
    def passes(self) -> bool:
        return self.tbt_s <= self.slo_s


@dataclass(slots=True)
class Judge:
    """Of one request, at one moment. `default_tbt_s`: its model's SLO; `queue_s`: the wait for a prefill instance, as
    far as it is known before one was chosen; `answer_tokens`: predicted."""

    mode: Mode
    request: Schedule
    slo: Slo
    default_tbt_s: float
    queue_s: float
    answer_tokens: float
    now: float

    def decode(self, choice: DecodeChoice, first_token_s: float | None = None) -> TbtVerdict:
        """`first_token_s`: predicted TTFT. None: no prefill instance was chosen yet; then it passes if it would after
        the queue that the last request met, or after none."""
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
        """TBT there with this request in the batch in `lead_s`, and so many `more` like it; `everybody`: what yields
        counts, too."""
        rows = self._rows(choice, lead_s, everybody=everybody)
        with_it = rows.requests + 1 + more, rows.context_tokens + (1 + more) * self.request.prompt_tokens
        return steps(choice.instance, *with_it, self.now)[1] + self._late_s(choice, lead_s)

    def beside_s(self, choice: DecodeChoice, lead_s: float) -> tuple[float, float]:
        """What the batch lane does to interactive rows there: their TBT without it, and with it and this request. Where
        none are there, to one as long as this request."""
        everybody = self._rows(choice, lead_s, everybody=True)
        others = self._rows(choice, lead_s, everybody=False)
        lane = max(0.0, everybody.requests - others.requests), everybody.context_tokens - others.context_tokens
        if others.requests < 1:
            others = BatchAt(1.0, float(self.request.prompt_tokens))
        with_it = others.requests + lane[0] + 1, others.context_tokens + lane[1] + self.request.prompt_tokens
        return steps(choice.instance, *others, self.now)[0], steps(choice.instance, *with_it, self.now)[0]

    def undisturbed_s(self, choice: DecodeChoice, lead_s: float) -> float:
        """The TBT that is predicted for this request, which has just been placed there, as if nothing of the batch lane
        were there."""
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
        """What waiting for pages adds to its TBT: one interval, the first, of the slowest tenth."""
        return max(0.0, choice.page_wait_s - lead_s) / max(1.0, SLOWEST * self.answer_tokens)

    def alone_s(self, instance: Instance) -> float:
        """TBT there if it had the instance for itself."""
        return instance.decode.admission_s(1, self.request.prompt_tokens, self.now)

    def wait_s(self, choice: DecodeChoice, bound_s: float, *, everybody: bool = False) -> float:
        """Seconds after which it would be within `bound_s` if nobody else came; inf: never."""
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
        """The tightest SLO of those who are there: the default of whom nothing is known."""
        batch = choice.instance.batch
        return choice.tightest_slo_s if batch.requests <= len(batch.stays) else self.default_tbt_s

    def _lead_s(self, choice: DecodeChoice) -> float:
        return self.queue_s + choice.instance.fits.prefill.predict(self.request.prompt_tokens, 0)

    def _rows(self, choice: DecodeChoice, lead_s: float, *, everybody: bool) -> BatchAt:
        """The others."""
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
    """How many times as slow rows there are now as was predicted when they were placed: fewer were there then, and they
    leave so much later."""
    works = choice.instance.batch.works.values()
    stays_s = [work.leaves_at - work.joins_at for work in works]
    predicted_s = sum(stays_s)
    if not 0 < predicted_s < math.inf:
        return 1.0
    return max(1.0, choice.tbt_s * sum(work.answer_tokens for work in works) / predicted_s)
