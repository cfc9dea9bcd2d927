"""`kvmesh serve coupled`: prefill and decode in one instance, around one front, its ranks and its node store.

Both halves are the services' own; `coupling.py` says how they share memory and steps. A request whose placement names
this instance as prefill and decode never leaves it; as half of a pair it does what a prefill or decode instance does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvmesh.clock import Tick
from kvmesh.errors import InternalError
from kvmesh.instance.front import Front, fronts_of, start_groups
from kvmesh.kvcache.sources import Pulled
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import conductor_pb2 as pb_conductor
from kvmesh.rpc.runner import observed
from kvmesh.rpc.server import Server
from kvmesh.services.coupled.config import ROLES, CoupledConfig
from kvmesh.services.coupled.coupling import FIRST_OF_DECODE, Coupling, doors, to_prefill
from kvmesh.services.decode import main as decode
from kvmesh.services.decode.core import DecodeCore, shape_of
from kvmesh.services.decode.servicer import DecodeServicer
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill import main as prefill
from kvmesh.services.prefill.servicer import PrefillServicer
from kvmesh.telemetry import names

log = logging.getLogger(__name__)


async def run(config: CoupledConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serve until `stop`; `started` hears the addresses once calls are accepted.

    Raises ConfigError or CheckpointError at start, InternalError when a rank process ends."""
    instance = CoupledInstance(config)
    for half in ("prefill", "decode"):
        names.activate(half)
    async with observed("coupled", instance.fronts[0].instance_id, config) as metrics:
        await instance.run(stop, lambda found: started({**found, "metrics": metrics}))


