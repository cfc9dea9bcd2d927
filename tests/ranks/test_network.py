"""Which interface ranks on several hosts compute over."""

from __future__ import annotations

import pytest

from kvmesh.errors import ConfigError
from kvmesh.ranks.network import NetworkInterface, check_network, find_interface

LOOPBACK = NetworkInterface("lo", "127.0.0.1")


@pytest.mark.parametrize(("network", "towards"), [("lo", ""), ("127.0.0.0/8", ""), ("", "127.0.0.1")])
def test_an_interface_is_found(network: str, towards: str) -> None:
    check_network(network)
    assert find_interface(network, towards) == LOOPBACK


@pytest.mark.parametrize(
    ("network", "why"),
    [
        ("none0", "this host has no interface of this name"),
        ("203.0.113.0/24", "no interface of this host has an address in it"),
        ("", "no interface leads to no.such.host.invalid"),
    ],
)
def test_none_is_found(network: str, why: str) -> None:
    check_network(network)
    with pytest.raises(ConfigError, match=f"rank_network={network!r}: {why}") as caught:
        find_interface(network, "no.such.host.invalid")
    assert caught.value.field == "rank_network"


@pytest.mark.parametrize("network", ["10.0.0.0/40", "eth0,eth1", "a" * 16])
def test_what_is_neither_a_network_nor_a_name_is_refused(network: str) -> None:
    with pytest.raises(ConfigError, match="rank_network="):
        check_network(network)
