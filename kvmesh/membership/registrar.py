"""How an instance makes itself known: registration and heartbeats at every conductor and at the store master.

Independent loops, one per peer. Each enters (Register or Join), beats at the interval the peer answered last, and
enters again whenever the peer does not know this incarnation or cannot be reached. What a heartbeat reports once
(samples, finished request ids, outcomes) is kept for each conductor, and sent again until that one has acknowledged it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from google.protobuf.descriptor import ServiceDescriptor

from kvmesh.clock import lease_clock_ns
from kvmesh.errors import InvalidRequest, KvmeshError, ProtocolMismatch, UnknownInstance
from kvmesh.kvcache.announce import Announcer
from kvmesh.membership.announcing import to_proto
from kvmesh.rpc import protocol
from kvmesh.rpc.addresses import split
from kvmesh.rpc.leader_client import LeaderTracker, ServiceClient, moves_on
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.rpc.pb import store_pb2 as pb_store
from kvmesh.rpc.terms import LeaderTerms

log = logging.getLogger(__name__)

# Before a peer has told its own: how long a first call may take, and how soon it is tried again.
ENTER_TIMEOUT_S = 2.0
FIRST_INTERVAL_S = 0.2
FIRST_BACKOFF_S = 0.02
# A peer that refuses us for what we are (another protocol, a bad card) will not change its mind soon.
REFUSED_RETRY_S = 5.0
GOODBYE_TIMEOUT_S = 1.0
URGE_GAP_S = 0.02


class Acknowledged(NamedTuple):
    """How often to beat, and how long silence may last. `pace`: the number of these two, which every beat says: before
    the peer has heard it, it counts on no shorter lease than was told before. `interval_ms` 0: nothing was told."""

    interval_ms: int
    lease_ms: int
    pace: int = 0


class MembershipPeer(ABC):
    """One membership at one service: it enters, beats, enters again, says goodbye. It owns its connection."""

    name: ClassVar[str]
    service: ClassVar[ServiceDescriptor]
    fast: ClassVar[str]  # the method of a beat

    def __init__(self, rng: random.Random) -> None:
        self.registered = False
        self._rng = rng
        self._peer = ServiceClient(self.service, (self.fast,))
        self._interval_s = FIRST_INTERVAL_S
        self._lease_s = ENTER_TIMEOUT_S
        self._pace = 0  # the number of what we go by
        self._urged = asyncio.Event()
        self._complained = False
        self._beaten = False  # since it entered last
        self._changed = False  # we are not what we said when we entered

    @property
    @abstractmethod
    def address(self) -> str:
        """The address to call now."""

    @abstractmethod
    async def _enter(self, peer: ServiceClient, timeout_s: float) -> Acknowledged:
        """Register."""

    @abstractmethod
    async def _beat(self, peer: ServiceClient, timeout_s: float) -> Acknowledged:
        """Send one heartbeat, which says `_pace`."""

    @abstractmethod
    async def _goodbye(self, peer: ServiceClient, timeout_s: float) -> None: ...

    def urge(self) -> None:
        """Beat soon."""
        self._urged.set()

    def enter_again(self) -> None:
        """Enter again at once: what we are has changed."""
        self._changed = True
        self._urged.set()

    async def run(self, stop: asyncio.Event) -> None:
        stopping = asyncio.ensure_future(stop.wait())
        failures = 0
        try:
            while not stop.is_set():
                error = await self._guarded(self._live(stopping))
                if error is None:
                    break
                failures = 0 if self._beaten else failures + 1
                wait_s = self._after(error, failures)
                await asyncio.wait({stopping}, timeout=wait_s)
            if self.registered and self._peer.address:
                await self._guarded(self._goodbye(self._peer, GOODBYE_TIMEOUT_S))
        finally:
            self.registered = False
            stopping.cancel()
            await self._peer.close()

    async def _live(self, stopping: asyncio.Future[Any]) -> None:
        """Enter and beat until stopped (returns) or until the peer fails us (raises)."""
        self._beaten = self._changed = False
        if not self._peer.address:
            self._peer.connect(self.address)
        told = await self._enter(self._peer, ENTER_TIMEOUT_S)
        self._go_by(told._replace(interval_ms=max(told.interval_ms, 1)))
        if not self.registered:
            log.info("registered with %s at %s", self.name, self.address)
        self._complained = False
        self.registered = True
        while not stopping.done():
            if self._changed:
                self._changed = False
                self._go_by(await self._enter(self._peer, ENTER_TIMEOUT_S))
            # Half a lease: one lost call leaves time for another before the peer takes us for dead.
            self._go_by(await self._beat(self._peer, self._lease_s / 2))
            self._beaten = True
            await self._pause(stopping)

    def _go_by(self, told: Acknowledged) -> None:
        if told.interval_ms:
            self._interval_s = told.interval_ms / 1000
            self._lease_s = max(told.lease_ms, told.interval_ms) / 1000
            self._pace = told.pace

    async def _pause(self, stopping: asyncio.Future[Any]) -> None:
        """Wait for one interval, cut short by `urge` but never under URGE_GAP_S."""
        gap_s = min(URGE_GAP_S, self._interval_s)
        await asyncio.wait({stopping}, timeout=gap_s)
        if stopping.done() or self._urged.is_set():
            self._urged.clear()
            return
        urged = asyncio.ensure_future(self._urged.wait())
        try:
            await asyncio.wait({stopping, urged}, timeout=self._interval_s - gap_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            urged.cancel()
            self._urged.clear()

    async def _guarded(self, call: Awaitable[None]) -> KvmeshError | Exception | None:
        """The error of `call` in the place of its exception; cancellation passes."""
        try:
            await call
        except KvmeshError as e:
            await self._peer.close()
            return e
        except Exception as e:
            log.exception("%s: registration loop failed", self.name)
            return e
        return None

    def _after(self, error: Exception, failures: int) -> float:
        """How many seconds to wait before entering again; logs what changed."""
        was, self.registered = self.registered, False
        if isinstance(error, UnknownInstance):
            log.info("%s at %s does not know this incarnation: registering again", self.name, self.address)
            return 0.0 if was else self._jittered(self._interval_s)
        if isinstance(error, ProtocolMismatch | InvalidRequest):
            log.error("%s at %s refuses this instance: %s", self.name, self.address, error)
            return self._jittered(REFUSED_RETRY_S)
        if not self._complained:
            self._complained = True
            log.warning("%s at %s does not answer: %s", self.name, self.address, error)
        # Capped at one heartbeat: a silent peer costs no more calls than a live one, and a peer that has come
        # back knows us again within one heartbeat.
        return self._jittered(min(FIRST_BACKOFF_S * 2 ** min(failures, 16), self._interval_s))

    def _jittered(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.5, 1.0)


class StoreOrders(Protocol):
    """What of a node hears the store master's answers."""

    @property
    def removed_seq(self) -> int:
        """The number of the last tombstone that was applied."""

    @property
    def lasting_seq(self) -> int | None:
        """The number of the last tombstone that was applied to a tier that this life leaves out; None: none is."""

    async def bury(self, tombstones: Sequence[pb_store.Tombstone], asked_ns: int) -> None:
        """Apply them in every tier, before anything is announced. `asked_ns`: when this node joined, by the clock of
        leases. Unavailable: that could not be written down."""

    def beat_answered(self, answer: pb_store.BeatResponse, asked_ns: int) -> None:
        """Take new tombstones, whether to drain, and what is allowed. `asked_ns`: when the beat was sent, by the clock
        of leases. It must not block."""


