"""StoreMaster over gRPC: protos to the brain and back. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from kvmesh.errors import NotLeader
from kvmesh.rpc import protocol
from kvmesh.rpc.catching_up import caught_up
from kvmesh.rpc.fastpath.server import FastContext
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.telemetry import names
from services.store import mapping
from services.store.domain import Announce, Beat, CaughtUp, Event, Heard, Join, Leave, Publish, Refuse, Relay, Tick
from services.store.durable import Durable
from services.store.orders import StoreOrderQueue
from services.store.servicer_find import FindServicer
from services.store.servicer_names import NamesServicer
from services.store.servicer_policy import PolicyServicer
from services.store.state import MasterState
from services.store.stream import Watchers

log = logging.getLogger(__name__)

MAX_LOOKUP_KEYS = 4096
MAX_HOLDERS = 64
COMPLAIN_S = 60.0  # a word on what is left out
SWEEP_KEYS = 8192  # of a store that is gone, in one turn of the loop: some milliseconds

SWEEP_TARGETS = 2048


class StoreMasterServicer(FindServicer, NamesServicer, PolicyServicer):
    """Of one reign, `incarnation`. `clock` gives monotonic seconds; `leads`: whether it goes on at this moment."""

    def __init__(
        self,
        state: MasterState,
        watchers: Watchers,
        *,
        incarnation: int,
        clock: Callable[[], float],
        leads: Callable[[], bool],
        durable: Durable,
        orders: StoreOrderQueue,
    ) -> None:
        self._state = state
        self._watchers = watchers
        self._incarnation = incarnation
        self._clock = clock
        self._leads = leads
        self._durable = durable
        self._orders = orders
        self._books = asyncio.Lock()
        self._complain_at = clock()
        self._sweeping: asyncio.Task[None] | None = None
        self._catching_up: asyncio.Task[None] | None = None
        self._grpc_calls = 0  # Join, Beat and Announce so far
        self._burying = False

    async def close(self) -> None:
        """End every stream and the clearing: the server is about to stop."""
        self._watchers.close()
        await self._orders.close()
        for task in (self._sweeping, self._catching_up):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def tick(self) -> None:
        """Let time pass: leases run out, what is gone is cleared away."""
        self._step(Tick())
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.create_task(self._catch_up(), name="catch up")
        orders, writes = self._state.policy.tick(self._clock())
        for order in orders:
            self._orders.start(self._orders.carry_out(self._state, order, self._clock))
        if writes or (self._state.policy.owes and not self._owing):
            self._orders.start(self._keep_meanwhile(writes))
        idle = self._sweeping is None or self._sweeping.done()
        if idle and self._swept():
            self._sweeping = asyncio.create_task(self._sweep(), name="sweep")

    async def _catch_up(self) -> None:
        until = await caught_up(lambda: self._grpc_calls, self._clock)
        with contextlib.suppress(NotLeader):
            self._step(CaughtUp(until))

    async def _sweep(self) -> None:
        more = True
        while more:
            await asyncio.sleep(0)
            more = self._swept()

    def _swept(self) -> bool:
        """A slice of what is gone; whether there is more."""
        more = self._state.blocks.sweep(SWEEP_KEYS)
        return self._state.policy.replicas.sweep(SWEEP_TARGETS) or more

    def _step(self, event: Event) -> Heard | None:
        """What the brain answers; its refusal is raised."""
        if not self._leads():
            raise NotLeader("this store master leads no more")
        refused, heard = None, None
        for action in self._state.step(event, self._clock()):
            match action:
                case Publish():
                    names.STORE_CHANGES.labels(change=action.change.value).inc()
                    self._watchers.publish(action)
                case Relay():
                    self._watchers.publish(action)
                case Heard():
                    heard = action
                case Refuse(error):
                    refused = error
        if self._state.overdue and not self._burying:
            self._burying = True
            self._orders.start(self._bury())
        if refused is not None:
            raise refused
        return heard

    async def _bury(self) -> None:
        """The rest of a mass death, in turns of the loop between which others are answered."""
        try:
            while self._state.overdue and self._leads():
                await asyncio.sleep(0)
                self._step(Tick())
        except NotLeader:
            pass
        finally:
            self._burying = False

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:  # noqa: N802
        """Raises ProtocolMismatch, InvalidRequest, Overloaded."""
        self._grpc_calls += 1
        member = request.member
        who = member.instance.instance_id or "a nameless instance"
        protocol.check(request.protocol_version, f"{who} at {member.instance.address}")
        self._step(Join(mapping.member_in(member), request.removed_seq))
        pulse = self._state.pulse
        return pb.JoinResponse(
            heartbeat_interval_ms=pulse.interval_ms,
            lease_ms=pulse.lease_ms,
            pace=pulse.number,
            master_incarnation=self._incarnation,
            term=self.term,
            tombstones=self._tombstones(member.instance.instance_id),
        )

    async def Beat(self, request: pb.BeatRequest, context: Any) -> pb.BeatResponse:  # noqa: N802
        """Raises UnknownInstance."""
        ref = request.instance
        usage = mapping.usage_in(request.usage) if request.HasField("usage") else None
        by_door = isinstance(context, FastContext)
        if by_door:
            names.STORE_HEARTBEAT_WAIT.observe(time.monotonic() - context.arrived)
        else:
            self._grpc_calls += 1
        self._step(Beat(ref.instance_id, ref.incarnation, usage, request.removed_seq, request.pace, by_door))
        names.STORE_BEATS.inc()
        pulse = self._state.pulse
        pools = [
            pb.PoolNode(instance=mapping.ref_out(member), free_bytes=free_bytes)
            for member, free_bytes in self._state.pools(ref.instance_id)
        ]
        return pb.BeatResponse(
            heartbeat_interval_ms=pulse.interval_ms,
            lease_ms=pulse.lease_ms,
            pace=pulse.number,
            master_incarnation=self._incarnation,
            pools=pools,
            term=self.term,
            tombstones=self._tombstones(ref.instance_id),
            draining=ref.instance_id in self._state.policy.drains,
            quotas=[
                pb.Quota(tag=tag, blocks=blocks)
                for tag, blocks in self._state.policy.allowances(ref.instance_id, self._clock()).items()
            ],
        )

    def _tombstones(self, instance_id: str) -> list[pb.Tombstone]:
        """What it has yet to apply, in order."""
        newer = self._state.policy.tombstones.newer(instance_id)
        return [pb.Tombstone(seq=each.seq, keys=b"".join(each.keys), prefix=each.prefix) for each in newer]

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:  # noqa: N802
        """Also right for one that is no member."""
        self._step(Leave(request.instance.instance_id, request.instance.incarnation))
        return pb.LeaveResponse()

    async def ListMembers(self, request: pb.ListMembersRequest, context: Any) -> pb.ListMembersResponse:  # noqa: N802
        """Those alive now."""
        self._step(Tick())
        members = map(mapping.member_out, self._state.members)
        return pb.ListMembersResponse(master_incarnation=self._incarnation, members=members)

    async def Announce(self, request: pb.AnnounceRequest, context: Any) -> pb.AnnounceResponse:  # noqa: N802
        """Raises UnknownInstance, InvalidRequest."""
        self._grpc_calls += not isinstance(context, FastContext)
        said = mapping.announcement_in(request.announcement)
        heard = self._step(Announce(said))
        assert heard is not None, "an announcement is refused or heard"
        names.STORE_ANNOUNCEMENTS.labels(verdict=heard.verdict.value).inc()
        names.STORE_KEYS.labels(change="sealed").inc(len(said.sealed))
        names.STORE_KEYS.labels(change="removed").inc(len(said.removed))
        names.STORE_KEYS.labels(change="over_limit").inc(heard.cut)
        if heard.shed:
            self._tell_shed(heard.shed)
        if heard.want_snapshot:
            names.STORE_SNAPSHOTS.inc()
        words = self._state.words
        return pb.AnnounceResponse(
            master_incarnation=self._incarnation,
            want_snapshot=heard.want_snapshot,
            seq=heard.seq,
            idle_ms=words.idle_ms,
            gap_ms=words.gap_ms,
        )

    def _tell_shed(self, replicas: int) -> None:
        names.STORE_KEYS.labels(change="shed").inc(replicas)
        now = self._clock()
        if now >= self._complain_at:
            self._complain_at = now + COMPLAIN_S
            memory = self._state.policy.memory
            log.warning("max_map_mb=%d: %d replicas are left out", memory.limit_bytes >> 20, memory.missing)

    # A coroutine that writes, where the stubs expect a generator: only so can a write have a deadline.
    async def Watch(self, request: pb.WatchRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Snapshot, then changes. Raises Unavailable once this watcher has fallen behind, Overloaded."""
        self._step(Tick())
        await self._watchers.follow(self._state.read(), context)

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:  # noqa: N802
        """At most MAX_HOLDERS of each key. Raises InvalidRequest."""
        keys = mapping.packed_keys("keys", request.keys, MAX_LOOKUP_KEYS)
        self._step(Tick())
        if not request.uncounted:
            self._state.policy.asked(keys, self._clock())
        holders = self._state.blocks.store_ids
        return pb.LookupResponse(holders=[pb.Holders(store_ids=holders(key)[:MAX_HOLDERS]) for key in keys])

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStoreStatusRequest, context: Any
    ) -> pb.GetStoreStatusResponse:
        """What is known now."""
        self._step(Tick())
        known, policy = self._state.blocks.map, self._state.policy
        pulse, words = self._state.pulse, self._state.words
        return pb.GetStoreStatusResponse(
            master_incarnation=self._incarnation,
            blocks=len(known),
            replicas=known.replicas,
            map_bytes=known.memory_bytes(),
            shed=policy.memory.missing,
            map_limit_bytes=policy.memory.limit_bytes,
            names=len(policy.names),
            tombstones=len(policy.tombstones),
            heartbeat_interval_ms=pulse.interval_ms,
            lease_ms=pulse.lease_ms,
            idle_ms=words.idle_ms,
            gap_ms=words.gap_ms,
            stores=map(mapping.status_out, self._state.statuses()),
        )
