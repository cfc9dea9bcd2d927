"""`kvmesh up --join`: what a machine finds out about the mesh on other machines before it starts instances for it, and
the one line that refuses when these could not serve there."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.cli.up import plan
from kvmesh.cli.up.advertising import AUTO, address_towards
from kvmesh.cli.up.hashing import fingerprints
from kvmesh.cli.up.settings import CONDUCTOR_PORT, EVERY_ADDRESS, Joined, MeshSettings
from kvmesh.errors import ConfigError, ProtocolMismatch, Unavailable
from kvmesh.rpc.addresses import is_loopback, split
from kvmesh.rpc.server import join

DIAL_S = 2.0  # for a look at whether a port opens
GONE_S = 4.0  # longer than the default leases: an instance that a crash has ended is forgotten by then
PAUSE_S = 0.5
LIVE_MS = 3_000  # heard of so lately: it may live
OUT = ("192.0.2.1", 9)  # an address for documentation: the way to it is the default route


@dataclass(frozen=True, slots=True)
class RunningMember:
    """One who serves in the mesh: `host` of its address."""

    instance_id: str
    address: str
    node_id: str

    @property
    def host(self) -> str:
        return host_port(self.address)[0]


@dataclass(frozen=True, slots=True)
class FoundMesh:
    """What a mesh tells. `at`: the conductor that told; `cards`: of its models, one an instance, as JSON; `bearers`:
    instances and pool nodes that may live."""

    at: str
    joined: Joined
    leader: str
    cards: tuple[dict[str, Any], ...]
    bearers: tuple[RunningMember, ...]


def host_port(address: str) -> tuple[str, int]:
    """Of "host:port" or "[v6]:port"; port 0: there is none."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port) if port.isdecimal() else 0


def conductors_of(text: str) -> tuple[str, ...]:
    """The addresses that --join names, each with a port. ConfigError: what cannot be one."""
    found = []
    for one in split(text, "join"):
        v6 = one.count(":") > 1 and not one.startswith("[")
        address = join(one.strip("[]"), CONDUCTOR_PORT) if v6 or ":" not in one.rpartition("]")[2] else one
        host, port = host_port(address)
        if not host or not 0 < port < 65536:
            raise ConfigError(f"join={one!r}: must be HOST or HOST:PORT", field="join")
        found.append(address)
    return tuple(found)


def advertised(settings: MeshSettings) -> MeshSettings:
    """With `auto` replaced by this machine's own address on its default route. ConfigError: there is no such route."""
    if settings.advertise_host != AUTO or settings.join:
        return settings
    try:
        own = address_towards([OUT], "advertise_host", 0)
    except ConfigError:
        why = "this machine has no default route: name the address that others reach it at"
        raise ConfigError(f"advertise_host='auto': {why}", field="advertise_host") from None
    return dataclasses.replace(settings, advertise_host=own)


# ── asking ────────────────────────────────────────────────────────────────────────────────────────


def look(settings: MeshSettings) -> FoundMesh:
    """Ask the conductors of `settings.join`, then the store masters that they name, with the TLS of `settings`.

    Unavailable: nobody answers; ProtocolMismatch: it speaks another version, or is no conductor; ConfigError: what it
    names can be reached by its own machine only."""
    from kvmesh.rpc import security

    before = security.use(security.Security.load(settings))
    try:
        return asyncio.run(_look(conductors_of(settings.join)))
    finally:
        security.use(before)


