"""Certificates are replaced under a live server and a live channel: what is made from then on uses the new ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh import watched_files
from kvmesh.rpc import security
from kvmesh.rpc.authorisation import ALL_IDENTITIES, grpc_caller, identities
from kvmesh.rpc.certificates import Certificates, make_role_certificates
from kvmesh.rpc.channels import connect
from kvmesh.rpc.security import Security
from kvmesh.rpc.server import Server

WANTED = {"a": ALL_IDENTITIES, "b": identities(["operator", "client/b"])}


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "LOOK_S", 0.0)


@pytest.fixture
def authority(tmp_path: Path) -> dict[str, Certificates]:
    return make_role_certificates(tmp_path / "made", WANTED, keep_authority=True)


def put(new: Certificates, at: Path) -> Certificates:
    """Replaces the files in a folder, one by one, as an operator would."""
    at.mkdir(exist_ok=True)
    for one in (new.ca, new.cert, new.key):
        shutil.copy(one, at / f"{one.name}.part")
        os.replace(at / f"{one.name}.part", at / one.name)
    return Certificates(at / "ca.pem", at / "cert.pem", at / "key.pem")


@contextlib.asynccontextmanager
async def listener(files: Certificates) -> AsyncIterator[tuple[str, Server]]:
    """Says which roles a caller's certificate has; Watch goes on until it is told something."""

    async def who(request: bytes, context: Any) -> bytes:
        held = grpc_caller(context).identities
        assert held is not None
        return ",".join(sorted(one.uri for one in held)).encode()

    async def hold(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    before = security.use(Security.load(files.files))
    server = Server("127.0.0.1", 0)
    handlers = {"Find": grpc.unary_unary_rpc_method_handler(who), "Watch": grpc.stream_stream_rpc_method_handler(hold)}
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvmesh.v1.StoreMaster", handlers),))
    await server.start()
    security.use(before)
    try:
        yield server.address, server
    finally:
        await server.stop(0)


def shown(address: str, tls: Certificates) -> bytes:
    """The certificate that the server shows on a new connection."""
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")

    with socket.create_connection((host, int(port)), 10) as raw, context.wrap_socket(raw, server_hostname=host) as sock:
        found = sock.getpeercert(binary_form=True)
    assert found is not None
    return found


def der(files: Certificates) -> bytes:
    return ssl.PEM_cert_to_DER_cert(files.cert.read_text())


async def test_a_live_server_shows_the_new_certificate(authority: dict[str, Certificates], tmp_path: Path) -> None:
    used = put(authority["a"], tmp_path / "server")
    async with listener(used) as (address, _):
        assert await asyncio.to_thread(shown, address, authority["a"]) == der(authority["a"])
        put(authority["b"], tmp_path / "server")
        assert await asyncio.to_thread(shown, address, authority["a"]) == der(authority["b"])
        used.key.write_bytes(authority["a"].key.read_bytes())  # no pair: what was goes on
        assert await asyncio.to_thread(shown, address, authority["a"]) == der(authority["b"])
        used.cert.write_bytes(authority["a"].cert.read_bytes())
        assert await asyncio.to_thread(shown, address, authority["a"]) == der(authority["a"])


async def test_a_live_channel_shows_the_new_certificate_and_streams_go_on(
    authority: dict[str, Certificates], tmp_path: Path
) -> None:
    used = put(authority["a"], tmp_path / "client")
    async with (
        listener(authority["a"]) as (address, _),
        connect(address, tls=Security.load(used.files)) as channel,
    ):
        ask = channel.unary_unary("/kvmesh.v1.StoreMaster/Find")
        assert b"kvmesh://instance/*" in await ask(b"", timeout=10)
        stream = channel.stream_stream("/kvmesh.v1.StoreMaster/Watch")()
        await stream.write(b"1")
        assert await stream.read() == b"1"
        put(authority["b"], tmp_path / "client")
        assert await ask(b"", timeout=10) == b"kvmesh://client/b,kvmesh://operator/*"
        await stream.write(b"2")
        assert await stream.read() == b"2"
        await stream.done_writing()
        assert await stream.code() is grpc.StatusCode.OK


async def test_another_authority(authority: dict[str, Certificates], tmp_path: Path) -> None:
    """A mesh changes its authority while both are in tls_ca."""
    other = make_role_certificates(tmp_path / "other", WANTED)
    server, client = put(authority["a"], tmp_path / "server"), put(authority["a"], tmp_path / "client")
    both = authority["a"].ca.read_bytes() + other["a"].ca.read_bytes()
    async with (
        listener(server) as (address, _),
        connect(address, tls=Security.load(client.files)) as channel,
    ):
        ask = channel.unary_unary("/kvmesh.v1.StoreMaster/Find")
        await ask(b"", timeout=10)
        for files in (server, client):
            files.ca.write_bytes(both)
        await ask(b"", timeout=10)
        put(other["a"], tmp_path / "server")
        server.ca.write_bytes(both)
        await ask(b"", timeout=10)
        assert await asyncio.to_thread(shown, address, other["a"]) == der(other["a"])
        put(other["b"], tmp_path / "client")
        assert b"client/b" in await ask(b"", timeout=10)
        put(other["a"], tmp_path / "server")
        async with connect(address, tls=Security.load(authority["a"].files)) as stranger:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stranger.unary_unary("/kvmesh.v1.StoreMaster/Find")(b"", timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
