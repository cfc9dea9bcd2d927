"""The shell of a decode instance feeds inputs from gRPC, ranks and the clock to the brain (state.py) and carries out
the brain's outputs. It decides nothing.

Everything here runs on one event loop; `feed` (kvmesh/rpc/brain_shell.py) never waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from kvmesh.blockservice.blocks import BlockService
from kvmesh.blockservice.shard_wire import to_wire
from kvmesh.clock import Tick
from kvmesh.errors import KvmeshError, Overloaded, Unavailable
from kvmesh.instance.front import Front
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.sources import Pulled
from kvmesh.ranks import protocol as m
from kvmesh.ranks.speculation import NO_DRAFTS
from kvmesh.rpc import protocol
from kvmesh.rpc.brain_shell import BrainShell
from kvmesh.rpc.pb import common_pb2, decode_pb2, prefill_pb2
from kvmesh.services.decode import events as e
from kvmesh.services.decode import inputs as i
from kvmesh.services.decode import mapping
from kvmesh.services.decode.events import Phase
from kvmesh.services.decode.handoffs import Handoffs
from kvmesh.services.decode.limits import NS_PER_MS, GroupRoom, RankShape, Shape
from kvmesh.services.decode.observe import Observer, RequestTrace, begin_request
from kvmesh.services.decode.requests import ServingInstance, check_start
from kvmesh.services.decode.state import DecodeState
from kvmesh.telemetry import names, spans

log = logging.getLogger(__name__)

OwnPrefill = Callable[[prefill_pb2.HandoffRequest], None]
FENCE_REASONS = {Phase.LOADING: "filled", Phase.CANCELLING: "cancelled", Phase.QUARANTINED: "quarantined"}
PUBLISH_S = 0.5
POLL_S = 0.02


class DecodeCore:
    """Joins the parts of one decode instance: the brain, its ranks, its streams, its timer. `blocks` serves the node
    store that `state` has; its maker must pass the result of every pull to `pulled`. `own` takes messages for the
    prefill half of this instance, where it has one; the coupled service sets it."""

    def __init__(
        self,
        front: Front,
        state: DecodeState,
        blocks: BlockService,
        *,
        connect_s: float,
    ) -> None:
        self.front = front
        self.state = state
        self.blocks = blocks
        self.own: OwnPrefill | None = None
        self.shell = BrainShell[i.Input, i.Output](
            state.step, state.next_due, lambda output, now: _DO[type(output)](self, output, now)
        )
        self.feed = self.shell.feed
        self.state.pulls.lower = self.blocks.lower
        self.state.refuses = self.blocks.removals.refuses
        self.blocks.removals.listeners.append(self.feed)
        self.observer = Observer(self.state, front.instance_id, front.gauges)
        self.handoffs = Handoffs(self._hello, self.feed, connect_s)
        self.wake: dict[int, asyncio.Event] = {}  # by session; set when the session's outbox has something
        self._publisher = asyncio.create_task(self._publish(), name="publish gauges")
        self._instance: ServingInstance | None = None
        self._paused: KvmeshError | None = None

    @property
    def instance(self) -> ServingInstance:
        """What requests are checked against. It is known once the front serves."""
        if self._instance is None:
            card, shape = self.front.card, self.state.shape
            self._instance = ServingInstance(
                ref=self.front.ref,
                weights=self.front.weights,
                block_tokens=shape.block_tokens,
                vocab_size=card.vocab_size,
                eos_token_ids=tuple(card.eos_token_ids),
                context_limit=shape.context_limit,
                drafts=getattr(self.front.config, "speculate", NO_DRAFTS) != NO_DRAFTS,
            )
        return self._instance

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def on_message(self, rank: int, message: m.ToFront) -> None:
        """Takes a message of one of the instance's ranks."""
        self.feed(m.FromRank(rank, message))
        if type(message) is m.DecodeStepDone:
            self.observer.step_done(message)

    def pulled(self, result: Pulled) -> None:
        """Takes the result of a pull that this instance asked for."""
        self.observer.pulled(result)
        self.feed(result)

    def start(self, session: int, start: decode_pb2.StartRequest) -> None:
        """Admits a gateway's request, or refuses it in its slot."""
        received = time.monotonic_ns()
        span = begin_request(start, received, self.front.instance_id)
        try:
            if self._paused is not None:
                raise self._paused
            if not self.front.ready:
                raise Unavailable(f"decode instance {self.front.instance_id}: {self.front.not_ready_reason}")
            carry = RequestTrace(span, start, start.attempt, start.placement.prefill.instance_id)
            spec = check_start(start, self.instance, received, carry)
            if self.own is None and self._is_own(start.placement.prefill):
                raise Unavailable(f"decode instance {self.front.instance_id} computes no prompts itself")
        except KvmeshError as error:
            self.observer.refused(start.request_id, start.attempt, span, error)
            self.feed(i.RefuseRequest(session, start.slot, error))
            return
        self.feed(i.Admit(session, start.slot, self._peer(start.placement.prefill), spec, received))

    def _peer(self, prefill: common_pb2.InstanceRef) -> int:
        return i.OWN_PEER if self._is_own(prefill) else self.handoffs.peer(prefill)

    def _is_own(self, ref: common_pb2.InstanceRef) -> bool:
        own = self.front.ref
        return (ref.instance_id, ref.incarnation) == (own.instance_id, own.incarnation)

    # ── pauses (kvmesh.instance.pausing.PausableHalf) ────────────────────────────────────────────

    def refuse(self, error: KvmeshError | None) -> None:
        """See PausableHalf."""
        self._paused = error

    def end_all(self, error: KvmeshError) -> int:
        """See PausableHalf."""
        there = len(self.state.requests)
        self.feed(i.EndAll(error, goes_on=True))
        return there

    @property
    def empty(self) -> bool:
        """See PausableHalf."""
        return not self.state.requests

    @property
    def copies(self) -> bool:
        """See PausableHalf."""
        return bool(self.state.scheduler.seals)

    async def leave_pages(self) -> None:
        """See PausableHalf. No row is left, so no page has a block. A stream's hello has told where pages are: the next
        request opens another."""
        await self.handoffs.close()

    def pages_moved(self) -> None:
        """See PausableHalf."""
        self.feed(i.PagesMoved(shape_of(self.front, not self.state.shape.direct_landing).ranks))

    def weights_changed(self) -> None:
        """Checks requests against the front's weights as they are now."""
        self._instance = None

    # ── the prefill half of this instance ────────────────────────────────────────────────────────

    def own_said(self, event: prefill_pb2.HandoffEvent) -> None:
        """Takes an event of the prefill half of this instance: what a prefill instance elsewhere would send in its
        stream."""
        found = mapping.from_prefill(event)
        assert found is not None, event
        self.feed(i.FromPrefill(i.OWN_PEER, *found))

    def adopt(self, first: prefill_pb2.FirstToken, pages: tuple[int, ...], groups: tuple[GroupPages, ...] = ()) -> None:
        """Takes over a computed prompt: one reference to each of its pages passes to the request."""
        self.feed(i.FromPrefill(i.OWN_PEER, first.handle, e.Adopted(mapping.first_token(first), pages, groups)))

    # ── out ──────────────────────────────────────────────────────────────────────────────────────

    def _tell_rank(self, output: m.TellRank, now: int) -> None:
        if type(output.message) is m.Fence:
            phase = self.state.phase_of_epoch(output.message.handoff_epoch)
            names.DECODE_FENCES.labels(reason=FENCE_REASONS.get(phase, "other")).inc()
        self.front.ranks[output.rank].send(output.message)

    def _ask_prefill(self, output: e.AskPrefill, now: int) -> None:
        spec, times = output.spec, output.times
        carry: RequestTrace = spec.carry
        start, carry.start = carry.start, None
        assert start is not None, "prefill is asked once"
        left_ms = max(1, (spec.deadline_ns - now) // NS_PER_MS)
        parent = spans.traceparent(carry.span) or start.traceparent
        message = mapping.start_prefill(output.handle, start, spec.max_tokens, left_ms, parent)

        def written() -> None:
            times.asked = time.monotonic_ns()

        self._send(output.peer, message, written)

    def _tell_prefill(self, output: e.ToPrefill, now: int) -> None:
        self._send(output.peer, mapping.to_prefill(output))

    def _send(self, peer: int, message: prefill_pb2.HandoffRequest, written: Callable[[], None] | None = None) -> None:
        if peer != i.OWN_PEER:
            self.handoffs.send(peer, message, written)
            return
        if written is not None:
            written()
        assert self.own is not None, "it was admitted with one"
        self.own(message)

    def _pull(self, output: i.Pull, now: int) -> None:
        self.blocks.pull(self.observer.pulling(output.job, output.request, now))

    def _flush(self, output: i.Flush, now: int) -> None:
        wake = self.wake.get(output.session)
        if wake is not None:
            wake.set()

    def _over(self, output: i.Over, now: int) -> None:
        self.observer.over(output.request, output.end)

    def _refused(self, output: i.Refused, now: int) -> None:
        carry: RequestTrace = output.spec.carry
        self.observer.refused(output.spec.request_id, carry.attempt, carry.span, output.error)
        if isinstance(output.error, Overloaded):
            self.front.urge()  # the conductor believes this instance to be less loaded than it is

    def _hello(self) -> prefill_pb2.HandoffHello:
        return prefill_pb2.HandoffHello(
            protocol_version=protocol.PROTOCOL_VERSION,
            instance=self.front.ref,
            segment_descriptors=[rank.ready.descriptor for rank in self.front.ranks],
            layouts=() if self.front.group_shards else to_wire(self.front.shards),
            group_layouts=to_wire(self.front.group_shards),
        )

    def counters(self) -> common_pb2.PoolCounters:
        """Returns how much of each kind of memory, request and stream the instance holds now."""
        return self.observer.counters(len(self.wake) + len(self.handoffs))

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    async def _publish(self) -> None:
        while True:
            self.observer.publish(len(self.wake), len(self.handoffs), self.front.ready)
            self.feed(Tick())  # memory that is leased to others comes back without an input
            await asyncio.sleep(PUBLISH_S)

    async def settled(self, what: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `what` holds, at most `timeout_s` seconds; returns whether it does."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not what():
            if loop.time() > end:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def close(self) -> None:
        """Ends the streams, the timer and the publishing task."""
        await self.handoffs.close()
        self._publisher.cancel()
        await asyncio.gather(self._publisher, return_exceptions=True)
        self.shell.close()


def shape_of(front: Front, host_landing: bool) -> Shape:
    """Returns how many pages and extents the ranks of `front` have and where they lie. Every rank counts as having as
    many as the smallest. `host_landing` forbids landings in device pages."""
    readies = [rank.ready for rank in front.ranks]
    groups = tuple(
        GroupRoom(
            group=group,
            num_pages=min(ready.groups[g].num_pages for ready in readies),
            num_extents=min(ready.groups[g].num_extents for ready in readies),
        )
        for g, group in enumerate(front.cache_groups)
    )
    return Shape(
        block_tokens=front.config.block_tokens,
        num_pages=min(ready.num_pages for ready in readies),
        num_extents=min(ready.num_extents for ready in readies),
        direct_landing=all(ready.direct_landing for ready in readies) and not host_landing,
        max_context_tokens=front.max_context_tokens,
        ranks=tuple(
            RankShape(
                segment=rank.ready.engine_name,
                shard_bytes=rank.ready.shard_bytes,
                page_base_offset=rank.ready.page_base_offset,
                extent_base_offset=rank.ready.extent_base_offset,
                groups=rank.ready.groups,
            )
            for rank in front.ranks
        ),
        groups=groups,
    )


_DO: dict[type[Any], Callable[[DecodeCore, Any, int], None]] = {
    m.TellRank: DecodeCore._tell_rank,
    e.AskPrefill: DecodeCore._ask_prefill,
    e.TellLanding: DecodeCore._tell_prefill,
    e.TellRenewed: DecodeCore._tell_prefill,
    e.TellCancel: DecodeCore._tell_prefill,
    i.Pull: DecodeCore._pull,
    i.Flush: DecodeCore._flush,
    i.Over: DecodeCore._over,
    i.Refused: DecodeCore._refused,
}
