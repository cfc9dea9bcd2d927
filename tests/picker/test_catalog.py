"""Names become addresses; gateways say themselves whether they are ready."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest

from kvmesh.services.gateway.conductor import Conductor
from kvmesh.services.picker.catalog import RESOLVED_S, EndpointCatalog, EndpointNames, url_address


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1:8000/v1", "10.0.0.1:8000"),
        ("https://engine", "engine:443"),
        ("http://[fd00::1]:80", "[fd00::1]:80"),
        ("http://", ""),
        ("http://x:99999", ""),
    ],
)
def test_an_engines_url_has_an_address(url: str, address: str) -> None:
    assert url_address(url) == address


async def test_names_are_looked_up_again_and_keep_their_last_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    now, found = [0.0], [["10.0.0.2", "10.0.0.1"]]

    async def getaddrinfo(host: str, port: int, **more: Any) -> list[Any]:
        if not found[0]:
            raise socket.gaierror("gone")
        return [(0, 0, 0, "", (ip, port)) for ip in found[0]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    names = EndpointNames(lambda: now[0])
    assert await names.addresses_of("pods:8000") == ("10.0.0.1:8000", "10.0.0.2:8000")
    found[0] = ["10.0.0.3"]
    assert await names.addresses_of("pods:8000") == ("10.0.0.1:8000", "10.0.0.2:8000")
    now[0] = RESOLVED_S
    assert await names.addresses_of("pods:8000") == ("10.0.0.3:8000",)
    now[0], found[0] = 2 * RESOLVED_S, []
    assert await names.addresses_of("pods:8000") == ("10.0.0.3:8000",)
    names.keep_only(())
    assert await names.addresses_of("pods:8000") == ()
    assert await names.addresses_of("[::1]:80") == ("[::1]:80",)


async def test_only_gateways_that_say_so_are_ready() -> None:
    states = {"10.0.0.1": 200, "10.0.0.2": 503}

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/ready"
        if request.url.host not in states:
            raise httpx.ConnectError("refused")
        return httpx.Response(states[request.url.host])

    told: list[tuple[bool, str]] = []
    conductor = Conductor("127.0.0.1:1", timeout_s=0.2, retry_s=0, max_waiting=0)
    addresses = [f"10.0.0.{n}:8000" for n in (1, 2, 3)]
    try:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            catalog = EndpointCatalog(conductor, addresses, probes=True, on_ready=lambda *one: told.append(one))
            await catalog.look(client)
            assert [one.ready for one in catalog.gateways] == [True, False, False]
            catalog.enter(addresses[0])
            assert catalog.gateways[0].requests == 1
            catalog.leave(addresses[0])
            assert not catalog.sent
            states.clear()
            await catalog.look(client)
            assert [ready for ready, _ in told] == [True, False]
            assert "127.0.0.1:1" in told[-1][1]  # and the conductor is not there either
            blind = EndpointCatalog(conductor, addresses, probes=False, on_ready=lambda *one: None)
            await blind.look(client)
            assert all(one.ready for one in blind.gateways)
    finally:
        await conductor.close()
