"""What `kvmesh doctor --mesh` sees of a running mesh from this machine: every service dialled, greeted and asked, all
at once, two seconds each."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.cli import collect, runs
from kvmesh.cli.up.joining import host_port, only_inside
from kvmesh.errors import ConfigError
from kvmesh.rpc.addresses import split
from kvmesh.rpc.channels import connect
from kvmesh.rpc.server import join
from kvmesh.rpc.status import from_rpc_error

DEADLINE_S = 2.0  # for each step with one peer
_IP_MTU, _IPV6_MTU = 14, 24  # linux/in.h, linux/in6.h: of the route of a connected socket


@dataclass(frozen=True, slots=True)
class MeshAddresses:
    """Where a mesh is looked for: "a:1,b:2" each; "": not told. `origin`: who told, for people."""

    conductor: str = ""
    store: str = ""
    redis: str = ""
    gateway: str = ""
    origin: str = ""


@dataclass(frozen=True, slots=True)
class DialledPeer:
    """One address, as seen from here. Errors are "" when there was none; `said`: its status as JSON, or {"error": ...};
    `health`: of grpc.health.v1; `rtt_ms`: of opening the connection; `mtu`: of the way there, 0: unknown."""

    kind: str
    address: str
    name_error: str = ""
    port_error: str = ""
    ip: str = ""
    own: bool = False  # an address of this very machine
    rtt_ms: float = 0.0
    mtu: int = 0
    health: str = ""
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def opens(self) -> bool:
        return not (self.name_error or self.port_error)

    @property
    def answers(self) -> bool:
        return self.opens and "error" not in self.said


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything. `instances`: of every registered instance and member, by address; `views`: (who told, instance id,
    address, incarnation) of every look."""

    targets: MeshAddresses
    conductors: tuple[DialledPeer, ...] = ()
    masters: tuple[DialledPeer, ...] = ()
    redis: tuple[DialledPeer, ...] = ()
    gateways: tuple[DialledPeer, ...] = ()
    members: tuple[Mapping[str, Any], ...] = ()  # as the leading store master tells
    instances: Mapping[str, DialledPeer] = field(default_factory=dict)
    views: tuple[tuple[str, str, str, int], ...] = ()
    rdma: tuple[str, ...] = ()  # active devices of this machine


def find_targets(given: MeshAddresses, env: Mapping[str, str]) -> MeshAddresses:
    """Flags, else the environment, else the mesh that runs here. ConfigError: none of them tells of a conductor or a
    store master."""
    if given.conductor or given.store:
        return replace(given, origin="flags")
    told = MeshAddresses(
        env.get("KVMESH_CONDUCTOR", ""),
        env.get("KVMESH_STORE", ""),
        given.redis or env.get("KVMESH_REDIS", ""),
        given.gateway,
        "the environment",
    )
    if told.conductor or told.store:
        return told
    try:
        run = runs.find_running(None)
    except ConfigError:
        why = "say where it is: kvmesh doctor --mesh --conductor HOST:7001 (or KVMESH_CONDUCTOR)"
        raise ConfigError(f"no mesh runs on this machine: {why}", field="conductor") from None
    redis = run.services.get("redis", {}).get("address", "")
    return MeshAddresses(
        runs.conductors(run),
        runs.masters(run),
        given.redis or (f"redis://{redis}/0" if redis else ""),
        given.gateway or str(run.told.get("grpc", "")),
        str(run.run_dir),
    )


async def look(targets: MeshAddresses) -> Seen:
    """All of it; three rounds: who was named, whom they name, and a second look at who bears which name."""
    first = await _services(targets, (), ())
    found = _named(first)
    more = await _services(
        MeshAddresses(conductor=",".join(found["conductor"]), store=",".join(found["store"])),
        first.conductors,
        first.masters,
    )
    conductors, masters = (*first.conductors, *more.conductors), (*first.masters, *more.masters)
    leading = [one for one in masters if one.said.get("leading")]
    members = tuple((await collect.ask_masters(",".join(one.address for one in leading)))["members"]) if leading else ()
    views = list(_views(conductors, members))
    addresses = dict.fromkeys(view[2] for view in views)
    instances, again = await asyncio.gather(
        asyncio.gather(*(_meet("instance", one) for one in addresses)),
        asyncio.gather(*(_ask("conductor", one.address) for one in conductors if one.answers)),
    )
    second = [replace(one, said=said) for one, said in zip([c for c in conductors if c.answers], again, strict=True)]
    views += [view for view in _views(second, ()) if view not in views]
    late = [one for one in dict.fromkeys(view[2] for view in views) if one not in addresses]
    instances += await asyncio.gather(*(_meet("instance", one) for one in late))
    return Seen(
        targets,
        conductors,
        masters,
        first.redis,
        first.gateways,
        members,
        {one.address: one for one in instances},
        tuple(views),
        _rdma(),
    )