MAX_KEPT_SAMPLES = 512
MAX_KEPT_FINISHED = 8192
MAX_KEPT_OUTCOMES = 4096

T = TypeVar("T")


class _Kept(Generic[T]):
    """What is still to be told to one peer, the last `most` of it."""

    def __init__(self, most: int) -> None:
        self._items: deque[T] = deque()
        self._most = most
        self._gone = 0  # how many stood before the first of them

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def extend(self, items: Iterable[T]) -> None:
        """Add more; the oldest make room."""
        self._items.extend(items)
        self.drop_until(self.end - self._most)

    @property
    def end(self) -> int:
        """The place behind the last one: what `drop_until` takes once all that is here now has been told."""
        return self._gone + len(self._items)

    def drop_until(self, end: int) -> None:
        """Drop everything before `end`, which has been told; others may have come or gone meanwhile."""
        while self._gone < end:
            self._items.popleft()
            self._gone += 1


class _StorePeer(MembershipPeer):
    """The membership at whichever store master leads."""

    name = "store master"
    service = pb_store.DESCRIPTOR.services_by_name["StoreMaster"]
    fast = "Beat"

    def __init__(
        self,
        masters: LeaderTracker,
        rng: random.Random,
        member: pb_store.Member,
        usage: Callable[[], pb_store.StoreUsage] | None,
        on_pools: Callable[[Sequence[pb_store.PoolNode]], None] | None,
        orders: StoreOrders | None,
    ) -> None:
        super().__init__(rng)
        self._orders = orders
        self.doubted = False  # the master seems to have forgotten us: nothing is announced before it has said more
        self.masters = masters
        self._member = member
        self._usage = usage
        self._on_pools = on_pools
        self._seq = 0

    @property
    def address(self) -> str:
        return self.masters.current

    async def _enter(self, peer: ServiceClient, timeout_s: float) -> Acknowledged:
        request = pb_store.JoinRequest(
            protocol_version=protocol.PROTOCOL_VERSION, member=self._member, term=self.masters.terms.highest
        )
        asked_ns = lease_clock_ns()
        if self._orders is not None:
            request.removed_seq = self._orders.removed_seq
            if self._orders.lasting_seq is not None:
                request.lasting_seq = self._orders.lasting_seq
        answer: pb_store.JoinResponse = await peer.call("Join", request, timeout_s)
        self._heard(answer.term)
        if self._orders is not None:
            await self._orders.bury(answer.tombstones, asked_ns)
        self.doubted = False
        return Acknowledged(answer.heartbeat_interval_ms, answer.lease_ms, answer.pace)

    async def _beat(self, peer: ServiceClient, timeout_s: float) -> Acknowledged:
        self._seq += 1
        term = self.masters.terms.highest
        request = pb_store.BeatRequest(instance=self._member.instance, seq=self._seq, term=term, pace=self._pace)
        if self._usage is not None:
            request.usage.CopyFrom(self._usage())
        asked_ns = lease_clock_ns()
        if self._orders is not None:
            request.removed_seq = self._orders.removed_seq
        answer: pb_store.BeatResponse = await peer.call("Beat", request, timeout_s)
        self._heard(answer.term)
        if self._orders is not None:
            self._orders.beat_answered(answer, asked_ns)  # tombstones too; the next beat does not wait for them
        self.doubted = False
        if self._on_pools is not None:
            self._on_pools(answer.pools)
        return Acknowledged(answer.heartbeat_interval_ms, answer.lease_ms, answer.pace)

    def _heard(self, term: int) -> None:
        """Note an answer of that term. Raises StaleTerm when an earlier leader has answered, which counts as no
        answer."""
        self.masters.terms.hear(term)
        self.masters.succeeded()

    def _after(self, error: Exception, failures: int) -> float:
        wait_s = super()._after(error, failures)
        if isinstance(error, KvmeshError) and moves_on(error) and not self.masters.move_on(error):
            return 0.0  # another master may know us
        return wait_s

    async def _goodbye(self, peer: ServiceClient, timeout_s: float) -> None:
        request = pb_store.LeaveRequest(instance=self._member.instance)
        await peer.call("Leave", request, timeout_s)