async def _look(given: Sequence[str]) -> FoundMesh:
    from kvmesh.cli import collect

    told = await collect.ask_conductors(",".join(given))
    if "error" in told:
        raise _no_answer(given, told["error"])
    at = told["address"]
    check_version(told["protocol_version"], f"the conductor at {at}")
    masters = tuple(told["store_masters"])
    if inside := [one for one in masters if only_inside(one, at)]:
        mend = "start that mesh with kvmesh up --host ADDRESS, or its services with addresses that others reach"
        why = f"that conductor follows a store master at {inside[0]}, which no other machine reaches: {mend}"
        raise ConfigError(f"join={at!r}: {why}", field="join")
    conductors = await opening([one for one in told["peers"] if not only_inside(one, at)])
    store = await collect.ask_masters(",".join(masters))
    if "error" in store:
        why = f"{store['error']}; is the way from here to {', '.join(masters)} open?"
        raise Unavailable(f"join={at!r}: the store masters of that mesh: {why}", field="join")
    live = [one for one in told["instances"] if one["silent_ms"] < max(LIVE_MS, told.get("lease_ms", 0))]
    bearers = {one["instance"]["instance_id"]: one for one in (*store["members"], *live)}
    return FoundMesh(
        at,
        Joined(conductors or tuple(given), masters),
        told["leadership"]["leader"],
        tuple(one["card"] for one in told["instances"] if one.get("card")),
        tuple(RunningMember(name, one["instance"]["address"], one["node_id"]) for name, one in bearers.items()),
    )


def _no_answer(given: Sequence[str], error: str) -> Unavailable | ProtocolMismatch:
    at = ", ".join(given)
    if "method not found" in error.lower():
        return ProtocolMismatch(f"join={at!r}: what listens there is no conductor of kvmesh", field="join")
    ports = ", ".join(sorted({str(host_port(one)[1]) for one in given}))
    why = f"does `kvmesh up --host ...` run there, and is port {ports} open to this machine?"
    return Unavailable(f"join={at!r}: no conductor answers ({error}); {why}", field="join")


def check_version(told: str | int, who: str) -> None:
    """ProtocolMismatch unless `who` speaks this build's version; `told` as JSON has it."""
    from kvmesh.rpc import protocol
    from kvmesh.rpc.pb import common_pb2

    protocol.check(told if isinstance(told, int) else common_pb2.ProtocolVersion.Value(told), who)


def only_inside(address: str, at: str) -> bool:
    """Does `address`, named by the service at `at`, mean that service's own machine, and not this one?"""
    return is_loopback(host_port(address)[0]) and not is_loopback(host_port(at)[0])


async def opening(addresses: Sequence[str]) -> tuple[str, ...]:
    """Those whose port opens from here: a name of a network of containers, say, does not."""

    async def opens(address: str) -> bool:
        try:
            async with asyncio.timeout(DIAL_S):
                _, writer = await asyncio.open_connection(*host_port(address))
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    opened = await asyncio.gather(*(opens(one) for one in addresses))
    return tuple(one for one, yes in zip(addresses, opened, strict=True) if yes)


# ── deciding ──────────────────────────────────────────────────────────────────────────────────────


def fitted(
    settings: MeshSettings, found: FoundMesh, own: str, prints: Mapping[str, str], *, named: bool, hostname: str
) -> MeshSettings:
    """`settings` of the instances to be started. Pure.

    `own`: this machine's address; `prints`: fingerprints of every checkpoint, by folder; `named`: the model's name was
    given, else it is what the mesh calls that checkpoint. ConfigError: another model or epoch of it, KV that would not
    fit, a machine's name that is taken, an address that no other machine reaches."""
    if is_loopback(own):
        why = f"the way to {found.at} leaves from {own}, which no other machine reaches: name it by its address"
        raise ConfigError(f"join={settings.join!r}: {why} on the network, or give --advertise-host", field="join")
    listens = settings.host in EVERY_ADDRESS or not is_loopback(settings.host)
    settings = dataclasses.replace(
        settings, joined=found.joined, advertise_host=own, host=settings.host if listens else own
    )
    settings = _model(settings, found, prints, named)
    node_id = settings.node_id or hostname
    theirs = sorted(one.address for one in found.bearers if one.node_id == node_id and one.host != own)
    if theirs and settings.node_id:
        why = f"the machine of {theirs[0]} has this name in the mesh already; give another with --node-id"
        raise ConfigError(f"node_id={node_id!r}: {why}", field="node_id")
    return dataclasses.replace(settings, node_id=f"{node_id}-{own}" if theirs else node_id)


