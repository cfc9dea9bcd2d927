"""A service that listens beyond loopback says what of it is open, in one line."""

from __future__ import annotations

import pytest

from kvmesh.cli.serve import SERVICES, config_class
from kvmesh.config import ServiceConfig
from kvmesh.pool.config import PoolConfig
from kvmesh.rpc.exposure import warning
from kvmesh.services.gateway.config import GatewayConfig

TLS = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.0.1", "::1", "localhost"])
def test_on_loopback_nothing_is_said(host: str) -> None:
    for service in SERVICES:
        cls = config_class(service)
        if service in ("gateway", "store", "conductor", "pool"):
            assert warning(cls(host=host)) == "", service


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node-1", ""])
def test_beyond_it_each_listener_is_named_with_what_to_set(host: str) -> None:
    said = warning(GatewayConfig(host=host))
    for part in ("gRPC in plaintext", "tls_cert", "REST in plaintext", "http_tls_cert", "api_keys", "metrics in plain"):
        assert part in said
    assert "\n" not in said and "KV bytes" not in said
    assert "weights" not in said and "may change the weights" in warning(GatewayConfig(host=host, rollout=True))


def test_what_is_guarded_is_left_out() -> None:
    assert warning(ServiceConfig(host="0.0.0.0", **TLS)) == ""
    assert "metrics" in warning(ServiceConfig(host="0.0.0.0", metrics_tls="off", **TLS))
    assert warning(ServiceConfig(host="0.0.0.0", metrics_tls="off", metrics_host="127.0.0.1", **TLS)) == ""
    assert "metrics" in warning(ServiceConfig(metrics_host="0.0.0.0"))
    whole = GatewayConfig(host="0.0.0.0", http_tls_cert="c", http_tls_key="k", api_keys="f", **TLS)
    assert warning(whole) == ""
    for transports in ("auto", "shm,tcp"):
        assert warning(PoolConfig(host="0.0.0.0", transports=transports, **TLS)) == "", "tcp is encrypted under TLS"
    pool = PoolConfig(host="0.0.0.0", transfer_network="trusted", **TLS)
    assert warning(pool).count(";") == 1 and "KV bytes travel in plaintext" in warning(pool)
    assert "KV bytes travel in plaintext" in warning(PoolConfig(host="0.0.0.0"))
