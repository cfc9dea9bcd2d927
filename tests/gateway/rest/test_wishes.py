"""What a client may tell of how it wants to be served: by header, field or gRPC; it reaches the conductor, or one error
names what is wrong with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvmesh.errors import Overloaded
from kvmesh.rpc.pb import conductor_pb2, gateway_pb2
from kvmesh.services.gateway.generation import BATCH_STEPS
from tests.gateway.conftest import Mesh, MeshMaker, seen
from tests.support.gateway.scripted import MODEL

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}


async def asked(mesh: Mesh, path: str = "chat/completions", **given: Any) -> conductor_pb2.ScheduleRequest:
    """What the conductor was asked for one request."""
    body = (CHAT if path.startswith("chat") else TEXT) | given.pop("body", {})
    response = await mesh.http.post(f"/v1/{path}", json=body, headers=given.pop("headers", {}))
    assert response.status_code == 200, response.text
    return mesh.conductor.asked[-1]


async def refused(mesh: Mesh, **given: Any) -> dict[str, Any]:
    response = await mesh.http.post(
        "/v1/chat/completions", json=CHAT | given.get("body", {}), headers=given.get("headers", {})
    )
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


WISHES = {
    "ttft_slo_ms": 1500,
    "tbt_slo_ms": 40,
    "priority": -2,
    "lane": "batch",
    "session": "s1",
    "origin": "shop",
    "expected_tokens": 77,
}


def is_as_wished(request: conductor_pb2.ScheduleRequest) -> None:
    assert (request.ttft_slo_ms, request.tbt_slo_ms) == (1500, 40)
    assert request.lane == conductor_pb2.LANE_BATCH
    assert request.priority == BATCH_STEPS - 2  # the batch lane stands behind
    assert (request.session, request.origin) == ("/s1", "/shop")
    assert request.expected_output_tokens == 77


async def test_told_in_the_body(mesh: Mesh) -> None:
    is_as_wished(await asked(mesh, body=WISHES))
    assert mesh.conductor.asked[-1].endpoint == "chat"
    is_as_wished(await asked(mesh, "completions", body=WISHES))
    assert mesh.conductor.asked[-1].endpoint == "completions"
    assert mesh.decodes[0].runs[-1].start.priority == BATCH_STEPS - 2


async def test_told_in_headers(mesh: Mesh) -> None:
    headers = {f"x-kvmesh-{name.replace('_', '-')}": str(value) for name, value in WISHES.items()}
    is_as_wished(await asked(mesh, headers=headers))
    is_as_wished(await asked(mesh, headers=headers, body=WISHES))  # both, and they agree


async def test_told_over_grpc(mesh: Mesh) -> None:
    request = gateway_pb2.GenerateRequest(
        text="Hi",
        ttft_slo_ms=1500,
        tbt_slo_ms=40,
        priority=-2,
        lane=conductor_pb2.LANE_BATCH,
        session="s1",
        origin="shop",
        expected_tokens=77,
    )
    async for _ in mesh.stub.Generate(request, timeout=10):
        pass
    is_as_wished(mesh.conductor.asked[-1])
    assert mesh.conductor.asked[-1].endpoint == "grpc"


async def test_nothing_told_is_the_gateways_own(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(ttft_slo_ms=900, tbt_slo_ms=90)
    request = await asked(mesh)
    assert (request.ttft_slo_ms, request.tbt_slo_ms) == (900, 90)
    assert request.lane == conductor_pb2.LANE_INTERACTIVE
    assert (request.priority, request.session, request.origin, request.expected_output_tokens) == (0, "", "", 0)
    assert (await asked(mesh, body={"ttft_slo_ms": 5})).ttft_slo_ms == 5


async def test_openais_own_words(mesh: Mesh) -> None:
    assert (await asked(mesh, body={"service_tier": "flex"})).lane == conductor_pb2.LANE_BATCH
    assert (await asked(mesh, body={"service_tier": "auto"})).lane == conductor_pb2.LANE_INTERACTIVE
    assert (await asked(mesh, body={"service_tier": "default", "lane": "batch"})).lane == conductor_pb2.LANE_BATCH
    assert (await asked(mesh, body={"prompt_cache_key": "shop"})).origin == "/shop"
    assert (await asked(mesh, body={"user": "me"})).session == ""  # a user is not a conversation


WRONG = [
    ({"headers": {"x-kvmesh-ttft-slo-ms": "soon"}}, "x-kvmesh-ttft-slo-ms", "'soon': must be a whole number"),
    ({"headers": {"x-kvmesh-ttft-slo-ms": "0"}}, "ttft_slo_ms", "ttft_slo_ms=0: must be between 1 and 86400000"),
    ({"headers": {"x-kvmesh-tbt-slo-ms": "-5"}}, "tbt_slo_ms", "tbt_slo_ms=-5: must be between"),
    ({"headers": {"x-kvmesh-lane": "fast"}}, "x-kvmesh-lane", "'fast': must be one of interactive, batch"),
    ({"headers": {"x-kvmesh-session": ""}}, "x-kvmesh-session", "must not be empty"),
    ({"headers": {"x-kvmesh-origin": "o" * 257}}, "origin", "at most 256 characters"),
    ({"headers": {"x-kvmesh-priority": "9" * 12}}, "priority", "priority=999999999999: must be between"),
    ({"headers": {"x-kvmesh-expected-tokens": "1.5"}}, "x-kvmesh-expected-tokens", "must be a whole number"),
    ({"headers": {"x-kvmesh-lane": "batch"}, "body": {"lane": "interactive"}}, "x-kvmesh-lane", "differs from lane="),
    ({"headers": {"x-kvmesh-tbt-slo-ms": "5"}, "body": {"tbt_slo_ms": 6}}, "x-kvmesh-tbt-slo-ms", "tbt_slo_ms=6"),
    ({"body": {"ttft_slo_ms": 0}}, "ttft_slo_ms", "ttft_slo_ms=0: must be between"),
    ({"body": {"ttft_slo_ms": "5"}}, "ttft_slo_ms", "ttft_slo_ms='5'"),
    ({"body": {"tbt_slo_ms": 10**9}}, "tbt_slo_ms", "must be between"),
    ({"body": {"expected_tokens": 0}}, "expected_tokens", "expected_tokens=0"),
    ({"body": {"lane": "fast"}}, "lane", "'fast': must be one of"),
    ({"body": {"session": "a\nb"}}, "session", "printable"),
    ({"body": {"service_tier": "priority"}}, "service_tier", "'priority': not supported"),
    ({"body": {"service_tier": "flex", "lane": "interactive"}}, "service_tier", "differs from lane='interactive'"),
    ({"body": {"origin": "a", "prompt_cache_key": "b"}}, "prompt_cache_key", "differs from origin='a'"),
]


async def test_what_makes_no_sense_is_named(mesh: Mesh) -> None:
    for given, field, words in WRONG:
        error = await refused(mesh, **given)
        assert error["param"] == field, (given, error)
        assert words in error["message"], (given, error)
    assert mesh.conductor.asked == []


async def test_the_batch_lane_waits_until_it_is_taken(mesh: Mesh) -> None:
    mesh.conductor.failures.extend(Overloaded("nothing is idle", retry_after_ms=60) for _ in range(3))
    request = await asked(mesh, body={"lane": "batch"})
    assert len({a.request_id for a in mesh.conductor.asked}) == 1  # the same request: it keeps its place
    assert len(mesh.conductor.asked) == 4
    assert request.attempt == 0


async def test_everybody_else_hears_at_once(mesh: Mesh) -> None:
    mesh.conductor.failures.append(Overloaded("full", retry_after_ms=2500))
    response = await mesh.http.post("/v1/chat/completions", json=CHAT)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert len(mesh.conductor.asked) == 1


async def test_the_batch_lane_waits_no_longer_than_its_request(mesh: Mesh) -> None:
    mesh.conductor.failures.append(Overloaded("nothing is idle", retry_after_ms=20_000))
    headers = {"x-request-timeout-ms": "5000", "x-kvmesh-lane": "batch"}
    response = await mesh.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert (response.status_code, response.headers["retry-after"]) == (429, "20")  # at once: waiting would not help


async def test_few_wait_at_a_gateway(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(max_waiting_batch=1)
    mesh.conductor.failures.extend(Overloaded("nothing is idle", retry_after_ms=60_000) for _ in range(2))
    headers = {"x-kvmesh-lane": "batch"}
    first = asyncio.create_task(mesh.http.post("/v1/chat/completions", json=CHAT, headers=headers))
    await seen(lambda: len(mesh.conductor.asked) == 1)
    second = await mesh.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert second.status_code == 429
    first.cancel()  # its client leaves: it waits no more
    with pytest.raises(asyncio.CancelledError):
        await first
    await mesh.quiet()