def _model(settings: MeshSettings, found: FoundMesh, prints: Mapping[str, str], named: bool) -> MeshSettings:
    """With the mesh's name, dtype and block size. A mesh without instances takes any."""
    if settings.lends and found.cards and prints[settings.model] not in {card["fingerprint"] for card in found.cards}:
        raise _other_model(settings.model, found, prints, "model")
    if not found.cards or not settings.ranks:
        return settings
    for at, served in enumerate(settings.served):
        mine = prints[served.path]
        equal = [card for card in found.cards if card["fingerprint"] == mine]
        card = next((card for card in equal if card["name"] == served.name), equal[0] if equal else None)
        if card is None:
            raise _other_model(served.path, found, prints, "add_model" if at else "model")
        if (theirs := int(card.get("weights_epoch", 0))) != settings.weights_epoch:
            why = f"the mesh at {found.at} serves epoch {theirs} of {card['name']}, and KV goes within one epoch alone"
            raise ConfigError(f"weights_epoch={settings.weights_epoch}: {why}", field="weights_epoch")
        if card["name"] != served.name and (named or at):
            why = f"the mesh at {found.at} calls this checkpoint {card['name']!r}"
            raise ConfigError(f"served_name={served.name!r}: {why}", field="served_name")
        fits = {"dtype": card["kv_dtype"], "block_tokens": card["block_tokens"]}
        for key, value in fits.items():
            if getattr(settings, key) not in (value, _default(key)):
                flag = f"--{key.replace('_', '-')}"
                why = f"the mesh at {found.at} has {value}, and KV goes between equals alone; leave {flag} out"
                raise ConfigError(f"{key}={getattr(settings, key)!r}: {why}", field=key)
        settings = dataclasses.replace(settings, **fits, **({} if at else {"served_name": card["name"]}))
    return settings


def _other_model(path: str, found: FoundMesh, prints: Mapping[str, str], key: str) -> ConfigError:
    serves = ", ".join(sorted({f"{card['name']} ({card['fingerprint'][:12]})" for card in found.cards}))
    mine = prints[path][:12]
    why = f"the mesh at {found.at} serves {serves}, this checkpoint is {mine}; give a folder of the same one"
    return ConfigError(f"model={path!r}: {why}", field=key)


def _default(key: str) -> object:
    return next(field.default for field in dataclasses.fields(MeshSettings) if field.name == key)


def taken(settings: MeshSettings, found: FoundMesh) -> RunningMember | None:
    """Who already bears a name that an instance of this machine would get. Pure."""
    names = {plan.identity(settings, one.name) for one in plan.processes(settings)}
    return next((one for one in found.bearers if one.instance_id in names), None)


# ── both ──────────────────────────────────────────────────────────────────────────────────────────


def joined(settings: MeshSettings, *, named: bool) -> tuple[MeshSettings, FoundMesh]:
    """Ask and decide; models are folders. Waits up to GONE_S for names that a crash here has left behind.

    Raises KvmeshError as `look` and `fitted`; ConfigError: a name stays taken."""
    found = look(settings)
    own = settings.advertise_host
    if own in ("", AUTO):
        outside = settings.host not in EVERY_ADDRESS and not is_loopback(settings.host)
        own = settings.host if outside else address_towards([host_port(found.at)], "join", 0)
    settings = fitted(settings, found, own, _fingerprints(settings), named=named, hostname=socket.gethostname())
    end = time.monotonic() + GONE_S
    while other := taken(settings, found):
        if time.monotonic() >= end:
            why = "does another kvmesh up --join run here? Give this one a name of its own with --node-id"
            raise ConfigError(f"{other.instance_id} serves in that mesh already, at {other.address}: {why}")
        time.sleep(PAUSE_S)
        found = look(settings)
    return settings, found


def _fingerprints(settings: MeshSettings) -> dict[str, str]:
    """Returns the fingerprint of every model's checkpoint, by folder; pool nodes alone need none."""
    return fingerprints([served.path for served in settings.served] if settings.ranks or settings.lends else [])
