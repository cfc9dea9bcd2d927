"""A decode instance whose ranks are in two containers: what compose makes of the files, and services of that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

import pytest

from kvmesh.cli.serve import config_class, known_keys
from kvmesh.config import load
from kvmesh.instance.front import check_hosts
from tests.support.paths import ROOT

COMPOSE = ROOT / "compose"
DOCKER = shutil.which("docker")
WHY_NOT = "" if DOCKER else "docker is not installed"
if DOCKER and subprocess.run([DOCKER, "compose", "version"], capture_output=True).returncode:
    WHY_NOT = "docker compose is not installed"
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

TWO = {"KVMESH_DECODE_MESH": "tp=2", "KVMESH_DECODE_RANK_HOSTS": "1", "KVMESH_RANK_NETWORK": "10.0.0.0/24"}
THERE = {"KVMESH_REDIS": "redis://a:6379/0", "KVMESH_STORE": "a:7002", "KVMESH_CONDUCTOR": "a:7001"}


def services(*overlays: str, profile: str = "ranks", **env: str) -> dict[str, Any]:
    """The services as compose would start them."""
    files = [part for name in ("compose", *overlays) for part in ("-f", f"{name}.yaml")]
    argv = [str(DOCKER), "compose", *files, *(("--profile", profile) if profile else ()), "config", "--format", "json"]
    done = subprocess.run(
        argv, cwd=COMPOSE, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


def settings(service: str, told: dict[str, Any]) -> Any:
    ours = {key: value for key, value in told[service]["environment"].items() if key.startswith("KVMESH_")}
    return load(config_class(service), {}, toml=None, env=ours, also_known=known_keys())


def test_an_instance_waits_for_the_rank_host_beside_it() -> None:
    told = services(**TWO)
    decode, ranks = settings("decode", told), settings("ranks", told)
    check_hosts(decode)
    assert (decode.axes.world, decode.rank_host_count, decode.rank_network) == (2, 1, "10.0.0.0/24")
    assert told["ranks"]["command"] == ["serve", "ranks"] and told["ranks"]["image"] == told["decode"]["image"]
    assert ranks.store == decode.store, "they find each other through the store masters"
    assert ranks.model == decode.model == "/model" and told["ranks"]["volumes"] == told["decode"]["volumes"]


def test_by_default_there_is_none() -> None:
    told = services(profile="")
    assert "ranks" not in told
    assert (settings("decode", told).axes.world, settings("decode", told).rank_hosts) == (1, "")


@pytest.mark.parametrize("overlays", [("compose.host",), ("compose.host", "compose.gpu", "compose.rdma")])
def test_another_machine_runs_rank_hosts_alone(overlays: tuple[str, ...]) -> None:
    told = services(*overlays, **TWO, **THERE)["ranks"]
    assert told["network_mode"] == "host" and "serve ranks" in told["entrypoint"][-1]
    ranks = settings("ranks", {"ranks": told})
    assert (ranks.store, ranks.port, ranks.advertise_host) == ("a:7002", 0, "auto")
    assert ("reservations" in told["deploy"]["resources"]) == ("compose.gpu" in overlays)