class CoupledInstance:
    """Runs one instance in this process. Each data-parallel group of its ranks is a member of the mesh by itself, with
    requests, pages and a store of its own; they begin and end together."""

    def __init__(self, config: CoupledConfig) -> None:
        config.check()
        self.config = config
        config.limits()  # what is wrong is told before anything starts
        self.fronts = fronts_of(config, ROLES[config.role], self._said, self._on_rank_lost)
        self._places: list[CoupledShell] = []
        self._lost = asyncio.Event()
        self._causes: list[str] = []

    async def run(self, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
        """Start ranks, serve, end in order."""
        first, places = self.fronts[0], self._places
        try:
            await start_groups(self.fronts, stop)
            try:
                for front in self.fronts:
                    places.append(_shell(front, self.config))
                if "dp" in self.config.axes.ep:
                    for halves in places:
                        others = [other.coupling for other in places if other is not halves]
                        halves.coupling.others_run = partial(_any_runs, others)
                for front, halves in zip(self.fronts, places, strict=True):
                    await halves.serve()
                    front.switch = halves.become
                names.PREFILL_READY.set(1)
                started({"address": first.address, "instance_id": first.instance_id})
                await prefill.watch([(halves.front, halves.runner) for halves in places], stop, self._lost)
                for front in self.fronts:
                    front.switch = None
                names.PREFILL_READY.set(0)
                await asyncio.gather(*(halves.wind_down(self._causes) for halves in places))
            finally:
                await asyncio.gather(*(halves.close() for halves in places))
        finally:
            await asyncio.gather(*(front.close() for front in self.fronts))
        if self._causes:
            raise InternalError(f"instance {first.instance_id} lost a rank: {self._causes[0]}")

    def _said(self, place: int) -> Callable[[int, m.ToFront], None]:
        def said(rank: int, message: m.ToFront) -> None:
            if place < len(self._places):
                self._places[place].rank_said(rank, message)

        return said

    def _on_rank_lost(self, cause: str) -> None:
        self._causes.append(cause)
        self._lost.set()
        log.error("%s", cause)
        for halves in self._places:
            halves.runner.feed(ev.RankLost(0, cause))


def _any_runs(others: Sequence[Coupling]) -> bool:
    return any(other.runs for other in others)


def _shell(front: Front, configured: CoupledConfig) -> CoupledShell:
    config = front.settled(configured)
    shape = shape_of(front, config.landing == "host")
    brain = prefill.brain_config(front, config)
    store = front.new_grouped_store() if front.cache_groups else front.new_store()
    return CoupledShell(front, Coupling(brain, config.limits(), shape, store, config.mixed_chunk_tokens), config)


class CoupledShell:
    """The shells of both brains, and what goes between them."""

    def __init__(self, front: Front, coupling: Coupling, config: CoupledConfig) -> None:
        self.front = front
        self.coupling = coupling
        self.config = config
        self.runner = prefill.make_runner(front, coupling.prefill)
        blocks = front.attach(coupling.store, self._pulled)
        prefill.connect(self.runner, blocks)
        self.core = DecodeCore(front, coupling.decode, blocks, connect_s=config.connect_ms / 1000)
        self._prefill_servicer = PrefillServicer(self.runner, lambda: front.ref, prefill.writers(front), self.counters)
        self._decode_servicer = DecodeServicer(self.core, self.counters)
        own = self.runner.open_own_stream(self.core.own_said, self.core.adopt)
        self.core.own = lambda message: self.runner.take(own, message)
        self.runner.shell.fed, self.core.shell.fed = self._prefill_fed, self._decode_fed
        self._shut()
        front.can_pause(self.core, self.runner, on_weights=self._weights_changed)

    def _weights_changed(self) -> None:
        self.core.weights_changed()
        prefill.follow_weights(self.front, self.runner)

    async def serve(self) -> None:
        """Serves with the front; raises as `Front.serve` does."""
        config = self.config
        await self.front.serve(
            self.add_to,
            self.report,
            config.max_running,
            local_prefill_tokens=config.local_prefill_tokens,
            prefill_chunk_tokens=min(config.mixed_chunk_tokens, config.prefill_chunk_tokens),
            switchable=True,
            prefill_size_weight=config.size_weight,
        )

    def add_to(self, server: Server) -> None:
        """Prefill and Decode on `server`."""
        prefill.add(server, self._prefill_servicer)
        decode.add(server, self._decode_servicer)

    # ── in ───────────────────────────────────────────────────────────────────────────────────────

    def rank_said(self, rank: int, message: m.ToFront) -> None:
        """Front's `on_message`."""
        if to_prefill(message):
            self.runner.rank_said(rank, message)
        else:
            self.core.on_message(rank, message)

    def _pulled(self, result: Pulled) -> None:
        if result.ticket < FIRST_OF_DECODE:
            self.runner.pulled(result)
        else:
            self.core.pulled(result)

    def _prefill_fed(self) -> None:
        self.coupling.prefill_looked()
        if self.coupling.decode_due():
            self.core.feed(Tick())

    def _decode_fed(self) -> None:
        self.coupling.decode_looked()
        if self.coupling.prefill_due():
            self.runner.feed(Tick())

    # ── role ─────────────────────────────────────────────────────────────────────────────────────

    def become(self, role: pb.Role.ValueType) -> None:
        """New work is taken as this role says from here on; what runs goes on to its end, blocks stay."""
        was = self.front.role
        self.front.become(role)
        self._shut()
        log.info("role %s (was %s)", pb.Role.Name(role), pb.Role.Name(was))

    def _shut(self) -> None:
        remote, own = doors(self.front.role, self.front.instance_id, self.config.local_prefill_tokens)
        self.runner.feed(remote)
        self.core.feed(own)

    # ── what others see ──────────────────────────────────────────────────────────────────────────

    def report(self) -> pb_conductor.HeartbeatRequest:
        """Both halves in one: `queued_*` and prompts are prefill's; running, waiting and context the rows'."""
        beat, rows = self.runner.reporter.beat(), self.core.observer.report()
        load = beat.load
        load.running_requests = rows.load.running_requests
        load.waiting_requests = rows.load.waiting_requests
        load.context_tokens = rows.load.context_tokens
        load.pulled_bytes += rows.load.pulled_bytes
        beat.decode_samples.extend(rows.decode_samples)
        beat.finished_request_ids.extend(rows.finished_request_ids)
        beat.outcomes.extend(rows.outcomes)
        return beat

    def counters(self) -> pb.PoolCounters:
        """What both hold: a request whose prompt is being computed here counts as a handoff of each."""
        prompts, rows = self.runner.counters(), self.core.counters()
        for name in ("handoffs", "streams", "pulls"):
            setattr(prompts, name, getattr(prompts, name) + getattr(rows, name))
        prompts.requests = rows.requests
        prompts.windows, prompts.quarantined = rows.windows, rows.quarantined
        return prompts

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    async def wind_down(self, lost: list[str]) -> None:
        """Refuse what waits, let what runs finish for a while, tell those who wait for us."""
        self.runner.feed(ev.Stop())
        grace_s = self.config.stop_grace_ms / 1000
        await decode.wind_down(self.front, self.core, self._decode_servicer, grace_s, lost)
        if not lost:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.runner.idle.wait()
        self._prefill_servicer.close()

    async def close(self) -> None:
        """End streams, timers and tasks."""
        self._prefill_servicer.close()
        self.runner.close()
        await self.core.close()
