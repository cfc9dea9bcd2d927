"""A gateway in front of several conductors: it stays with one that answers, and moves on when that one fails."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from kvmesh.errors import KvmeshError, Overloaded, RequestCancelled, Unavailable
from tests.gateway.conftest import Mesh, MeshMaker, seen, until
from tests.support.gateway.scripted import MODEL, Conductor

URL = "/v1/chat/completions"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@dataclass
class Pair:
    """Requests go to both through doors, or over gRPC: the same happens."""

    mesh: Mesh
    a: Conductor
    b: Conductor
    way: str

    async def code(self) -> int:
        return (await self.mesh.http.post(URL, json=CHAT)).status_code

    @property
    def asked(self) -> tuple[int, int]:
        return len(self.a.asked), len(self.b.asked)


@pytest.fixture(params=["grpc", "door"])
async def pair(make_mesh: MeshMaker, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    a, b = Conductor(), Conductor()
    await asyncio.gather(a.server.start(), b.server.start())
    if request.param == "door":
        await asyncio.gather(a.door.open("127.0.0.1"), b.door.open("127.0.0.1"))
    addresses = f"{a.server.address},{b.server.address}"
    mesh = await make_mesh(wait_ready=False, conductor=addresses, schedule_timeout_ms=4000, schedule_retry_ms=500)
    a.decodes = b.decodes = mesh.decodes
    await until(mesh.status, lambda status: status.ready)
    if request.param == "door":
        await seen(lambda: len(a.door) == len(b.door) == 1)
    yield Pair(mesh, a, b, request.param)
    for one in (a, b):
        one.gate.set()
        await one.stop()


async def test_a_request_goes_through_the_door_where_there_is_one_and_over_grpc_again_when_it_closes(
    pair: Pair,
) -> None:
    assert [await pair.code() for _ in range(2)] == [200] * 2
    by_grpc = [bool(metadata) for metadata in pair.a.metadata]
    assert by_grpc == [pair.way == "grpc"] * 2
    await pair.a.door.close()
    assert [await pair.code() for _ in range(2)] == [200] * 2
    assert pair.asked == (4, 0), "the conductor itself is as well as before"
    assert all(pair.a.metadata[2:])


async def test_one_is_asked_until_it_fails_then_the_other(pair: Pair) -> None:
    assert [await pair.code() for _ in range(3)] == [200] * 3
    assert pair.asked == (3, 0)
    await pair.a.stop()
    assert [await pair.code() for _ in range(3)] == [200] * 3
    assert pair.asked == (3, 3), "and stays there"


async def test_one_that_hangs_is_left_in_time(pair: Pair) -> None:
    pair.a.gate.clear()
    assert await asyncio.wait_for(pair.code(), 5) == 200
    assert await pair.code() == 200
    assert pair.asked == (1, 2)


async def test_one_that_knows_no_instances_yet_is_passed_over(pair: Pair) -> None:
    pair.a.failures.append(Unavailable("no prefill and no decode instance of model is registered"))
    assert await pair.code() == 200
    assert pair.asked == (1, 1)


async def test_one_that_stops_under_a_call_is_passed_over(pair: Pair) -> None:
    """gRPC cancels what is under way when a server's grace is over; a door does too."""
    pair.a.failures.append(RequestCancelled("Schedule was cancelled"))
    assert await pair.code() == 200
    assert pair.asked == (1, 1)


async def test_a_refusal_is_final_whoever_says_it(pair: Pair) -> None:
    pair.a.failures.append(Overloaded("ttft would be 9 s", retry_after_ms=2300))
    assert await pair.code() == 429
    assert pair.asked == (1, 0)


async def test_with_nobody_left_there_is_one_clear_error(pair: Pair) -> None:
    await pair.a.stop()
    pair.b.failures.extend([Unavailable("no ready decode instance (d0: silent for 3 s)")] * 100)
    response = await pair.mesh.http.post(URL, json=CHAT)
    assert response.status_code == 503
    assert "d0: silent" in response.json()["error"]["message"], "what a living one says tells more"
    assert len(pair.b.asked) > 1, "for a while both are asked again"
    await pair.b.stop()
    response = await pair.mesh.http.post(URL, json=CHAT)
    assert response.status_code == 503
    assert "cannot be reached" in response.json()["error"]["message"]


async def test_what_one_said_is_told_although_it_is_silent_when_asked_again(pair: Pair) -> None:
    await pair.a.stop()

    class Once(deque[KvmeshError]):
        def popleft(self) -> KvmeshError:
            pair.b.gate.clear()
            return super().popleft()

    pair.b.failures = Once([Unavailable("no ready decode instance (d0: silent for 3 s)")])
    response = await pair.mesh.http.post(URL, json=CHAT)
    assert response.status_code == 503
    assert len(pair.b.asked) > 1
    assert "d0: silent" in response.json()["error"]["message"]
