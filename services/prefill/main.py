"""Runs a prefill instance as a service: its wiring, the liveness of its ranks, and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvmesh.blockservice.blocks import BlockService
from kvmesh.chunk_pipeline import ChunkCost
from kvmesh.errors import InternalError
from kvmesh.instance.front import Front, fronts_of, start_groups
from kvmesh.kvcache.grouped_store import GroupedStore
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PagePool
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import prefill_pb2_grpc as pb_grpc
from kvmesh.rpc.runner import observed
from kvmesh.rpc.server import Server
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.config import PrefillConfig
from kvmesh.services.prefill.report import Reporter
from kvmesh.services.prefill.runner import PrefillRunner
from kvmesh.services.prefill.servicer import PrefillServicer
from kvmesh.services.prefill.state import PrefillState
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

SERVICE = "kvmesh.v1.Prefill"
WATCH_S = 0.25


async def run(config: PrefillConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serves until `stop` is set. `started` is called with the addresses once calls are accepted.

    Raises ConfigError or CheckpointError at start, InternalError when a rank process ends.
    """
    instance = PrefillInstance(config)
    async with observed("prefill", instance.fronts[0].instance_id, config) as metrics:
        await instance.run(stop, lambda found: started({**found, "metrics": metrics}))


class PrefillInstance:
    """Runs one prefill instance in this process. Each data-parallel group of its ranks is a member of the mesh by
    itself, with prompts, pages and a store of its own; they begin and end together."""

    def __init__(self, config: PrefillConfig) -> None:
        config.check()
        self.config = config
        self.fronts = fronts_of(config, pb_common.ROLE_PREFILL, self._said, self._on_rank_lost)
        self._places: list[tuple[Front, PrefillRunner]] = []
        self._lost = asyncio.Event()
        self._cause = ""

    async def run(self, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
        """Starts the ranks, serves until `stop` is set, and ends in order. Raises InternalError when a rank process
        ends."""
        first = self.fronts[0]
        servicers: list[PrefillServicer] = []
        try:
            await start_groups(self.fronts, stop)
            try:
                for front in self.fronts:
                    runner = self._build(front)
                    servicers.append(PrefillServicer(runner, partial(_ref, front), writers(front)))
                    self._places.append((front, runner))
                for (front, runner), servicer in zip(self._places, servicers, strict=True):
                    await front.serve(
                        partial(_add_to, servicer),
                        runner.reporter.beat,
                        prefill_size_weight=self.config.size_weight,
                        prefill_tenant_fairness=self.config.tenant_fairness,
                    )
                names.PREFILL_READY.set(1)
                started({"address": first.address, "instance_id": first.instance_id})
                await watch(self._places, stop, self._lost)
                names.PREFILL_READY.set(0)
                await asyncio.gather(*(self._wind_down(*place) for place in self._places))
            finally:
                for servicer in servicers:
                    servicer.close()
                for _, runner in self._places:
                    runner.close()
        finally:
            await asyncio.gather(*(front.close() for front in self.fronts))
        if self._cause:
            raise InternalError(self._cause)

    def _build(self, front: Front) -> PrefillRunner:
        store = front.new_grouped_store() if front.cache_groups else front.new_store()
        runner = make_runner(front, make_state(front, self.config, store))
        front.can_pause(runner, on_weights=lambda: follow_weights(front, runner))
        connect(runner, front.attach(store, runner.pulled))
        return runner

    async def _wind_down(self, front: Front, runner: PrefillRunner) -> None:
        """Refuses what waits and lets what runs finish within the grace period."""
        runner.feed(ev.Stop())
        leaving = asyncio.ensure_future(front.depart())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.stop_grace_ms / 1000):
                await runner.idle.wait()
        await leaving

    def _said(self, place: int) -> Callable[[int, m.ToFront], None]:
        def said(rank: int, message: m.ToFront) -> None:
            if place < len(self._places):
                self._places[place][1].rank_said(rank, message)

        return said

    def _on_rank_lost(self, cause: str) -> None:
        self._cause = cause
        self._lost.set()
        log.error("%s", cause)
        for _, runner in self._places:
            runner.feed(ev.RankLost(0, cause))


