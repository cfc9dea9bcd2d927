"""What was placed and is not over: the work that instances carry for it, the blocks it brings, the pulls it makes; and
what its reports teach.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

from kvmesh.kvcache.tiers import Tier
from kvmesh.services.conductor.admission.judge import Slo
from kvmesh.services.conductor.costs.accuracy import Accuracy, Calibration, PredictionKind, group_of
from kvmesh.services.conductor.costs.interference import without_rows_s
from kvmesh.services.conductor.costs.plausible import plausible_decode, plausible_prefill
from kvmesh.services.conductor.domain import (
    BlockKnowledge,
    Heartbeat,
    Lane,
    Life,
    Measured,
    Outcome,
    Placed,
    PrefillSample,
    RequestOutcome,
    Schedule,
)
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.loads.batch_forecast import DecodeWork
from kvmesh.services.conductor.loads.outgoing import Outgoing, OutgoingLoad, Wires
from kvmesh.services.conductor.loads.queues import PrefillWork
from kvmesh.services.conductor.peers.others import OtherConductors
from kvmesh.services.conductor.placing.placement import PlacementChoice
from kvmesh.services.conductor.placing.timeline import pull_after_s
from kvmesh.services.conductor.prefixes.fetch_plan import FetchSegment, lives_of, sizes_of
from kvmesh.services.conductor.prefixes.index import Index
from kvmesh.services.conductor.prefixes.pending import Marks, ends, marks
from kvmesh.services.conductor.prefixes.tier_times import TierLoads
from kvmesh.services.conductor.settings import Settings

MAX_PREDICTED_TOKENS = 4096
MAX_PROMISED = 16_384
MAX_OVERDUE = 1_024


@dataclass(slots=True)
class _Placed:
    prefill: Instance
    decode: Instance
    ahead_bytes: int  # what the holders had to send before its pull
    push_ahead: int  # what seemed to go before its push
    holders: int
    below: bool  # whether lower tiers had to read for it
    only: tuple[Life, Tier] | None  # all of it came out of that one
    # Marks and their cache groups, at an external instance: nobody may tell when the prompt is computed, as others ask
    # its engine, too.
    keys: Marks = ()
    masks: bytes = b""


class _Beside(TypedDict):
    """See `PrefillModel.add`."""

    steps: int
    beside_tokens: int
    beside_pairs: int


class _Promise(NamedTuple):
    """What a placement has foretold, until decode tells how it went."""

    attempt: int
    decode: Life
    goes_on: bool  # its first token was another attempt's: nobody's TTFT
    ttft_s: float
    tbt_s: float
    output_tokens: int
    expected_ttft_s: float  # `ttft_s` and `tbt_s`, as corrected by what was seen lately
    expected_tbt_s: float
    crowd: int  # requests that were placed then
    queued_at: Instance | None  # the prefill instance, if others were before it
    among_rows: bool


class Ledger:
    """Placements by request; one request has one."""

    def __init__(
        self, settings: Settings, index: Index, tiers: TierLoads, touch: Callable[[str], None] = lambda name: None
    ) -> None:
        """`touch` hears the names of instances whose load has changed."""
        self._settings = settings
        self._index = index
        self._tiers = tiers
        self._touch = touch
        self.wires = Wires()
        self.accuracy = Accuracy()
        self.calibration = Calibration()
        self._others: dict[str, OtherConductors] = {}  # by model name
        self._placed: dict[str, _Placed] = {}
        self._overdue: OrderedDict[str, _Placed] = OrderedDict()  # at external instances: forgotten, and not yet ended
        self._promised: OrderedDict[str, _Promise] = OrderedDict()

    def __len__(self) -> int:
        return len(self._placed)

    @property
    def outgoing(self) -> Outgoing:
        """What node stores have still to send."""
        return self.wires.outgoing

    def expect_others(self, model: str, prefills: Iterable[Instance], now: float) -> None:
        """What other conductors place may lie before what this one is about to place at one of these."""
        others = self._others.get(model)
        if others is not None and others.due(now):
            among = list(prefills)
            for at in others.spread([i.queue for i in among], now):
                self._touch(among[at].ref.instance_id)

    def others_rate(self, model: str) -> float:
        """Seconds of prefill work that other conductors place in one second."""
        others = self._others.get(model)
        return others.rate if others is not None else 0.0

    def _others_of(self, model: str, now: float) -> OtherConductors:
        return self._others.setdefault(model, OtherConductors(now))

    def commit(self, request: Schedule, choice: PlacementChoice, now: float, slo: Slo, answer_tokens: float) -> None:
        """The chosen instances carry the work from this moment on. `answer_tokens`: predicted."""
        p, d = choice.prefill, choice.decode
        name, patience_s = request.request_id, self._settings.pending_timeout_s
        promised, cost = marks(request.keys), p.instance.model.cost
        last = (request.prompt_tokens - 1) // cost.block_tokens
        masks = cost.coming(ends(len(request.keys)), p.cached_tokens // cost.block_tokens, last)
        p.instance.queue.add(
            PrefillWork(
                name,
                p.computed_tokens,
                p.prefill_s,
                promised,
                now,
                now + 2 * choice.ttft_s + patience_s,
                request.priority,
                request.lane is Lane.BATCH,
                p.instance.prefill.chunks_of(p.computed_tokens),
                masks,
                request.tenant,
                request.tenant_weight,
                p.instance.step_share(p.computed_tokens, p.prefill_s),
            )
        )
        self._index.place(p.instance.ref.life, p.instance.slot, promised, name, masks)
        answer_s = min(request.max_tokens or MAX_PREDICTED_TOKENS, MAX_PREDICTED_TOKENS) * d.tbt_s
        stay_s = 2 * (choice.ttft_s + d.slot_wait_s + answer_s) + patience_s
        blocks = d.instance.blocks_for(request.prompt_tokens + 1)
        joins_at = now + choice.ttft_s + d.slot_wait_s
        d.instance.batch.add(
            DecodeWork(
                name,
                request.prompt_tokens,
                blocks,
                now,
                now + stay_s,
                joins_at,
                joins_at + answer_tokens * d.tbt_s,
                slo.tbt_s,
                request.lane is Lane.BATCH,
                answer_tokens,
            )
        )
        fetched, own = sizes_of(p.segments, cost), sizes_of(choice.decode_segments, cost)
        delay_s = pull_after_s(choice)  # of prefill: decode fetches at once
        if delay_s:
            sent, later = lives_of(choice.decode_segments, own), lives_of(p.segments, fetched)
        else:
            sent, later = lives_of((*p.segments, *choice.decode_segments), (*fetched, *own)), {}
        until = now + delay_s + 2 * max(p.fetch_s, choice.decode_load_s)
        loads, loads_later = ([OutgoingLoad(life, nbytes) for life, nbytes in some.items()] for some in (sent, later))
        self.wires.outgoing.add(name, loads, until, loads_later, now + delay_s)
        self._flows(name, choice, own, now, now + delay_s, until)
        holders = len({segment.holder.ref.life for segment in p.segments if not segment.own})
        kept = (promised, masks) if p.instance.external else ((), b"")
        self._placed[name] = _Placed(
            p.instance,
            d.instance,
            p.ahead_bytes,
            p.push_ahead,
            holders,
            p.tier is not Tier.DRAM,
            _only(p.segments),
            *kept,
        )
        self._touch(p.instance.ref.instance_id)
        self._touch(d.instance.ref.instance_id)

    def _flows(
        self, name: str, choice: PlacementChoice, sizes: Sequence[int], now: float, pull_at: float, until: float
    ) -> None:
        """What will arrive at prefill and at decode; `sizes` are the bytes of each segment that decode fetches."""
        p, d = choice.prefill, choice.decode
        fetched = [OutgoingLoad(p.instance.ref.life, p.pull_bytes)] if p.pull_bytes else []
        segments = zip(choice.decode_segments, sizes, strict=True)
        own = sum(nbytes for segment, nbytes in segments if not segment.own)
        at_once = [OutgoingLoad(d.instance.ref.life, own)] if own else []
        if pull_at <= now:
            self.wires.pull(name, at_once + fetched, until, (), now)
        else:
            self.wires.pull(name, at_once, until, fetched, pull_at)
        begins = now + p.start_s
        self.wires.push(name, d.instance.ref.life, p.pushed_bytes, begins, begins + 2 * (p.prefill_s + p.tail_s))

    def promise(self, request: Schedule, placed: Placed) -> Placed:
        """The same with what its client may expect. What was foretold is kept until `ended` compares it; the oldest go
        first."""
        self._promised.pop(request.request_id, None)
        at = self._placed[request.request_id]
        group, crowd = _group(at.decode), len(self._placed)
        placed = replace(
            placed,
            expected_ttft_s=self.calibration.spread(PredictionKind.TTFT, group, crowd).of(placed.life.prefill_end_s)[1],
            expected_tbt_s=self.calibration.spread(PredictionKind.TBT, group, crowd).of(placed.tbt_s)[1],
        )
        self._promised[request.request_id] = _Promise(
            request.attempt,
            placed.decode.life,
            request.answered_tokens > 0,
            placed.life.prefill_end_s,  # the client has the first token then: it waits for no KV
            placed.tbt_s,
            placed.life.output_tokens,
            placed.expected_ttft_s,
            placed.expected_tbt_s,
            crowd,
            at.prefill if placed.terms["queue_ms"] > 0 and not request.answered_tokens else None,
            at.decode.batch.requests > 1,
        )
        if len(self._promised) > MAX_PROMISED:
            self._promised.popitem(last=False)
        return placed

    def withdraw(self, request_id: str, now: float) -> None:
        """An earlier attempt of the same request is not coming any more."""
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            work = placed.prefill.queue.withdraw(request_id, now)
            if work is not None:
                self._index.pending.withdraw(placed.prefill.slot, work.keys, request_id)
            placed.decode.batch.withdraw(request_id, now)
            self._touch(placed.prefill.ref.instance_id)
            self._touch(placed.decode.ref.instance_id)
        self.wires.end(request_id)

    def learn(self, instance: Instance, beat: Heartbeat, now: float) -> list[Measured]:
        """Take in the samples of a heartbeat."""
        measured = []
        for sample in beat.prefill_samples:
            if instance.first_sample_of(sample.request_id):
                if plausible_prefill(sample):
                    measured.append(self._prefilled(instance, sample, now))
                self._computed(instance, sample, now)
        for d in filter(plausible_decode, beat.decode_samples):
            predicted_s = instance.decode.predict(d.batch, d.context_tokens)
            self.accuracy.add(PredictionKind.DECODE_STEP, _group(instance), predicted_s, d.duration_s, now)
            instance.decode.add(d.batch, d.context_tokens, d.duration_s, now)
        return measured

    def _prefilled(self, instance: Instance, s: PrefillSample, now: float) -> Measured:
        took_s = without_rows_s(instance, s.computed_tokens, s.duration_s, s.steps)
        shape = s.computed_tokens, s.cached_tokens
        beside: _Beside = {"steps": s.steps, "beside_tokens": s.beside_tokens, "beside_pairs": s.beside_pairs}
        predicted_s = instance.prefill.predict(*shape, **beside)
        self.accuracy.add(
            PredictionKind.PREFILL, _group(instance), predicted_s if s.computed_tokens else 0.0, took_s, now
        )
        placed = self._placed.get(s.request_id)
        ahead = placed.push_ahead if placed is not None else 0
        if not instance.transfer.hidden(s.transfer_bytes, ahead, s.transfer_s, s.duration_s):
            transfer_s = instance.transfer.predict(s.transfer_bytes, ahead)
            self.accuracy.add(PredictionKind.TRANSFER, _group(instance), transfer_s, s.transfer_s, now)
        instance.prefill.add(*shape, took_s, now, chunks=s.chunks, **beside)
        instance.transfer.add(s.transfer_bytes, ahead, s.transfer_s, now, prefill_s=s.duration_s)
        self._pulled(instance, s, now)
        if s.request_id not in instance.queue.works:
            self._others_of(instance.model.name, now).computed(predicted_s, now)
        return Measured(s.request_id, predicted_s, took_s)

    def _computed(self, instance: Instance, s: PrefillSample, now: float) -> None:
        work = instance.queue.finish(s.request_id, now, done=True)
        if work is not None:
            self._confirm(instance, work.keys, work.masks, now)
        self.wires.end(s.request_id)

    def _confirm(self, instance: Instance, keys: Marks, masks: bytes, now: float) -> None:
        """These blocks of a prompt are there. An engine of others that does not report its blocks announces none of
        those that others have asked it for: they count until later ones take their place, or it is lost."""
        forever = instance.knowledge is BlockKnowledge.FALLBACK
        until = math.inf if forever else now + self._settings.confirmed_s
        self._index.confirm(instance.ref.life, instance.slot, keys, until, masks)

    def _pulled(self, instance: Instance, s: PrefillSample, now: float) -> None:
        fits = instance.fits
        if s.transfer_bytes > 0 and not len(fits.pull.fit):
            fits.pull.assume(fits.transfer.bytes_per_s)
            fits.pull.equals.refresh(now)
        if s.pull_bytes > 0:
            placed = self._placed.get(s.request_id)
            if placed is not None and placed.below:
                self._read_below(instance, placed, s, now)
                return
            ahead, holders = (placed.ahead_bytes, placed.holders) if placed is not None else (0, 1)
            pull_s = instance.pull.predict(s.pull_bytes + ahead, holders)
            self.accuracy.add(PredictionKind.PULL, _group(instance), pull_s, s.pull_s, now)
            instance.pull.add(s.pull_bytes + ahead, holders, s.pull_s, now)

    def _read_below(self, instance: Instance, placed: _Placed, s: PrefillSample, now: float) -> None:
        """What the wires took of it nobody can tell: it teaches nothing of them, but of the tier, if it was one."""
        if placed.only is not None:
            wires_s = instance.pull.seconds(s.pull_bytes + placed.ahead_bytes, placed.holders, now)
            read_s = s.pull_s - wires_s
            tier_s = self._tiers.seconds(*placed.only, s.pull_bytes, now)
            self.accuracy.add(PredictionKind.TIER_LOAD, _group(instance), tier_s, read_s, now)
            self._tiers.saw(*placed.only, s.pull_bytes, read_s, now)

    def ended(self, instance: Instance, outcome: RequestOutcome, now: float) -> bool:
        """How a request went, as the decode instance tells it; whether that is news (what is not acknowledged is told
        again)."""
        if not instance.first_outcome_of(outcome.request_id, outcome.attempt):
            return False
        promise = self._promised.get(outcome.request_id)
        if promise is None or (promise.attempt, promise.decode) != (outcome.attempt, instance.ref.life):
            return True
        del self._promised[outcome.request_id]
        done = outcome.outcome is Outcome.DONE
        group = _group(instance)
        if not promise.goes_on:
            self.accuracy.add(PredictionKind.TTFT, group, promise.expected_ttft_s, outcome.ttft_s, now)
            self.calibration.add(PredictionKind.TTFT, group, promise.crowd, promise.ttft_s, outcome.ttft_s)
        self.accuracy.add(PredictionKind.TBT, group, promise.expected_tbt_s, outcome.tbt_s, now)
        self.calibration.add(PredictionKind.TBT, group, promise.crowd, promise.tbt_s, outcome.tbt_s)
        if done:
            self.accuracy.add(PredictionKind.OUTPUT_TOKENS, group, promise.output_tokens, outcome.output_tokens, now)
        served = done or outcome.outcome is Outcome.CANCELLED
        if served:
            _teach(promise, instance, outcome)
        if outcome.outcome in (Outcome.REFUSED, Outcome.CANCELLED) and not outcome.duration_s:
            self.withdraw(outcome.request_id, now)  # decode did not admit it, so prefill is not asked for its prompt
        instance.batch.left(outcome.request_id, outcome.duration_s if served else 0.0)
        return True

    def finished(self, instance: Instance, request_id: str, now: float) -> None:
        """The request has left that instance."""
        work = instance.queue.finish(request_id, now, done=False)
        if work is not None:
            self._index.pending.withdraw(instance.slot, work.keys, request_id)
            self.wires.end(request_id)
        instance.batch.finish(request_id, now)
        placed = self._placed.get(request_id)
        if placed is not None and placed.decode is instance:
            del self._placed[request_id]

    def release(self, request_id: str, served: Instance | None, now: float) -> None:
        """Takes the request for over, as whoever asked for its placement says. `served` is the instance that took its
        prompt, if one did: then its blocks are taken to be there, as after a report of a prefill. Another one than was
        chosen may have answered. A request that is not known is passed over."""
        overdue = self._overdue.pop(request_id, None)
        placed = self._placed.get(request_id, overdue)
        if placed is None:
            return
        chosen = placed.prefill
        computed_at = chosen if served is placed.decode else served
        work = chosen.queue.works.get(request_id)  # None: it has long been due to be computed
        keys, masks = (placed.keys, placed.masks) if work is None else (work.keys, work.masks)
        if computed_at is chosen:
            chosen.queue.finish(request_id, now, done=True)
            placed.decode.batch.finish(request_id, now)
            self._placed.pop(request_id, None)
            self.wires.end(request_id)
            self._touch(chosen.ref.instance_id)
            self._touch(placed.decode.ref.instance_id)
        else:
            self.withdraw(request_id, now)
        self._promised.pop(request_id, None)
        if keys and computed_at is not None and computed_at.model.cost == chosen.model.cost:
            self._confirm(computed_at, keys, masks, now)

    def lost(self, instance: Instance) -> None:
        """Its life is over: nothing placed there counts any more."""
        for request_id in instance.batch.works:
            self._placed.pop(request_id, None)
        instance.queue.clear()
        instance.batch.clear()
        self._index.pending.close(instance.slot)
        self._touch(instance.ref.instance_id)

    def expire(self, instance: Instance, now: float) -> None:
        """Placements there whose time is over count no more."""
        for request_id in instance.queue.expired(now):
            work = instance.queue.withdraw(request_id, now)
            assert work is not None, "an expired placement is in the queue"
            self._index.pending.withdraw(instance.slot, work.keys, request_id)
            self._touch(instance.ref.instance_id)
        for request_id in instance.batch.expired(now):
            instance.batch.drop(request_id)
            placed = self._placed.pop(request_id, None)
            if placed is not None and placed.keys:
                self._overdue[request_id] = placed
                if len(self._overdue) > MAX_OVERDUE:
                    self._overdue.popitem(last=False)
            self._touch(instance.ref.instance_id)


def _group(instance: Instance) -> str:
    return group_of(instance.model.name, instance.role)


def _teach(promise: _Promise, decode: Instance, outcome: RequestOutcome) -> None:
    """How far what happened was from what was foretold."""
    # Who gave up before the first token would have waited longer still.
    ttft_s = outcome.ttft_s or max(outcome.duration_s, promise.ttft_s)
    if promise.queued_at is not None:
        promise.queued_at.margins.ttft.add(promise.ttft_s, ttft_s)
    if promise.among_rows:
        decode.margins.tbt.add(promise.tbt_s, outcome.tbt_s)


def _only(segments: Sequence[FetchSegment]) -> tuple[Life, Tier] | None:
    """The lower tier of another node that all of `legs` come from."""
    sources = {(segment.holder.ref.life, segment.tier, segment.own) for segment in segments}
    if len(sources) != 1:
        return None
    ((life, tier, own),) = sources
    return None if own or tier is Tier.DRAM else (life, tier)