async def _services(targets: MeshAddresses, conductors: Sequence[DialledPeer], masters: Sequence[DialledPeer]) -> Seen:
    """The named ones that are not among those known already."""
    jobs = []
    for kind, text, known in (
        ("conductor", targets.conductor, conductors),
        ("store", targets.store, masters),
        ("gateway", targets.gateway, ()),
    ):
        addresses = split(text, kind) if text else ()
        jobs += [_meet(kind, one) for one in addresses if one not in {peer.address for peer in known}]
    if targets.redis:
        jobs.append(_meet_redis(targets.redis))
    found = await asyncio.gather(*jobs)
    by_kind = {
        kind: tuple(one for one in found if one.kind == kind) for kind in ("conductor", "store", "gateway", "Redis")
    }
    return Seen(targets, by_kind["conductor"], by_kind["store"], by_kind["Redis"], by_kind["gateway"])


def _named(seen: Seen) -> dict[str, tuple[str, ...]]:
    """Addresses that conductors and masters name: other conductors, masters, leaders."""
    conductors, masters = [], []
    for one in seen.conductors:
        named = (*one.said.get("conductors", ()), one.said.get("leadership", {}).get("leader", ""))
        conductors += [name for name in named if not only_inside(name, one.address)]
        masters += [name for name in one.said.get("store_masters", ()) if not only_inside(name, one.address)]
    for one in seen.masters:
        masters += [name for name in (one.said.get("leader", ""),) if not only_inside(name, one.address)]
    return {
        kind: tuple(dict.fromkeys(one for one in found if host_port(one)[1]))
        for kind, found in (("conductor", conductors), ("store", masters))
    }


def _views(
    conductors: Iterable[DialledPeer], members: Iterable[Mapping[str, Any]]
) -> Iterable[tuple[str, str, str, int]]:
    told = [(peer.address, one["instance"]) for peer in conductors for one in peer.said.get("instances", ())]
    told += [("the store master", one["instance"]) for one in members]
    return ((who, ref["instance_id"], ref["address"], ref["incarnation"]) for who, ref in told)


# ── one peer ──────────────────────────────────────────────────────────────────────────────────────


async def _meet(kind: str, address: str) -> DialledPeer:
    """Dial; if that works, greet and ask."""
    peer = await dial(kind, address)
    if not peer.opens:
        return peer
    health, said = await asyncio.gather(_health(address), _ask(kind, address))
    return replace(peer, health=health, said=said)


async def dial(kind: str, address: str) -> DialledPeer:
    """Does the name resolve, does the port open, how far is it?"""
    host, port = host_port(address)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(DEADLINE_S):
            infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as err:
        return DialledPeer(kind, address, name_error=getattr(err, "strerror", "") or "no answer from the name service")
    family, _, _, _, where = infos[0]
    ip = str(where[0])
    own, mtu = _way(family, where)
    start = time.perf_counter()
    try:
        async with asyncio.timeout(DEADLINE_S):
            _, writer = await asyncio.open_connection(ip, port)
    except TimeoutError:
        return DialledPeer(kind, address, port_error="no answer", ip=ip, own=own, mtu=mtu)
    except OSError as err:
        why = "refused" if isinstance(err, ConnectionRefusedError) else os.strerror(err.errno or 0)
        return DialledPeer(kind, address, port_error=why, ip=ip, own=own, mtu=mtu)
    rtt_ms = (time.perf_counter() - start) * 1000
    writer.close()
    return DialledPeer(kind, address, ip=ip, own=own, rtt_ms=rtt_ms, mtu=mtu)


def _way(family: int, where: Any) -> tuple[bool, int]:
    """Does an address mean this machine, and the MTU of the way there. Nothing is sent."""
    v6 = family == socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if v6 else (socket.IPPROTO_IP, _IP_MTU)
            return probe.getsockname()[0] == where[0], probe.getsockopt(level, option)
    except OSError:
        return False, 0


async def _health(address: str) -> str:
    async with connect(address) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        except grpc.RpcError as err:
            return from_rpc_error(err).message
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def _ask(kind: str, address: str) -> Mapping[str, Any]:
    if kind == "conductor":
        return await collect.ask_conductor(address)
    if kind == "store":
        return await collect.ask_master(address)
    if kind == "gateway":
        return await collect.ask_gateway(address)
    return {}


async def _meet_redis(url: str) -> DialledPeer:
    """PING; without TLS and password only, else whether the port opens."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return DialledPeer("Redis", parts.path)
    peer = await dial("Redis", join(parts.hostname or "127.0.0.1", parts.port or 6379))
    if not peer.opens or parts.scheme == "rediss" or parts.password:
        return peer
    try:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection(peer.ip, parts.port or 6379)
            writer.write(b"PING\r\n")
            line = (await reader.readline()).decode("utf-8", "replace").strip()
            writer.close()
    except (OSError, TimeoutError):
        line = "no answer"
    return replace(peer, said={} if line == "+PONG" else {"error": line.lstrip("-") or "it closed the connection"})


def _rdma() -> tuple[str, ...]:
    from kvmesh.transfer.host import look as look_at_host

    return tuple(device.name for device in look_at_host(Path("/"), os.environ).rdma if device.active)
