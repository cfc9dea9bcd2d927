"""The network over which the ranks of one instance compute together: which interface of this host has a part in it."""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

import psutil

from kvmesh.errors import ConfigError


class NetworkInterface(NamedTuple):
    """Is an interface of this host, and an address that it has there."""

    name: str
    address: str


def check_network(text: str) -> None:
    """Raises ConfigError unless `text` is a network (10.0.0.0/8) or can be an interface's name; "" is neither and
    allowed."""
    if "/" in text:
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            raise _bad(text, f"not a network: {error}") from None
    elif len(text) > 15 or not text.isprintable() or any(sign in text for sign in " ,="):
        raise _bad(text, "not the name of an interface (at most 15 signs), nor a network like 10.0.0.0/8")


def find_interface(network: str, towards: str = "") -> NetworkInterface:
    """Returns the interface of this host that `network` names, or that has an address in it; where it is "" the one
    that packets to the host `towards` leave by. Raises ConfigError, field "rank_network", where there is none."""
    known = _interfaces()
    if "/" in network:
        within = ipaddress.ip_network(network, strict=False)
        for one in known:
            if ipaddress.ip_address(one.address) in within:
                return one
        raise _bad(network, "no interface of this host has an address in it")
    if network:
        for one in known:
            if one.name == network:
                return one
        names = ", ".join(dict.fromkeys(one.name for one in known))
        raise _bad(network, f"this host has no interface of this name with an address; it has {names}")
    address = _address_towards(towards)
    for one in known:
        if one.address == address:
            return one
    raise _bad(network, f"no interface leads to {towards}; name one")


def _interfaces() -> list[NetworkInterface]:
    """Returns the interfaces with their addresses, IPv4 first; link-local addresses of IPv6 need a scope, and are left
    out."""
    found: dict[bool, list[NetworkInterface]] = {False: [], True: []}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6) and "%" not in one.address:
                found[one.family == socket.AF_INET6].append(NetworkInterface(name, one.address))
    return found[False] + found[True]


def _address_towards(host: str) -> str:
    """Returns the address that packets to `host` leave from; "" where it cannot be reached. Nothing is sent."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def _bad(network: str, why: str) -> ConfigError:
    return ConfigError(f"rank_network={network!r}: {why}", field="rank_network")
