"""Admission: whether a request is taken, and which SLO it is held to. Pure: time is an argument.

Before instances are weighed, a request gets its SLO and its judge (judge.py). Weighing itself refuses what no instance
can serve in time, before any prefill is paid for. This module then confirms the choice: decode is judged again, now
that the time of the first token is known; less urgent requests leave some room to others; and the batch lane takes only
what is idle (lanes.py). A request that goes on after its instance was lost has been admitted before and is not refused
here.

The load of a pool is defined as in the paper: the greatest predicted TTFT / SLO at prefill, TBT / SLO at decode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvmesh.errors import Overloaded
from kvmesh.services.conductor.admission import impossible
from kvmesh.services.conductor.admission.context import AdmissionContext
from kvmesh.services.conductor.admission.impossible import BestSeen
from kvmesh.services.conductor.admission.judge import Judge, Slo
from kvmesh.services.conductor.admission.lanes import GONE_FACTOR, GONE_S, BatchLane, BatchRequest, pause_s, share_of
from kvmesh.services.conductor.admission.refusals import idle_only
from kvmesh.services.conductor.admission.slowdown import Slowdown, Undisturbed
from kvmesh.services.conductor.admission.turns import PoolWork, RetryTurns
from kvmesh.services.conductor.costs.lengths import LearntLengths, LengthModel
from kvmesh.services.conductor.domain import Lane, Refuse, RequestOutcome, Schedule
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.placing.placement import PlacementChoice, overloaded
from kvmesh.services.conductor.placing.prefills import wait_for_s
from kvmesh.services.conductor.settings import Mode, Settings

MIN_BATCH_RETRY_S = 1.0
LOADS = ("ttft", "tbt")  # what interactive requests are refused for
USUAL_SHARE = 0.1  # of a new prompt in what is thought usual
MAX_MODELS = 64  # of which something is remembered
MAX_WATCHED = 8192


@dataclass(frozen=True, slots=True)
class Loads:
    """The loads of a model's two pools; 1 means at the SLO."""

    prefill: float
    decode: float

    @property
    def greatest(self) -> float:
        return max(self.prefill, self.decode)


@dataclass(slots=True)
class _Seen:
    """What the last placements of one model showed, in seconds: the queue that the last one met, and the usual time of
    a prompt."""

    queue_s: float = 0.0
    at: float = -math.inf
    prompt_s: float = 0.0


@dataclass(slots=True)
class _OfModel:
    """What requests of one model have shown."""

    slowdown: Slowdown
    turns: RetryTurns = field(default_factory=RetryTurns)
    fastest: BestSeen = field(default_factory=BestSeen)


