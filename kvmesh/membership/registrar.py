"""How an instance makes itself known: registration and heartbeats at every conductor and at the store master.

Independent loops, one per peer. Each enters (Register or Join), beats at the interval the peer answered last, and
enters again whenever the peer does not know this incarnation or cannot be reached. What a heartbeat reports once
(samples, finished request ids, outcomes) is kept for each conductor, and sent again until that one has acknowledged it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from kvmesh.errors import KvmeshError
from kvmesh.membership.membership import Acknowledged, MembershipPeer
from kvmesh.rpc import protocol
from kvmesh.rpc.addresses import split
from kvmesh.rpc.leader_client import LeaderTracker, ServiceClient, moves_on
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.rpc.pb import store_pb2 as pb_store
from kvmesh.rpc.terms import LeaderTerms


class StoreOrders(Protocol):
    """What of a node hears the store master's answers."""

    @property
    def removed_seq(self) -> int:
        """The last tombstone applied."""

    async def bury(self, tombstones: Sequence[pb_store.Tombstone]) -> None:
        """Apply them in every tier, before anything is announced. Unavailable: that could not be written down."""

    def beat_answered(self, answer: pb_store.BeatResponse) -> None:
        """New tombstones, whether to drain, what is allowed. Must not block."""


log = logging.getLogger(__name__)

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
        """More of it; the oldest make room."""
        self._items.extend(items)
        self.drop_until(self.end - self._most)

    @property
    def end(self) -> int:
        """Behind the last one: what `drop_until` takes once all that is here now has been told."""
        return self._gone + len(self._items)

    def drop_until(self, end: int) -> None:
        """Everything before `end` has been; others may have come or gone meanwhile."""
        while self._gone < end:
            self._items.popleft()
            self._gone += 1


class _StorePeer(MembershipPeer):
    """At whichever master leads."""

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
        if self._orders is not None:
            request.removed_seq = self._orders.removed_seq
        answer: pb_store.JoinResponse = await peer.call("Join", request, timeout_s)
        self._heard(answer.term)
        if self._orders is not None:
            await self._orders.bury(answer.tombstones)
        self.doubted = False
        return Acknowledged(answer.heartbeat_interval_ms, answer.lease_ms, answer.pace)

    async def _beat(self, peer: ServiceClient, timeout_s: float) -> Acknowledged:
        self._seq += 1
        term = self.masters.terms.highest
        request = pb_store.BeatRequest(instance=self._member.instance, seq=self._seq, term=term, pace=self._pace)
        if self._usage is not None:
            request.usage.CopyFrom(self._usage())
        if self._orders is not None:
            request.removed_seq = self._orders.removed_seq
        answer: pb_store.BeatResponse = await peer.call("Beat", request, timeout_s)
        self._heard(answer.term)
        if self._orders is not None:
            self._orders.beat_answered(answer)  # tombstones too; the next beat does not wait for them
        self.doubted = False
        if self._on_pools is not None:
            self._on_pools(answer.pools)
        return Acknowledged(answer.heartbeat_interval_ms, answer.lease_ms, answer.pace)

    def _heard(self, term: int) -> None:
        """Raises StaleTerm: a leader of yesterday has answered, which counts as no answer."""
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
    ) -> None:
        super().__init__(rng)
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

    async def _enter(self, peer: ServiceClient, timeout_s: float) -> Acknowledged:
        answer: pb.RegisterInstanceResponse = await peer.call("Register", self._registration, timeout_s)
        return Acknowledged(answer.heartbeat_interval_ms, answer.lease_ms, answer.pace)

    async def _beat(self, peer: ServiceClient, timeout_s: float) -> Acknowledged:
        return await self._send(peer, timeout_s, self._ready(), "")

    async def _goodbye(self, peer: ServiceClient, timeout_s: float) -> None:
        await self._send(peer, timeout_s, False, "shutting down")

    async def _send(self, peer: ServiceClient, timeout_s: float, ready: bool, reason: str) -> Acknowledged:
        beat = self._compose(ready, reason)
        queues: tuple[_Kept[Any], ...] = self._prefill, self._decode, self._finished, self._outcomes
        ends = [kept.end for kept in queues]
        answer: pb.HeartbeatResponse = await peer.call("Heartbeat", beat, timeout_s)
        for kept, end in zip(queues, ends, strict=True):
            kept.drop_until(end)
        return Acknowledged(answer.heartbeat_interval_ms, answer.lease_ms, answer.pace)

    def keep(self, new: pb.HeartbeatRequest) -> None:
        """What this conductor must hear once, whoever has asked for it."""
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
        """Of memory without an engine: it joins the master and nobody else."""
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

    def urge_store(self) -> None:
        """The master seems to have forgotten us: beat soon, to find out and to join again; until then nothing counts as
        registered there (tombstones come first). On the loop, as `urge`."""
        self._store.doubted = True
        self._store.urge()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set; then Leave to the master and a last heartbeat with ready=false to the conductors,
        each with a deadline of 1 s. Raises nothing but CancelledError."""
        await asyncio.gather(*(peer.run(stop) for peer in (*self._conductors, self._store)))
