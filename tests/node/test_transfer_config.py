"""What operators say of transfers reaches the rank's engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvmesh.cli import plan
from kvmesh.cli.settings import MeshSettings
from kvmesh.node import pool
from kvmesh.node.pool_config import PoolConfig
from kvmesh.node.transfer_config import engine_config
from kvmesh.rpc.errors import ConfigError

TOPOLOGY = '{"cpu:0": [["eth0"], ["eth1"]]}'


def test_a_pool_nodes_settings_reach_the_engine() -> None:
    config = PoolConfig(transports=" tcp, shm", nics="eth0,eth1", topology=TOPOLOGY, advertise_host="here")
    made = engine_config(pool.PoolNode(config)._configure())
    assert (made.transports, made.nics, made.topology) == (("tcp", "shm"), ("eth0", "eth1"), TOPOLOGY)
    assert (made.host, made.advertise_host) == ("127.0.0.1", "here")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"transports": "smoke"}, "transports='smoke': a list of .*shm, tcp"),
        ({"transports": ""}, "transports='': a list of"),
        ({"transports": "tcp,shm,tcp"}, "transports='tcp,shm,tcp': one is named twice"),
        ({"nics": "a,b,a"}, "nics='a,b,a': one is named twice"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PoolConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        MeshSettings(model="m", **settings)  # type: ignore[arg-type]


def test_up_tells_every_member_that_holds_kv(tmp_path: Path) -> None:
    settings = MeshSettings(model="m", pool=1, transports="tcp", nics="eth0", topology=TOPOLOGY, http_port=0)
    specs = {spec.service: spec.argv for spec in plan.plan(settings, tmp_path, plan.Ports())}
    for service in ("prefill", "decode", "pool"):
        assert {"--transports=tcp", "--nics=eth0", f"--topology={TOPOLOGY}"} <= set(specs[service])
    assert not any(flag.startswith("--nics") for flag in specs["gateway"])


async def test_a_nic_that_is_not_there_is_a_bad_configuration() -> None:
    node = pool.PoolNode(PoolConfig(memory_mb=1, nics="nope0"))
    with pytest.raises(ConfigError, match="nics='nope0'"):
        await node.run(asyncio.Event(), lambda _: None)
