"""What befalls the mesh, one thing after another: each is begun, lasts, and is made good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from tests.support.compose.containers import Container, Containers, until

PAUSE_S = 8.0  # longer than leases of conductor (1.5 s), master (2 s) and leaders (2 s)
CUT_S = 10.0

Strike = Callable[[Containers], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """`strike` begins it on entering, and has made it good when it is left. `breaks`: a client may see its connection
    break, for it is the gateway that dies."""

    name: str
    strike: Strike
    breaks: bool = False


async def _pick(mesh: Containers, who: str) -> Container:
    """ "decode", "store leader", "conductor standby" ...: the container that is meant; of workers the busiest one."""
    service, _, role = who.partition(" ")
    if role:
        leader, standby = await mesh.leader(service)
        return leader if role == "leader" else standby
    if service in ("prefill", "decode"):
        return await mesh.busiest(service)
    return (await mesh.of(service))[0]


async def _whole(mesh: Containers, service: str) -> None:
    """Every container of `service` runs and is healthy again."""

    async def running() -> bool:
        return all(one.running and not one.paused and one.health == "healthy" for one in await mesh.of(service))

    await until(running, f"{service} whole again", 120.0)


def scaled(service: str, away: int, back: int) -> Fault:
    """To another number of containers; the way back is a fault of its own."""

    @asynccontextmanager
    async def strike(mesh: Containers) -> AsyncIterator[None]:
        await mesh.scale(service, away)
        yield

    return Fault(f"scale {service} {back} → {away}", strike)


def killed(who: str) -> Fault:
    @asynccontextmanager
    async def strike(mesh: Containers) -> AsyncIterator[None]:
        one = await _pick(mesh, who)
        await mesh.kill(one.name)
        await asyncio.sleep(1.0)  # as long as an orchestrator needs to notice
        await mesh.start(one.name)
        yield
        await _whole(mesh, one.service)

    return Fault(f"kill -9 {who}", strike, breaks=who == "gateway")


def paused(who: str) -> Fault:
    @asynccontextmanager
    async def strike(mesh: Containers) -> AsyncIterator[None]:
        one = await _pick(mesh, who)
        await mesh.pause(one.name)
        try:
            await asyncio.sleep(PAUSE_S)
        finally:
            await mesh.unpause(one.name)
        yield
        await _whole(mesh, one.service)

    return Fault(f"pause {who} for {PAUSE_S:g} s", strike)


def unplugged(who: str) -> Fault:
    @asynccontextmanager
    async def strike(mesh: Containers) -> AsyncIterator[None]:
        one = await _pick(mesh, who)
        await mesh.disconnect(one.name)
        try:
            await asyncio.sleep(PAUSE_S)
        finally:
            await mesh.connect(one)
        yield
        await _whole(mesh, one.service)

    return Fault(f"network of {who} away for {PAUSE_S:g} s", strike)


def cut(source: str, target: str) -> Fault:
    """Packets go one way only, between the first containers of both."""

    @asynccontextmanager
    async def strike(mesh: Containers) -> AsyncIterator[None]:
        here, there = await _pick(mesh, source), await _pick(mesh, target)
        await mesh.cut(here.address, there.address)
        try:
            await asyncio.sleep(CUT_S)
        finally:
            await mesh.heal(here.address, there.address)
        yield

    return Fault(f"one-way partition {source} → {target} for {CUT_S:g} s", strike)


def restarted(service: str) -> Fault:
    """One container after the other, each healthy before the next."""

    @asynccontextmanager
    async def strike(mesh: Containers) -> AsyncIterator[None]:
        for one in await mesh.of(service):
            await mesh.restart(one.name)
            await _whole(mesh, service)
        yield

    return Fault(f"rolling restart of {service}", strike, breaks=False)


FAULTS = (
    scaled("prefill", 3, 2), scaled("prefill", 1, 3), scaled("prefill", 2, 1),
    scaled("decode", 3, 2), scaled("decode", 1, 3), scaled("decode", 2, 1),
    scaled("gateway", 3, 2), scaled("gateway", 1, 3), scaled("gateway", 2, 1),
    scaled("pool", 2, 1), scaled("pool", 1, 2),
    scaled("conductor", 3, 2), scaled("conductor", 2, 3),
    scaled("store", 3, 2), scaled("store", 2, 3),
    killed("prefill"), killed("decode"), killed("gateway"), killed("pool"), killed("conductor leader"),
    killed("conductor standby"), killed("store leader"), killed("store standby"), killed("redis"),
    paused("prefill"), paused("decode"), paused("gateway"), paused("pool"), paused("conductor leader"),
    paused("conductor standby"), paused("store leader"), paused("store standby"), paused("redis"),
    unplugged("prefill"), unplugged("decode"),
    cut("decode", "prefill"), cut("prefill", "decode"), cut("gateway", "decode"), cut("decode", "gateway"),
    restarted("prefill"), restarted("decode"), restarted("gateway"), restarted("pool"), restarted("conductor"),
    restarted("store"), restarted("redis"),
)  # fmt: skip
# Each kind of fault, at those where it means something else: they run unless others are asked for.
IN_CI = (
    "^scale decode 2 ", "^kill -9 (decode|conductor leader)$", "^pause decode ",
    "partition gateway → decode ", "^rolling restart of gateway$",
)  # fmt: skip
