"""One continuous time as leader: its map, its members, its streams. All of it is void once it has ended."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable

from kvmesh.telemetry import names
from services.store.config import StoreConfig
from services.store.domain import Role
from services.store.durable import Durable, Kept
from services.store.orders import StoreOrderQueue
from services.store.policy.brain import PolicyLimits
from services.store.servicer import StoreMasterServicer
from services.store.state import MasterState
from services.store.stream import Watchers

log = logging.getLogger(__name__)


class LeaderSession:
    """`may_lead` is asked in the turn in which something is answered, published or ordered; `kept`: see `durable`."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        term: int,
        kept: Kept,
        durable: Durable,
        may_lead: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._may_lead = may_lead
        self._ended = False
        self._began_at = float("inf")
        self.incarnation = secrets.randbits(63) | 1
        self.state = MasterState(
            lease_s=config.lease_ms / 1000,
            stall_s=config.lease_ms / 2000,
            max_members=config.max_members,
            max_store_blocks=config.max_store_blocks,
            limits=PolicyLimits(
                max_map_bytes=config.max_map_mb << 20,
                hot_lookups=config.hot_lookups,
                max_names=config.max_names,
                tombstone_retention_s=config.tombstone_s,
            ),
            wall_ns=time.time_ns(),
            interval_s=config.heartbeat_interval_ms / 1000,
            heartbeats_per_s=config.heartbeats_per_s,
            announcements_per_s=config.announcements_per_s,
        )
        for bad in self.state.policy.lead(term, kept, clock()):
            log.error("what an earlier leader kept cannot be read: %s", bad)
        self.watchers = Watchers(
            incarnation=self.incarnation,
            interval_s=config.heartbeat_interval_ms / 1000,
            max_events=config.watch_queue,
            max_bytes=config.watch_queue_bytes,
            max_watchers=config.max_watchers,
            leads=self.leads,
            term=lambda: self.term,
        )
        self.servicer = StoreMasterServicer(
            self.state,
            self.watchers,
            incarnation=self.incarnation,
            clock=clock,
            leads=self.leads,
            durable=durable,
            orders=StoreOrderQueue(self.leads),
        )

    @property
    def term(self) -> int:
        """Of what it answers and orders."""
        return self.state.policy.term

    def leads(self) -> bool:
        """Whether this reign goes on, at this moment."""
        return not self._ended and self._may_lead()

    def begin(self) -> None:
        """From now on members find it. On the event loop; making a reign may be left to a thread."""
        self._began_at = self._clock()

    def young(self) -> bool:
        """Whether members of the reign before may not have found this one yet; those that live find it within a
        lease. Of how many members that lease was shows as they come: while some are still to come, those who have
        come make it longer than they have taken."""
        return self._clock() < self._began_at + self.state.pulse.lease_s

    def rise(self, term: int) -> None:
        """Go on under a higher term."""
        self.state.policy.term = term

    def end(self) -> None:
        """Nothing is answered, published or ordered from now on. `close` is to follow."""
        self._ended = True
        self.watchers.close()

    def tick(self) -> None:
        """Leases run out; gauges are set."""
        self.servicer.tick()
        roles = Counter(member.role for member in self.state.members)
        for role in Role:
            names.STORE_MEMBERS.labels(role=role.value).set(roles[role])
        names.STORE_HEARTBEAT_AGE.set(self.state.longest_silence_s(self._clock()))
        names.STORE_HEARTBEAT_INTERVAL.set(self.state.pulse.interval_s)
        names.STORE_ANNOUNCE_IDLE.set(self.state.words.idle_s)
        names.STORE_ANNOUNCE_GAP.set(self.state.words.gap_s)
        names.STORE_WATCHERS.set(len(self.watchers))
        known = self.state.blocks.map
        names.STORE_BLOCKS.set(len(known))
        names.STORE_REPLICAS.set(known.replicas)
        names.STORE_UNSWEPT.set(known.unswept)
        names.STORE_MAP_BYTES.set(known.memory_bytes())

    async def close(self) -> None:
        """End its streams and tasks."""
        self.end()
        await self.servicer.close()
