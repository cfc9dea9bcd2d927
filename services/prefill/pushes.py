"""This module manages the landings, leases and pushes of the handoffs. Pure.

The lease that decode grants counts, here, from when BeginFill (or RenewLease) was sent, less a margin: the writer's
lease is always the shorter one. It is renewed only when every rank has just shown progress, so the landings of a frozen
rank lapse by themselves.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.errors import HandoffLost, InternalError
from kvmesh.kvcache.groups import plan_group
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import landing_fault
from kvmesh.services.prefill.handoff import LandingLease, PrefillHandoff, PrefillPhase, Push
from kvmesh.services.prefill.handoff_table import HandoffTable


class HandoffPushes:
    """Is the part of the brain that lets ranks write into decode's memory."""

    def __init__(
        self, lives: HandoffTable, world: int, layouts: tuple[ShardLayout, ...] = (), *, at_end: bool = False
    ) -> None:
        """`layouts` says how this instance's ranks cut blocks into shards. `at_end` pushes a prompt's KV when all of it
        is computed, instead of layer by layer."""
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
        fault = early or landing_fault(landing, len(h.pages), len(landing.readers) or self._world)
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
                self._push(h, target.rank, segment=target.segment, offsets=target.offsets)
            return
        plan = plan_group(self._layouts, landing.readers)
        at = {target.rank: m.PushTarget(target.rank, target.segment, target.offsets) for target in landing.ranks}
        for writer in range(self._world):
            targets = tuple(at[reader] for reader in plan.targets(writer))
            if targets:
                self._push(h, writer, group=m.PushGroup(writer, self._layouts, landing.readers, targets))
            else:
                h.pushes[writer] = Push.DONE  # other ranks send all that this one holds

    def _push(
        self,
        h: PrefillHandoff,
        rank: int,
        *,
        segment: str = "",
        offsets: tuple[int, ...] = (),
        group: m.PushGroup | None = None,
    ) -> None:
        """Lets one rank write: whole shards at `offsets` of `segment`, or what the group's plan gives that rank."""
        assert h.landing is not None and h.lease is not None
        h.pushes[rank] = Push.OPEN
        push = m.PushOpen(
            handle=h.handle,
            handoff_epoch=h.epoch,
            segment=segment,
            pages=tuple(h.pages),
            offsets=offsets,
            first_block=h.landing.ranks[0].first_block,
            ready_tokens=h.ready_tokens,  # pages being loaded follow with the step: this message overtakes a LoadCopy
            prompt_tokens=h.prompt_tokens,
            lease_until_ns=h.lease.until_ns,
            group=group,
            at_end=self._at_end,
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
