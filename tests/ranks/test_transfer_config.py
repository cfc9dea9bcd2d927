"""What operators say of transfers reaches the rank's engine."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest

from kvmesh.cli.up import plan
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.config import load
from kvmesh.errors import ConfigError
from kvmesh.pool import pool
from kvmesh.pool.config import PoolConfig
from kvmesh.ranks.protocol import Configure
from kvmesh.ranks.transfer_config import engine_config
from kvmesh.transfer import EngineConfig

TOPOLOGY = '{"cpu:0": [["eth0"], ["eth1"]]}'


def test_a_pool_nodes_settings_reach_the_engine() -> None:
    config = PoolConfig(transports=" tcp, shm", nics="eth0,eth1", topology=TOPOLOGY, advertise_host="here")
    made = engine_config(pool.PoolNode(config)._configure())
    assert (made.transports, made.nics, made.topology) == (("tcp", "shm"), ("eth0", "eth1"), TOPOLOGY)
    assert (made.host, made.advertise_host) == ("127.0.0.1", "here")


def test_rdma_settings_reach_the_engine() -> None:
    """Through the message to the rank; what is not said is as the engine has it."""
    given = {"KVMESH_RDMA_TRAFFIC_CLASS": "104", "KVMESH_RDMA_PAIRS": "mlx5_0=mlx5_2, mlx5_1=mlx5_3"}
    config = load(PoolConfig, {"rdma_mtu": 2048, "rdma_gid_index": 3}, toml=None, env=given)
    sent = msgspec.msgpack.encode(pool.PoolNode(config)._configure())
    made = engine_config(msgspec.msgpack.decode(sent, type=Configure))
    assert made == replace(
        engine_config(pool.PoolNode(PoolConfig())._configure()),
        rdma_mtu=2048,
        rdma_gid_index=3,
        rdma_traffic_class=104,
        rdma_pairs=("mlx5_0=mlx5_2", "mlx5_1=mlx5_3"),
    )
    defaults = {one.name: one.default for one in fields(PoolConfig) if one.name.startswith("rdma_")}
    engine = EngineConfig()
    assert {name: getattr(engine, name) or "" for name in defaults} == {k: v or "" for k, v in defaults.items()}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rdma_mtu", 1500, "rdma_mtu=1500: not 0, 256, 512"),
        ("rdma_retry_cnt", 7, "rdma_retry_cnt=7: not in 0..6"),
        ("rdma_pairs", "mlx5_0", "rdma_pairs='mlx5_0': must be LOCAL=REMOTE"),
    ],
)
def test_bad_rdma_settings_are_refused_by_name_and_origin(key: str, value: int | str, words: str) -> None:
    env = {f"KVMESH_{key.upper()}": str(value)}
    with pytest.raises(ConfigError, match=words) as caught:
        load(PoolConfig, {}, toml=None, env=env)
    assert (caught.value.field, f"from KVMESH_{key.upper()}" in caught.value.message) == (key, True)


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
