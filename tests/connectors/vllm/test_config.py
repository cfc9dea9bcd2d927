"""Settings of the connector: what is wrong with one is said of its name and value."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.connectors.vllm.config import ConnectorConfig
from kvmesh.errors import ConfigError


def test_the_clients_own_defaults_are_kept() -> None:
    made = ConnectorConfig.of({"namespace": "n", "store": "a:1,b:2"}).client()
    assert (made.store, made.namespace, made.keys, made.host) == ("a:1,b:2", "n", "computed", "127.0.0.1")
    assert made.node_id


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"stoer": "x"}, "'stoer' is no setting of KvmeshConnector; there are .*store"),
        ({"load_timeout_ms": 0}, r"load_timeout_ms=0: not in 10\.\.600000"),
        ({"load_timeout_ms": "5"}, "load_timeout_ms='5': must be int, not str"),
        ({"save_decoded": 1}, "save_decoded=1: must be bool"),
        ({"transports": "pigeon"}, "transports='pigeon'"),
        ({"store": "no port"}, "no port"),
        ({"push_port": 65_536}, r"push_port=65536: not in 0\.\.65535"),
        ({"push_threads": 0}, r"push_threads=0: not in 1\.\.16"),
        ({"push_staging_mb": 0}, "push_staging_mb=0"),
        ({"push_timeout_ms": 9}, "push_timeout_ms=9"),
        ({"hold_ms": 3_600_001}, r"hold_ms=3600001: not in 100\.\.3600000"),
        ({"push": "yes"}, "push='yes': must be bool, not str"),
        ({"pool": False}, "pool=False: without push there is nothing to do"),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ConnectorConfig.of(extra)


FAR = {"store": "10.0.0.1:7002"}


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({}, ""),
        (FAR, "host='127.0.0.1': pool nodes on other machines cannot read"),
        (FAR | {"host": "::1"}, "host='::1': pool nodes"),
        (FAR | {"host": "10.0.0.2", "advertise_host": "localhost"}, "host='localhost': pool nodes"),
        (FAR | {"host": "10.0.0.2"}, ""),
        (FAR | {"host": "0.0.0.0", "advertise_host": "beta"}, ""),
        (FAR | {"nics": "eth1"}, ""),
        (FAR | {"pool": False, "push": True}, "host='127.0.0.1', by default: prompts"),
        ({"push": True}, "host='127.0.0.1', by default: prompts"),
        ({"push": True, "host": "127.0.0.1"}, ""),
    ],
)
def test_a_host_that_others_cannot_reach_is_named(extra: dict[str, Any], told: str) -> None:
    found = ConnectorConfig.of(extra).unreachable()
    assert found.startswith(told) and bool(found) == bool(told)
    assert not told or "set host, or advertise_host, in kv_connector_extra_config" in found
