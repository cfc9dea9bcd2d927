"""What conductors share through Redis: which of them leads, and so orders replication and roles, and the cordons that
all of them obey. Without Redis a conductor is alone, and leads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvmesh.clock import lease_clock
from kvmesh.errors import DeadlinePassed, InvalidRequest, KvmeshError, NotLeader, Unavailable, UnknownInstance
from kvmesh.leader.leadership import Leadership
from kvmesh.leader.redis_lease import Redis, RedisLease
from kvmesh.rpc.leader_client import LeaderClient, LeaderTracker
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.rpc.pb import store_pb2
from kvmesh.rpc.terms import first_term
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.conductor.domain import Cordon, CordonState, Event, Lead
from kvmesh.services.conductor.peers.cordon_book import CordonBook

STORE = store_pb2.DESCRIPTOR.services_by_name["StoreMaster"]
PART = "conductor"  # of the mesh's names in Redis
DRAIN_S = 3.0


class ConductorLeadership:
    """What this conductor shares with others. `deliver` gives an event to the brain, on the event loop."""

    def __init__(
        self, config: ConductorConfig, deliver: Callable[[Event], object], clock: Callable[[], float] = lease_clock
    ) -> None:
        """`clock` is as in Leadership. Raises ConfigError when a Redis setting is wrong."""
        self._config = config
        self._deliver = deliver
        self._address = ""
        self.opened = False  # what operators have said has been read, if Redis answered
        self._redis: Redis | None = None
        self._book: CordonBook | None = None
        self._store = LeaderClient(STORE, LeaderTracker(config.store))
        lease_s = None
        if config.redis:
            lease_s = config.leader_lease_ms / 1000
            self._redis = Redis(config.redis, config.mesh, lease_s / 3, PART)
            self._book = CordonBook(self._redis, deliver)
        first = 1 if lease_s is None else first_term()
        self._leadership = Leadership(lease_s, self._lead, self._lead, lambda why: self._lead(0), clock, first)

    def begin(self) -> None:
        """Leads at once if there is no Redis."""
        if self._redis is None:
            self._leadership.begin()
            self.opened = True

    async def open(self, address: str) -> None:
        """Reads the cordons, and competes for the lease under `address`."""
        self._address = address
        if self._redis is not None and self._book is not None:
            await self._book.open()
            self.opened = True
            self._leadership.start(RedisLease(self._redis, address, self._config.leader_lease_ms))

    async def close(self) -> None:
        """Gives the lease back, so that another may lead at once."""
        await self._leadership.close()
        if self._book is not None:
            await self._book.close()
        if self._redis is not None:
            await self._redis.close()
        await self._store.close()

    @property
    def address(self) -> str:
        """This conductor's address as others reach it; "" before `open`."""
        return self._address

    def leads(self) -> bool:
        """Whether this conductor leads now. Check it in the very turn in which something is ordered: a lease that has
        run out ends the leadership before this returns."""
        return self._leadership.leads()

    @property
    def as_proto(self) -> pb.Leadership:
        """The leadership as GetStatus shows it."""
        if self._redis is None:
            return pb.Leadership(role="alone", term=self._leadership.term, leader=self._address)
        if self.leads():
            return pb.Leadership(role="leader", term=self._leadership.term, leader=self._address)
        return pb.Leadership(role="standby", term=self._leadership.term, leader=self._leadership.leader)

    async def cordon(self, event: Cordon, was: CordonState, places: Sequence[str]) -> None:
        """Stores a cordon that the brain would accept, gives it to the brain and, if replicas are to move, tells the
        store master, to which each of the instance's `places` is a node.

        Raises Overloaded. Raises Unavailable when Redis, if there is one, has not answered, and nothing has changed; or
        when the store master could not be told, and everything else is done.
        """
        if self._book is not None:
            await self._book.put(event)
        else:
            self._deliver(event)
        if CordonState.DRAINING in (event.state, was):
            for place in places:
                await self._drain(place, cancel=event.state is not CordonState.DRAINING)

    async def _drain(self, instance_id: str, *, cancel: bool) -> None:
        request = store_pb2.DrainRequest(instance_id=instance_id, cancel=cancel)
        try:
            await self._store.call("Drain", request, DRAIN_S)
        except (UnknownInstance, InvalidRequest):
            if not cancel:
                text = f"{instance_id!r} gets no work; the store master does not know it, so no block is moved: say it"
                raise Unavailable(f"{text} again when it does", field="instance_id") from None
        except (Unavailable, DeadlinePassed, NotLeader) as err:
            done = "gets work again" if cancel else "gets no work"
            what = "its drain goes on" if cancel else "no block is moved"
            text = f"{instance_id!r} {done}, but no store master could be told, so {what}: say it again"
            raise Unavailable(f"{text} ({_short(err)})", field="instance_id") from None

    def _lead(self, term: int) -> None:
        self._deliver(Lead(term))


def _short(err: KvmeshError) -> str:
    return err.message[:200]