class Admission:
    """Decides for one conductor which requests are taken."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._mode = settings.admission.mode
        self._defaults = {name: Slo(ttft_s, tbt_s) for name, ttft_s, tbt_s in settings.admission.by_model}
        self._seen: dict[str, _Seen] = {}
        self._models: dict[str, _OfModel] = {}
        self.lengths: LengthModel = LearntLengths()
        self.batch = BatchLane(settings.admission)
        self._watched: dict[str, tuple[int, Undisturbed]] = {}  # interactive requests under way, with their attempts

    def default(self, model: str) -> Slo:
        """Returns the SLO of requests of this model that name none."""
        return self._defaults.get(model) or Slo(self._settings.slo_ttft_s, self._settings.slo_tbt_s)

    def slo(self, request: Schedule) -> Slo:
        """Returns the request's SLO: its own, else its model's, else the general one. A batch request has its model's,
        which it must leave to others."""
        default = self.default(request.model)
        if request.lane is Lane.BATCH:
            return default
        return Slo(request.ttft_slo_s or default.ttft_s, request.tbt_slo_s or default.tbt_s)

    def bounds(self, request: Schedule, slo: Slo) -> Slo:
        """Returns the SLO by which weighing may refuse the request; infinite where it may not."""
        if self._mode is Mode.OFF or request.lane is Lane.BATCH or request.answered_tokens:
            return Slo(math.inf, math.inf)
        return Slo(slo.ttft_s, math.inf) if self._mode is Mode.BASELINE else slo

    def held_at_decode(self, request: Schedule, judge: Judge) -> dict[str, float]:
        """Returns the bounds for decode's own check (see `Placed`); empty where decode is to refuse nothing."""
        bound_s = self.bounds(request, judge.slo).tbt_s
        if math.isinf(bound_s):
            return {}
        return {"tbt_slo_s": bound_s, "held_tbt_s": max(bound_s, self.default(request.model).tbt_s)}

    def judge(self, request: Schedule, slo: Slo, now: float) -> Judge:
        """Returns the judge that says whether a decode instance may have the request."""
        seen = self._seen.get(request.model) or _Seen()
        queue_s = max(0.0, seen.queue_s - (now - seen.at))
        tokens = self.lengths.predict(request).mean
        mode = Mode.OFF if request.answered_tokens else self._mode
        return Judge(mode, request, slo, self.default(request.model).tbt_s, queue_s, tokens, now)

    def confirm(self, choice: PlacementChoice, judge: Judge, among: AdmissionContext) -> PlacementChoice | Refuse:
        """Returns the choice, or the reason why it is refused after all."""
        if judge.mode is Mode.OFF:
            return choice
        if judge.request.lane is Lane.BATCH:
            return self._batch(choice, judge, among)
        return self._interactive(choice, judge, among) or choice

    def placed(self, choice: PlacementChoice, judge: Judge) -> None:
        """Notes a placement."""
        request, p = judge.request, choice.prefill
        seen = self._seen.setdefault(request.model, _Seen())
        seen.queue_s, seen.at = p.queue_s, judge.now
        seen.prompt_s += (USUAL_SHARE if seen.prompt_s else 1.0) * (p.prefill_s - seen.prompt_s)
        self.lengths.placed(request)
        if request.lane is not Lane.BATCH:
            of = self._of(request.model)
            of.turns.came(request, judge.now)
            of.turns.placed(p.prefill_s, judge.now)
            of.fastest.see(p.instance, choice.decode.instance, judge.now)
            self.batch.earn(_machine_s(choice, judge))
            self._watch(choice, judge, of.slowdown)

    def refused(self, request: Schedule, refuse: Refuse, among: AdmissionContext, now: float) -> Refuse:
        """Returns the refusal with a turn of the request's own for the next attempt, if it was refused for load. A
        request that no instance could ever serve within its SLO is told so, and gets no turn."""
        error = refuse.error
        if not isinstance(error, Overloaded) or refuse.reason not in LOADS or request.lane is Lane.BATCH:
            return refuse
        of = self._of(request.model)
        if refuse.least_s and not among.found.picked_by:
            slo = self.slo(request)
            slo_s = slo.ttft_s if refuse.reason == "ttft" else slo.tbt_s
            least_s = impossible.least_s(request, slo_s, refuse, among, of.fastest, now)
            if least_s:
                return impossible.refusal(request, refuse, least_s)
        of.slowdown.came(now)
        turns = of.turns
        had = turns.came(request, now)
        work = among.pool_work(request, self.lengths.predict(request).mean)
        part = turns.part(among.others_rate, now)
        work = PoolWork(work.prefill_s / part, work.decode_s / part)
        wait_s = turns.wait_s(request, error.retry_after_ms / 1000, work, LOADS.index(refuse.reason), now, had)
        wait_ms = math.ceil(round(1000 * wait_s, 3))
        text = f"{error.message}; try again in {wait_ms} ms"
        return Refuse(Overloaded(text, retry_after_ms=wait_ms), refuse.reason)

    def _of(self, model: str) -> _OfModel:
        found = self._models.get(model)
        if found is None:
            if len(self._models) >= MAX_MODELS:
                del self._models[next(iter(self._models))]
            found = self._models[model] = _OfModel(Slowdown(self._settings.admission.batch_slowdown))
        return found

    def _watch(self, choice: PlacementChoice, judge: Judge, slowdown: Slowdown) -> None:
        """Remembers an interactive placement; its outcome will show what the batch lane does to it."""
        request = judge.request
        slowdown.came(judge.now)
        if request.answered_tokens:
            return
        self._watched[request.request_id] = request.attempt, slowdown.placed(choice, judge)
        if len(self._watched) > MAX_WATCHED:
            del self._watched[next(iter(self._watched))]

    def ended(self, outcome: RequestOutcome, now: float) -> None:
        """Notes how a request went."""
        self.lengths.ended(outcome)
        attempt, watched = self._watched.get(outcome.request_id) or (0, None)
        if watched is not None and attempt == outcome.attempt:
            del self._watched[outcome.request_id]
            watched.of.ended(watched, outcome, now)
        elif watched is None:
            for of in self._models.values():
                of.slowdown.left(outcome.request_id)

    def loads(self, instances: Iterable[Instance], now: float) -> dict[str, Loads]:
        """Returns the loads of every model's pools. `instances` are those that may get work. The TTFT of a prefill
        instance is that of a usual prompt arriving now; the TBT of a decode instance is that of its present batch."""
        found: dict[str, Loads] = {}
        for i in instances:
            slo, seen = self.default(i.model.name), self._seen.get(i.model.name) or _Seen()
            ttft_s = i.queue.wait_s(now) + seen.prompt_s if i.role.prefills else 0.0
            rows = i.batch.running
            tbt_s = i.decode.predict(round(rows.requests), rows.context_tokens) if rows.requests else 0.0
            old = found.get(i.model.name, Loads(0.0, 0.0))
            found[i.model.name] = Loads(max(old.prefill, ttft_s / slo.ttft_s), max(old.decode, tbt_s / slo.tbt_s))
        return found

    def _interactive(self, choice: PlacementChoice, judge: Judge, among: AdmissionContext) -> Refuse | None:
        share, p, slo = share_of(judge.request.priority), choice.prefill, judge.slo
        ttft_s = p.admission_ttft_s + choice.decode.landing_wait_s
        idle_s = p.admission_alone_s
        bound_s = slo.ttft_s - (1 - share) * max(0.0, slo.ttft_s - idle_s)
        before = self._of(judge.request.model).turns.before(judge.request, judge.now)
        bound_s = max(idle_s, bound_s - before.prefill_s)  # who would wait for nobody need not
        if ttft_s > bound_s:
            drain_s = ttft_s - idle_s
            wanted_s = wait_for_s(p, bound_s - choice.decode.landing_wait_s)
            return overloaded("TTFT", ttft_s, bound_s, drain_s, min(wanted_s, ttft_s - bound_s, drain_s))
        if self._mode is Mode.BASELINE:
            return None
        verdict = judge.decode(choice.decode, choice.ttft_s)
        idle_s = judge.alone_s(choice.decode.instance)
        bound_s = verdict.slo_s - (1 - share) * max(0.0, verdict.slo_s - idle_s)
        batch = choice.decode.instance.batch
        tbt_s = verdict.tbt_s
        if before.requests and batch.requests:
            tbt_s = max(tbt_s, judge.tbt_s(choice.decode, choice.ttft_s, more=before.requests / len(among.decodes)))
        if tbt_s <= bound_s:
            return None
        wanted_s = judge.wait_s(choice.decode, bound_s)
        return overloaded("TBT", tbt_s, bound_s, batch.drain_s(batch.requests), wanted_s)

    def _batch(self, choice: PlacementChoice, judge: Judge, among: AdmissionContext) -> PlacementChoice | Refuse:
        p, d, slo, now = choice.prefill, choice.decode, judge.slo, judge.now
        slowdown = self._of(judge.request.model).slowdown
        allowed = slowdown.allowed(now)
        without_s, with_s = judge.beside_s(d, choice.ttft_s) if allowed < math.inf else (1.0, 1.0)
        asked = BatchRequest(
            judge.request.request_id,
            slo.ttft_s,
            slo.tbt_s,
            p.queue_s,
            p.prefill_s,
            judge.tbt_s(d, choice.ttft_s, everybody=True),
            judge.alone_s(d.instance),
            room=not (d.short or d.landing_wait_s or d.slot_wait_s),
            slower=with_s / without_s - 1,
            allowed=allowed,
            early_s=max(0.0, slowdown.next_at - now) if allowed < math.inf else 0.0,
        )
        way = self.batch.way_in(asked, now)
        if way:
            self.batch.taken(asked.request_id, way, _machine_s(choice, judge))
            chunk_s = p.prefill_s / p.instance.prefill.chunks_of(p.computed_tokens)
            rest_s = pause_s(p.prefill_s, chunk_s, slowdown.ttft_s, allowed, max(1, len(among.prefills)))
            until = now + GONE_FACTOR * (choice.ttft_s + judge.answer_tokens * d.tbt_s) + GONE_S
            slowdown.entered(asked.request_id, until, now + min(rest_s, self._settings.admission.patience_s))
            return choice
        queue_s = max(0.0, p.queue_s - self.batch.queue_bound_s(slo.ttft_s))
        wait_s = judge.wait_s(d, self.batch.tbt_bound_s(asked), everybody=True)
        if not asked.room:
            wait_s = max(wait_s, d.landing_wait_s, d.slot_wait_s)
        retry_s = min(self._settings.admission.patience_s, max(MIN_BATCH_RETRY_S, queue_s, wait_s, asked.early_s))
        self.batch.told_to_wait(asked.request_id, retry_s, now)
        return idle_only(retry_s)


def _machine_s(choice: PlacementChoice, judge: Judge) -> float:
    """Returns the machine time that a request takes, in seconds: its prompt, and its share of the steps of its
    answer."""
    rows = max(1, choice.decode.instance.batch.requests)
    return choice.prefill.prefill_s + judge.answer_tokens * choice.decode.tbt_s / rows
