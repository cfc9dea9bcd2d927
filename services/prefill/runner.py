"""This is the shell of a prefill instance: events from streams and ranks go into the brain (state.py), actions come out
and are carried out. It decides nothing."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvmesh.blockservice.peers import SegmentOpener
from kvmesh.blockservice.shard_wire import grouped_writers_of, writers_of
from kvmesh.errors import InvalidRequest, KvmeshError, TransferError
from kvmesh.instance.served_weights import ServedWeights
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.sources import Pulled, PullJob
from kvmesh.ranks import protocol as m
from kvmesh.rpc.brain_shell import BrainShell
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import prefill_pb2 as pb
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill import wire
from kvmesh.services.prefill.report import Origin, Reporter
from kvmesh.services.prefill.state import PrefillState
from kvmesh.telemetry import spans


class RankSender(Protocol):
    """Is the part of kvmesh.ranks.client.RankClient that the runner needs."""

    def send(self, message: m.ToRank, /) -> None: ...


class BlockPuller(Protocol):
    """Is the part of kvmesh.blockservice.blocks.BlockService that the runner needs. Its owner passes the result of
    every pull to `PrefillRunner.pulled`."""

    def pull(self, job: PullJob, /) -> None: ...

    def cancel_pull(self, ticket: int, /) -> None: ...


@dataclass(eq=False)
class HandoffStream:
    """Is one decode instance's Handoff stream: its number, its own handles, and the events that are still to be written
    to it."""

    number: int
    readers: tuple[ShardLayout, ...] = ()  # how its ranks cut blocks into shards; (): as this instance's do
    segments: list[str] = field(default_factory=list)
    handles: dict[int, int] = field(default_factory=dict)  # the stream's handle → the instance's
    outbox: list[pb.HandoffEvent] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, event: pb.HandoffEvent) -> None:
        self.outbox.append(event)
        self.news.set()

    def take(self) -> list[pb.HandoffEvent]:
        """Returns all that is to be written now."""
        events, self.outbox = self.outbox, []
        return events


class Adopt(Protocol):
    """Takes a computed prompt over: its first token, and one reference to each of its pages, which are `groups` where
    the model has several cache groups."""

    def __call__(
        self, first: pb.FirstToken, pages: tuple[int, ...], groups: tuple[GroupPages, ...] = (), /
    ) -> None: ...


@dataclass(eq=False, kw_only=True)
class OwnStream(HandoffStream):
    """Is the connection to the decode half of this instance. `hear` gets each event at once; `adopt` gets the first
    token of a computed prompt and one reference to each of its pages."""

    hear: Callable[[pb.HandoffEvent], None]
    adopt: Adopt

    def put(self, event: pb.HandoffEvent) -> None:
        self.hear(event)


@dataclass(frozen=True, slots=True)
class _Owner:
    stream: HandoffStream
    handle: int  # the stream's
    origin: Origin


class PrefillRunner:
    """Is the only owner of the brain. Every method belongs to the event loop; none blocks.

    `urge` asks for a heartbeat soon; it is called when the instance becomes idle or refuses work.
    """

    def __init__(
        self,
        state: PrefillState,
        ranks: Sequence[RankSender],
        segments: SegmentOpener,
        reporter: Reporter,
        weights: ServedWeights,
        urge: Callable[[], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.state = state
        self.reporter = reporter
        self.idle = asyncio.Event()  # set while there is no handoff
        self.idle.set()
        self.puller: BlockPuller | None = None  # set before the first stream opens: making it needs `pulled`
        self.reached: Callable[[], int] = lambda: 0  # number of the master's last removal order carried out here
        self.shell = BrainShell[ev.Event, ev.Action](state.step, state.next_due, self._do, clock_ns)
        self.feed = self.shell.feed
        self._ranks = ranks
        self._segments = segments
        self.weights = weights
        self._paused: KvmeshError | None = None
        self._urge = urge
        self._clock_ns = clock_ns
        self._streams: dict[int, HandoffStream] = {}
        self._owners: dict[int, _Owner] = {}
        self._handles = itertools.count(1)
        self._stream_numbers = itertools.count(1)

    @property
    def streams(self) -> int:
        """The number of open Handoff streams of decode instances elsewhere."""
        return sum(not isinstance(stream, OwnStream) for stream in self._streams.values())

    def counters(self) -> pb_common.PoolCounters:
        """Returns how much of each kind of memory and request the instance holds now."""
        return self.reporter.pools(self.streams)

    def _do(self, action: ev.Action, now: int) -> None:
        if isinstance(action, m.TellRank):
            self._ranks[action.rank].send(action.message)
        elif isinstance(action, ev.FetchBlocks):
            assert self.puller is not None
            self.puller.pull(self.reporter.pulling(action.job, now))
        elif isinstance(action, ev.CancelPull):
            assert self.puller is not None
            self.puller.cancel_pull(action.ticket)
        elif isinstance(action, ev.HandoffEnded):
            self._ended(action, now)
        else:
            self._tell(action)

    def rank_said(self, rank: int, message: m.ToFront) -> None:
        """Takes a message of a rank."""
        self.reporter.rank_said(message)
        self.feed(m.FromRank(rank, message))

    def pulled(self, result: Pulled) -> None:
        """Takes the result of a pull."""
        self.reporter.pulled(result)
        self.feed(result)

    # ── pauses (kvmesh.instance.pausing.PausableHalf) ────────────────────────────────────────────

    def refuse(self, error: KvmeshError | None) -> None:
        """See PausableHalf."""
        self._paused = error

    def end_all(self, error: KvmeshError) -> int:
        """See PausableHalf. A handoff is a decode instance's request, which that counts."""
        self.feed(ev.EndHandoffs(error))
        return 0

    @property
    def empty(self) -> bool:
        """See PausableHalf."""
        return not self._owners

    @property
    def copies(self) -> bool:
        """See PausableHalf."""
        return self.state.seals

    async def leave_pages(self) -> None:
        """See PausableHalf."""
        self.feed(ev.LeavePages())

    def pages_moved(self) -> None:
        """See PausableHalf. Pages are told to nobody here: ranks find their own."""

    def wake_streams(self) -> None:
        """Wakes the writer of every stream."""
        for stream in self._streams.values():
            stream.news.set()

    def close(self) -> None:
        """Stops the timer."""
        self.shell.close()

    # ── streams ──────────────────────────────────────────────────────────────────────────────────

    def open_stream(self, segment_descriptors: Sequence[bytes], readers: tuple[ShardLayout, ...] = ()) -> HandoffStream:
        """Opens the stream of a decode instance that has said hello: ranks learn where its segments are. Its ranks cut
        blocks as `readers` say (empty: as this instance's do; of several cache groups rank by rank, as a Hello has
        them). Raises InvalidRequest for a descriptor that is not valid, or when the two instances do not cut the same
        blocks."""
        self._check_readers(readers, len(segment_descriptors))
        stream = HandoffStream(next(self._stream_numbers), readers)
        for at, descriptor in enumerate(segment_descriptors):
            try:
                stream.segments.append(self._segments.open(descriptor))
            except TransferError as error:
                self._release(stream)
                field = f"segment_descriptors[{at}]"
                raise InvalidRequest.of(field, descriptor, error.message) from None
        self._streams[stream.number] = stream
        return stream

    def _check_readers(self, readers: tuple[ShardLayout, ...], segments: int) -> None:
        config = self.state.config
        if config.groups:
            grouped_writers_of([""] * config.world, config.layouts, readers, segments)
        elif readers and len(readers) != segments:
            raise InvalidRequest.of("layouts", f"{len(readers)} layouts", f"{segments} segments")
        elif readers:
            writers_of([""] * config.world, config.layouts, readers)

    def open_own_stream(self, hear: Callable[[pb.HandoffEvent], None], adopt: Adopt) -> OwnStream:
        """Opens the stream of the decode half of this instance."""
        stream = OwnStream(next(self._stream_numbers), hear=hear, adopt=adopt)
        self._streams[stream.number] = stream
        return stream

    def close_stream(self, stream: HandoffStream) -> None:
        """Ends a stream: all of its handoffs are cancelled, and its segments closed unless another stream uses them."""
        del self._streams[stream.number]
        self.feed(ev.StreamBroken(stream.number))
        self._release(stream)

    def _release(self, stream: HandoffStream) -> None:
        while stream.segments:
            self._segments.release(stream.segments.pop())

    def take(self, stream: HandoffStream, request: pb.HandoffRequest) -> None:
        """Takes one message of decode. Raises InvalidRequest when it breaks the protocol: the stream has to end
        then."""
        kind = request.WhichOneof("kind")
        if kind == "start":
            self._start(stream, request.start)
            return
        message = getattr(request, kind) if kind else None
        if message is None or kind == "hello":
            raise InvalidRequest.of("kind", kind, "after the hello: start, landing, renewed or cancel")
        handle = stream.handles.get(message.handle)
        if handle is None:
            return  # the handoff ended meanwhile
        match kind:
            case "landing":
                self.feed(wire.landing_in(request.landing, handle, stream.readers))
            case "renewed":
                self.feed(ev.Renewed(handle, message.handoff_epoch, message.lease_ms))
            case "cancel":
                self.feed(ev.HandoffCancelled(handle, message.reason))

    def _start(self, stream: HandoffStream, request: pb.StartPrefill) -> None:
        if request.handle in stream.handles:
            raise InvalidRequest.of("handle", request.handle, "names a handoff of this stream already")
        now = self._clock_ns()
        origin = self.reporter.began(request.request_id, request.attempt, request.traceparent, now)
        handle = next(self._handles)
        try:
            if self._paused is not None:
                raise self._paused
            own, life = self.reporter.instance_id, spans.traceparent(origin.life)
            vocab = self.state.config.vocab_size
            start = wire.start_in(request, handle, stream.number, self.weights, own, now, life, vocab)
            start = replace(start, removed_seq=self.reached(), adopt=isinstance(stream, OwnStream))
        except KvmeshError as error:
            self.reporter.refused(origin, error.code, now)
            failed = wire.event_out(ev.SendFailed(handle, error, drained=True), request.handle)
            assert failed is not None
            stream.put(failed)
            return
        stream.handles[request.handle] = handle
        self._owners[handle] = _Owner(stream, request.handle, origin)
        self.idle.clear()
        self.feed(start)

    def _tell(self, action: ev.Action) -> None:
        owner = self._owners[action.handle]  # type: ignore[union-attr]
        if isinstance(action, ev.SendAdopted):
            assert isinstance(owner.stream, OwnStream), "pages are handed over within an instance"
            owner.stream.adopt(wire.first_token(action.first, owner.handle), action.pages, action.groups)
            return
        event = wire.event_out(action, owner.handle)
        assert event is not None, action
        owner.stream.put(event)

    def _ended(self, end: ev.HandoffEnded, now: int) -> None:
        owner = self._owners.pop(end.handle)
        del owner.stream.handles[owner.handle]
        self.reporter.ended(end, owner.origin, now)
        if not self._owners:
            self.idle.set()
        if not self._owners or "overloaded" in end.cause:
            self._urge()
