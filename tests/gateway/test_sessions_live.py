"""Decode sessions under stress: other protocols, other lives, credit, clients that do not read, leavers."""

from __future__ import annotations

import asyncio
import itertools
import json

import httpx
import pytest

from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import gateway_pb2
from tests.gateway.conftest import Mesh, MeshMaker, seen, until
from tests.gateway.test_failures import CHAT, URL, dribble
from tests.support import services
from tests.support.gateway.scripted import Decode, Run


async def test_a_decode_of_another_protocol_is_refused(mesh: Mesh) -> None:
    mesh.decodes[0].reply_version = 9
    response = await mesh.http.post(URL, json=CHAT)
    assert response.status_code == 412
    assert "protocol version 9" in response.json()["error"]["message"]
    assert mesh.decodes[0].hellos[0].protocol_version == pb.PROTOCOL_VERSION_1
    assert not mesh.decodes[0].runs


@pytest.mark.slow
async def test_another_life_at_the_address_is_not_taken_for_the_first(mesh: Mesh) -> None:
    (decode,) = mesh.decodes
    assert (await mesh.http.post(URL, json=CHAT)).status_code == 200
    placed = pb.InstanceRef()
    placed.CopyFrom(decode.ref)
    decode.ref.incarnation = 2
    assert (await mesh.http.post(URL, json=CHAT)).status_code == 200
    assert len(decode.hellos) == 2, "a new incarnation gets a new session"
    stale = Decode("decode-0", decode.script)
    stale.ref = placed
    stale.ref.incarnation = 3
    mesh.conductor.decodes[:] = [stale]
    response = await mesh.http.post(URL, json=CHAT)
    assert response.status_code == 503
    assert "another life" in response.json()["error"]["message"]


async def test_credit_flows(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(session_credit_tokens=4)
    text = "The quick brown fox " * 20
    mesh.decodes[0].script = mesh.says(text)
    answer = await mesh.client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == text
    assert mesh.decodes[0].runs[0].start.credit_tokens == 4


@pytest.mark.slow
async def test_a_client_that_does_not_read_stops_its_own_tokens_only(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(session_credit_tokens=8)
    sent = 0

    async def endless(run: Run) -> None:
        nonlocal sent
        if run.start.sampling.max_tokens == 5:
            await mesh.says("Hello, world")(run)
            return
        token = mesh.ids("a")[0]
        while True:
            await run.token(token, sent)
            sent += 1

    mesh.decodes[0].script = endless
    mesh.conductor.card.max_context_tokens = 2**31
    host, port = mesh.told["http"].split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps(CHAT | {"stream": True, "ignore_eos": True}).encode()
    head = f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readline()

    async def stuck() -> bool:
        before = sent
        for _ in range(3):  # round trips through the whole gateway
            answer = await mesh.http.post(URL, json=CHAT | {"max_tokens": 5})
            assert answer.status_code == 200
        return before == sent

    await services.until(stuck, timeout_s=60.0)  # the kernel's buffers take megabytes of small events
    assert mesh.decodes[0].runs[0].credit == 0
    writer.close()
    await asyncio.wait_for(mesh.decodes[0].runs[0].cancelled.wait(), 30)
    await mesh.quiet()


@pytest.mark.slow
async def test_a_client_that_never_reads_is_let_go_after_its_deadline(make_mesh: MeshMaker) -> None:
    """Over HTTP and gRPC: its connection stays open, the request behind it does not."""
    mesh = await make_mesh()
    mesh.conductor.card.max_context_tokens = 2**31

    async def endless(run: Run) -> None:
        for index in itertools.count():
            await run.token(mesh.ids("a")[0], index)

    mesh.decodes[0].script = endless
    host, port = mesh.told["http"].split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps(CHAT | {"stream": True, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}).encode()
    head = (
        f"POST {URL} HTTP/1.1\r\nHost: localhost\r\nx-request-timeout-ms: 5000\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await reader.readline()
    call = mesh.stub.Generate(
        gateway_pb2.GenerateRequest(text="Hi", ignore_eos=True, logprobs=True, top_logprobs=20, timeout_ms=5000)
    )
    await call.read()
    await mesh.quiet()
    assert not call.done(), "the client has not read to the end"
    call.cancel()
    writer.close()


async def test_the_session_of_an_instance_that_left_is_closed(
    make_mesh: MeshMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvmesh.services.gateway import conductor

    monkeypatch.setattr(conductor, "READY_REFRESH_S", 0.2)
    mesh = await make_mesh()
    (decode,) = mesh.decodes
    assert (await mesh.http.post(URL, json=CHAT)).status_code == 200
    assert (await mesh.status()).streams == 1
    mesh.conductor.decodes.clear()
    await asyncio.wait_for(decode.ended.wait(), 15)
    assert (await mesh.status()).streams == 0
    assert not (await mesh.status()).ready


async def test_stopping_ends_what_runs_with_one_error(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(stop_grace_ms=100)
    mesh.decodes[0].script = dribble(mesh, 2)
    streamed = asyncio.create_task(mesh.http.post(URL, json=CHAT | {"stream": True}))
    waiting = asyncio.create_task(mesh.http.post(URL, json=CHAT))
    await seen(lambda: len(mesh.decodes[0].runs) == 2)
    await mesh.stop()
    assert "shutting down" in (await streamed).text
    response = await waiting
    assert response.status_code == 503
    assert "shutting down" in response.json()["error"]["message"]
    with pytest.raises(httpx.ConnectError):
        await mesh.http.get("/health")


async def test_a_leaving_gateway_serves_while_ready_says_no(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(stop_delay_ms=2_000)
    stopping = asyncio.create_task(mesh.stop())

    async def says_no() -> bool:
        return (await mesh.http.get("/ready")).status_code == 503

    await until(says_no, bool)
    assert (await mesh.http.get("/ready")).json()["reason"] == "shutting down"
    assert (await mesh.http.post(URL, json=CHAT)).status_code == 200
    await stopping