class _ConductorPeer(MembershipPeer):
    name = "conductor"
    service = pb.DESCRIPTOR.services_by_name["Conductor"]
    fast = "Heartbeat"

    def __init__(
        self,
        address: str,
        rng: random.Random,
        registration: pb.RegisterInstanceRequest,
        report: Callable[[], pb.HeartbeatRequest],
        ready: Callable[[], bool],
        announcer: Announcer | None = None,
    ) -> None:
        """`announcer` tells what the engine behind an external instance holds, to this conductor alone."""
        super().__init__(rng)
        self._announcer = announcer
        self._address = address
        self._registration = registration
        self._report = report
        self._ready = ready
        self._seq = 0
        self._prefill: _Kept[pb.PrefillSample] = _Kept(MAX_KEPT_SAMPLES)
        self._decode: _Kept[pb.DecodeSample] = _Kept(MAX_KEPT_SAMPLES)
        self._finished: _Kept[str] = _Kept(MAX_KEPT_FINISHED)
        self._outcomes: _Kept[pb.RequestOutcome] = _Kept(MAX_KEPT_OUTCOMES)

    @property
    def address(self) -> str:
        return self._address

    def become(self, role: pb_common.Role.ValueType) -> None:
        """Register again at once, with this role."""
        self._registration.role = role
        self.enter_again()

    def serve(self, card: pb_common.ModelCard) -> None:
        """Register again at once, with this card."""
        self._registration.model.CopyFrom(card)
        self.enter_again()

    async def _enter(self, peer: ServiceClient, timeout_s: float) -> Acknowledged:
        answer: pb.RegisterInstanceResponse = await peer.call("Register", self._registration, timeout_s)
        if self._announcer is not None:
            self._announcer.restart()  # it may have forgotten all
        return Acknowledged(answer.heartbeat_interval_ms, answer.lease_ms, answer.pace)

    async def _beat(self, peer: ServiceClient, timeout_s: float) -> Acknowledged:
        return await self._send(peer, timeout_s, self._ready(), "")

    async def _goodbye(self, peer: ServiceClient, timeout_s: float) -> None:
        await self._send(peer, timeout_s, False, "shutting down")

    async def _send(self, peer: ServiceClient, timeout_s: float, ready: bool, reason: str) -> Acknowledged:
        beat = self._compose(ready, reason)
        queues: tuple[_Kept[Any], ...] = self._prefill, self._decode, self._finished, self._outcomes
        ends = [kept.end for kept in queues]
        word = self._announcer.next() if self._announcer is not None else None
        if word is not None:
            beat.blocks.CopyFrom(to_proto(word))
        try:
            answer: pb.HeartbeatResponse = await peer.call("Heartbeat", beat, timeout_s)
        except BaseException:
            if self._announcer is not None:
                self._announcer.failed()
            raise
        if self._announcer is not None:
            self._announcer.acked(answer.want_snapshot)
            if word is not None and word.more:
                self.urge()  # parts of a snapshot follow one another
        for kept, end in zip(queues, ends, strict=True):
            kept.drop_until(end)
        return Acknowledged(answer.heartbeat_interval_ms, answer.lease_ms, answer.pace)

    def keep(self, new: pb.HeartbeatRequest) -> None:
        """Keep what this conductor must hear once, whoever has asked for it."""
        self._prefill.extend(new.prefill_samples)
        self._decode.extend(new.decode_samples)
        self._finished.extend(new.finished_request_ids)
        self._outcomes.extend(new.outcomes)

    def _compose(self, ready: bool, reason: str) -> pb.HeartbeatRequest:
        self._seq += 1
        beat = pb.HeartbeatRequest(instance=self._registration.instance, seq=self._seq, ready=ready, pace=self._pace)
        try:
            new = self._report()
        except Exception:
            # An instance that cannot tell its own state gets no work; the error is in the log.
            log.exception("the instance's report failed; this heartbeat says not ready")
            beat.ready, reason = False, "its report failed, see its log"
        else:
            beat.load.CopyFrom(new.load)
            beat.tiers.extend(new.tiers)
            reason = reason or new.not_ready_reason
        beat.not_ready_reason = "" if beat.ready else reason
        beat.prefill_samples.extend(self._prefill)
        beat.decode_samples.extend(self._decode)
        beat.finished_request_ids.extend(self._finished)
        beat.outcomes.extend(self._outcomes)
        return beat


