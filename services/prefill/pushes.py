"""This module manages the landings, leases and pushes of the handoffs. Pure.

The lease that decode grants counts, here, from when BeginFill (or RenewLease) was sent, less a margin: the writer's
lease is always the shorter one. It is renewed only when every rank has just shown progress, so the landings of a frozen
rank lapse by themselves.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.blockservice.shard_wire import by_group
from kvmesh.errors import HandoffLost, InternalError
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.groups import plan_group
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import grouped_landing_fault, landing_fault
from kvmesh.services.prefill.handoff import LandingLease, PrefillHandoff, PrefillPhase, Push
from kvmesh.services.prefill.handoff_book import HandoffBook


class HandoffPushes:
    """Is the part of the brain that lets ranks write into decode's memory."""

    def __init__(
        self, lives: HandoffBook, world: int, layouts: tuple[ShardLayout, ...] = (), *, at_end: bool = False
    ) -> None:
        """`layouts` says how this instance's ranks cut blocks into shards, as of BrainConfig. `at_end` pushes a
        prompt's KV when all of it is computed, instead of layer by layer."""
        self._lives = lives
        self._world = world
        self._layouts = layouts
        self._at_end = at_end
        self._progress_ns = [0] * world
        self._leased: dict[
            int, PrefillHandoff
        ] = {}  # handoffs with a landing; those that are over leave at the next progress

    def landing(self, landing: ev.Landing, now: int) -> None:
        """Takes the landing that decode has reserved: the ranks begin to push."""
        h = self._lives.handoffs.get(landing.handle)
        if h is None or h.ending or h.landing is not None:
            return  # the handoff was ending meanwhile, or the message came twice
        early = "it came before BeginFill" if h.phase is PrefillPhase.QUEUED else ""
        fault = early or self._fault(h, landing)
        if fault:
            self._lives.abort(h, InternalError(f"landing of {h.start.request_id}: {fault}"))
            return
        h.landing = landing
        h.lease = LandingLease.granted(h.begin_sent_ns, landing.lease_ms)
        if now >= h.lease.until_ns:
            late = (now - h.begin_sent_ns) // 1_000_000
            why = f"the landing came {late} ms after BeginFill, too late for its lease of {landing.lease_ms} ms"
            self._lives.abort(h, HandoffLost(why))
            return
        self._leased[h.handle] = h
        if landing.readers in ((), self._layouts):
            for target in landing.ranks:
                self._push(h, target.rank, target)
            return
        at = {t.rank: m.PushTarget(t.rank, t.segment, t.offsets, t.groups) for t in landing.ranks}
        for writer, readers in enumerate(self._targets(h, landing)):
            targets = tuple(at[reader] for reader in readers)
            if targets:
                self._push(h, writer, group=m.PushGroup(writer, self._layouts, landing.readers, targets))
            else:
                h.pushes[writer] = Push.DONE  # other ranks send all that this one holds

    def _fault(self, h: PrefillHandoff, landing: ev.Landing) -> str:
        if h.memory is None:
            return landing_fault(landing, len(h.pages), len(landing.readers) or self._world)
        kept = h.memory.kept
        return grouped_landing_fault(landing, kept, len(landing.readers) // len(kept) or self._world)

    def _targets(self, h: PrefillHandoff, landing: ev.Landing) -> list[tuple[int, ...]]:
        """Returns the readers that each writer sends to, where the two cut blocks differently."""
        if h.memory is None:
            plan = plan_group(self._layouts, landing.readers)
            return [plan.targets(writer) for writer in range(self._world)]
        cuts = zip(by_group(self._layouts, self._world), by_group(landing.readers, len(landing.ranks)), strict=True)
        plans = [plan_group(own, theirs) for own, theirs in cuts]
        return [tuple(sorted({r for plan in plans for r in plan.targets(writer)})) for writer in range(self._world)]

    def _push(
        self,
        h: PrefillHandoff,
        rank: int,
        target: ev.RankLanding | None = None,
        *,
        group: m.PushGroup | None = None,
    ) -> None:
        """Lets one rank write: whole shards at the offsets of `target`, or what the group's plan gives that rank."""
        assert h.landing is not None and h.lease is not None
        h.pushes[rank] = Push.OPEN
        sent: tuple[GroupPages, ...] = ()
        if h.memory is not None:
            named = h.landing.ranks[0].groups
            sent = tuple(h.memory.sent(one.group, one.first, len(one.ids)) for one in named)
        push = m.PushOpen(
            handle=h.handle,
            handoff_epoch=h.epoch,
            segment=target.segment if target else "",
            pages=tuple(h.pages),
            offsets=target.offsets if target else (),
            first_block=h.landing.ranks[0].first_block,
            ready_tokens=h.ready_tokens,  # pages being loaded follow with the step: this message overtakes a LoadCopy
            prompt_tokens=h.prompt_tokens,
            lease_until_ns=h.lease.until_ns,
            group=group,
            at_end=self._at_end,
            groups=sent,
            group_offsets=target.groups if target else (),
        )
        self._lives.actions.append(m.TellRank(rank, push))

    def renewed(self, renewed: ev.Renewed) -> None:
        """Takes the time that decode has granted, and passes it on to the ranks that write."""
        h = self._lives.handoffs.get(renewed.handle)
        if h is None or h.ending or h.lease is None or not h.lease.renew_sent_ns or renewed.handoff_epoch != h.epoch:
            return
        granted = LandingLease.granted(h.lease.renew_sent_ns, renewed.lease_ms)
        h.lease = replace(granted, until_ns=max(granted.until_ns, h.lease.until_ns))
        for rank, push in enumerate(h.pushes):
            if push is Push.OPEN:
                self._lives.actions.append(m.TellRank(rank, m.PushLease(h.handle, h.lease.until_ns)))

    def from_rank(self, rank: int, message: m.ToFront) -> None:
        """Takes PushProgress, PushDone, PushFailed or PushDrained; those of a handoff that is over are ignored."""
        handle = getattr(message, "handle", 0)
        h = self._lives.handoffs.get(handle)
        if h is None:
            return
        match message:
            case m.PushProgress(_, done):
                h.acked_bytes[rank] = max(h.acked_bytes[rank], done)
            case m.PushDone():
                self._done(h, rank, message)
            case m.PushFailed():
                self._failed(h, rank, message)
            case m.PushDrained(_, certain) if h.pushes[rank] is Push.DRAINING:
                h.pushes[rank] = Push.OVER
                h.in_doubt = h.in_doubt or not certain
                self._lives.settle(h)
            case _:
                pass

    def progress(self, rank: int, now: int) -> None:
        """Notes that the rank has got something done, and asks to renew the leases that are half over."""
        self._progress_ns[rank] = now
        for h in list(self._leased.values()):
            lease = h.lease
            if lease is None or h.ending or h.quiet:
                del self._leased[h.handle]
            elif not lease.renew_sent_ns and lease.half_over(now) and self._alive(h, lease, now):
                lease.renew_sent_ns = now
                self._lives.tell(h, ev.SendRenew(h.handle, h.epoch, sum(h.acked_bytes)))

    def _alive(self, h: PrefillHandoff, lease: LandingLease, now: int) -> bool:
        """Whether every rank that still writes has sent something since the lease began. A rank that is done need
        not."""
        writing = (at for at, push in zip(self._progress_ns, h.pushes, strict=True) if push is Push.OPEN)
        return min(writing, default=now) >= lease.from_ns

    def doubt(self, h: PrefillHandoff, *, dead: bool) -> None:
        """Marks the pushes of a handoff whose writers do not answer, or are `dead`, as in doubt: their last bytes may
        still come."""
        for rank, push in enumerate(h.pushes):
            if push in (Push.OPEN, Push.DRAINING):
                h.in_doubt = True
                if dead:
                    h.pushes[rank] = Push.OVER

    def _done(self, h: PrefillHandoff, rank: int, done: m.PushDone) -> None:
        if h.pushes[rank] is not Push.OPEN:
            return  # cancelled meanwhile: PushDrained follows
        h.pushes[rank] = Push.DONE
        h.acked_bytes[rank] = done.bytes_done
        h.wire_ns = max(h.wire_ns, done.busy_ns)
        _moved(h, done)
        if h.pushed:
            h.fill_told = True
            exposed = max(h.last_ack_ns - h.sampled_ns, 0) if h.sampled_ns else 0
            transfer = h.last_ack_ns - h.first_post_ns
            self._lives.tell(h, ev.SendFillDone(h.handle, h.epoch, transfer, sum(h.acked_bytes), exposed))
        self._lives.settle(h)

    def _failed(self, h: PrefillHandoff, rank: int, failed: m.PushFailed) -> None:
        if h.pushes[rank] not in (Push.OPEN, Push.DRAINING):
            return
        h.in_doubt = h.in_doubt or not failed.drained
        h.acked_bytes[rank] = max(h.acked_bytes[rank], failed.bytes_done)
        _moved(h, failed)
        if h.pushes[rank] is Push.OPEN:  # else it crossed with PushCancel, which PushDrained answers
            h.pushes[rank] = Push.OVER
        self._lives.abort(h, HandoffLost(f"the KV did not arrive: {failed.cause}"))
        self._lives.settle(h)


def _moved(h: PrefillHandoff, end: m.PushDone | m.PushFailed) -> None:
    """Adds what one rank's push moved to the handoff's record."""
    if end.first_post_ns:
        h.first_post_ns = min(h.first_post_ns or end.first_post_ns, end.first_post_ns)
    h.last_ack_ns = max(h.last_ack_ns, end.last_ack_ns)
    h.carried += end.carried
