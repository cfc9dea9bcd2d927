"""Web pages of foreign names do not reach a gateway without API keys on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import ConfigError
from kvmesh.services.gateway.api_keys import make_entry
from kvmesh.services.gateway.config import GatewayConfig
from kvmesh.services.gateway.rest.hosts import ForeignHost, check_host, checks_hosts
from tests.gateway.conftest import MeshMaker
from tests.support.gateway.scripted import MODEL

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
OURS = {"mesh.example"}


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (None, None),
        ("localhost", None),
        ("LOCALHOST:8000", "http://localhost:3000"),
        ("app.localhost", None),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("[::1]:8000", "http://[::1]"),
        ("10.0.0.5:8000", "http://10.0.0.5:8000"),
        ("mesh.example:8000", "https://mesh.example"),
        ("mesh.example.", None),
    ],
)
def test_own_names_pass(host: str | None, origin: str | None) -> None:
    check_host(host, origin, OURS)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("evil.example", None),
        ("evil.example:8000", "http://evil.example:8000"),
        ("localhost.evil.example", None),
        ("127.0.0.1.evil.example", None),
        ("sub.mesh.example", None),
        ("127.0.0.1:8000", "https://evil.example"),
        ("127.0.0.1:8000", "http://6.6.6.6"),
        ("127.0.0.1:8000", "null"),
        ("127.0.0.1:8000", ""),
        ("127.0.0.1:8000", "http://localhost@evil.example"),
        ("localhost@evil.example", None),
        ("localhost/evil", None),
        ("localhost:99999", None),
        ("[::1", None),
        ("", None),
    ],
)
def test_foreign_names_are_refused(host: str | None, origin: str | None) -> None:
    with pytest.raises(ForeignHost):
        check_host(host, origin, OURS)


def test_where_names_are_checked() -> None:
    assert checks_hosts(GatewayConfig(host="127.0.0.1"), keys=False)
    assert not checks_hosts(GatewayConfig(host="127.0.0.1"), keys=True)
    assert not checks_hosts(GatewayConfig(host="0.0.0.0"), keys=False)
    assert checks_hosts(GatewayConfig(host="0.0.0.0", allowed_hosts=("a.example",)), keys=True)
    assert not checks_hosts(GatewayConfig(host="127.0.0.1", allowed_hosts=("*",)), keys=False)
    with pytest.raises(ConfigError, match="allowed_hosts='http://a'"):
        GatewayConfig(allowed_hosts=("http://a",))


async def test_a_rebound_name_is_refused_by_a_gateway_without_keys(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(allowed_hosts=("mesh.example",))
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        refused = await mesh.http.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_host")
        assert (await mesh.http.get("/v1/models", headers=headers)).status_code == 403
    assert not mesh.decodes[0].runs
    for headers in ({}, {"Host": "mesh.example"}, {"Origin": mesh.url}):
        assert (await mesh.http.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200


async def test_no_page_may_read_answers_of_another_origin(make_mesh: MeshMaker, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(make_entry("acme")[1])
    mesh = await make_mesh(api_keys=str(keys))
    found = await mesh.http.options(
        "/v1/chat/completions",
        headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"},
    )
    assert found.status_code == 405
    assert not [name for name in found.headers if name.startswith("access-control-")]
    assert (await mesh.http.get("/health", headers={"Host": "evil.example"})).status_code == 200, "keys guard it"
