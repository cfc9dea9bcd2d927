"""What `kvmesh doctor --mesh` says of meshes that are made of facts, and of one that nobody is in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvmesh.cli.app import app
from kvmesh.cli.doctor import mesh as doctor_mesh
from kvmesh.cli.doctor import mesh_look
from kvmesh.cli.doctor.findings import Finding
from kvmesh.cli.doctor.mesh_look import DialledPeer, MeshAddresses, Seen, find_targets

A, B = "10.0.0.1", "10.0.0.2"


def instance(name: str, address: str, role: str = "PREFILL", node: str = "alpha", **more: Any) -> dict[str, Any]:
    return {
        "instance": {"instance_id": name, "address": address, "incarnation": 1},
        "role": f"ROLE_{role}", "model": "demo", "ready": True, "not_ready_reason": "", "silent_ms": 100,
        "node_id": node, "cordon": "CORDON_STATE_UNSPECIFIED",
        "card": {"fingerprint": "ab", "kv_dtype": "float32", "block_tokens": 64, "weights_epoch": 0},
        **more,
    }  # fmt: skip


def conductor(*instances: Mapping[str, Any], at: str = f"{A}:7001", role: str = "alone", **more: Any) -> DialledPeer:
    said = {
        "address": at, "protocol_version": "PROTOCOL_VERSION_1", "instances": list(instances),
        "leadership": {"role": role, "term": 3, "leader": at}, "store_master": "connected", **more,
    }  # fmt: skip
    return DialledPeer("conductor", at, ip=at.rpartition(":")[0], health="SERVING", said=said)


def master(at: str = f"{A}:7002", *, leading: bool = True) -> DialledPeer:
    return DialledPeer("store", at, ip=A, health="SERVING", said={"leading": leading, "leader": at, "term": 5})


def seen(*instances: dict[str, Any], conductors: tuple[DialledPeer, ...] = (), **more: Any) -> Seen:
    """All can be reached, but those that `more["peers"]` says otherwise of."""
    peers = {one["instance"]["address"]: one for one in instances}
    met = {
        at: DialledPeer("instance", at, ip=at.rpartition(":")[0], health="SERVING", rtt_ms=1, mtu=1500) for at in peers
    }
    views = tuple((f"{A}:7001", one["instance"]["instance_id"], at, 1) for at, one in peers.items())
    bad = more.pop("peers", {})
    whole = Seen(
        MeshAddresses(), conductors or (conductor(*instances),), (master(),), instances={**met, **bad}, views=views
    )
    return replace(whole, **more)


PAIR = (instance("p@alpha", f"{A}:10"), instance("d@beta", f"{B}:11", "DECODE", "beta"))


def told(what: Seen) -> dict[tuple[str, str], Finding]:
    return {(one.group, one.what): one for one in doctor_mesh.findings(what)}


def test_a_mesh_that_is_well() -> None:
    found = told(seen(*PAIR))
    assert {one.level for one in found.values()} == {"ok", "missing"}
    assert doctor_mesh.why_not(seen(*PAIR)) == ""
    assert "1.0 ms away, MTU 1500: KV over tcp" in found["machines", "beta"].found
    assert found["conductors", f"{A}:7001"].found == "is alone, 2 instances, 0.0 ms away"


@pytest.mark.parametrize(
    ("peer", "says", "todo"),
    [
        (DialledPeer("conductor", "x:7001", name_error="unknown"), "the name x cannot be resolved", "/etc/hosts"),
        (DialledPeer("conductor", f"{A}:7001", port_error="refused", ip=A), "refuses", "not on 127.0.0.1 alone"),
        (
            DialledPeer("conductor", f"{A}:7001", port_error="no answer", ip=A),
            "no way to",
            "firewalls let TCP 7001 through",
        ),
        (
            DialledPeer("conductor", f"{A}:7001", said={"error": "it speaks no TLS, and"}),
            "no TLS",
            "unset KVMESH_TLS_CA",
        ),
        (DialledPeer("conductor", f"{A}:7001", said={"error": "it may speak TLS"}), "may speak", "set KVMESH_TLS_CA"),
        (
            DialledPeer("conductor", f"{A}:7001", said={"error": "may want a client certificate"}),
            "",
            "set KVMESH_TLS_CERT",
        ),
        (
            DialledPeer("conductor", f"{A}:7001", said={"error": "Method not found!"}),
            "",
            "another program listens there",
        ),
        (conductor(protocol_version="PROTOCOL_VERSION_UNSPECIFIED"), "this build speaks 1", "the same kvmesh"),
        (conductor(store_master="silent"), "store master: silent", "the same on all machines"),
        (conductor(leadership={"role": "standby", "term": 1, "leader": "127.0.0.1:7001"}), "names 127", "--host"),
    ],
)
def test_what_is_wrong_with_a_conductor(peer: DialledPeer, says: str, todo: str) -> None:
    one = told(seen(conductors=(peer,)))["conductors", peer.address]
    assert one.level in ("broken", "warn")
    assert says in one.found
    assert todo in one.todo


def test_exactly_one_leads() -> None:
    second = f"{A}:7011"
    for roles, says in (
        (("leader", "leader"), f"{A}:7001 and {second} lead side by side"),
        (("alone", "alone"), "lead side by side"),
        (("standby", "standby"), "none leads"),
        (("leader", "standby"), ""),
    ):
        both = (conductor(*PAIR, role=roles[0]), conductor(*PAIR, at=second, role=roles[1]))
        one = told(seen(*PAIR, conductors=both)).get(("conductors", "leader"))
        assert (says in one.found and one.level == "broken") if one else not says
    masters = (master(leading=False), master(f"{A}:7012", leading=False))
    assert "none leads" in told(seen(*PAIR, masters=masters))["store masters", "leader"].found


@pytest.mark.parametrize(
    ("bad", "says", "todo"),
    [
        (instance("d", "127.0.0.1:11", "DECODE"), "advertises 127.0.0.1:11: others would dial them", "--host ADDRESS"),
        (instance("d", f"{B}:11", "DECODE", silent_ms=4000), "silent for 4.0 s", "is that machine up"),
        (instance("d", f"{B}:11", "DECODE", ready=False, not_ready_reason="loading"), "loading", "wait while"),
        (
            instance("d", f"{B}:11", "DECODE", ready=False, not_ready_reason="x", cordon="CORDON_STATE_CORDONED"),
            "x", "kvmesh uncordon d",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_instance(bad: dict[str, Any], says: str, todo: str) -> None:
    one = told(seen(PAIR[0], bad))["instances", "d"]
    assert one.level in ("broken", "warn")
    assert says in one.found
    assert todo in one.todo


def test_an_address_that_only_its_own_network_knows() -> None:
    for address, peer, todo in (
        (
            "172.18.0.5:11",
            DialledPeer("instance", "172.18.0.5:11", port_error="no answer", ip="172.18.0.5"),
            "host.yaml",
        ),
        ("decode-1:11", DialledPeer("instance", "decode-1:11", name_error="unknown"), "known in its own network only"),
        (f"{B}:11", DialledPeer("instance", f"{B}:11", port_error="no answer", ip=B), "open TCP 11 there"),
    ):
        mesh = seen(PAIR[0], instance("d", address, "DECODE"), peers={address: peer})
        one = told(mesh)["instances", "d"]
        assert one.level == "broken"
        assert "cannot be reached from here" in one.found
        assert todo in one.todo
        assert "KVMESH_ADVERTISE_HOST" in one.todo
        assert doctor_mesh.why_not(mesh) == "prefill and decode of one model are needed, ready are only: prefill"


def test_kv_that_does_not_fit_names_what_differs() -> None:
    card = {**PAIR[0]["card"], "block_tokens": 32}
    odd = instance("q", f"{B}:12", node="beta", card=card)
    one = told(seen(*PAIR, odd))["instances", "q"]
    assert one.found == "does not fit the others: block_tokens 32 (others: 64)"
    assert doctor_mesh.why_not(seen(*PAIR, odd)) == ""
    assert "only" in doctor_mesh.why_not(seen(odd, PAIR[1])), "each alone"


def test_names_that_two_bear() -> None:
    twin = instance("d@beta", f"{A}:12", "DECODE")
    views = ((f"{A}:7001", "d@beta", f"{B}:11", 1), ("the store master", "d@beta", f"{A}:12", 2))
    mesh = seen(*PAIR, conductors=(conductor(*PAIR),), views=views)
    mesh = replace(mesh, instances={**mesh.instances, **seen(twin).instances})
    one = told(mesh)["names", "d@beta"]
    assert one.found == f"is borne by {A}:12 and {B}:11: each drives the other out of the mesh"
    gone = {**mesh.instances, f"{A}:12": DialledPeer("instance", f"{A}:12", port_error="refused", ip=A)}
    assert ("names", "d@beta") not in told(replace(mesh, instances=gone)), "it has moved"
    both = told(seen(PAIR[0], instance("d", f"{B}:11", "DECODE")))["machines", "alpha"]
    assert both.level == "warn"
    assert "--node-id" in both.todo


def test_why_requests_cannot_be_served() -> None:
    assert (
        doctor_mesh.why_not(seen(conductors=(DialledPeer("conductor", "x:1", port_error="refused"),)))
        == "no conductor answers"
    )
    assert doctor_mesh.why_not(seen(conductors=(conductor(),))) == "no instance is ready and can be reached"
    late = DialledPeer("gateway", f"{A}:8001", said={"ready": False, "not_ready_reason": "knows no model"})
    assert "knows no model" in doctor_mesh.why_not(seen(*PAIR, gateways=(late,)))
    both = instance("c", f"{A}:10", "BOTH")
    assert doctor_mesh.why_not(seen(both)) == ""


def test_where_it_looks() -> None:
    env = {"KVMESH_CONDUCTOR": "a:1", "KVMESH_REDIS": "redis://r"}
    assert find_targets(MeshAddresses(), env) == MeshAddresses("a:1", "", "redis://r", "", "the environment")
    assert find_targets(MeshAddresses(store="s:2"), env) == MeshAddresses("", "s:2", "", "", "flags")


def test_an_address_where_nobody_is() -> None:
    peer = asyncio.run(mesh_look.dial("conductor", "127.0.0.1:9"))
    assert (peer.port_error, peer.own, peer.opens) == ("refused", True, False)
    assert asyncio.run(mesh_look.dial("conductor", "nowhere.invalid:9")).name_error
    result = CliRunner().invoke(app, ["doctor", "--mesh", "--conductor", "127.0.0.1:9", "--json"])
    assert result.exit_code == 1, result.output
    told = json.loads(result.output)
    assert (told["serves"], told["why_not"]) == (False, "no conductor answers")
    for args, says in ((["--conductor", "a:1"], "only --mesh takes one"), (["--mesh", "--listen"], "give one of them")):
        result = CliRunner().invoke(app, ["doctor", *args])
        assert result.exit_code == 2
        assert says in result.output
