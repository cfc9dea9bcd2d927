"""The conductor as a service: how its parts are connected, its clock, and its shutdown."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable

from kvmesh.clock import CaughtUp
from kvmesh.loading import LastingHeap
from kvmesh.native import library
from kvmesh.rpc import runner
from kvmesh.rpc.call_queue import CallQueue, caught_up
from kvmesh.rpc.fastpath.control import ControlFastPath
from kvmesh.rpc.fastpath.server import FastPathLimits
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.rpc.pb import conductor_pb2_grpc as pb_grpc
from kvmesh.rpc.server import Server
from kvmesh.services.conductor.balance.orders import BalanceOrders
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.conductor.domain import Event, Fetch
from kvmesh.services.conductor.fleet.watch import StoreWatch
from kvmesh.services.conductor.peers.leadership import ConductorLeadership
from kvmesh.services.conductor.records.journal import Header, Recorder
from kvmesh.services.conductor.records.log_file import LogFile
from kvmesh.services.conductor.servicer import ConductorServicer
from kvmesh.services.conductor.settings import (
    AdmissionSettings,
    AffinitySettings,
    BalanceSettings,
    Mode,
    Settings,
    ThresholdMode,
)
from kvmesh.services.conductor.weights_catch_up import WeightsCatchUp
from kvmesh.telemetry import names

SERVICE = "kvmesh.v1.Conductor"
TICK_S, LEAST_TICK_S = 0.2, 0.02
TICK_INSTANCES = 100  # rounds over all instances are spread over ticks, the more often they come: so each is short


async def run(config: ConductorConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serves until `stop`; `started` is called with the addresses. Raises ConfigError when a port is in use."""
    await runner.run(ConductorService(config), config, stop, started)


class ConductorService(runner.ServiceRunner):
    """One run of the conductor in this process."""

    def __init__(self, config: ConductorConfig) -> None:
        library.tell()
        super().__init__("conductor", tick_s=min(TICK_S, config.lease_ms / 8000))
        self._tick_s = self.tick_s  # at most
        header = Header(secrets.randbits(63), time.monotonic(), settings_of(config))
        self._log = LogFile(config.decision_log) if config.decision_log else None
        recorder = None
        if self._log is not None:
            recorder = Recorder(header, self._log.write, config.decision_log_mb << 20)
        state = header.brain() if recorder is None else recorder.state
        self.leadership = ConductorLeadership(config, self._deliver)
        self._queue = CallQueue(config.max_schedules, "max_schedules", names.CONDUCTOR_SCHEDULE_WAIT.observe)
        self._servicer = ConductorServicer(
            state,
            queue=self._queue,
            step=state.step if recorder is None else recorder.step,
            clock=time.monotonic,
            store_status=lambda: self._watch.status,
            leadership=self.leadership,
            store=config.store,
            peers=config.peers,
        )
        self._orders = BalanceOrders(self.leadership.leads, self._deliver)
        self._weights = WeightsCatchUp(self._servicer.control, state.newest_weights, self.leadership.leads)
        self.leadership.begin()
        self._advertised = config.advertise
        self._server: Server | None = None
        self._door_port = config.door_port
        self._door_limits = FastPathLimits.of(config)
        self._catching_up: asyncio.Task[None] | None = None
        self._watch = StoreWatch(
            config.store, self._deliver, silence_s=config.store_silence_ms / 1000, rng=random.Random()
        )
        self._stop = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._heap = LastingHeap(time.monotonic())

    def add_to(self, server: Server) -> None:
        """Adds the Conductor service to `server`."""
        self._server = server
        pb_grpc.add_ConductorServicer_to_server(self._servicer, server.grpc)
        server.serves(SERVICE)

    def door(self) -> ControlFastPath:
        """Returns the fast path for what instances and gateways call most often."""
        service = pb.DESCRIPTOR.services_by_name["Conductor"]
        methods = ("Heartbeat", "Schedule", "Release")
        return ControlFastPath(
            service,
            self._servicer,
            methods,
            self._door_port,
            names.CONDUCTOR_DOOR_CALLS,
            limits=self._door_limits,
            queue=self._queue,
            queued=("Schedule",),
        )

    async def start(self) -> None:
        """Follows the store master, and competes with other conductors if there are any."""
        await self.leadership.open(self._advertised or (self._server.address if self._server is not None else ""))
        self._following = asyncio.create_task(self._watch.run(self._stop))

    def _deliver(self, event: Event) -> None:
        self._servicer.deliver(event)

    def tick(self) -> None:
        """Ends leases and placements whose time is over, and sets gauges."""
        self.tick_s = min(self._tick_s, max(LEAST_TICK_S, TICK_S * TICK_INSTANCES / max(1, self._servicer.instances)))
        self.leadership.leads()  # the brain orders nothing once the lease has run out
        self._servicer.tick()
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.create_task(self._catch_up(), name="catch up")
        self._orders.carry_out(self._servicer.take_orders())
        self._weights.tick(time.monotonic())
        if self._log is not None:
            self._log.flush()
        if self._heap.due(now := time.monotonic()):
            self._heap.tick(len(asyncio.all_tasks()), now)

    async def _catch_up(self) -> None:
        self._deliver(CaughtUp(await caught_up(lambda: self._servicer.grpc_calls, time.monotonic)))

    async def close(self) -> None:
        """Leaves the store master's stream, and lets another conductor lead at once."""
        self._heap.close()
        self._stop.set()
        await self._orders.close()
        await self._weights.close()
        await self.leadership.close()
        for task in (self._following, self._catching_up):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._log is not None:
            self._log.close()


def settings_of(config: ConductorConfig) -> Settings:
    """Returns the brain's settings."""
    lease_s = config.lease_ms / 1000
    return Settings(
        lease_s=lease_s,
        heartbeat_s=config.heartbeat_interval_ms / 1000,
        heartbeats_per_s=config.heartbeats_per_s,
        slo_ttft_s=config.slo_ttft_ms / 1000,
        slo_tbt_s=config.slo_tbt_ms / 1000,
        stall_s=lease_s / 2,
        warm_up_s=2 * lease_s,
        balancing_threshold=config.balancing_threshold,
        threshold_mode=ThresholdMode(config.threshold_mode),
        fetch=Fetch(config.fetch),
        policy=config.policy,
        admission=AdmissionSettings(
            Mode(config.admission),
            config.slos,
            config.admission_confidence,
            batch_share=config.batch_share,
            batch_slowdown=config.batch_slowdown,
        ),
        affinity=AffinitySettings(config.session_affinity_ms / 1000, config.origin_affinity_ms / 1000),
        member_grace_s=3 * lease_s,
        balance=BalanceSettings(
            replicate=config.replicate,
            switch_roles=config.switch_roles,
            window_s=config.balance_window_ms / 1000,
            copy_bytes=config.replicate_mb << 20,
            dwell_s=config.role_dwell_ms / 1000,
            target_load=config.scale_target,
            zero_after_s=config.scale_to_zero_after_s,
        ),
    )
