"""What a stranger can send to the REST listener, hold there or leave unread has a bound."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvmesh.rpc.certificates import make_certificates
from kvmesh.services.gateway.api_keys import make_entry
from kvmesh.services.gateway.rest.http_limits import BodyBounds, HttpLimits
from kvmesh.services.gateway.rest.http_protocol import BoundedHttpProtocol
from tests.gateway.conftest import Mesh, MeshMaker, seen, until
from tests.support.gateway.scripted import MODEL

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


Dial = Callable[..., Awaitable[Client]]


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    """`await dial(mesh)` opens a connection that ends with the test."""
    clients: list[Client] = []

    async def one(mesh: Mesh, **more: Any) -> Client:
        host, _, port = str(mesh.told["http"]).rpartition(":")
        clients.append(await asyncio.open_connection(host, int(port), **more))
        return clients[-1]

    yield one
    for _, writer in clients:
        writer.transport.abort()
    for _, writer in clients:
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one answer; status 0 when the connection ends without one."""
    async with asyncio.timeout(15):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, {}, b""
        first, *lines = head.splitlines()
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return int(first.split()[1]), headers, body


async def ended(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends."""
    async with asyncio.timeout(15):
        try:
            return await reader.read(1) == b""
        except ConnectionError:
            return True


async def send_all(writer: asyncio.StreamWriter, data: bytes, limit: int) -> int:
    """Sends `data` again and again until the other side ends it, or `limit` bytes went; tells how many went."""
    sent = 0
    async with asyncio.timeout(30):
        try:
            while sent < limit:
                writer.write(data)
                await writer.drain()
                sent += len(data)
        except ConnectionError:
            pass
    return sent


def metric(text: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


async def test_a_head_without_an_end_is_431_after_64_kib(dial: Dial, mesh: Mesh) -> None:
    _, writer = await dial(mesh)
    sent = await send_all(writer, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * (1 << 20), 64 << 20)
    assert sent < 64 << 20, "the gateway took 64 MiB of one header"
    assert (await mesh.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * 101 + b"\r\n", 431),
        (b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * 99 + b"Host: localhost\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 60_000 + b"\r\n\r\n", 200),
        (b"NONSENSE\r\n\r\n", 400),
    ],
)
async def test_heads_are_bounded_in_bytes_headers_and_url(dial: Dial, mesh: Mesh, head: bytes, status: int) -> None:
    reader, writer = await dial(mesh)
    writer.write(head)
    assert (await answer(reader))[0] == status


async def test_a_head_that_comes_byte_by_byte_is_parsed_in_few_parts(
    dial: Dial, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[int] = []
    feed = BoundedHttpProtocol._feed

    def counted(self: BoundedHttpProtocol, piece: bytes) -> None:
        fed.append(len(piece))
        feed(self, piece)

    monkeypatch.setattr(BoundedHttpProtocol, "_feed", counted)
    reader, writer = await dial(mesh)
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 30_000 + b"\r\n\r\n"
    for start in range(0, len(head), 8):
        writer.write(head[start : start + 8])
        await writer.drain()
        await asyncio.sleep(0)
    assert (await answer(reader))[0] == 200
    assert sum(fed) == len(head)
    assert len(fed) <= 200, "each small part was parsed alone"


async def test_trailers_of_a_chunked_body_are_bounded(dial: Dial, mesh: Mesh) -> None:
    _, writer = await dial(mesh)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ")
    assert await send_all(writer, b"a" * (1 << 20), 64 << 20) < 64 << 20


async def test_silent_connections_end_and_late_heads_are_408(dial: Dial, make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(http_head_timeout_s=1.5, http_idle_timeout_s=1.5)
    silent, half, idle, empty = [await dial(mesh) for _ in range(4)]
    half[1].write(b"GET /health HTTP/1.1\r\nHost: loc")
    empty[1].write(b"\r\n")
    idle[1].write(HEALTH)
    assert (await answer(idle[0]))[0] == 200
    assert await ended(silent[0])
    status, headers, _ = await answer(half[0])
    assert (status, headers["connection"]) == (408, "close")
    assert await ended(half[0])
    assert await ended(idle[0])
    assert (await answer(empty[0]))[0] == 408


async def test_connections_are_capped_and_the_oldest_idle_one_makes_room(dial: Dial, make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(http_max_connections=16)
    silent = [await dial(mesh) for _ in range(100)]
    reader, writer = await dial(mesh)
    writer.write(HEALTH)
    assert (await answer(reader))[0] == 200
    assert await ended(silent[0][0])
    text = (await mesh.http.get("/metrics")).text
    assert metric(text, "kvmesh_gateway_http_connections_count") <= 16


async def test_requests_in_flight_are_not_cut_for_new_connections(dial: Dial, make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(http_max_connections=16)
    go = asyncio.Event()
    says = mesh.says("Hello")

    async def late(run: Any) -> None:
        await go.wait()
        await says(run)

    mesh.decodes[0].script = late
    asking = asyncio.create_task(mesh.http.post("/v1/chat/completions", json=CHAT))
    await seen(lambda: mesh.decodes[0].runs)
    silent = [await dial(mesh) for _ in range(50)]
    assert await ended(silent[0][0])
    go.set()
    assert (await asking).status_code == 200


async def test_handshakes_that_are_not_done_are_counted_and_make_room(
    dial: Dial, make_mesh: MeshMaker, tmp_path: Path
) -> None:
    made = make_certificates(tmp_path)
    mesh = await make_mesh(
        http_max_connections=16, http_tls_cert=str(made.cert), http_tls_key=str(made.key), http_ca=made.ca
    )
    silent = [await dial(mesh) for _ in range(60)]
    reader, writer = await dial(mesh, ssl=ssl.create_default_context(cafile=made.ca))
    writer.write(HEALTH)
    assert (await answer(reader))[0] == 200
    assert await ended(silent[0][0])


async def test_a_tls_handshake_has_a_time(dial: Dial, make_mesh: MeshMaker, tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    mesh = await make_mesh(
        http_head_timeout_s=0.3, http_tls_cert=str(made.cert), http_tls_key=str(made.key), http_ca=made.ca
    )
    reader, _ = await dial(mesh)
    assert await ended(reader)


def test_the_default_cap_leaves_half_of_the_descriptors() -> None:
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert HttpLimits().connections <= max(16, descriptors // 2)
    assert HttpLimits(max_connections=7).connections == 7


def test_a_body_must_keep_its_rate() -> None:
    bounds = BodyBounds(8 << 20, 10.0, 64 << 10)
    assert bounds.by_s(0) == 10
    assert bounds.by_s(640 << 10) == 20


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def test_a_body_that_trickles_is_refused(dial: Dial, make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(http_body_timeout_s=0.3)
    reader, writer = await dial(mesh)
    writer.write(post(b"x" * 1000)[:-900])
    status, headers, body = await answer(reader)
    assert (status, headers["connection"]) == (504, "close")
    assert b"bytes a second" in body
    assert await ended(reader)


async def test_a_length_over_the_limit_is_413_before_the_body(dial: Dial, make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(max_body_bytes=10_000)
    for length in (b"10001", b"9" * 40):
        reader, writer = await dial(mesh)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + length + b"\r\n\r\n")
        assert (await answer(reader))[0] in (400, 413)
        assert await ended(reader)
    reader, writer = await dial(mesh)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    writer.write((b"1000\r\n" + b"a" * 4096 + b"\r\n") * 3)
    assert (await answer(reader))[0] == 413


async def test_bodies_beyond_the_memory_are_429_and_those_within_it_are_served(
    dial: Dial, make_mesh: MeshMaker
) -> None:
    """Sixteen at once where six fit."""
    mib = 1 << 20
    mesh = await make_mesh(max_body_bytes=mib, max_request_memory=16 * mib, grpc_receiving=1)
    budget = 16 * mib - mib
    body = json.dumps(CHAT).encode().ljust(mib)
    clients = [await dial(mesh) for _ in range(16)]
    for _, writer in clients:
        writer.write(post(body)[:-1])  # all but the last byte
    refused = [asyncio.create_task(answer(reader)) for reader, _ in clients]
    await seen(lambda: sum(task.done() for task in refused) >= 16 - budget // 2 // mib)
    text = (await mesh.http.get("/metrics")).text
    assert 0 < metric(text, "kvmesh_gateway_request_memory_bytes") <= budget // 2
    assert (await mesh.http.post("/v1/chat/completions", json=CHAT)).status_code == 200, "small ones still fit"
    for _, writer in clients:
        writer.write(b" ")
    found = [(await task)[:2] for task in refused]
    statuses = [status for status, _ in found]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) == budget // 2 * 3 // 4 // (mib + (16 << 10))
    assert all(int(headers["retry-after"]) >= 1 for status, headers in found if status == 429)
    text = (await mesh.http.get("/metrics")).text
    assert metric(text, "kvmesh_gateway_request_memory_bytes") == 0


async def test_a_body_that_swells_when_parsed_is_refused_unparsed(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(max_body_bytes=1 << 20, max_request_memory=16 << 20)
    body = b'{"prompt":[' + b",".join([b"[[[[[]]]]]"] * 90_000) + b"]}"
    response = await mesh.http.post("/v1/completions", content=body)
    assert response.status_code == 413
    assert "max_request_memory" in response.json()["error"]["message"]


async def test_keyless_calls_end_before_their_body_is_read(dial: Dial, make_mesh: MeshMaker, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(make_entry("acme")[1])
    mesh = await make_mesh(api_keys=str(keys), max_body_bytes=8 << 20)
    reader, writer = await dial(mesh)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n")
    status, headers, _ = await answer(reader)  # nothing of the body was sent
    assert (status, headers["connection"]) == (401, "close")
    assert await send_all(writer, b"a" * (1 << 20), 64 << 20) < 64 << 20
    reader, writer = await dial(mesh)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        b"Content-Length: 8000000\r\n\r\n"
    )
    assert (await answer(reader))[0] == 401, "never told to go on"


async def test_pipelining_is_bounded(dial: Dial, mesh: Mesh) -> None:
    reader, writer = await dial(mesh)
    writer.write(HEALTH * 5)
    assert [(await answer(reader))[0] for _ in range(5)] == [200] * 5
    writer.write(HEALTH * 1000)
    served = 0
    while (await answer(reader))[0] == 200:
        served += 1
    assert served <= 16
    assert (await mesh.http.get("/health")).status_code == 200


async def test_a_head_behind_a_request_may_wait_as_long_as_that(dial: Dial, make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(http_head_timeout_s=0.2)
    go = asyncio.Event()
    says = mesh.says("Hello")

    async def late(run: Any) -> None:
        await go.wait()
        await says(run)

    mesh.decodes[0].script = late
    reader, writer = await dial(mesh)
    writer.write(post(json.dumps(CHAT).encode()) + HEALTH[:10])
    await seen(lambda: mesh.decodes[0].runs)
    other = await dial(mesh)
    assert await ended(other[0]), "twice the time has passed for it"
    go.set()
    assert (await answer(reader))[0] == 200
    writer.write(HEALTH[10:])
    assert (await answer(reader))[0] == 200


async def test_a_client_over_tls_reads_why_its_body_was_refused(
    dial: Dial, make_mesh: MeshMaker, tmp_path: Path
) -> None:
    made = make_certificates(tmp_path)
    mesh = await make_mesh(
        max_body_bytes=1 << 20, http_tls_cert=str(made.cert), http_tls_key=str(made.key), http_ca=made.ca
    )
    response = await mesh.http.post("/v1/completions", content=b" " * (3 << 19))
    assert response.status_code == 413


async def test_a_client_that_reads_no_answer_is_cut(dial: Dial, make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(http_write_timeout_s=0.5)
    _, writer = await dial(mesh, limit=1 << 10)
    writer.write(b"GET /docs/assets/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8)

    async def cut() -> bool:
        text = (await mesh.http.get("/metrics")).text
        return 'gateway_http_refused_total{reason="unread"} 1.0' in text

    await until(cut, bool)
