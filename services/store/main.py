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
from services.store.servicer import StoreMasterServicer
from services.store.state import MasterState, Publish, Role

SERVICE = "kvmesh.v1.StoreMaster"
TICK_S = 0.25


async def run(config: StoreConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serve until `stop`; `started` hears the addresses. Raises ConfigError when a port is in use."""
    await runner.run(Master(config), config, stop, started)


class Master(runner.Service):
    """One life of the store master in this process."""

    def __init__(self, config: StoreConfig) -> None:
        super().__init__("store", tick_s=min(TICK_S, config.heartbeat_interval_ms / 1000))
        self._state = MasterState(lease_s=config.lease_ms / 1000, stall_s=config.lease_ms / 2000)
        self._servicer = StoreMasterServicer(
            self._state,
            incarnation=secrets.randbits(63) | 1,
            heartbeat_interval_ms=config.heartbeat_interval_ms,
            lease_ms=config.lease_ms,
            watch_queue=config.watch_queue,
            clock=time.monotonic,
            observe=_count,
        )

    def add_to(self, server: Server) -> None:
        """StoreMaster on `server`."""
        pb_grpc.add_StoreMasterServicer_to_server(self._servicer, server.grpc)
        server.serves(SERVICE)

    def tick(self) -> None:
        """Leases run out; gauges are set."""
        self._servicer.tick()
        roles = Counter(member.role for member in self._state.members)
        for role in Role:
            names.STORE_MEMBERS.labels(role=role.value).set(roles[role])
        names.STORE_HEARTBEAT_AGE.set(self._state.longest_silence_s(time.monotonic()))
        names.STORE_WATCHERS.set(self._servicer.watchers)

    async def close(self) -> None:
        """Watchers hear that this is the end."""
        self._servicer.close()


def _count(event: Publish) -> None:
    names.STORE_CHANGES.labels(change=event.change.value).inc()
