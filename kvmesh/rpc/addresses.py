"""Lists of addresses as configurations name them: "host:port,host:port"."""

from __future__ import annotations

from ipaddress import ip_address

from kvmesh.errors import ConfigError


def split(addresses: str, field: str = "store") -> tuple[str, ...]:
    """Returns the addresses of a comma-separated list, each once. Raises ConfigError, which names `field`, when there
    is none."""
    found = tuple(dict.fromkeys(part.strip() for part in addresses.split(",") if part.strip()))
    if not found:
        raise ConfigError(f"{field}={addresses!r}: names no address (host:port,host:port,...)", field=field)
    return found


def split_address(address: str) -> tuple[str, int]:
    """Returns host and port of an address that `check_addresses` allows, an IPv6 host without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Says whether this address is reached from this machine alone. Names other than localhost are not resolved, and
    count as reachable from others."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_addresses(addresses: str, field: str = "store") -> None:
    """Raises ConfigError, which names `field`, unless each address has a host and a port."""
    for one in split(addresses, field):
        if why := _wrong(one):
            raise ConfigError(f"{field}={one!r}: {why}", field=field)


def _wrong(address: str) -> str:
    """Returns why this is no HOST:PORT, or ""."""
    if "/" in address:
        return "must be HOST:PORT, without a scheme or a path"
    host, colon, port = address.rpartition(":")
    if not host or not colon:
        return "must be HOST:PORT, and has no port" if not colon else "must be HOST:PORT, and has no host"
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        return f"its port {port!r} is not in 1..65535"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return "an IPv6 address is written [ADDRESS]:PORT"
    if any(letter.isspace() or not letter.isprintable() for letter in host):
        return "its host holds spaces or signs that cannot be printed"
    return ""
