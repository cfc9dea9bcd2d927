"""`auto`: the address of this machine on the way to its peers."""

from __future__ import annotations

import pytest

from kvmesh.cli.up.advertising import resolved
from kvmesh.errors import ConfigError
from kvmesh.pool.config import PoolConfig
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.decode.config import DecodeConfig
from kvmesh.services.store.config import StoreConfig


def test_a_worker_advertises_the_way_to_its_conductor() -> None:
    config = DecodeConfig(host="0.0.0.0", advertise_host="auto", conductor="nowhere.invalid:1,127.0.0.1:7001")
    assert resolved(config).advertise_host == "127.0.0.1"
    assert resolved(PoolConfig(advertise_host="auto", store="[::1]:7002")).advertise_host == "::1"
    left = DecodeConfig(advertise_host="10.1.2.3")
    assert resolved(left) is left


def test_a_master_advertises_the_way_to_redis_with_its_port() -> None:
    config = StoreConfig(host="0.0.0.0", port=7002, advertise="auto", redis="redis://127.0.0.1:6379/0")
    assert resolved(config).advertise == "127.0.0.1:7002"
    conductor = ConductorConfig(port=7001, advertise="auto", store="127.0.0.1:7002", redis="redis://[::1]:1/0")
    assert resolved(conductor).advertise == "127.0.0.1:7001"


def test_no_way_is_one_line() -> None:
    config = DecodeConfig(advertise_host="auto", conductor="nowhere.invalid:1", store="neither.invalid:2")
    with pytest.raises(ConfigError, match=r"advertise_host='auto': no way to nowhere\.invalid, neither\.invalid"):
        resolved(config, wait_s=0.0)
    with pytest.raises(ConfigError, match="needs a port of its own"):
        resolved(StoreConfig(port=0, advertise="auto", redis="redis://127.0.0.1:1/0"), wait_s=0.0)
