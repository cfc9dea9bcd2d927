"""`auto` in place of an address to advertise: this machine's own one, on the way to those it will talk to.

In a container nobody knows its address beforehand, and it listens on all of them.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kvmesh.config import ServiceConfig
from kvmesh.errors import ConfigError

AUTO = "auto"
WAIT_S = 60.0  # the names of services that start beside this one may come later
PAUSE_S = 0.5

C = TypeVar("C", bound=ServiceConfig)


def resolved(config: C, *, wait_s: float = WAIT_S) -> C:
    """`config` with `advertise_host=auto` and `advertise=auto` replaced. ConfigError: no peer's name resolves."""
    from kvmesh.rpc.server import join  # gRPC, which --help does without

    changed: dict[str, Any] = {}
    if getattr(config, "advertise_host", "") == AUTO:
        changed["advertise_host"] = address_towards(_peers(config), "advertise_host", wait_s)
    if getattr(config, "advertise", "") == AUTO:
        if not config.port:
            raise ConfigError("advertise='auto': needs a port of its own (port)", field="advertise")
        changed["advertise"] = join(address_towards(_peers(config), "advertise", wait_s), config.port)
    return dataclasses.replace(config, **changed) if changed else config


def _peers(config: ServiceConfig) -> list[tuple[str, int]]:
    """Returns host and port of each service that this one will talk to."""
    from kvmesh.rpc.addresses import split

    found = []
    for key in ("conductor", "store"):
        for address in split(text, key) if (text := getattr(config, key, "")) else ():
            host, _, port = address.rpartition(":")
            found.append((host.strip("[]"), int(port)))
    if url := getattr(config, "redis", ""):
        parts = urlsplit(url)
        found.append((parts.hostname or "", parts.port or 6379))
    return [(host, port or 1) for host, port in found if host]


def address_towards(peers: list[tuple[str, int]], field: str, wait_s: float) -> str:
    """The address that packets to the first of `peers` which can be resolved leave from. Nothing is sent."""
    end = time.monotonic() + wait_s
    while True:
        for host, port in peers:
            try:
                family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
                with socket.socket(family, kind) as probe:
                    probe.connect(where)
                    return str(probe.getsockname()[0])
            except OSError:
                continue
        if time.monotonic() >= end or not peers:
            names = ", ".join(host for host, _ in peers) or "nobody"
            why = f"no way to {names} was found within {wait_s:g} s; name the address that others reach this machine at"
            raise ConfigError(f"{field}='auto': {why}", field=field)
        time.sleep(PAUSE_S)
