"""Runs a decode instance as a service: it wires the parts and ends them in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from kvmesh.errors import InternalError, Unavailable
from kvmesh.instance.front import Front, fronts_of, start_groups
from kvmesh.ranks.protocol import ToFront
from kvmesh.rpc.pb import common_pb2, decode_pb2_grpc
from kvmesh.rpc.runner import observed
from kvmesh.rpc.server import Server
from kvmesh.services.decode import inputs as i
from kvmesh.services.decode.config import DecodeConfig
from kvmesh.services.decode.core import DecodeCore, shape_of
from kvmesh.services.decode.limits import Limits
from kvmesh.services.decode.servicer import DecodeServicer
from kvmesh.services.decode.state import DecodeState

log = logging.getLogger(__name__)

SERVICE = "kvmesh.v1.Decode"
TELL_S = 1.0  # the longest wait until gateways have been told the ends of their requests
DRAIN_S = 1.0  # the longest wait for cancelled writers


async def run(config: DecodeConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serves until `stop` is set. `started` is called with the addresses once the instance serves. Raises ConfigError
    or CheckpointError when it cannot begin, and InternalError when a rank dies."""
    config.limits()  # what is wrong is said before anything starts
    lost: list[str] = []

    def on_rank_lost(cause: str) -> None:
        lost.append(cause)
        stop.set()

    def said(place: int) -> Callable[[int, ToFront], None]:
        return lambda rank, message: cores[place].on_message(rank, message)

    # Each data-parallel group of ranks is a member of the mesh by itself: it has pages and a store of its own, and the
    # conductor balances them. They begin and end together.
    fronts = fronts_of(config, common_pb2.ROLE_DECODE, said, on_rank_lost)
    cores: list[DecodeCore] = []
    name = fronts[0].instance_id
    async with observed("decode", name, config) as metrics:
        try:
            await start_groups(fronts, stop)
            try:
                for front in fronts:
                    settled = front.settled(config)
                    cores.append(_make_core(front, settled, settled.limits()))
                servicers = [DecodeServicer(core) for core in cores]
                for front, core, servicer in zip(fronts, cores, servicers, strict=True):
                    most = front.settled(config).max_running
                    await front.serve(partial(_add_to, servicer), core.observer.report, most)
                started({"address": fronts[0].address, "metrics": metrics})
                await stop.wait()
                grace_s = config.stop_grace_ms / 1000
                await asyncio.gather(
                    *(wind_down(*parts, grace_s, lost) for parts in zip(fronts, cores, servicers, strict=True))
                )
            finally:
                await asyncio.gather(*(core.close() for core in cores))
        finally:
            await asyncio.gather(*(front.close() for front in fronts))
    if lost:
        raise InternalError(f"decode instance {name} lost a rank: {lost[0]}")


def _add_to(servicer: DecodeServicer, server: Server) -> None:
    add(server, servicer)


def _make_core(front: Front, config: DecodeConfig, limits: Limits) -> DecodeCore:
    store = front.new_grouped_store() if front.cache_groups else front.new_store()
    state = DecodeState(limits, shape_of(front, config.landing == "host"), store)
    blocks = front.attach(store, lambda result: core.pulled(result))
    core = DecodeCore(front, state, blocks, connect_s=config.connect_ms / 1000)
    front.can_pause(core, on_weights=core.weights_changed)
    return core


def add(server: Server, servicer: DecodeServicer) -> None:
    """Adds the Decode service to `server`."""
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server.grpc)
    server.serves(SERVICE)


async def wind_down(front: Front, core: DecodeCore, servicer: DecodeServicer, grace_s: float, lost: list[str]) -> None:
    """Ends the service in order: new requests are refused, running ones finish within `grace_s` or fail, writers drain,
    gateways are told."""
    why = f"decode instance {front.instance_id} " + (f"lost a rank: {lost[0]}" if lost else "is shutting down")
    core.feed(i.CloseDoor(Unavailable(why)))
    state, parted = core.state, asyncio.Event()
    # What rows leave behind when they part is moved away with the rest.
    after = parted if state.shape.groups else None
    leaving = asyncio.create_task(front.depart(after), name="say goodbye")
    if not lost:
        await core.settled(lambda: not state.scheduler.live or bool(lost), grace_s)
    if not lost and state.shape.groups:
        core.feed(i.EndAll(Unavailable(why), part=True))
        await core.settled(lambda: bool(lost) or not (state.requests or state.scheduler.seals), DRAIN_S)
    parted.set()
    core.feed(i.EndAll(Unavailable(why), lost=bool(lost)))
    if not lost:
        await core.settled(lambda: not state.requests or bool(lost), DRAIN_S)
    servicer.close()
    await core.settled(lambda: not core.wake, TELL_S)
    await asyncio.gather(leaving, return_exceptions=True)
