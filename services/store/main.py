"""Runs the store master as a service: its wiring, its clock, and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, cast

from kvmesh.errors import NotLeader, StaleTerm, Unavailable
from kvmesh.leader.leadership import Leadership
from kvmesh.leader.redis_lease import Redis, RedisLease
from kvmesh.rpc import runner
from kvmesh.rpc.call_queue import CallQueue
from kvmesh.rpc.fastpath.control import ControlFastPath
from kvmesh.rpc.fastpath.server import FastPathLimits
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.rpc.pb import store_pb2_grpc as pb_grpc
from kvmesh.rpc.server import Server
from kvmesh.rpc.terms import first_term
from kvmesh.services.store.config import StoreConfig, settled
from kvmesh.services.store.durable import CONFIG, Durable, Kept, MemoryDurable, RedisDurable, StateFile, nothing
from kvmesh.services.store.leadership import LeaderGuard, LeaderSession
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

SERVICE = "kvmesh.v1.StoreMaster"
TICK_S = 0.25
LOAD_RETRY_S = 0.1


async def run(config: StoreConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serves until `stop` is set; `started` is called with the addresses. Raises ConfigError when a port is in use."""
    await runner.run(Master(config), config, stop, started)


class Master(runner.ServiceRunner):
    """Runs the store master in this process: it leads, or stands by. It has a `session` while it leads."""

    def __init__(self, config: StoreConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins to lead at once when there is no Redis. Raises ConfigError when a setting of Redis or the state file
        is wrong."""
        super().__init__("store", tick_s=min(TICK_S, config.heartbeat_interval_ms / 1000))
        self._config = config
        self._clock = clock
        self._server: Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._redis: Redis | None = None
        self._durable: Durable = MemoryDurable()
        lease_s = None
        if config.redis:
            lease_s = config.leader_lease_ms / 1000
            self._redis = Redis(config.redis, config.mesh, lease_s / 3)
            self._durable = RedisDurable(self._redis)
        self._file = StateFile(config.state_path) if config.state_path else None
        if self._file is not None:
            self._durable = self._file
        self.session: LeaderSession | None = None
        self._leaderships = 0  # how many have begun, so that a task knows whether its own is still the current one
        first = max(first_term(), self._file.term + 1 if self._file is not None else 0)
        self.leadership = Leadership(lease_s, self._lead, self._rise, self._end, first=first)
        self._servicer = LeaderGuard(self.leadership, lambda: self.session, lambda: self.address)
        if lease_s is None:
            self.leadership.begin()

    @property
    def address(self) -> str:
        """Where others reach this master; "" before it listens."""
        return self._config.advertise or (self._server.address if self._server else "")

    def add_to(self, server: Server) -> None:
        """Serves StoreMaster on `server`."""
        self._server = server
        pb_grpc.add_StoreMasterServicer_to_server(cast(Any, self._servicer), server.grpc)
        server.serves(SERVICE)

    def door(self) -> ControlFastPath:
        """Returns the fast path for the calls that members make most often, and for those that readers make for every
        block."""
        service = pb.DESCRIPTOR.services_by_name["StoreMaster"]
        methods = ("Announce", "Beat", "Find", "Resolve")
        config = self._config
        return ControlFastPath(
            service,
            self._servicer,
            methods,
            config.door_port,
            names.STORE_DOOR_CALLS,
            limits=FastPathLimits.of(config),
            queue=CallQueue(config.max_announcements, "max_announcements"),
            queued=("Announce", "Find", "Resolve"),
        )

    async def start(self) -> None:
        """Competes for the lease in Redis, if there is one."""
        if self._redis is not None:
            self.leadership.start(RedisLease(self._redis, self.address, self._config.leader_lease_ms))

    def tick(self) -> None:
        """Lets time pass in the session, if this master leads."""
        if self.leadership.leads() and self.session is not None:
            with contextlib.suppress(NotLeader):  # it may have ceased to lead just now
                self.session.tick()

    async def close(self) -> None:
        """Ends the master: watchers are told, and another master may lead at once."""
        await self.leadership.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.session is not None:
            await self.session.close()
        if self._redis is not None:
            await self._redis.close()
        if self._file is not None:
            await self._file.close()

    # ── what leadership says ─────────────────────────────────────────────────────────────────────────

    def _lead(self, term: int) -> None:
        self._leaderships += 1
        if self._redis is None:
            kept = nothing() if self._file is None else self._file.begin(term)
            self._begin(self._made(term, kept, self._config))
        else:
            self._spawn(self._take_over(self._leaderships), "take over")

    async def _take_over(self, number: int) -> None:
        """Begins to lead with what earlier leaders kept, without which quotas and removals would be forgotten. The term
        may rise meanwhile."""
        while self.leadership.leads() and self._leaderships == number:
            try:
                kept = await self._durable.load()
            except Unavailable as err:
                log.warning("cannot load what earlier leaders kept: %s", err)
                await asyncio.sleep(LOAD_RETRY_S)
                continue
            config = await self._settled(kept)
            # A million names take many seconds, and the lease must be renewed meanwhile.
            session = await asyncio.to_thread(self._made, self.leadership.term, kept, config)
            if self.leadership.leads() and self._leaderships == number:
                session.rise(self.leadership.term)
                self._begin(session)
            return

    async def _settled(self, kept: Kept) -> StoreConfig:
        """Returns the configuration that this session goes by. It is written for later leaders, unless Redis refuses it
        now."""
        found = settled(self._config, kept[CONFIG])
        for note in found.notes:
            log.warning("%s", note)
        if found.keep:
            try:
                await self._durable.put(CONFIG, found.keep, self.leadership.term)
            except (StaleTerm, Unavailable) as err:
                log.warning("the configuration is not kept for later leaders: %s", err)
        return found.config

    def _begin(self, session: LeaderSession) -> None:
        self.session = session
        session.begin()

    def _made(self, term: int, kept: Kept, config: StoreConfig) -> LeaderSession:
        return LeaderSession(
            config,
            term=term,
            kept=kept,
            durable=self._durable,
            may_lead=self.leadership.leads,
            clock=self._clock,
        )

    def _rise(self, term: int) -> None:
        if self.session is not None:  # a session that is still being made takes the new term when it begins
            self.session.rise(term)

    def _end(self, why: str) -> None:
        ended, self.session = self.session, None
        if ended is not None:
            ended.end()
            self._spawn(ended.close(), "end a session")

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