class ConductorRegistrar:
    """Keeps one incarnation of an external instance known to the conductors, and to nobody else: it holds no bytes that
    a store master could tell others of.

    `registration` is sent to each conductor, which `announcer()` makes an announcer of blocks for. `report` and `ready`
    are those of `Registrar`."""

    def __init__(
        self,
        conductor_address: str,
        registration: pb.RegisterInstanceRequest,
        report: Callable[[], pb.HeartbeatRequest],
        ready: Callable[[], bool],
        announcer: Callable[[], Announcer],
    ) -> None:
        rng = random.Random()
        registration.protocol_version = protocol.PROTOCOL_VERSION
        self._report = report
        self._registration = registration
        self._conductors = [
            _ConductorPeer(address, rng, registration, self._news, ready, announcer())
            for address in split(conductor_address, "conductor")
        ]

    def _news(self) -> pb.HeartbeatRequest:
        new = self._report()
        for peer in self._conductors:
            peer.keep(new)
        return new

    @property
    def registered(self) -> bool:
        """Whether a conductor knows this incarnation now."""
        return any(peer.registered for peer in self._conductors)

    def urge(self) -> None:
        """The load has changed a lot: see `Registrar.urge`."""
        for peer in self._conductors:
            peer.urge()

    def know(self, knowledge: pb.BlockKnowledge.ValueType) -> None:
        """Registers again at once where it is now known otherwise which blocks its engine holds."""
        if knowledge != self._registration.knowledge:
            self._registration.knowledge = knowledge
            for peer in self._conductors:
                peer.enter_again()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set; then a last heartbeat with ready=false. Raises nothing but CancelledError."""
        await asyncio.gather(*(peer.run(stop) for peer in self._conductors))


class Registrar:
    """Keeps one incarnation of one instance known to conductor and store master; a pool node (`pool_node`) to the
    master alone.

    `report` returns what is new since its last call (`load` and `tiers` in full, samples, finished ids and outcomes
    once, and a `not_ready_reason`); the registrar fills in instance, seq and ready. `usage` is what the master is told
    of the node store, `on_pools` hears which pool nodes it knows, `orders` the rest of its answers. `store_address` may
    be a list, "a:1,b:2"; `terms` hears the terms of masters. All callbacks run on the event loop, none may block."""

    def __init__(
        self,
        ref_pb: pb_common.InstanceRef,
        role: pb_common.Role.ValueType,
        node_id: str,
        model_card_pb: pb_common.ModelCard,
        capacity_blocks: int,
        max_running: int,
        conductor_address: str,
        store_address: str,
        report: Callable[[], pb.HeartbeatRequest],
        ready: Callable[[], bool],
        *,
        usage: Callable[[], pb_store.StoreUsage] | None = None,
        on_pools: Callable[[Sequence[pb_store.PoolNode]], None] | None = None,
        terms: LeaderTerms | None = None,
        orders: StoreOrders | None = None,
        local_prefill_tokens: int = 0,
        prefill_chunk_tokens: int = 0,
        switchable: bool = False,
        prefill_size_weight: float = 0.0,
        prefill_tenant_fairness: bool = False,
        axes: pb.InstanceAxes | None = None,
    ) -> None:
        rng = random.Random()
        registration = pb.RegisterInstanceRequest(
            protocol_version=protocol.PROTOCOL_VERSION,
            instance=ref_pb,
            role=role,
            node_id=node_id,
            model=model_card_pb,
            capacity_blocks=capacity_blocks,
            max_running_requests=max_running,
            local_prefill_tokens=local_prefill_tokens,
            prefill_chunk_tokens=prefill_chunk_tokens,
            switchable=switchable,
            prefill_size_weight=prefill_size_weight,
            prefill_tenant_fairness=prefill_tenant_fairness,
            axes=axes,
        )
        member = pb_store.Member(instance=ref_pb, role=role, node_id=node_id, store_id=ref_pb.instance_id)
        self._report = report
        self._conductors = [
            _ConductorPeer(address, rng, registration, self._news, ready)
            for address in split(conductor_address, "conductor")
        ]
        self._store = _StorePeer(LeaderTracker(store_address, terms), rng, member, usage, on_pools, orders)

    @classmethod
    def pool_node(
        cls,
        ref_pb: pb_common.InstanceRef,
        node_id: str,
        store_address: str,
        usage: Callable[[], pb_store.StoreUsage],
        terms: LeaderTerms | None = None,
        orders: StoreOrders | None = None,
    ) -> Registrar:
        """The registrar of memory without an engine: it joins the master and nobody else."""
        made = cls.__new__(cls)
        member = pb_store.Member(
            instance=ref_pb, role=pb_common.ROLE_POOL, node_id=node_id, store_id=ref_pb.instance_id
        )
        made._conductors = []
        made._store = _StorePeer(LeaderTracker(store_address, terms), random.Random(), member, usage, None, orders)
        return made

    @property
    def masters(self) -> LeaderTracker:
        """The store masters; `current` is the one this instance has joined, or is about to join."""
        return self._store.masters

    @property
    def registered(self) -> dict[str, bool]:
        """Whether a conductor and the master know this incarnation now: {"conductor": ..., "store": ...}."""
        known = {"store": self._store.registered and not self._store.doubted}
        return {"conductor": any(peer.registered for peer in self._conductors)} | known if self._conductors else known

    def _news(self) -> pb.HeartbeatRequest:
        new = self._report()
        for peer in self._conductors:
            peer.keep(new)
        return new

    def urge(self) -> None:
        """The load has changed a lot: send a conductor heartbeat soon (coalesced, at most every 20 ms).
        Call it on the event loop that runs `run`."""
        for peer in self._conductors:
            peer.urge()

    def become(self, role: pb_common.Role.ValueType) -> None:
        """The instance has another role from now on: the conductor hears of it at once. To the master it stays what it
        was, a node with memory."""
        for peer in self._conductors:
            peer.become(role)

    def serve(self, card: pb_common.ModelCard) -> None:
        """The instance serves other weights from now on: the conductors hear of it at once."""
        for peer in self._conductors:
            peer.serve(card)

    def urge_store(self) -> None:
        """The master seems to have forgotten us: beat soon, to find out and to join again; until then nothing counts as
        registered there (tombstones come first). On the loop, as `urge`."""
        self._store.doubted = True
        self._store.urge()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set; then Leave to the master and a last heartbeat with ready=false to the conductors,
        each with a deadline of 1 s. Raises nothing but CancelledError."""
        await asyncio.gather(*(peer.run(stop) for peer in (*self._conductors, self._store)))
