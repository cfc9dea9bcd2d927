"""`kvmesh doctor --mesh`: a running mesh as this machine sees it; what is wrong with it in words, and what mends it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import ip_address, ip_network
from typing import Any

from rich.markup import escape

from kvmesh.cli import runs
from kvmesh.cli.console import console, wide_enough
from kvmesh.cli.doctor.findings import MARKS, Finding, screen
from kvmesh.cli.doctor.mesh_look import DialledPeer, MeshAddresses, Seen, find_targets, look
from kvmesh.cli.store.target import patiently
from kvmesh.cli.up.joining import host_port, only_inside
from kvmesh.errors import ConfigError
from kvmesh.rpc.addresses import is_loopback

SILENT_MS = 1_500  # the default lease of instances
DOCKER = tuple(ip_network(net) for net in ("172.16.0.0/12", "10.88.0.0/16", "10.244.0.0/16"))  # defaults of runtimes
ENV = {"conductor": "KVMESH_CONDUCTOR", "store": "KVMESH_STORE", "gateway": "--gateway", "Redis": "KVMESH_REDIS"}
SECURITY = "docs/operate/security.md"
ADVERTISE = "start it with an address that others reach: kvmesh up --host ADDRESS, KVMESH_ADVERTISE_HOST in containers"

Instance = Mapping[str, Any]  # InstanceStatus as JSON


def show(conductor: str, store: str, redis: str, gateway: str, *, as_json: bool) -> int:
    """Looks and tells. 0: requests can be served; 1: they cannot. ConfigError: nobody says where the mesh is, or a TLS
    file is wrong."""
    targets = find_targets(MeshAddresses(conductor, store, redis, gateway), os.environ)
    runs.secure(_run_of(targets))
    seen = asyncio.run(patiently("asking the mesh", look(targets)))
    found, why = findings(seen), why_not(seen)
    out = console()
    if as_json:
        told = {"serves": not why, "why_not": why, "findings": [dataclasses.asdict(one) for one in found]}
        out.out(json.dumps(told, indent=2), highlight=False)
        return int(bool(why))
    wide_enough(out)
    out.print(f"[dim]where to look was told by {escape(targets.origin)}[/]\n")
    out.print(screen(found))
    counts = ", ".join(f"{n} {level}" for level in MARKS if (n := sum(one.level == level for one in found)))
    if why:
        out.print(f"\n[red]✗[/] requests cannot be served: {escape(why)} ({counts})")
    else:
        out.print(f"\n[green]✓[/] requests can be served ({counts})")
    return int(bool(why))


def _run_of(targets: MeshAddresses) -> runs.Run | None:
    """The local mesh, when it was that which told: its certificates are used."""
    try:
        run = runs.find_running(None)
    except ConfigError:
        return None
    return run if targets.origin == str(run.run_dir) else None


# ── judging: pure ─────────────────────────────────────────────────────────────────────────────────


def findings(seen: Seen) -> list[Finding]:
    """Everything, most needed first."""
    groups: tuple[tuple[str, Callable[[Seen], Iterable[Finding]]], ...] = (
        ("conductors", _conductors),
        ("store masters", _masters),
        ("Redis", _redis),
        ("gateway", _gateways),
        ("machines", _machines),
        ("instances", _instances),
        ("names", _names),
    )
    return [dataclasses.replace(one, group=group) for group, judge in groups for one in judge(seen)]


def why_not(seen: Seen) -> str:
    """Why no request can be served; "" when requests can be."""
    if not any(one.answers for one in seen.conductors):
        return "no conductor answers"
    late = [one for one in seen.gateways if not one.answers or not one.said.get("ready", True)]
    if seen.gateways and len(late) == len(seen.gateways):
        return f"the gateway at {late[0].address} {late[0].said.get('not_ready_reason') or 'does not answer'}"
    able = [one for one in _known(seen) if one["ready"] and _opens(seen, one)]
    models = {identity(one) for one in able}
    for model in models:
        roles = {one["role"] for one in able if identity(one) == model}
        if "ROLE_BOTH" in roles or roles >= {"ROLE_PREFILL", "ROLE_DECODE"}:
            return ""
    if not able:
        return "no instance is ready and can be reached"
    has = ", ".join(sorted({one["role"].removeprefix("ROLE_").lower() for one in able}))
    return f"prefill and decode of one model are needed, ready are only: {has}"


def identity(one: Instance) -> tuple[Any, ...]:
    """Instances whose tuples are equal exchange KV."""
    card = one.get("card") or {}
    return one["model"], *(card.get(key) for key in ("fingerprint", "kv_dtype", "block_tokens", "weights_epoch"))


def _known(seen: Seen) -> list[Instance]:
    """Instances as the leading conductor knows them, else the one that knows most."""
    answering = [one for one in seen.conductors if one.answers]
    leads = [one for one in answering if one.said["leadership"]["role"] != "standby"]
    told = max(leads or answering, key=lambda one: len(one.said["instances"]), default=None)
    return list(told.said["instances"]) if told else []


def _silent_ms(seen: Seen) -> int:
    """How long an instance may be silent: the lease that conductors tell."""
    told = (int(one.said.get("lease_ms", 0)) for one in seen.conductors if one.answers)
    return max((SILENT_MS, *told))


def _opens(seen: Seen, one: Instance) -> bool:
    peer = seen.instances.get(one["instance"]["address"])
    return peer is None or (peer.opens and not _astray(seen, peer.address))


def _astray(seen: Seen, address: str) -> bool:
    """Does an address mean every machine to itself, in a mesh that is on several?"""
    others = [*seen.conductors, *seen.masters, *seen.instances.values()]
    return is_loopback(host_port(address)[0]) and any(not is_loopback(host_port(one.address)[0]) for one in others)


# ── services ──────────────────────────────────────────────────────────────────────────────────────


def _reached(peer: DialledPeer) -> Finding | None:
    """What keeps this machine from talking to it; None: nothing does."""
    what = f"{peer.kind} {peer.address}" if peer.kind in ("Redis", "gateway") else peer.address
    host, port = host_port(peer.address)
    if peer.name_error:
        todo = f"write the address in the place of the name, or make {host} known here (DNS, /etc/hosts)"
        return Finding(what, "broken", f"the name {host} cannot be resolved here: {peer.name_error}", todo=todo)
    if peer.port_error == "refused":
        todo = f"nothing listens on port {port} there: is it running, and on that address (not on 127.0.0.1 alone)?"
        return Finding(what, "broken", f"{peer.ip} refuses the connection", todo=todo)
    if peer.port_error:
        todo = f"is that machine up, and do firewalls let TCP {port} through? Ports: docs/operate/multi-host.md"
        return Finding(what, "broken", f"no way to {peer.ip}: {peer.port_error}", todo=todo)
    if error := str(peer.said.get("error", "")):
        return Finding(what, "broken", error, todo=_mend(peer, error))
    if peer.said and (version := peer.said.get("protocol_version", "PROTOCOL_VERSION_1")) != "PROTOCOL_VERSION_1":
        told = f"speaks protocol version {version}, this build speaks 1"
        return Finding(what, "broken", told, todo="run the same kvmesh on all machines")
    return None


def _mend(peer: DialledPeer, error: str) -> str:
    if "speaks no TLS" in error:
        return "only one side speaks TLS: unset KVMESH_TLS_CA here, or give the mesh --tls-cert, --tls-key, --tls-ca"
    if "may speak TLS" in error:
        return f"set KVMESH_TLS_CA, KVMESH_TLS_CERT and KVMESH_TLS_KEY here to the mesh's files ({SECURITY})"
    if "client certificate" in error:
        return f"set KVMESH_TLS_CERT and KVMESH_TLS_KEY here, too: the mesh takes no caller without ({SECURITY})"
    if "does not name" in error:
        return f"make certificates that name this address, or set KVMESH_TLS_SERVER_NAME ({SECURITY})"
    if "vouch" in error or "distrust" in error:
        return f"certificates of one authority are needed on all machines: tls_ca there and here ({SECURITY})"
    if "NOAUTH" in error:
        return f"give its password in {ENV['Redis']}: redis://:PASSWORD@HOST:6379/0"
    if "ethod not found" in error:
        return f"another program listens there: look at {ENV.get(peer.kind, 'its address')}"
    return "look at its log"


def _way(peer: DialledPeer) -> str:
    return "here" if peer.own else f"{peer.rtt_ms:.1f} ms away"


def _conductors(seen: Seen) -> Iterable[Finding]:
    if not seen.conductors:
        yield Finding(
            "conductors", "missing", "none was named", "whether requests can be placed", "--conductor HOST:7001"
        )
    roles = {}
    for peer in seen.conductors:
        if found := _reached(peer):
            yield found
            continue
        told = peer.said["leadership"]
        roles[peer.address] = told["role"]
        count = len(peer.said["instances"])
        word = {"leader": f"leads, term {told['term']}", "alone": "is alone"}.get(told["role"], "stands by")
        text = f"{word}, {count} instance{'' if count == 1 else 's'}, {_way(peer)}"
        if (state := peer.said.get("store_master", "connected")) != "connected":
            todo = "it knows of no KV blocks until then: is --store the same on all machines?"
            yield Finding(peer.address, "warn", f"{text}; store master: {state}", todo=todo)
            continue
        named = told["leader"]
        if named and only_inside(named, peer.address):
            yield Finding(
                peer.address, "broken", f"{text}; names {named} as leader, which is no machine", todo=ADVERTISE
            )
        else:
            yield Finding(peer.address, "ok", text)
    leaders = sorted(address for address, role in roles.items() if role == "leader")
    alone = sorted(address for address, role in roles.items() if role == "alone")
    if len(leaders) > 1 or len(alone) + len(leaders) > 1:
        why = f"{' and '.join(leaders + alone)} lead side by side: each orders copies and roles for itself"
        yield Finding("leader", "broken", why, todo="give all conductors one Redis and one mesh name (--redis, --mesh)")
    elif roles and not leaders and not alone:
        why = "none leads: requests are placed, hot blocks are not copied and roles not switched"
        yield Finding("leader", "broken", why, todo="do the conductors reach Redis? Their logs tell")


def _masters(seen: Seen) -> Iterable[Finding]:
    if not seen.masters:
        yield Finding("store masters", "missing", "none was named", "finding blocks", "--store HOST:7002")
    leaders, standing = [], 0
    for peer in seen.masters:
        if found := _reached(peer):
            yield found
            continue
        leading, leader = peer.said["leading"], peer.said["leader"]
        leaders += [peer.address] * leading
        standing += not leading
        word = f"leads, term {peer.said['term']}, {len(seen.members)} members" if leading else "stands by"
        if leader and only_inside(leader, peer.address):
            text = f"{word}; names {leader} as leader, which others cannot reach"
            yield Finding(peer.address, "broken", text, todo=ADVERTISE.replace("_HOST", ""))
        else:
            yield Finding(peer.address, "ok", f"{word}, {_way(peer)}")
    if len(leaders) > 1:
        todo = "give all masters one Redis and one mesh name (--redis, --mesh)"
        yield Finding("leader", "broken", f"{' and '.join(leaders)} lead side by side", todo=todo)
    elif standing and not leaders:
        why = "none leads: blocks are not found, instances are not known to live"
        yield Finding("leader", "broken", why, todo="do the masters reach Redis? Their logs tell")


def _redis(seen: Seen) -> Iterable[Finding]:
    for peer in seen.redis:
        yield _reached(peer) or Finding(peer.address, "ok", f"answers, {_way(peer)}")


def _gateways(seen: Seen) -> Iterable[Finding]:
    if not seen.gateways:
        yield Finding("gateway", "missing", "none was named", "a look at it", "--gateway HOST:8001 (its gRPC port)")
    for peer in seen.gateways:
        if found := _reached(peer):
            yield found
        elif peer.said["ready"]:
            yield Finding(peer.address, "ok", f"serves {', '.join(peer.said['models'])}, {_way(peer)}")
        else:
            todo = "it waits for a conductor that knows ready instances: see below"
            yield Finding(peer.address, "broken", str(peer.said["not_ready_reason"]), todo=todo)


# ── machines and instances ────────────────────────────────────────────────────────────────────────


def _everybody(seen: Seen) -> dict[str, tuple[str, str]]:
    """Returns machine and address of every instance and member, by its name."""
    told = [*_known(seen), *seen.members]
    return {one["instance"]["instance_id"]: (one["node_id"], one["instance"]["address"]) for one in told}


def _machines(seen: Seen) -> Iterable[Finding]:
    on: dict[str, list[DialledPeer]] = {}
    for node_id, address in _everybody(seen).values():
        on.setdefault(node_id, []).append(seen.instances.get(address) or DialledPeer("instance", address))
    for node_id, peers in sorted(on.items()):
        hosts = sorted({host_port(peer.address)[0] for peer in peers})
        if len(hosts) > 1:
            why = f"instances at {' and '.join(hosts)} say that they are on this machine"
            todo = "two machines of one name count as one (copies, near and far): give each its own --node-id"
            yield Finding(node_id, "warn", why, todo=todo)
            continue
        open_ = [peer for peer in peers if peer.opens]
        count = f"{len(peers)} node{'' if len(peers) == 1 else 's'}"
        if not open_:
            todo = "see its instances below; firewall: docs/operate/multi-host.md"
            yield Finding(node_id, "broken", f"{hosts[0]}, {count}, none can be reached from here", todo=todo)
            continue
        nearest = min(open_, key=lambda peer: peer.rtt_ms)
        if nearest.own:
            yield Finding(node_id, "ok", f"{hosts[0]}, {count}, this machine: KV over shm, tcp")
            continue
        ways = "tcp, and rdma if that machine has it" if seen.rdma else "tcp (no active RDMA device here)"
        text = f"{hosts[0]}, {count}, {nearest.rtt_ms:.1f} ms away, MTU {nearest.mtu or 'unknown'}: KV over {ways}"
        if 0 < nearest.mtu < 1280:
            yield Finding(node_id, "warn", text, todo="so small an MTU costs much CPU: is that a tunnel in a tunnel?")
        else:
            yield Finding(node_id, "ok", text)


def _instances(seen: Seen) -> Iterable[Finding]:
    known = _known(seen)
    if not known and any(one.answers for one in seen.conductors):
        todo = "kvmesh up --join HOST:7001 on a machine, or kvmesh serve prefill | decode"
        yield Finding("instances", "broken", "none is registered at a conductor", todo=todo)
    usual = _usual(known)
    for one in sorted(known, key=lambda one: str(one["instance"]["instance_id"])):
        yield _instance(seen, one, usual[one["model"]])
    names = {one["instance"]["instance_id"] for one in known}
    for member in seen.members:
        name, address = member["instance"]["instance_id"], member["instance"]["address"]
        if name in names:
            continue
        peer = seen.instances.get(address)
        if found := peer and _unreached(seen, name, peer):
            yield found
        elif member["role"] == "ROLE_POOL":
            yield Finding(name, "ok", f"pool node at {address}")
        elif seen.conductors:
            todo = "does it reach the conductors, and is its --conductor right? Its log tells"
            yield Finding(name, "warn", f"at {address}: a member of the store that no conductor knows", todo=todo)


def _usual(known: Sequence[Instance]) -> dict[str, tuple[Any, ...]]:
    """Returns of each model the identity that most of its instances have."""
    counts: dict[str, dict[tuple[Any, ...], int]] = {}
    for one in known:
        of_model = counts.setdefault(one["model"], {})
        of_model[identity(one)] = of_model.get(identity(one), 0) + 1
    return {model: max(found, key=lambda key: found[key]) for model, found in counts.items()}


def _instance(seen: Seen, one: Instance, usual: tuple[Any, ...]) -> Finding:
    name, address = str(one["instance"]["instance_id"]), one["instance"]["address"]
    if (peer := seen.instances.get(address)) and (found := _unreached(seen, name, peer)):
        return found
    if identity(one) != usual:
        keys = ("model", "fingerprint", "dtype", "block_tokens", "weights_epoch")
        differs = [
            f"{key} {str(mine)[:12]} (others: {str(theirs)[:12]})"
            for key, mine, theirs in zip(keys, identity(one), usual, strict=True)
            if mine != theirs
        ]
        todo = "KV goes between equals alone: the same checkpoint, --dtype and --block-tokens on all machines"
        return Finding(name, "broken", f"does not fit the others: {', '.join(differs)}", todo=todo)
    if one["silent_ms"] > _silent_ms(seen):
        todo = "is that machine up, and does it reach the conductors?"
        return Finding(name, "broken", f"at {address}: silent for {one['silent_ms'] / 1000:.1f} s", todo=todo)
    if not one["ready"]:
        return Finding(name, "warn", f"at {address}: {one['not_ready_reason']}", todo=_next(one))
    return Finding(name, "ok", f"ready at {address}, heard {one['silent_ms']} ms ago")


def _next(one: Instance) -> str:
    if str(one.get("cordon", "")) not in ("", "CORDON_STATE_UNSPECIFIED"):
        return f"kvmesh uncordon {one['instance']['instance_id']}, when it shall work again"
    if "died" in one["not_ready_reason"]:
        return "its heartbeats stayed out: does it run, is its machine overloaded, does it reach the store master?"
    return "wait while it loads or rests; else its log tells"


def _unreached(seen: Seen, name: str, peer: DialledPeer) -> Finding | None:
    """Why other machines cannot call it, as far as can be seen from here."""
    host = host_port(peer.address)[0]
    if _astray(seen, peer.address):
        return Finding(name, "broken", f"advertises {peer.address}: others would dial themselves", todo=ADVERTISE)
    if peer.opens and "NOT_SERVING" not in peer.health and peer.health != "SERVING":
        return Finding(name, "broken", f"at {peer.address}: {peer.health}", todo=_mend(peer, peer.health))
    if peer.opens:
        return None
    why = peer.name_error or peer.port_error
    if peer.name_error:
        todo = f"the name {host} is known in its own network only: {ADVERTISE}"
    elif any(ip_address(peer.ip) in net for net in DOCKER):
        todo = f"{peer.ip} may be an address of containers on its machine: compose/compose.host.yaml; or {ADVERTISE}"
    else:
        port = host_port(peer.address)[1]
        todo = f"open TCP {port} there (docs/operate/multi-host.md); if that is not its address: {ADVERTISE}"
    return Finding(name, "broken", f"advertises {peer.address}, which cannot be reached from here: {why}", todo=todo)


def _names(seen: Seen) -> Iterable[Finding]:
    """One name, two processes: each registers again and again, and drives the other out."""
    bearers: dict[str, set[str]] = {}
    for _, name, address, _ in seen.views:
        bearers.setdefault(name, set()).add(address)
    twice = {
        name: sorted(found)
        for name, found in bearers.items()
        if sum(one.opens for address in found if (one := seen.instances.get(address))) > 1
    }
    for name, addresses in sorted(twice.items()):
        why = f"is borne by {' and '.join(addresses)}: each drives the other out of the mesh"
        todo = "give each machine its own name: kvmesh up --node-id NAME, KVMESH_NODE_ID, or --instance-id of a service"
        yield Finding(name, "broken", why, todo=todo)
