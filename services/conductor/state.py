"""The conductor's brain: `step(event, now) -> actions`. All of it is soft state, rebuilt from registrations, heartbeats
and the store master's stream of members and blocks, which says who is dead and which node store holds what.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvmesh.clock import CaughtUp, Tick
from kvmesh.errors import KvmeshError, UnknownInstance
from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.tiers import split_name
from kvmesh.pacing import Pacing
from kvmesh.services.conductor.admission.gate import Loads
from kvmesh.services.conductor.balance.hot import ReplicationContext
from kvmesh.services.conductor.balance.rounds import Hint
from kvmesh.services.conductor.candidates.columns import Columns, View
from kvmesh.services.conductor.costs.accuracy import PredictionError, PredictionKind, group_of
from kvmesh.services.conductor.domain import (
    Action,
    BlockKnowledge,
    Blocks,
    Cordon,
    CordonState,
    Heartbeat,
    Lead,
    Life,
    MemberGone,
    MemberJoined,
    MembersReset,
    ModelCard,
    NewestWeights,
    OrderEnded,
    Outcome,
    OutOfStep,
    Refuse,
    Register,
    RequestOutcome,
    RequestReleased,
    RequestsHeld,
    Role,
    Schedule,
    StoreLost,
)
from kvmesh.services.conductor.domain import Event as Event
from kvmesh.services.conductor.fleet.cordons import Cordons
from kvmesh.services.conductor.fleet.health import Breakers, Standing
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.fleet.members import Members
from kvmesh.services.conductor.fleet.roster import Fleet
from kvmesh.services.conductor.fleet.walk import Pace, Walk
from kvmesh.services.conductor.loads.ledger import Ledger
from kvmesh.services.conductor.prefixes.index import Index
from kvmesh.services.conductor.prefixes.tier_times import TierLoads
from kvmesh.services.conductor.records.explain import Decision, Explanations
from kvmesh.services.conductor.scheduler import Scheduling, SharedState
from kvmesh.services.conductor.settings import Mode, Settings
from kvmesh.services.conductor.views import InstanceView, TierView

# Looked at in one tick, so that none takes long: one instance takes some 4 us.
EXPIRED = Pace(1280, 26)
SURVEYED = Pace(2000, 40)


class ConductorState:
    """The conductor's brain. `rng` breaks ties; `now` is in seconds of one monotonic clock and never decreases."""

    def __init__(self, settings: Settings, rng: random.Random, now: float) -> None:
        self._settings = settings
        self._stepped_at = now
        self._fleet = Fleet(settings.admission.confidence)
        self._members = Members(settings.member_grace_s)
        self._index = Index()
        self._tiers = TierLoads()
        self._columns = Columns(self._fleet, self._index, self._members, self._is_open)
        self._ledger = Ledger(settings, self._index, self._tiers, self._columns.reload)
        self._columns.wires = self._ledger.wires
        self._explanations = Explanations(settings.max_explained)
        self._cordons = Cordons()
        self._breakers = Breakers(settings.breaker)
        self._surveyed = Walk(SURVEYED)
        # Its pulse is what instances are told when they register and with each heartbeat.
        self.pacing = Pacing(settings.heartbeat_s, settings.lease_s, settings.heartbeats_per_s)
        self._ticked_at = -math.inf
        self._term = 0
        kept = self._fleet, self._members, self._index, self._tiers, self._ledger, self._explanations
        known = SharedState(*kept, self.why_not, self._breakers, self._columns)
        self.scheduling = Scheduling(settings, rng, known, now)

    # ── what the outside may ask ──────────────────────────────────────────────────────────────────

    def models(self, now: float) -> list[ModelCard]:
        """Returns one card per model name, of the KV identity on which Schedule would place."""
        return self._fleet.models(lambda i: self.why_not(i, now))

    @property
    def instances(self) -> list[Instance]:
        """All known instances, in the order in which they registered."""
        return list(self._fleet)

    def newest_weights(self) -> Iterator[tuple[Instance, NewestWeights]]:
        """Yields the instances of models whose weights have changed, each with the newest weights of its model."""
        for instance in self._fleet:
            if (newest := self._fleet.newest_weights(instance.model)).epoch:
                yield instance, newest

    def weights_epoch(self, instance_id: str) -> int:
        """Returns the weights epoch that the instance has registered with; 0 for one that is not known."""
        instance = self._fleet.named(instance_id)
        return instance.model.weights_epoch if instance is not None else 0

    def is_external(self, instance_id: str) -> bool:
        """Says whether that instance asks an engine that is not kvmesh's own."""
        instance = self._fleet.named(instance_id)
        return instance is not None and instance.external

    def weights_ordered(self, name: str, fingerprint: str, weights: NewestWeights) -> None:
        """Takes it that an order has given a model these weights: instances with older ones get no work."""
        self._fleet.weights_ordered(name, fingerprint, weights)

    def views(self, now: float, among: Iterable[Instance] | None = None) -> list[InstanceView]:
        """Returns what GetStatus shows of all instances, or of those `among` the given ones that are still known."""
        known = self._fleet if among is None else (i for i in among if self._is_known(i))
        return [self._view(i, now) for i in known]

    def _is_known(self, instance: Instance) -> bool:
        return self._fleet.of(instance.ref.life) is instance

    def idle(self, now: float) -> dict[str, bool]:
        """Returns, of each instance that is cordoned or drains, whether no request is there or on its way to it."""
        closed = [name for state in (CordonState.CORDONED, CordonState.DRAINING) for name in self._cordons.named(state)]
        known = [i for name in closed for i in self._fleet.places(name)]
        return {view.ref.instance_id: not (view.pending or view.load.requests) for view in self.views(now, known)}

    @property
    def indexed_blocks(self) -> int:
        """The number of distinct blocks that node stores have announced."""
        return len(self._index.truth)

    @property
    def policy(self) -> str:
        """The name of the placement policy."""
        return self._settings.policy

    @property
    def admission(self) -> Mode:
        """When a request is refused."""
        return self._settings.admission.mode

    def balancing_threshold(self, now: float) -> float:
        """Returns the present balancing threshold."""
        return self.scheduling.threshold.value(now)

    def prediction_errors(self, now: float) -> Sequence[PredictionError]:
        """Returns how far recent predictions were off, by kind."""
        return self._ledger.accuracy.errors(now)

    def group_errors(self, now: float) -> Sequence[PredictionError]:
        """Returns how far recent predictions were off, by kind and group of instances (accuracy.py)."""
        return self._ledger.accuracy.group_errors(now)

    def explain(self, request_id: str) -> Decision | None:
        """Returns the last decision about that request, or None when it is unknown or was forgotten."""
        return self._explanations.get(request_id)

    def stranded(self, instance_id: str) -> str:
        """Returns why no instance of its model can work with that instance (see `Fleet.stranded`); "" for an unknown
        one."""
        instance = self._fleet.named(instance_id)
        return self._fleet.stranded(instance) if instance is not None else ""

    def _view(self, i: Instance, now: float) -> InstanceView:
        why = self.why_not(i, now) or self._fleet.stranded(i)
        return InstanceView(
            i.ref,
            i.role,
            i.model,
            ready=why == "",
            not_ready_reason=why,
            load=i.load,
            silent_s=max(0.0, now - i.last_seen),
            capacity_blocks=i.capacity_blocks,
            queue_s=i.queue.wait_s(now),
            pending=len(i.queue.works) + len(i.batch.works),
            indexed_blocks=self._index.count(i.ref.life),
            tiers=self._tier_views(i, now),
            cordon=self._cordons.of(i.ref.instance_id)[0],
            cordon_reason=self._cordons.of(i.ref.instance_id)[1],
            breaker=self._breakers.why_not(i.ref.life, now),
            tbt_s=i.decode.predict(i.batch.requests, i.batch.context_tokens) if i.batch.requests else 0.0,
            node_id=i.node_id,
            axes=i.axes,
            http_url=i.http_url,
            knowledge=i.knowledge,
        )

    def readiness(self, now: float) -> tuple[Mapping[tuple[Role, bool], int], float]:
        """Returns how many instances of each role may and may not get work, and the longest silence, in seconds, of one
        that may."""
        return self._view_of_all(now).readiness()

    def _view_of_all(self, now: float) -> View:
        return self._columns.view(now, self.why_not, self._breakers.tripped)

    def _tier_views(self, i: Instance, now: float) -> tuple[TierView, ...]:
        indexed, block_bytes = self._index.counts(i.ref.life), i.model.cost.block
        return tuple(
            TierView(use, indexed.get(use.tier, 0), self._tiers.seconds(i.ref.life, use.tier, block_bytes, now))
            for use in i.tiers
        )

    def why_not(self, instance: Instance, now: float) -> str:
        """Returns why an instance may get no work now, or ""."""
        return self._why_unable(instance, now) or self._breakers.why_not(instance.ref.life, now)

    def _is_open(self, instance: Instance) -> bool:
        """Says whether it may get work, apart from its silence and its breaker."""
        verdict = self._members.verdict(instance.ref.life)
        return not verdict and instance.ready and not self._cordons.why_not(instance.ref.instance_id)

    def _why_unable(self, instance: Instance, now: float) -> str:
        """Returns why an instance may get no work, apart from its breaker."""
        verdict = self._members.verdict(instance.ref.life)
        silent_s = self._silent_s(instance, now)
        if verdict:
            return f"the store master says it {verdict}"
        if silent_s > instance.lease.seconds:
            return f"silent for {silent_s * 1000:.0f} ms"
        if not instance.ready:
            return instance.not_ready_reason or "says it is not ready"
        return self._cordons.why_not(instance.ref.instance_id)

    def _silent_s(self, instance: Instance, now: float) -> float:
        """Returns for how many seconds nothing has come from the instance. Messages that have arrived and are not
        handled yet may include its heartbeat, so silence counts up to `heard_until` only."""
        return min(now, self._columns.heard_until) - instance.last_seen

    def cordon_of(self, instance_id: str) -> CordonState:
        """Returns the state that an operator has set for the instance."""
        return self._cordons.of(instance_id)[0]

    def cordon_refusal(self, event: Cordon) -> KvmeshError | None:
        """Returns why an operator's cordon would be refused, or None."""
        return self._cordons.refusal(event, known=bool(self._fleet.places(event.instance_id)))

    def places(self, instance_id: str) -> list[str]:
        """Returns the names of all places of the instance that has this name, or has a place of this name."""
        return [i.ref.instance_id for i in self._fleet.places(instance_id)]

    def loads(self, among: Iterable[Instance], now: float) -> dict[str, Loads]:
        """Returns the loads of these instances by model, as admission sees them."""
        able = (i for i in among if self._is_known(i) and not self.why_not(i, now))
        return self.scheduling.admission.loads(able, now)

    def hints(self, now: float) -> Sequence[Hint]:
        """Returns the scale hints of the last round."""
        return self.scheduling.balance.hints

    # ── events ────────────────────────────────────────────────────────────────────────────────────

    def step(self, event: Event, now: float) -> Sequence[Action]:
        """Applies one event. At most one Placed or Refuse is among the actions, which answers this event. Raises
        ValueError when an announced key does not have 16 bytes."""
        self._forgive_own_stall(now)
        match event:
            case Schedule():
                return [self.scheduling.schedule(event, now)]
            case Heartbeat():
                return self._heartbeat(event, now)
            case RequestReleased():
                self._released(event, now)
            case Blocks(announcement):
                return [] if self._hear(announcement) else [OutOfStep(announcement.store_id)]
            case Register():
                error = self._register(event, now)
                return [Refuse(error)] if error else []
            case MembersReset(incarnation, members):
                # Members of a master before find another one with their next beats there.
                self._members.grace_s = self._settings.member_grace_s + self.pacing.longer_s
                self._lose(self._members.reset(incarnation, members, now))
                self._drop_strangers()
                for member in members:
                    self._columns.touch(member.ref.instance_id)
                self._columns.touch_all()
            case MemberJoined(member):
                self._lose(self._members.joined(member))
                self._columns.touch(member.ref.instance_id)
            case MemberGone(life, how):
                self._members.gone(life, how)
                self._columns.touch(life[0])
                self._lose([life])
            case StoreLost():
                self._members.lost()
                self._columns.touch_all()
            case Cordon():
                return self._cordon(event)
            case Lead(term):
                self._term = term
            case CaughtUp(until):
                self._columns.heard_until = min(until, now)
            case Tick():
                passed_s, self._ticked_at = now - self._ticked_at, now
                self._expire(now, passed_s)
                self._fleet.fade(now)
                self._reload_changed()
                if self.pacing.paced:  # here alone: what is answered is what the lease was told in the same step
                    self.pacing.count(self._columns.beating(now))
                self._survey(now, passed_s)
                self._adapt(now)
                return self._balance(now, passed_s)
            case OrderEnded():
                self.scheduling.balance.ended(event, now)
            case RequestsHeld():
                self.scheduling.balance.held(event, now)
        return []

    def _forgive_own_stall(self, now: float) -> None:
        """Extends all leases by a time in which this process itself stood still, and so heard nobody."""
        gap, self._stepped_at = now - self._stepped_at, now
        if gap > self._settings.stall_s:
            for instance in self._fleet:
                instance.last_seen += gap
            self._columns.touch_all()

    def _register(self, event: Register, now: float) -> KvmeshError | None:
        if error := self._fleet.check(event):
            return error
        old = self._fleet.named(event.ref.instance_id)
        if old is not None and self._fleet.is_same(event):
            if event.knowledge is not old.knowledge:
                self._index.pending.forget_confirmed(old.slot)  # what it reports now counts
            old.become(event)
            old.last_seen = now
            old.lease.tell(self.pacing.pulse)
            self._columns.touch(event.ref.instance_id)
            return None
        if old is not None:
            self._forget(old, replaced=old.ref.incarnation != event.ref.incarnation)
        self._fleet.add(event, self._index.pending.open(event.capacity_blocks), self.pacing.pulse, now)
        self._columns.touch(event.ref.instance_id)
        return None

    def _heartbeat(self, beat: Heartbeat, now: float) -> list[Action]:
        instance = self._fleet.of(beat.ref.life)
        if instance is None:
            who = f"instance {beat.ref.instance_id!r} incarnation {beat.ref.incarnation}"
            return [Refuse(UnknownInstance(f"{who} is not registered here: register again"))]
        instance.last_seen = now
        instance.lease.tell(self.pacing.count_heartbeat(beat.ref.instance_id, by_door=beat.by_door), beat.pace)
        self._columns.reload(beat.ref.instance_id, learnt=bool(beat.prefill_samples or beat.decode_samples))
        strange = {s.request_id for s in beat.prefill_samples if s.request_id not in instance.queue.works}
        measured = self._ledger.learn(instance, beat, now)
        self._reload_changed()
        for one in measured:
            self._breakers.served(beat.ref.life, one.request_id, now)
            if one.request_id in strange:
                self.scheduling.balance.computed_elsewhere(instance, one.predicted_s, now)
        for outcome in beat.outcomes:
            if self._ledger.ended(instance, outcome, now):
                self._explanations.ended(outcome)
                self._breakers.record_outcome(beat.ref.life, outcome, now)
            self.scheduling.ended(outcome, now)
        for sample in beat.prefill_samples:
            self._explanations.report(instance.ref, sample)
            self.scheduling.threshold.sampled(sample, now)
        for request_id in beat.finished_request_ids:
            self._ledger.finished(instance, request_id, now)
        if beat.seq >= instance.last_seq:  # a call that was overtaken tells an older load
            instance.last_seq = beat.seq
            stale = self._fleet.stale(instance)
            if instance.ready and not beat.ready and instance.knowledge is BlockKnowledge.FALLBACK:
                self._index.pending.forget_confirmed(instance.slot)  # its engine is lost: another may answer there next
            instance.ready = beat.ready and not stale
            instance.not_ready_reason = beat.not_ready_reason or stale
            instance.load = beat.load
            instance.tiers = beat.tiers
            for expected_s, measured_s in self._tiers.hear(instance.ref.life, beat.tiers, now):
                group = group_of(instance.model.name, instance.role)
                self._ledger.accuracy.add(PredictionKind.TIER_LOAD, group, expected_s, measured_s, now)
            queued = beat.load.queued_tokens
            instance.queue.report(queued, instance.seconds_per_token() if queued else 0.0, now)
            instance.batch.report(beat.load, now, instance.queue.works)
        return list(measured)

    def _released(self, event: RequestReleased, now: float) -> None:
        """Takes away what a placement reserved. Only what it blames an instance for is taken for its outcome: lengths
        and times of the answer are known to those who made it."""
        served = self._fleet.named(event.served_by) if event.served_by else None
        computed = event.outcome in (Outcome.DONE, Outcome.CANCELLED)  # else it has not taken the prompt
        self._ledger.release(event.request_id, served if computed else None, now)
        if served is not None:
            outcome = RequestOutcome(event.request_id, 0, event.outcome, blamed=served.ref.instance_id)
            self._breakers.record_outcome(served.ref.life, outcome, now)

    def _reload_changed(self) -> None:
        for name in self._fleet.changed():
            self._columns.reload(name, learnt=True)

    def _cordon(self, event: Cordon) -> list[Action]:
        if not event.kept and (error := self.cordon_refusal(event)):
            return [Refuse(error)]
        self._cordons.put(event)
        for name in self.places(event.instance_id):
            self._columns.touch(name)
        return []

    def _survey(self, now: float, passed_s: float) -> None:
        if not self._surveyed.under_way:
            if not self._breakers.due(now):
                return
            self._breakers.begin(now)
            self._surveyed.begin(self.instances)
        some = (i for i in self._surveyed.next(passed_s) if self._is_known(i))
        self._breakers.survey((Standing(i.ref.life, i.pools, not self._why_unable(i, now)) for i in some), now)

    def _adapt(self, now: float) -> None:
        threshold = self.scheduling.threshold
        if threshold.adapts:
            threshold.tick(self._view_of_all(now).queues_s(), now)

    def _balance(self, now: float, passed_s: float) -> Sequence[Action]:
        if not self.scheduling.balance.due(now):
            return []

        def may(i: Instance) -> bool:
            return self._is_known(i) and not self.why_not(i, now)

        leaving = [i for name in self._cordons.named(CordonState.DRAINING) for i in self._fleet.places(name)]
        moment = ReplicationContext(
            now, passed_s, lambda: self.instances, may, leaving, self._index, self._members.member
        )
        return self.scheduling.balance.tick(moment, leads=self._term > 0)

    def _hear(self, announcement: Announcement) -> bool:
        instance = self._fleet.of((split_name(announcement.store_id)[0], announcement.incarnation))
        life, slot = (None, None) if instance is None else (instance.ref.life, instance.slot)
        return self._index.hear(announcement, life, slot, ended=self._members.ended)

    # ── forgetting ────────────────────────────────────────────────────────────────────────────────

    def _lose(self, lives: Iterable[Life]) -> None:
        """Drops the blocks, queue and expectations of dead incarnations. Their records stay for the status, and in case
        they come back."""
        for life in lives:
            self._index.drop(life)
            self._tiers.drop(life)
            self._breakers.drop(life)
            instance = self._fleet.of(life)
            if instance is not None:
                self._ledger.lost(instance)
                instance.slot = self._index.pending.open(instance.capacity_blocks)

    def _drop_strangers(self) -> None:
        """Drops the blocks of stores that are no members, or of another incarnation than the member. Those of external
        instances stay: no master knows them."""
        for name in self._index.truth.stores():
            store_id, life = split_name(name)[0], self._index.truth.incarnation(name)
            instance = self._fleet.of((store_id, life))
            if instance is not None and instance.external:
                continue
            member = self._members.member(store_id)
            if member is None or member.ref.incarnation != life:
                self._index.drop((store_id, life))

    def _forget(self, instance: Instance, *, replaced: bool = False) -> None:
        if instance.external:  # else the master says when its blocks are gone
            self._index.drop(instance.ref.life)
        self._ledger.lost(instance)
        self._tiers.drop(instance.ref.life)
        self._breakers.forget(instance.ref.life)
        self._fleet.remove(instance, replaced=replaced)
        self.pacing.forget(instance.ref.instance_id)
        self._columns.touch(instance.ref.instance_id)

    def _expire(self, now: float, passed_s: float) -> None:
        self._ledger.wires.expire(now)
        for life in self._members.expire(now):
            self._index.drop(life)
            self._tiers.drop(life)
            self._columns.touch(life[0])
        self._columns.keep_up()
        # While the master is not heard nothing could take the place of what was promised.
        self._index.expire(now, promises=self._members.connected)
        for instance in self._fleet.next(EXPIRED.count(passed_s)):
            self._ledger.expire(instance, now)
            if (
                self._silent_s(instance, now) - instance.lease.seconds
                > self._settings.forget_s - self._settings.lease_s
            ):
                self._forget(instance)
