"""StoreMaster over gRPC: protos to the brain and back. Decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from kvmesh.rpc import protocol
from kvmesh.rpc.errors import InvalidRequest, Unavailable
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.rpc.pb import store_pb2_grpc as pb_grpc
from kvmesh.telemetry import names
from services.store.state import Beat, Change, Event, Join, Leave, MasterState, Member, Publish, Refuse, Role, Tick
from services.store.watchers import Mailbox

_ROLES = {
    pb_common.ROLE_PREFILL: Role.PREFILL,
    pb_common.ROLE_DECODE: Role.DECODE,
    pb_common.ROLE_BOTH: Role.BOTH,
}
_ROLES_OUT = {role: number for number, role in _ROLES.items()}
_CHANGES_OUT = {
    Change.JOINED: pb.MEMBER_CHANGE_JOINED,
    Change.LEFT: pb.MEMBER_CHANGE_LEFT,
    Change.DIED: pb.MEMBER_CHANGE_DIED,
}
# A watcher that takes nothing for this long has lost its place whatever its mailbox holds.
WRITE_TIMEOUT_S = 10.0


class StoreMasterServicer(pb_grpc.StoreMasterServicer):
    """`clock` gives monotonic seconds; `incarnation` is this process's life; `observe` hears every change."""

    def __init__(
        self,
        state: MasterState,
        *,
        incarnation: int,
        heartbeat_interval_ms: int,
        lease_ms: int,
        watch_queue: int,
        clock: Callable[[], float],
        observe: Callable[[Publish], None] = lambda _: None,
    ) -> None:
        self._state = state
        self._incarnation = incarnation
        self._interval_ms = heartbeat_interval_ms
        self._lease_ms = lease_ms
        self._watch_queue = watch_queue
        self._clock = clock
        self._observe = observe
        self._watchers: dict[Mailbox, asyncio.Event] = {}
        self._closing = False

    @property
    def watchers(self) -> int:
        """Open member streams."""
        return len(self._watchers)

    def close(self) -> None:
        """End every member stream: the server is about to stop."""
        self._closing = True
        for arrived in self._watchers.values():
            arrived.set()

    def tick(self) -> None:
        """Let time pass: leases run out."""
        self._step(Tick())

    def _step(self, event: Event) -> None:
        refused = None
        for action in self._state.step(event, self._clock()):
            match action:
                case Publish():
                    self._publish(action)
                case Refuse(error):
                    refused = error
        if refused is not None:
            raise refused

    def _publish(self, event: Publish) -> None:
        self._observe(event)
        for mailbox, arrived in self._watchers.items():
            mailbox.put(event)
            arrived.set()

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:  # noqa: N802
        """Raises ProtocolMismatch, InvalidRequest."""
        member = request.member
        who = member.instance.instance_id or "a nameless instance"
        protocol.check(request.protocol_version, f"{who} at {member.instance.address}")
        self._step(Join(_member_in(member)))
        return pb.JoinResponse(
            heartbeat_interval_ms=self._interval_ms, lease_ms=self._lease_ms, master_incarnation=self._incarnation
        )

    async def Beat(self, request: pb.BeatRequest, context: Any) -> pb.BeatResponse:  # noqa: N802
        """Raises UnknownInstance."""
        self._step(Beat(request.instance.instance_id, request.instance.incarnation))
        names.STORE_BEATS.inc()
        return pb.BeatResponse(master_incarnation=self._incarnation)

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:  # noqa: N802
        """Also right for one that is no member."""
        self._step(Leave(request.instance.instance_id, request.instance.incarnation))
        return pb.LeaveResponse()

    async def ListMembers(self, request: pb.ListMembersRequest, context: Any) -> pb.ListMembersResponse:  # noqa: N802
        """Those alive now."""
        self._step(Tick())
        return pb.ListMembersResponse(
            master_incarnation=self._incarnation, members=[_member_out(m) for m in self._state.members]
        )

    # A coroutine that writes, where the stubs expect a generator: only so can a write have a deadline.
    async def WatchMembers(  # type: ignore[override]  # noqa: N802
        self, request: pb.WatchMembersRequest, context: Any
    ) -> None:
        """Snapshot, then changes. Raises Unavailable once this watcher has fallen behind."""
        self._step(Tick())
        # Nothing awaits between snapshot and mailbox: no change can fall between them.
        sent_seq = self._state.seq
        events = [_event_out(sent_seq, Change.JOINED, m) for m in self._state.members]
        mailbox, arrived = Mailbox(self._watch_queue), asyncio.Event()
        self._watchers[mailbox] = arrived
        try:
            await self._send(context, sent_seq, events, snapshot=True)
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_ms / 1000):
                        await arrived.wait()
                arrived.clear()
                if self._closing:
                    raise Unavailable("the store master is stopping")
                if mailbox.overrun:
                    raise Unavailable(f"this watcher is over {self._watch_queue} member events behind: start over")
                new = mailbox.take()
                sent_seq = new[-1].seq if new else sent_seq
                await self._send(context, sent_seq, [_event_out(e.seq, e.change, e.member) for e in new])
        finally:
            del self._watchers[mailbox]

    async def _send(self, context: Any, seq: int, events: Iterable[pb.MemberEvent], *, snapshot: bool = False) -> None:
        message = pb.MemberEvents(master_incarnation=self._incarnation, snapshot=snapshot, events=events, seq=seq)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await context.write(message)
        except TimeoutError:
            raise Unavailable(f"this watcher took nothing for {WRITE_TIMEOUT_S:.0f} s: start over") from None


def _member_in(member: pb.Member) -> Member:
    role = _ROLES.get(member.role)
    if role is None:
        raise InvalidRequest.of("member.role", member.role, "must be prefill, decode or both")
    ref = member.instance
    return Member(ref.instance_id, ref.address, ref.incarnation, role, member.node_id, member.store_id)


def _member_out(member: Member) -> pb.Member:
    ref = pb_common.InstanceRef(instance_id=member.instance_id, address=member.address, incarnation=member.incarnation)
    return pb.Member(instance=ref, role=_ROLES_OUT[member.role], node_id=member.node_id, store_id=member.store_id)


def _event_out(seq: int, change: Change, member: Member) -> pb.MemberEvent:
    return pb.MemberEvent(seq=seq, change=_CHANGES_OUT[change], member=_member_out(member))
