"""The order in which flows post. Pure: no clock, no lock (the sender's is held around every call).

    flow = what waits for one peer in one traffic class

    ready ──take──▶ cut a frame ──▶ posted; a flow with more to send goes back to ready
      ▲                 └── no room ──▶ parked at a way (its frames) or at a NIC (the budget of all peers)
      └──────────────────── woken when an answer makes room ◀──┘

Between classes the more urgent goes first, and each of the others earns tokens: a share of the bytes that go before it.
With tokens it goes ahead. Between peers of a class turns are by bytes (deficit round robin, Shreedhar and Varghese,
SIGCOMM 1995, with a debt: a frame may overdraw, and is paid off in later turns). Every operation costs the same however
many flows wait; a debt is paid by as many steps as it has quanta.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvmesh.transfer.api import TrafficClass

if TYPE_CHECKING:
    from kvmesh.transfer.batch import RequestGroup, RetriedParts
    from kvmesh.transfer.peer_link import PeerLink

QUANTUM = 2 << 20  # bytes a turn: the frame of the socket transports
BURST = 8 << 20  # tokens that a class can save up
RANKS = len(TrafficClass)


def rank_of(traffic_class: int) -> int:
    """Returns the rank of a traffic class. Unknown higher numbers count as the least urgent, negative ones as the most
    urgent."""
    return min(max(traffic_class, 0), RANKS - 1)


@dataclass(eq=False, slots=True)
class SendFlow:
    """What waits for one peer in one traffic class. `queue` holds groups that are not wholly cut, by serial; `retry`
    holds parts to be sent again or verified, and goes first. `placed` says that the flow is in a ring or parked.
    `woken_by` is the NIC whose room it was woken for. `amid` says that its turn has begun and lasts while it has a
    deficit left."""

    link: PeerLink
    rank: int
    queue: OrderedDict[int, RequestGroup] = field(default_factory=OrderedDict)
    retry: deque[RetriedParts] = field(default_factory=deque)
    deficit: int = 0
    amid: bool = False
    placed: bool = False
    woken_by: Budgeted | None = None

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.retry)


class Waiting(Protocol):
    """What a ring of turns needs to know of a flow."""

    rank: int
    deficit: int
    amid: bool


FlowT = TypeVar("FlowT", bound=Waiting)


class SendTurns(Generic[FlowT]):
    """One ring of flows for each class."""

    __slots__ = ("count", "rings")

    def __init__(self) -> None:
        self.rings: tuple[deque[FlowT], ...] = tuple(deque() for _ in range(RANKS))
        self.count = 0

    def put(self, flow: FlowT) -> None:
        """Appends a flow to the ring of its class; one whose turn has begun stays first."""
        ring = self.rings[flow.rank]
        flow.amid = flow.amid and flow.deficit > 0
        if flow.amid:
            ring.appendleft(flow)
        else:
            ring.append(flow)
        self.count += 1

    def take(self, rank: int) -> FlowT:
        ring = self.rings[rank]
        self.count -= 1
        while True:
            flow = ring.popleft()
            if flow.deficit <= 0:
                flow.deficit += QUANTUM
            if flow.deficit > 0:
                return flow
            ring.append(flow)


class Shares:
    """Token buckets that keep less urgent classes from starving: while it waits, class `rank` earns `shares[rank]` of
    the bytes of more urgent classes."""

    def __init__(self, shares: Sequence[float]) -> None:
        assert len(shares) == RANKS, "one share a class"
        self.shares = tuple(shares)
        self.tokens = [0.0] * RANKS

    def pick(self, rings: Sequence[Sequence[object]]) -> int:
        """Returns the class whose turn it is among those that wait, or -1."""
        first = -1
        for rank, ring in enumerate(rings):
            if ring:
                if first < 0:
                    first = rank
                elif self.tokens[rank] > 0:
                    return rank
        return first

    def spend(self, rank: int, nbytes: int, backlog: Sequence[int]) -> None:
        """Charges bytes posted by class `rank`, and credits the classes below that wait. `backlog[r]` is the number of
        waiting flows of class r."""
        if self.tokens[rank] > 0 and any(backlog[:rank]):
            self.tokens[rank] -= nbytes
        for lower in range(rank + 1, RANKS):
            if backlog[lower]:
                self.tokens[lower] = min(self.tokens[lower] + nbytes * self.shares[lower], BURST)


class Budgeted(Protocol):
    """A local NIC as the scheduler of sends sees it: bytes on their way, their limit, and the flows that wait
    for room."""

    inflight: int
    budget: int
    parked: SendTurns[SendFlow]


class DeficitRoundRobin:
    """Chooses which of an engine's flows posts next."""

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares = Shares(shares)
        self.ready: SendTurns[SendFlow] = SendTurns()
        self.backlog = [0] * RANKS

    def place(self, flow: SendFlow) -> None:
        """Adds a flow that has something to post, unless it waits already."""
        if not flow.placed:
            flow.placed = True
            self.backlog[flow.rank] += 1
            self.ready.put(flow)

    def take(self) -> SendFlow | None:
        """Removes and returns the flow that posts next, or None. The caller then calls `spent` or `park_at`, or finds
        that it has nothing."""
        if not self.ready.count:
            return None
        flow = self.ready.take(self.shares.pick(self.ready.rings))
        flow.placed = False
        self.backlog[flow.rank] -= 1
        return flow

    def spent(self, flow: SendFlow, nbytes: int, parked: list[SendFlow] | None = None) -> None:
        """Charges a flow for a frame that it posted. With `parked`, the flow waits in that list for room for the next
        one."""
        flow.deficit -= nbytes
        flow.amid = flow.busy
        if flow.rank < RANKS - 1 or any(self.backlog[: flow.rank]):
            self.shares.spend(flow.rank, nbytes, self.backlog)
        if parked is not None:
            self.park_at(flow, parked)
        elif flow.busy:
            self.place(flow)
        else:
            flow.deficit = min(flow.deficit, 0)  # an unused turn is not saved up

    def room(self, nic: Budgeted, rank: int) -> bool:
        """Says whether a class may post over a NIC. Less urgent classes may fill half of the budget only, so that an
        urgent frame never waits for a full one."""
        urgent = rank == 0 or self.shares.tokens[rank] > 0
        return nic.inflight < (nic.budget if urgent else max(1, nic.budget // 2))

    def park_at(self, flow: SendFlow, parked: list[SendFlow] | SendTurns[SendFlow]) -> None:
        """Lets a flow wait for room at a rail or NIC."""
        flow.placed = True
        self.backlog[flow.rank] += 1
        if isinstance(parked, SendTurns):
            parked.put(flow)
        else:
            parked.append(flow)

    def wake_all(self, parked: list[SendFlow]) -> None:
        """Wakes the flows parked at a rail, of which there is at most one a class."""
        for flow in parked:
            self.ready.put(flow)
        parked.clear()

    def wake_one(self, nic: Budgeted) -> None:
        """Wakes the next flow parked at a NIC, if the NIC has room for it. It is called again when that flow has taken
        the room or left it (`woken_by`), so that no room stays unused and the cost goes by frames, not by waiting
        flows."""
        if nic.parked.count:
            rank = self.shares.pick(nic.parked.rings)
            if self.room(nic, rank):
                flow = nic.parked.take(rank)
                flow.woken_by, flow.amid = nic, True
                self.ready.put(flow)
