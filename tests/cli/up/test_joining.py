"""What a machine that joins a mesh takes from it and is refused for; where `up` listens and under which names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.up import checks, joining, plan
from kvmesh.cli.up.joining import FoundMesh, RunningMember, conductors_of, fitted, taken
from kvmesh.cli.up.settings import Joined, MeshSettings
from kvmesh.errors import ConfigError, ProtocolMismatch

CARD = {"name": "demo", "fingerprint": "ab" * 32, "kv_dtype": "bfloat16", "block_tokens": 32}
MESH = Joined(("10.0.0.1:7001", "10.0.0.1:7011"), ("10.0.0.1:7002",))


def found(*bearers: RunningMember, **card: Any) -> FoundMesh:
    return FoundMesh("10.0.0.1:7001", MESH, "10.0.0.1:7001", ({**CARD, **card},), bearers)


def fit(
    settings: MeshSettings, what: FoundMesh | None = None, own: str = "10.0.0.2", *, named: bool = False
) -> MeshSettings:
    prints = dict.fromkeys((one.path for one in settings.served), CARD["fingerprint"])
    return fitted(settings, what or found(), own, prints, named=named, hostname="ubuntu")  # type: ignore[arg-type]


def joiner(**settings: Any) -> MeshSettings:
    return MeshSettings(**{"model": "/m/folder", "join": "10.0.0.1", **settings})


# ── addresses ─────────────────────────────────────────────────────────────────────────────────────


def test_a_port_need_not_be_named() -> None:
    assert conductors_of("10.0.0.1") == ("10.0.0.1:7001",)
    assert conductors_of("alpha:7011, 10.0.0.1,fd00::1,[fd00::2]:9") == (
        "alpha:7011", "10.0.0.1:7001", "[fd00::1]:7001", "[fd00::2]:9",
    )  # fmt: skip
    for wrong in (":7001", "10.0.0.1:", "10.0.0.1:70000", "alpha:http"):
        with pytest.raises(ConfigError, match="must be HOST or HOST:PORT"):
            conductors_of(wrong)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host": "0.0.0.0"}, "host='0.0.0.0': others need one address to dial"),
        ({"host": "::"}, "others need one address"),
        ({"host": "0.0.0.0", "advertise_host": "127.0.0.1"}, "would dial themselves"),
        ({"host": "0.0.0.0", "advertise_host": "0.0.0.0"}, "would dial themselves"),
        ({"advertise_host": "10.0.0.1"}, "nobody who dials 10.0.0.1 would be heard: give --host 0.0.0.0"),
        ({"join": "a", "masters": 2, "redis": "auto"}, "masters=2: the mesh that is joined has its own"),
        ({"join": "a", "redis": "auto"}, "redis='auto': the mesh that is joined has its own"),
        ({"join": "a", "tls": True}, "with --join give --tls-cert"),
        ({"join": "a", "prefill": 0, "decode": 0}, "nothing would be started"),
    ],
)
def test_what_settings_refuse(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        MeshSettings(model="/m", **settings)
    assert says in refused.value.message


def test_a_name_that_means_this_machine_to_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 0))])
    with pytest.raises(ConfigError, match=r"host='beta': is 127\.0\.1\.1 on this machine, which no other reaches"):
        checks.check_reach(MeshSettings(model="/m", host="beta"))
    checks.check_reach(MeshSettings(model="/m"))


def test_the_plan_of_a_mesh_that_others_join(tmp_path: Path) -> None:
    settings = MeshSettings(model="/m/tiny", host="127.0.0.1")
    alone = {one.name: one for one in plan.plan(settings, tmp_path, plan.Ports())}
    assert "--instance-id=decode-0" in alone["decode-0"].argv
    assert not any(one.startswith("--advertise") for spec in alone.values() for one in spec.argv)
    assert plan.fixed_ports(settings) == {}
    told = dataclasses.replace(settings, conductor_port=7301, store_port=7302)
    ports = {one.name: one.address for one in plan.plan(told, tmp_path, plan.Ports())}
    assert (ports["conductor"], ports["store"]) == ("127.0.0.1:7301", "127.0.0.1:7302")
    settings = MeshSettings(
        model="/m/tiny", host="0.0.0.0", advertise_host="10.0.0.1", node_id="alpha", conductors=2, redis="redis://r:1/0"
    )
    specs = {one.name: set(one.argv) for one in plan.plan(settings, tmp_path, plan.Ports())}
    for name, port in (("conductor-0", 7001), ("conductor-1", 7011), ("store", 7002)):
        assert {f"--port={port}", f"--advertise=10.0.0.1:{port}", "--host=0.0.0.0"} <= specs[name]
    conductors = "10.0.0.1:7001,10.0.0.1:7011"
    assert f"--peers={conductors}" in specs["conductor-1"]
    wanted = {"--advertise-host=10.0.0.1", "--instance-id=decode-0@alpha", "--node-id=alpha", "--store=10.0.0.1:7002"}
    assert wanted | {f"--conductor={conductors}"} <= specs["decode-0"]
    assert f"--conductor={conductors}" in specs["gateway"]


def test_ports_that_are_to_be_free_ones_are_not_fixed() -> None:
    shared = MeshSettings(model="/m", host="10.0.0.1", conductor_port=0)
    assert plan.fixed_ports(shared) == {"store": 7002}
    assert plan.fixed_ports(joiner(conductor_port=7301)) == {}


def test_what_moves_kv_is_told_of_the_network(tmp_path: Path) -> None:
    settings = MeshSettings(model="/m/tiny", pool=1, transfer_network="trusted")
    specs = {one.name: one.argv for one in plan.plan(settings, tmp_path, plan.Ports())}
    told = {name for name, argv in specs.items() if "--transfer-network=trusted" in argv}
    assert told == {"prefill-0", "decode-0", "pool-0"}


def test_the_plan_of_a_machine_that_joins(tmp_path: Path) -> None:
    settings = fit(joiner(decode=2, pool=1, host="0.0.0.0"))
    specs = {one.name: set(one.argv) for one in plan.plan(settings, tmp_path, plan.Ports())}
    assert list(specs) == ["pool-0", "prefill-0", "decode-0", "decode-1"]
    wanted = {
        "--conductor=10.0.0.1:7001,10.0.0.1:7011", "--store=10.0.0.1:7002", "--host=0.0.0.0", "--node-id=ubuntu",
        "--advertise-host=10.0.0.2", "--instance-id=decode-1@ubuntu", "--block-tokens=32", "--dtype=bfloat16",
    }  # fmt: skip
    assert wanted <= specs["decode-1"]
    assert {"--store=10.0.0.1:7002", "--instance-id=pool-0@ubuntu"} <= specs["pool-0"]


# ── the mesh ──────────────────────────────────────────────────────────────────────────────────────


def test_it_takes_the_meshs_name_dtype_and_block_size() -> None:
    settings = fit(joiner())
    assert (settings.model_name, settings.dtype, settings.block_tokens) == ("demo", "bfloat16", 32)
    assert (settings.joined, settings.address, settings.node_id) == (MESH, "10.0.0.2", "ubuntu")
    empty = dataclasses.replace(found(), cards=())
    settings = fit(joiner(), empty)
    assert (settings.model_name, settings.dtype) == ("folder", "auto"), "a mesh without instances takes any"
    settings = fit(joiner(host="0.0.0.0"))
    assert (settings.host, settings.address) == ("0.0.0.0", "10.0.0.2")


@pytest.mark.parametrize(
    ("settings", "card", "named", "says"),
    [
        ({}, {"fingerprint": "cd" * 32}, False, "serves demo (cdcdcdcdcdcd), this checkpoint is abababababab"),
        ({"dtype": "float16"}, {}, False, "dtype='float16': the mesh at 10.0.0.1:7001 has bfloat16"),
        ({"block_tokens": 128}, {}, False, "has 32, and KV goes between equals alone; leave --block-tokens out"),
        ({}, {"weights_epoch": "7"}, False, "weights_epoch=0: the mesh at 10.0.0.1:7001 serves epoch 7 of demo"),
        ({"weights_epoch": 8}, {"weights_epoch": "7"}, False, "weights_epoch=8: the mesh at 10.0.0.1:7001 serves"),
        ({"weights_epoch": 8}, {}, False, "weights_epoch=8: the mesh at 10.0.0.1:7001 serves epoch 0"),
        ({"served_name": "mine"}, {}, True, "calls this checkpoint 'demo'"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], card: dict[str, Any], named: bool, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fit(joiner(**settings), found(**card), named=named)
    assert says in refused.value.message


def test_an_address_that_no_other_reaches_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"leaves from 127\.0\.0\.1, which no other machine reaches"):
        fit(joiner(), own="127.0.0.1")


def test_machines_of_one_host_name_get_names_of_their_own() -> None:
    other = RunningMember("decode-0@ubuntu", "10.0.0.1:9", "ubuntu")
    assert fit(joiner(), found(other)).node_id == "ubuntu-10.0.0.2"
    before = RunningMember("decode-0@ubuntu", "10.0.0.2:9", "ubuntu")
    settings = fit(joiner(), found(before))
    assert settings.node_id == "ubuntu", "a machine that comes back keeps its name"
    assert taken(settings, found(before)) == before
    assert taken(settings, found(RunningMember("decode-1@ubuntu", "10.0.0.2:9", "ubuntu"))) is None
    with pytest.raises(ConfigError, match=r"node_id='ubuntu': the machine of 10\.0\.0\.1:9 has this name"):
        fit(joiner(node_id="ubuntu"), found(other))


def test_versions() -> None:
    joining.check_version("PROTOCOL_VERSION_1", "it")
    for other in (7, "PROTOCOL_VERSION_UNSPECIFIED"):
        with pytest.raises(ProtocolMismatch, match="run the same kvmesh on both sides"):
            joining.check_version(other, "it")