def _ref(front: Front) -> pb_common.InstanceRef:
    return front.ref


def _add_to(servicer: PrefillServicer, server: Server) -> None:
    add(server, servicer)


def make_state(front: Front, config: PrefillConfig, store: NodeStore | GroupedStore) -> PrefillState:
    """Returns the brain of an instance whose ranks are ready."""
    brain, readies = brain_config(front, config), [rank.ready for rank in front.ranks]
    if not front.cache_groups:
        return PrefillState(brain, PagePool(min(ready.num_pages for ready in readies)), store)
    counts = zip(*([memory.num_pages for memory in ready.groups] for ready in readies), strict=True)
    return PrefillState(brain, [PagePool(min(pages)) for pages in counts], store)


def brain_config(front: Front, config: PrefillConfig) -> BrainConfig:
    """Returns the brain's configuration: what is configured, within what the ranks can take."""
    ready = front.ranks[0].ready
    cost = ChunkCost(ready.token_products, ready.pair_products) if ready.token_products else None
    return front.settled(config).brain(
        max_context_tokens=front.max_context_tokens,
        vocab_size=ready.vocab_size,
        world=len(front.ranks),
        layouts=front.group_shards or front.shards,
        groups=front.cache_groups,
        chunk_cost=cost,
    )


def make_runner(front: Front, state: PrefillState) -> PrefillRunner:
    """Returns the brain's shell; `connect` completes it."""
    reporter = Reporter(state, front.instance_id, front.gauges)
    return PrefillRunner(state, front.ranks, front.segments, reporter, front.weights, front.urge)


def follow_weights(front: Front, runner: PrefillRunner) -> None:
    """Has the shell check requests against the front's weights as they are now."""
    runner.weights = front.weights


def connect(runner: PrefillRunner, blocks: BlockService) -> None:
    """Connects the shell with the pulls, removals and lower tiers of the node store."""
    removals = blocks.removals
    runner.puller = blocks
    runner.state.lower = blocks.lower
    runner.reached = lambda: removals.reached
    removals.listeners.append(runner.feed)


def writers(front: Front) -> tuple[str, ...]:
    """Returns the transfer engine names of the ranks."""
    return tuple(rank.ready.engine_name for rank in front.ranks)


def add(server: Server, servicer: PrefillServicer) -> None:
    """Adds the Prefill service to `server`."""
    pb_grpc.add_PrefillServicer_to_server(servicer, server.grpc)
    server.serves(SERVICE)


async def watch(places: Sequence[tuple[Front, PrefillRunner]], *over: asyncio.Event) -> None:
    """Waits until one of `over` is set; tells each place's brain when its ranks fall silent and when they answer
    again."""
    ready, looks = [True] * len(places), [0] * len(places)
    waits = [asyncio.ensure_future(event.wait()) for event in over]
    try:
        while True:
            await asyncio.wait(waits, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
            if any(wait.done() for wait in waits):
                return
            for at, (front, runner) in enumerate(places):
                # A change counts when it is seen twice: after a pause of this process the ranks' answers are still
                # unread.
                looks[at] = looks[at] + 1 if (not front.unhealthy_reason) != ready[at] else 0
                if looks[at] < 2:
                    continue
                ready[at], looks[at] = not ready[at], 0
                names.PREFILL_READY.set(all(ready))
                cause = front.unhealthy_reason
                log.warning("ready again" if ready[at] else f"not ready: {cause}")
                runner.feed(ev.RanksBack() if ready[at] else ev.RanksSilent(cause))
                front.urge()
    finally:
        for wait in waits:
            wait.cancel()
