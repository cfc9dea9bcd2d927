"""Refuses requests that a web page of a foreign name sends to a gateway that has no other guard.

A browser lets any page send requests to addresses of its user's machine, and lets it read the answers where the page's
own name is made to resolve there (DNS rebinding). Such a request tells the foreign name in Host or in Origin.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Collection
from typing import Any
from urllib.parse import urlsplit

from kvmesh.errors import KvmeshError
from kvmesh.rpc.addresses import is_loopback
from kvmesh.services.gateway.config import GatewayConfig
from kvmesh.services.gateway.generation import brief_repr
from kvmesh.services.gateway.rest.http import Receive, Scope, Send, send_error
from kvmesh.telemetry import names

Application = Callable[[Scope, Receive, Send], Awaitable[Any]]


class ForeignHost(KvmeshError):
    """The request is for another name, or from a page of one."""

    code = "foreign_host"
    http_status = 403
    openai_type = "invalid_request_error"


def check_host(host: str | None, origin: str | None, allowed: Collection[str]) -> None:
    """Raises ForeignHost unless the Host header names this machine, an address or one of `allowed`, and the Origin
    header, where there is one, names this machine, one of `allowed` or what Host names."""
    name = None if host is None else _name(f"//{host}")
    if host is not None and not (name and (_is_local(name) or _is_address(name) or name in allowed)):
        raise ForeignHost(f"host={brief_repr(host)}: not a name of this gateway (allowed_hosts)", field="host")
    if origin is not None:
        page = _name(origin)
        if not (page and (_is_local(page) or page in allowed or page == name)):
            raise ForeignHost(
                f"origin={brief_repr(origin)}: not a name of this gateway (allowed_hosts)", field="origin"
            )


def _name(url: str) -> str | None:
    """The host of `url` in lower case, without port; None: it has none, or is none."""
    try:
        parts = urlsplit(url)
        if parts.username is not None or parts.path or parts.query or parts.fragment:
            return None
        parts.port  # noqa: B018 (refuses what is none)
        return parts.hostname.rstrip(".") if parts.hostname else None
    except ValueError:
        return None


def _is_local(name: str) -> bool:
    return is_loopback(name) or name.endswith(".localhost")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def checks_hosts(config: GatewayConfig, *, keys: bool) -> bool:
    """Whether requests are checked: where names are given, or nothing else keeps foreign pages out."""
    if "*" in config.allowed_hosts:
        return False
    return bool(config.allowed_hosts) or (not keys and is_loopback(config.host))


class HostCheck:
    """`application` behind `check_host`."""

    def __init__(self, application: Application, allowed: Collection[str]) -> None:
        self._application = application
        self._allowed = frozenset(name.lower().rstrip(".") for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, as ASGI has it."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        try:
            for host in hosts or [None]:
                for origin in origins or [None]:
                    check_host(host, origin, self._allowed)
        except ForeignHost as err:
            names.GATEWAY_HTTP_REFUSED.labels(reason="host").inc()
            await send_error(send, err, [], unread=True)
            return
        await self._application(scope, receive, send)
