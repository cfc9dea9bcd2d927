"""The brain of a decode instance keeps all requests, their memory, their gateways. `step(input, now)` returns outputs;
see inputs.py for both.

The brain is pure and deterministic: the same inputs at the same times give the same outputs. Messages for gateways are
gathered in `sessions` (outbox.py); an output `Flush` says that there is one to send.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from kvmesh.blockservice.removals import NotHere
from kvmesh.clock import NEVER, Tick
from kvmesh.errors import DeadlinePassed, KvmeshError, RequestCancelled
from kvmesh.kvcache.grouped_store import GroupedStore
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import Pages
from kvmesh.kvcache.sources import Pulled
from kvmesh.ranks import protocol as m
from kvmesh.services.decode import events as e
from kvmesh.services.decode import inputs as i
from kvmesh.services.decode.events import Phase
from kvmesh.services.decode.grouped.handoff import GroupedHandoff
from kvmesh.services.decode.grouped.scheduler import GroupedScheduler
from kvmesh.services.decode.grouped.sources import GroupedPulls
from kvmesh.services.decode.handoff import Handoff
from kvmesh.services.decode.limits import Limits, Shape
from kvmesh.services.decode.outbox import Finish, GatewayStream, Outbox
from kvmesh.services.decode.scheduler import Scheduler
from kvmesh.services.decode.sources import DecodePulls

MAX_SAMPLES = 16  # step times kept between two heartbeats; the conductor keeps a longer window


class DecodeState:
    """Keeps the whole state of one decode instance. In a coupled instance `pages` is the pool that it shares with
    the prefill half, and handles, tickets and epochs begin at `first`, so that they differ from those of the prefill
    half. Of a model of several cache groups `store` has the stores of all, and `pages` is one pool a group."""

    def __init__(
        self,
        limits: Limits,
        shape: Shape,
        store: NodeStore | GroupedStore,
        pages: Pages | Sequence[Pages] | None = None,
        first: int = 1,
    ) -> None:
        self.limits = limits
        self.shape = shape
        tickets = itertools.count(first)

        def new_ticket() -> int:
            return next(tickets)

        self.scheduler: Scheduler
        self.pulls: DecodePulls
        if isinstance(store, GroupedStore):
            pools = cast("Sequence[Pages] | None", pages)
            self.scheduler = GroupedScheduler(limits, shape, store, new_ticket, pools, first)
            self.pulls = GroupedPulls(store, limits.pull_timeout_ms, new_ticket)
        else:
            self.scheduler = Scheduler(limits, shape, store, new_ticket, cast("Pages | None", pages), first)
            self.pulls = DecodePulls(store, limits.pull_timeout_ms, new_ticket)
        self.requests = self.scheduler.requests
        self.sessions: dict[int, Outbox] = {}
        self.steps: deque[tuple[int, int, int]] = deque(maxlen=MAX_SAMPLES)  # (batch, context_tokens, duration_ns)
        # refuses(key, source_seq): whether the block may have been removed here since, if it comes from a node that had
        # carried out the removal orders up to number source_seq.
        self.refuses: Callable[[bytes, int], bool] = lambda key, source_seq: False
        self._fast_path: KvmeshError | None = None
        self._handles = itertools.count(first)
        self._by_epoch: dict[int, Handoff] = {}
        self._writers: dict[int, tuple[tuple[int, str], ...]] = {}
        self._held: dict[int, GatewayStream] = {}  # finished answers that wait for credit, by handle
        self._timers: list[tuple[int, int]] = []
        self._out: list[i.Output] = []
        self._flush: dict[int, None] = {}

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def step(self, event: i.Input, now: int) -> list[i.Output]:
        """Takes one input at `now` (monotonic ns) and returns what is to be done, in order."""
        _HANDLERS[type(event)](self, event, now)
        while self.scheduler.dirty:
            self.scheduler.dirty = False
            while (grant := self.scheduler.next_grant()) is not None:
                h, given = grant
                if type(given) is e.Land:
                    self._by_epoch[given.epoch] = h
                self._run(h, given, now)
        out, self._out = self._out, []
        if self._flush:
            out.extend(i.Flush(session) for session in self._flush)
            self._flush.clear()
        return out

    def next_due(self) -> int:
        """When to send a Tick at the latest (monotonic ns); NEVER if nothing waits for the time."""
        timers = self._timers
        while timers:
            when, handle = timers[0]
            h = self.requests.get(handle)
            if (h is not None and h.armed == when) or (handle in self._held):
                return when
            heapq.heappop(timers)
        return NEVER

    def phase_of_epoch(self, epoch: int) -> Phase:
        """Returns the phase of the request that has this handoff epoch; FREE if none has it."""
        h = self._by_epoch.get(epoch)
        return h.phase if h is not None else Phase.FREE

    def _run(self, h: Handoff, event: e.Event, now: int) -> None:
        self._do(h, h.step(event, now), now)

    def _do(self, h: Handoff, actions: list[e.Action], now: int) -> None:
        for action in actions:
            ours = _ACTIONS.get(type(action))
            if ours is not None:
                ours(self, h, action, now)
            else:
                assert isinstance(action, _OUTWARD), action
                self._out.append(action)
        if h.phase is not Phase.FREE and h.wake_at != h.armed:
            h.armed = h.wake_at
            if h.armed < NEVER:
                heapq.heappush(self._timers, (h.armed, h.handle))
        self.scheduler.file(h)

    # ── gateways ─────────────────────────────────────────────────────────────────────────────────

    def _session_opened(self, event: i.SessionOpened, now: int) -> None:
        self.sessions[event.session] = Outbox(event.session)

    def _session_closed(self, event: i.SessionClosed, now: int) -> None:
        box = self.sessions.pop(event.session, None)
        if box is None:
            return
        for stream in list(box.streams.values()):
            self._held.pop(stream.handle, None)
            self._cancel(stream.handle, RequestCancelled(f"the gateway's session ended: {event.cause}"), now)
        self._flush.pop(event.session, None)

    def _admit(self, event: i.Admit, now: int) -> None:
        box = self.sessions.get(event.session)
        if box is None or event.slot in box.streams:
            return  # the session is over, or a Start came twice
        error = self._fast_path or self.scheduler.refusal(event.spec, now, event.peer == i.OWN_PEER)
        if error is not None:
            self._refuse(i.RefuseRequest(event.session, event.slot, error), now)
            self._out.append(i.Refused(event.spec, error))
            return
        handle = next(self._handles)
        h = (GroupedHandoff if self.shape.groups else Handoff)(handle, event.spec, self.limits, self.shape)
        h.peer, h.adopts = event.peer, event.peer == i.OWN_PEER
        h.times.received = event.received_ns
        h.stream = box.open(event.slot, handle, event.spec.credit_tokens, event.spec.deadline_ns)
        self.requests[handle] = h
        self.scheduler.live += 1
        self._do(h, h.begin(now), now)
        # In a coupled instance the half that computes the prompt fetches its blocks.
        job = None if h.adopts else self.pulls.begin(h, self.scheduler.room_for_blocks)
        if job is not None:
            self._out.append(i.Pull(job, h))

    def _refuse(self, event: i.RefuseRequest, now: int) -> None:
        box = self.sessions.get(event.session)
        if box is not None and event.slot not in box.streams:
            box.refuse(event.slot, event.error)
            self._flush[event.session] = None

    def _cancel_slot(self, event: i.CancelSlot, now: int) -> None:
        stream = self._stream(event.session, event.slot)
        if stream is None:
            return
        if self._held.pop(stream.handle, None) is not None:
            stream.fail(event.error)
            self._flush[event.session] = None
        self._cancel(stream.handle, event.error, now)

    def _add_credit(self, event: i.AddCredit, now: int) -> None:
        stream = self._stream(event.session, event.slot)
        if stream is not None and stream.add_credit(event.tokens):
            self._flush[event.session] = None
            if not stream.held_back:
                self._held.pop(stream.handle, None)

    def _stream(self, session: int, slot: int) -> GatewayStream | None:
        box = self.sessions.get(session)
        return box.streams.get(slot) if box is not None else None

    def _cancel(self, handle: int, error: KvmeshError, now: int) -> None:
        h = self.requests.get(handle)
        if h is not None:
            self._run(h, e.Cancel(error), now)

    # ── prefill instances ────────────────────────────────────────────────────────────────────────

    def _peer_ready(self, event: i.PeerReady, now: int) -> None:
        self._writers[event.peer] = event.writers

    def _peer_gone(self, event: i.PeerGone, now: int) -> None:
        self._writers.pop(event.peer, None)
        for h in [h for h in self.requests.values() if h.peer == event.peer]:
            self._run(h, e.PeerLost(event.cause), now)

    def _from_prefill(self, event: i.FromPrefill, now: int) -> None:
        h = self.requests.get(event.handle)
        if type(event.event) is e.Adopted and (h is None or h.ended):  # cancelled while this was on its way
            self.scheduler.release_pages(event.event.pages, event.event.groups)
            return
        if h is None or h.peer != event.peer:
            return  # the request has been freed, or the message is not from its writer
        if type(event.event) is e.BeginFill and not h.adopts:
            h.writers = self._writers.get(event.peer, ())
            if not h.writers:
                return  # cannot be: the stream's hello, which names the writers, comes first
            seq, keys = event.event.removed_seq, h.chain.keys
            h.sealable = min(h.sealable, next((at for at, key in enumerate(keys) if self.refuses(key, seq)), NEVER))
        given = self.scheduler.adopt(event.event) if type(event.event) is e.Adopted else event.event
        self._run(h, given, now)

    # ── ranks ────────────────────────────────────────────────────────────────────────────────────

    def _from_rank(self, event: m.FromRank, now: int) -> None:
        rank, message = event.rank, event.message
        match message:
            case m.DecodeStepDone():
                self._step_done(message, now)
            case m.WindowOpened(_, epoch) | m.FillEnded(_, epoch) | m.Fenced(_, epoch) | m.LoadCopied(epoch):
                self._give(self._by_epoch.get(epoch), event, now)
            case m.SealCopied():
                self.scheduler.dirty |= self.scheduler.sealed(rank, message)
            case m.Copied(handle) | m.Left(handle) | m.GrammarCompiled(handle):
                self._give(self.requests.get(handle), event, now)
            case m.Stalled(handle):
                self._stalled(handle, now)
            case m.RankError(handles):
                for handle in handles:
                    self._give(self.requests.get(handle), event, now)
            case _:
                pass  # for the prefill half of a coupled instance

    def _give(self, h: Handoff | None, event: m.FromRank, now: int) -> None:
        if h is not None:
            self._run(h, event, now)

    def _stalled(self, handle: int, now: int) -> None:
        h = self.requests.get(handle)
        if h is not None and h.running and h.room <= 0:  # room may have been granted while this message was on its way
            h.stalled = True
            self.scheduler.want_page(h)
            self._drop(h, now, idle=True)

    def _step_done(self, step: m.DecodeStepDone, now: int) -> None:
        """Handles the tokens of one step. It is the path of every token: it makes no objects, and schedules only when a
        page is wanted or an answer ends."""
        requests, flush = self.requests, self._flush
        for token in step.tokens:
            h = requests.get(token.handle)
            if h is None:
                continue
            if h.token(token.token_id, token.token_index, step.end_ns):
                stream = h.stream
                assert stream is not None
                if stream.push(token.token_id, token.token_index, token.logprobs):
                    flush[stream.box.session] = None
                if h.made >= h.grow_at and not token.finish and h.running:
                    self.scheduler.want_page(h)
                if h.made >= h.seal_at:
                    self._seal(h)
                if h.made >= h.drop_at and not token.finish and h.running:
                    self._drop(h, now)
            if token.finish:
                self._run(h, e.Ended(e.Reason(token.finish), token.handle in step.held), now)
        if not step.prefill_tokens:  # a step that computed prompts beside its rows tells nothing of rows
            took_ns = step.end_ns - (step.since_ns or step.start_ns)
            if step.drafts and step.tokens:  # several tokens of a row: what one of them takes in the mean
                took_ns = took_ns * step.batch // max(len(step.tokens), step.batch)
            sample = (step.batch, step.context_tokens, took_ns)
            self.steps.append(sample)
            self.scheduler.step_times.add(*sample)

    # ── time and ends ────────────────────────────────────────────────────────────────────────────

    def _tick(self, event: Tick, now: int) -> None:
        self.scheduler.look_again()
        timers = self._timers
        while timers and timers[0][0] <= now:
            when, handle = heapq.heappop(timers)
            h = self.requests.get(handle)
            if h is not None and h.armed == when:
                h.armed = NEVER
                self._run(h, e.Timer(), now)
            stream = self._held.get(handle)
            if stream is not None and stream.deadline_ns <= now:
                del self._held[handle]
                stream.fail(DeadlinePassed("the deadline passed while the client took no more tokens"))
                self._flush[stream.box.session] = None

    def _close_door(self, event: i.CloseDoor, now: int) -> None:
        self._fast_path = event.error

    def _pulled(self, event: Pulled, now: int) -> None:
        for handle in self.pulls.ended(event):
            if handle in self.requests:
                self.scheduler.file(self.requests[handle])
        self.scheduler.dirty = True

    def _removed(self, event: NotHere, now: int) -> None:
        for h in self.requests.values():
            if (first := event.first(h.chain.keys)) < len(h.chain.keys):
                h.sealable = min(h.sealable, first)
                self.scheduler.sharing.pages.forget(h.chain.keys[first:])

    def _end_all(self, event: i.EndAll, now: int) -> None:
        if event.part:
            for h in list(self.requests.values()):
                self._run(h, e.EndAfterStep(event.error), now)
            return
        if not event.goes_on:
            self.scheduler.close_sealing()
        if event.lost:
            self.scheduler.drop_seals()
            self.pulls.drop()
            self.scheduler.drop_store()
        for h in list(self.requests.values()):
            self._run(h, e.Cancel(event.error), now)

    def _pages_moved(self, event: i.PagesMoved, now: int) -> None:
        assert not self.requests, "pages are in use"
        self.shape = self.scheduler.shape = replace(self.shape, ranks=event.ranks)

    # ── what a request's machine asks for ────────────────────────────────────────────────────────

    def _do_seal(self, h: Handoff, action: e.SealFull, now: int) -> None:
        self._seal(h)

    def _seal(self, h: Handoff) -> None:
        self._tell_ranks(self.scheduler.seal(h))

    def _drop(self, h: Handoff, now: int, *, idle: bool = False) -> None:
        actions: list[e.Action] = []
        h.drop(actions, idle=idle)
        self._do(h, actions, now)

    def _tell_ranks(self, message: m.ToRank | None) -> None:
        if message is not None:
            self._out.extend(m.TellRank(rank, message) for rank in range(len(self.shape.ranks)))

    def _do_free_pages(self, h: Handoff, action: e.FreePages, now: int) -> None:
        if h.ended and h.in_pages and h.first is not None and not h.failed:
            self._tell_ranks(self.scheduler.seal_last(h, action))
        if h.failed:
            self.scheduler.sharing.pages.distrust(action.pages)
        self.scheduler.release_pages(action.pages, action.groups, h.handle)

    def _do_free_dropped(self, h: Handoff, action: e.FreeDropped, now: int) -> None:
        self.scheduler.release_pages((), action.groups)

    def _do_free_extents(self, h: Handoff, action: e.FreeExtents, now: int) -> None:
        self.scheduler.release_extents(action.extents, action.groups)

    def _do_keep_extents(self, h: Handoff, action: e.KeepExtents, now: int) -> None:
        self.scheduler.keep(h, action.extents, action.shared)

    def _do_first(self, h: Handoff, action: e.EmitFirst, now: int) -> None:
        assert h.stream is not None
        h.stream.prefilled(h.times, action.first.prompt_scores)
        h.stream.push(action.first.token_id, 0, action.first.logprobs)
        self._flush[h.stream.box.session] = None

    def _do_finish(self, h: Handoff, action: e.EmitFinish, now: int) -> None:
        stream = h.stream
        assert stream is not None
        stream.finish(Finish(action.reason, h.spec.prompt_tokens, h.made, h.times))
        self._flush[stream.box.session] = None
        if stream.held_back:
            self._held[h.handle] = stream
            heapq.heappush(self._timers, (h.spec.deadline_ns, h.handle))
        self._over(h, action.reason)

    def _do_fail(self, h: Handoff, action: e.EmitFail, now: int) -> None:
        assert h.stream is not None
        h.stream.fail(action.error)
        self._flush[h.stream.box.session] = None
        self._over(h, action.error)

    def _over(self, h: Handoff, end: e.Reason | KvmeshError) -> None:
        self.scheduler.note_ended(h)
        self._out.append(i.Over(h, end))

    def _do_freed(self, h: Handoff, action: e.Freed, now: int) -> None:
        del self.requests[h.handle]
        self._by_epoch.pop(h.epoch, None)


_HANDLERS: dict[type[Any], Callable[[DecodeState, Any, int], None]] = {
    i.SessionOpened: DecodeState._session_opened,
    i.SessionClosed: DecodeState._session_closed,
    i.Admit: DecodeState._admit,
    i.RefuseRequest: DecodeState._refuse,
    i.CancelSlot: DecodeState._cancel_slot,
    i.AddCredit: DecodeState._add_credit,
    i.PeerReady: DecodeState._peer_ready,
    i.PeerGone: DecodeState._peer_gone,
    i.FromPrefill: DecodeState._from_prefill,
    m.FromRank: DecodeState._from_rank,
    Tick: DecodeState._tick,
    i.CloseDoor: DecodeState._close_door,
    i.EndAll: DecodeState._end_all,
    i.PagesMoved: DecodeState._pages_moved,
    Pulled: DecodeState._pulled,
    NotHere: DecodeState._removed,
}
_OUTWARD = (m.TellRank, e.AskPrefill, e.TellLanding, e.TellRenewed, e.TellCancel)
_ACTIONS: dict[type[Any], Callable[[DecodeState, Handoff, Any, int], None]] = {
    e.SealFull: DecodeState._do_seal,
    e.FreePages: DecodeState._do_free_pages,
    e.FreeDropped: DecodeState._do_free_dropped,
    e.FreeExtents: DecodeState._do_free_extents,
    e.KeepExtents: DecodeState._do_keep_extents,
    e.EmitFirst: DecodeState._do_first,
    e.EmitFinish: DecodeState._do_finish,
    e.EmitFail: DecodeState._do_fail,
    e.Freed: DecodeState._do_freed,
}
