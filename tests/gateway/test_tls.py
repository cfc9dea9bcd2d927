"""The gateway in an mTLS mesh: certificates towards the mesh, none asked at its own doors, HTTPS."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kvmesh import watched_files
from kvmesh.errors import ConfigError, TlsFailed, Unavailable
from kvmesh.rpc import security
from kvmesh.rpc.certificates import Certificates, make_certificates
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from kvmesh.rpc.security import PLAINTEXT, Security, TlsFiles
from kvmesh.rpc.status import from_rpc_error
from kvmesh.services.gateway import main
from kvmesh.services.gateway.config import GatewayConfig
from tests.gateway.conftest import Mesh, MeshMaker, until
from tests.support.gateway.scripted import MODEL

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def mtls(made: Certificates) -> Iterator[Security]:
    """This process, and so every service in it, speaks mTLS."""
    before = security.use(Security.load(made.files))
    yield security.current()
    security.use(before)


async def generate(stub: Any) -> str:
    request = gateway_pb2.GenerateRequest(text="Hi", max_tokens=30)
    return "".join([part.text async for part in stub.Generate(request, timeout=15)])


async def test_a_request_through_a_mesh_of_mtls(mtls: Security, made: Certificates, make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(http_tls_cert=str(made.cert), http_tls_key=str(made.key), http_ca=made.ca)
    assert mesh.url.startswith("https://")
    response = await mesh.http.post("/v1/chat/completions", json=CHAT)
    assert response.json()["choices"][0]["message"]["content"] == "Hello, world"
    streamed = await mesh.http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert await generate(mesh.stub) == "Hello, world"

    stranger = Security.load(TlsFiles(tls_ca=str(made.ca)))
    async with connect(str(mesh.told["address"]), tls=stranger) as channel:
        assert await generate(gateway_pb2_grpc.GatewayStub(channel)) == "Hello, world", "no certificate is asked for"
    async with connect(mesh.conductor.server.address, tls=stranger) as channel:
        stub = conductor_pb2_grpc.ConductorStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=15)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, "inside the mesh one is"


async def test_plaintext_clients_of_secure_doors_and_the_reverse(
    mtls: Security, made: Certificates, make_mesh: MeshMaker
) -> None:
    mesh = await make_mesh(http_tls_cert=str(made.cert), http_tls_key=str(made.key), http_ca=made.ca)
    security.use(PLAINTEXT)
    async with connect(str(mesh.told["address"])) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(gateway_pb2_grpc.GatewayStub(channel))
        refused = from_rpc_error(caught.value)
        assert isinstance(refused, Unavailable)
        assert "it may speak TLS, and this side does not" in refused.message
    security.use(mtls)
    async with httpx.AsyncClient(timeout=15) as http:
        with pytest.raises(httpx.TransportError):
            await http.get(f"http://{mesh.told['http']}/health")
    async with httpx.AsyncClient(timeout=15, verify=ssl.create_default_context()) as http:
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await http.get(f"{mesh.url}/health")
    assert (await mesh.http.get("/health")).status_code == 200


async def test_a_renewed_certificate_is_for_new_connections(
    make_mesh: MeshMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_files, "LOOK_S", 0.0)
    made = make_certificates(tmp_path)
    mesh = await make_mesh(http_tls_cert=str(made.cert), http_tls_key=str(made.key), http_ca=made.ca)
    host, _, port = str(mesh.told["http"]).rpartition(":")

    async def shown() -> str:
        return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)), timeout=15)

    first = made.cert.read_text()
    assert (await mesh.http.get("/health")).status_code == 200
    assert await shown() == first
    made.cert.write_text("not a certificate")
    assert await shown() == first, "what was goes on"
    make_certificates(tmp_path)
    assert await shown() == made.cert.read_text() != first
    assert (await mesh.http.get("/health")).status_code == 200, "over the connection of before"


async def test_a_mesh_that_speaks_otherwise_is_said_in_one_line(made: Certificates, make_mesh: MeshMaker) -> None:
    """The scripted mesh speaks plaintext; the gateway is told of TLS afterwards, as by a wrong configuration."""
    mesh = await make_mesh()
    before = security.use(Security.load(made.files))
    try:
        wrong = await _gateway_of(mesh)
        reason = await until(lambda: _reason(wrong), lambda text: "TLS" in text)
        assert "cannot be reached: " in reason
        assert "speaks no TLS, and this side does: tls_ca is set here, tls_cert is not set there" in reason
        response = await wrong.http.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 503
        await wrong.stop()
    finally:
        security.use(before)


class _Gateway:
    """One more gateway in front of the same mesh."""

    http: httpx.AsyncClient

    def __init__(self, running: asyncio.Task[None], stop: asyncio.Event, told: dict[str, object]) -> None:
        self.http = httpx.AsyncClient(base_url=f"http://{told['http']}", timeout=15)
        self._running = running
        self._stop = stop

    async def stop(self) -> None:
        await self.http.aclose()
        self._stop.set()
        await asyncio.wait_for(self._running, 15)


async def _gateway_of(mesh: Mesh) -> _Gateway:
    config = GatewayConfig(
        port=0, http_port=0, model=str(mesh.folder), served_name=MODEL, schedule_retry_ms=100,
        conductor=mesh.conductor.server.address,
    )  # fmt: skip
    stop, told = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(main.run(config, stop, told.set_result))
    return _Gateway(running, stop, await asyncio.wait_for(told, 15))


async def _reason(gateway: _Gateway) -> str:
    return str((await gateway.http.get("/ready")).json().get("reason", ""))


async def test_https_certificates_are_looked_at_before_anything_listens(
    made: Certificates, checkpoint: Path, tmp_path: Path
) -> None:
    config = GatewayConfig(port=0, http_port=0, model=str(checkpoint), conductor="127.0.0.1:1")
    other = make_certificates(tmp_path)
    for cert, key, words in (
        (made.cert, "", "http_tls_key='': is needed with http_tls_cert"),
        (made.cert, other.key, "http_tls_key=.*: is not the key of http_tls_cert="),
        (tmp_path / "none", made.key, "http_tls_cert=.*: No such file"),
    ):
        given = dataclasses.replace(config, http_tls_cert=str(cert), http_tls_key=str(key))
        with pytest.raises(ConfigError, match=words):
            await asyncio.wait_for(main.run(given, asyncio.Event(), lambda told: None), 15)
    assert issubclass(TlsFailed, Unavailable)
