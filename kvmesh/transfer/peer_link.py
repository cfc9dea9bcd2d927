"""One opened segment as its writer and reader sees it: what waits, and how it is cut into frames.

    submit ─▶ flow.queue (groups) ─┐
                                   ├─ cut ─▶ frame ─▶ transport ─▶ done ─▶ slots final, or ─▶ flow.retry (to verify)
    lost and settled ─▶ flow.retry ┘                     └─▶ lost

There is one flow a traffic class. Nothing here locks or does I/O: the sender's lock is held around every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from kvmesh.transfer import checks
from kvmesh.transfer.api import Opcode, TransferState
from kvmesh.transfer.batch import AfterUnlock, Part, RequestGroup, RetriedParts
from kvmesh.transfer.epochs import Epochs
from kvmesh.transfer.rails import Nic, RailBoard, RailChoice, RailState, Tiers, Topology, tiers
from kvmesh.transfer.segment import LocalRegion, RegionInfo, SegmentDescriptor
from kvmesh.transfer.send_queue import RANKS, DeficitRoundRobin, SendFlow
from kvmesh.transfer.transports.base import Frame, FrameKind, FrameOwner, Rail, Transport

MAX_PAIRS = 1024


@dataclass(eq=False, slots=True)
class PeerLink:
    """One open segment. `rails` are the paths to it, in the order of preference of their transports."""

    descriptor: SegmentDescriptor
    rails: tuple[Rail, ...]
    owner: FrameOwner
    serials: count[int]
    board: RailBoard
    dealer: DeficitRoundRobin
    finals: dict[tuple[int, TransferState], int]  # requests of the engine by class and outcome
    ways: dict[Rail, RailState] = field(default_factory=dict)
    flows: tuple[SendFlow, ...] = ()
    epochs: Epochs = field(default_factory=Epochs)
    closed: str = ""
    _routes: dict[tuple[object, ...], Tiers] = field(default_factory=dict)
    _pairs: dict[tuple[FrameKind, int, int], Tiers] = field(
        default_factory=dict
    )  # by regions: offsets are never reused

    def __post_init__(self) -> None:
        self.flows = tuple(SendFlow(self, rank) for rank in range(RANKS))
        self.renew(self.descriptor, self.rails)

    @property
    def name(self) -> str:
        return self.descriptor.name

    def renew(self, descriptor: SegmentDescriptor, rails: tuple[Rail, ...]) -> None:
        """Takes a newer descriptor of the same process; measurements of rails that stay are kept."""
        self.descriptor, self.rails = descriptor, rails
        self._routes.clear()
        self._pairs.clear()
        speeds = {(nic.transport, nic.name): nic.gbps for nic in descriptor.nics}
        for rail in rails:
            if rail not in self.ways:
                gbps = speeds.get((rail.transport.name, rail.remote), 0.0)
                self.ways[rail] = self.board.way(rail, gbps, descriptor.name)

    @property
    def transports(self) -> tuple[Transport, ...]:
        return tuple(dict.fromkeys(rail.transport for rail in self.rails))

    def routes(self, kind: FrameKind, local: LocalRegion, remote: RegionInfo, topology: Topology) -> Tiers:
        """Returns the rails between two memory regions, in tiers of preference."""
        pair = (kind, local.public.base_offset, remote.base_offset)
        found = self._pairs.get(pair)
        if found is not None:
            return found
        host = local.on_host and checks.on_host(remote.location)
        able = tuple(t for t in self.transports if (host or t.device_memory) and t.carries(kind, local, remote))
        key = (local.public.location, remote.location, *able)
        found = self._routes.get(key)
        if found is None:
            rails = (rail for rail in self.rails if rail.transport in able)
            by_rail = tiers(rails, local.public.location, remote.location, topology, self.descriptor.topology)
            found = self._routes[key] = tuple(tuple(self.ways[rail] for rail in tier) for tier in by_rail)
        if len(self._pairs) >= MAX_PAIRS:
            self._pairs.clear()
        self._pairs[pair] = found
        return found

    @property
    def device_rails(self) -> tuple[Rail, ...]:
        """The rails that reach a device's memory, here or there."""
        return tuple(rail for rail in self.rails if rail.transport.device_memory)

    def notice_routes(self) -> Tiers:
        """Returns the rails for end marks, which depend on no memory."""
        found = self._routes.get(())
        if found is None:
            found = self._routes[()] = tuple(tuple(self.ways[rail] for rail in tier) for tier in tiers(self.rails))
        return found

    def why_none(self, routes: Tiers) -> str:
        """Returns the reason, for a user, why none of these rails can be used."""
        if routes or not self.rails:
            return self.board.why_none(routes) or f"no transport reaches {self.name}"
        names = ", ".join(transport.name for transport in self.transports)
        needs = "; shm needs memory that its owner allocated as the source" if "shm" in names else ""
        return f"{names}: cannot carry this memory, and no other transport reaches {self.name}{needs}"

    # ── groups ────────────────────────────────────────────────────────────────────────────────────

    def enqueue(self, group: RequestGroup) -> None:
        flow = self.flows[group.rank]
        flow.queue[group.serial] = group
        self.dealer.place(flow)
        if group.opcode is Opcode.WRITE:
            self.epochs.began(group)

    def again(self, group: RequestGroup, again: RetriedParts) -> None:
        flow = self.flows[group.rank]
        flow.retry.append(again)
        self.dealer.place(flow)

    def unqueue(self, group: RequestGroup) -> None:
        """Stops cutting frames of a group. Parts of it in `retry` are dropped when their turn comes, since their slots
        are doomed."""
        group.at, group.todo = len(group.slots), 0
        self.flows[group.rank].queue.pop(group.serial, None)

    def drop(self, group: RequestGroup, cause: str, after: AfterUnlock) -> None:
        """Stops posting a group and fails its unfinished slots."""
        self.unqueue(group)
        for slot in group.slots:
            group.doom(slot, TransferState.FAILED, cause, after)

    # ── cutting ───────────────────────────────────────────────────────────────────────────────────

    def cut(
        self, flow: SendFlow, now: float, dropped: Callable[[RequestGroup, str], None]
    ) -> Frame | RailChoice | Nic | None:
        """Returns the next frame of a flow; or the rail choice or NIC that it has to wait for; or None when the flow
        has nothing. `dropped` is called for each group that no rail can carry."""
        while True:
            again = flow.retry[0] if flow.retry else None
            group = again.group if again is not None else next(iter(flow.queue.values()), None)
            if group is None:
                return None
            if again is not None and not self._alive(again):
                flow.retry.popleft()
                continue
            wanted = sum(p[3] for p in again.parts[again.at :]) if again is not None else group.todo
            avoid = again.avoid if again is not None and again.kind is not FrameKind.CHECKSUM else None
            choice = None if self.closed else self.board.choose(group.routes, wanted, now, avoid)
            if choice is None:
                if again is not None:
                    flow.retry.popleft()
                dropped(group, self.closed or self.why_none(group.routes))
                continue
            if not choice.open:
                return choice
            if not self.dealer.room(choice.way.nic, flow.rank):
                return choice.way.nic
            frame = self._next(group, choice, wanted) if again is None else self._resend(flow, again, choice)
            if frame is not None:
                return frame

    @staticmethod
    def _alive(again: RetriedParts) -> bool:
        """Skips parts that are not wanted any more, and says whether one is left."""
        batch, parts = again.group.batch, again.parts
        while again.at < len(parts):
            slot = parts[again.at][0]
            if not batch.states[slot].final and slot not in batch.doom:
                return True
            again.at += 1
        return False

    def _resend(self, flow: SendFlow, again: RetriedParts, choice: RailChoice) -> Frame | None:
        limits, batch = choice.way.rail.transport.limits, again.group.batch
        cap = room = self._cap(choice, limits.frame_bytes)
        slice_bytes = min(limits.slice_bytes, cap)
        tail = min(slice_bytes + slice_bytes // 4, cap)
        parts: list[Part] = []
        while room > 0 and len(parts) < limits.frame_parts and self._alive(again):
            slot, address, offset, length = again.parts[again.at]
            take = length if length <= tail else slice_bytes
            if take > room:
                break
            parts.append((slot, address, offset, take))
            room -= take
            if take == length:
                again.at += 1
            else:
                again.parts[again.at] = (slot, address + take, offset + take, length - take)
        if again.at >= len(again.parts):
            flow.retry.popleft()
        if not parts:
            return None
        frame = self._frame(again.group, choice.way, again.kind, parts, cap - room)
        frame.sendings, frame.checks = again.sendings, again.checks
        if again.kind is FrameKind.CHECKSUM:
            frame.avoid = again.avoid
        else:
            for part in parts:
                batch.states[part[0]] = TransferState.PENDING
        return frame

    def _cap(self, choice: RailChoice, frame_bytes: int) -> int:
        return min(frame_bytes, self.board.config.probe_bytes) if choice.way.rest_until else frame_bytes

    def _next(self, group: RequestGroup, choice: RailChoice, wanted: int) -> Frame | None:
        """Cuts the next frame of a group. Where several rails share the work, frames shrink towards its end, so that
        all rails finish together."""
        limits, batch = choice.way.rail.transport.limits, group.batch
        cap = self._cap(choice, limits.frame_bytes)
        slice_bytes = min(limits.slice_bytes, cap)
        if choice.width > 1:
            cap = min(cap, max(slice_bytes, -(-wanted // choice.width)))
        parts: list[Part] = []
        room = cap
        at, skip, total = group.at, group.skip, len(group.slots)
        slots, addresses, offsets = group.slots, group.addresses, group.offsets
        lengths, states, dooms = batch.lengths, batch.states, batch.doom
        waiting, pending = TransferState.WAITING, TransferState.PENDING
        tail = slice_bytes + slice_bytes // 4  # a short tail rides with the last slice
        while at < total and room > 0 and len(parts) < limits.frame_parts:
            slot = slots[at]
            state = states[slot]
            if (state is not waiting and state is not pending) or slot in dooms:
                at, skip = at + 1, 0
                continue
            left = lengths[slot] - skip
            take = left if left <= tail else slice_bytes
            if take > room and parts:
                break
            parts.append((slot, addresses[at] + skip, offsets[at] + skip, take))
            states[slot] = pending
            room -= take
            if take == left:
                at, skip = at + 1, 0
            else:
                skip += take
        group.at, group.skip = at, skip
        group.todo -= cap - room
        if at >= total:
            self.unqueue(group)
        kind = FrameKind.WRITE if group.opcode is Opcode.WRITE else FrameKind.READ
        return self._frame(group, choice.way, kind, parts, cap - room) if parts else None

    def _frame(self, group: RequestGroup, way: RailState, kind: FrameKind, parts: list[Part], nbytes: int) -> Frame:
        flight = group.batch.flight
        for part in parts:
            flight[part[0]] += 1
        epoch, burden = (0, 0) if kind is FrameKind.CHECKSUM else (group.epoch, nbytes)
        frame = Frame(next(self.serials), self.owner, self, way.rail, kind, epoch, parts, nbytes, group)
        frame.way, frame.burden = way, burden
        return frame
