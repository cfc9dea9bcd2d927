"""Which listeners of a service strangers can reach in plaintext or without a key: one line for the log. Pure."""

from __future__ import annotations

from typing import Any

from kvmesh.config import ServiceConfig
from kvmesh.rpc.addresses import is_loopback


def _kv_leaves_in_plaintext(config: Any) -> bool:
    """Says whether KV may go to other hosts in plaintext: without TLS, or where the network is trusted."""
    transports = getattr(config, "transports", "")
    carried = any(name in transports for name in ("tcp", "rdma", "auto"))
    return carried and (not (config.tls_cert or config.tls_ca) or config.transfer_network == "trusted")


def warning(config: ServiceConfig) -> str:
    """Returns one line about every listener of a service that is open beyond loopback, or ""."""
    told: Any = config  # services have further fields
    found: list[str] = []
    beyond = not is_loopback(config.host)
    metrics_host = config.metrics_host or config.host
    if beyond and not config.tls_cert:
        found.append("gRPC in plaintext (set tls_cert, tls_key, tls_ca)")
    if beyond and hasattr(told, "http_port"):
        if not told.http_tls_cert:
            found.append("REST in plaintext (set http_tls_cert, http_tls_key)")
        if not told.api_keys:
            more = ", and may change the weights of models (rollout)" if told.rollout else ""
            found.append(f"anybody is served{more} (set api_keys)")
    if beyond and _kv_leaves_in_plaintext(told):
        found.append(
            "KV bytes travel in plaintext (set tls_cert, tls_key, tls_ca without transfer_network=trusted, or keep "
            "that network to the mesh)"
        )
    if not is_loopback(metrics_host) and (not config.tls_cert or config.metrics_tls == "off"):
        found.append("metrics in plaintext (set tls_cert, or metrics_host=127.0.0.1)")
    where = config.host if beyond else metrics_host
    return f"listens on {where}, beyond this machine: {'; '.join(found)}; see docs/operate/security.md" if found else ""
