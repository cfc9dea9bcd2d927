"""The store master as a service: wiring, the clock, and the end."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable

from kvmesh.rpc import runner
from kvmesh.rpc.pb import store_pb2_grpc as pb_grpc
from kvmesh.rpc.server import Server
from kvmesh.telemetry import names
from services.store.config import StoreConfig
from services.store.domain import Role
from services.store.servicer import StoreMasterServicer
from services.store.state import MasterState
from services.store.stream import Watchers

SERVICE = "kvmesh.v1.StoreMaster"
TICK_S = 0.25


async def run(config: StoreConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serve until `stop`; `started` hears the addresses. Raises ConfigError when a port is in use."""
    await runner.run(Master(config), config, stop, started)


class Master(runner.Service):
    """One life of the store master in this process."""

    def __init__(self, config: StoreConfig, clock: Callable[[], float] = time.monotonic) -> None:
        interval_s = config.heartbeat_interval_ms / 1000
        super().__init__("store", tick_s=min(TICK_S, interval_s))
        self._clock = clock
        self.incarnation = secrets.randbits(63) | 1
        self.state = MasterState(
            lease_s=config.lease_ms / 1000,
            stall_s=config.lease_ms / 2000,
            max_members=config.max_members,
            max_store_blocks=config.max_store_blocks,
        )
        self.watchers = Watchers(
            incarnation=self.incarnation,
            interval_s=interval_s,
            max_events=config.watch_queue,
            max_bytes=config.watch_queue_bytes,
            max_watchers=config.max_watchers,
        )
        self.servicer = StoreMasterServicer(
            self.state,
            self.watchers,
            incarnation=self.incarnation,
            heartbeat_interval_ms=config.heartbeat_interval_ms,
            lease_ms=config.lease_ms,
            clock=clock,
        )

    def add_to(self, server: Server) -> None:
        """StoreMaster on `server`."""
        pb_grpc.add_StoreMasterServicer_to_server(self.servicer, server.grpc)
        server.serves(SERVICE)

    def tick(self) -> None:
        """Leases run out; gauges are set."""
        self.servicer.tick()
        roles = Counter(member.role for member in self.state.members)
        for role in Role:
            names.STORE_MEMBERS.labels(role=role.value).set(roles[role])
        names.STORE_HEARTBEAT_AGE.set(self.state.longest_silence_s(self._clock()))
        names.STORE_WATCHERS.set(len(self.watchers))
        known = self.state.blocks.map
        names.STORE_BLOCKS.set(len(known))
        names.STORE_REPLICAS.set(known.replicas)
        names.STORE_UNSWEPT.set(known.unswept)
        names.STORE_MAP_BYTES.set(known.memory_bytes())

    async def close(self) -> None:
        """Watchers hear that this is the end."""
        await self.servicer.close()
