"""A gateway that holds requests while no instance of their model is there: order, bounds, and every way to leave."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import httpx
import pytest

from kvmesh.errors import InvalidRequest, Overloaded, Paused, Unavailable
from kvmesh.rpc.pb import gateway_pb2
from tests.gateway.conftest import Mesh, MeshMaker, seen, until
from tests.support.gateway.scripted import MODEL, Decode

URL = "/v1/completions"
HOLDS = {"hold_requests": 8, "hold_ms": 60_000, "schedule_retry_ms": 0}


def body(name: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": f"Tell me of {name}", "max_tokens": 4, **more}


async def ask(mesh: Mesh, name: str, **more: Any) -> httpx.Response:
    return await mesh.http.post(URL, json=body(name, **more), headers={"x-request-id": name})


async def metric(mesh: Mesh, name: str, **labels: str) -> float:
    """The sum of what is shown with these labels."""
    text = (await mesh.http.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    mine = [line for line in lines if all(f'{key}="{value}"' in line for key, value in labels.items())]
    return sum(float(line.rsplit(" ", 1)[1]) for line in mine)


async def held(mesh: Mesh, count: int) -> None:
    await until(lambda: metric(mesh, "kvmesh_gateway_held_requests", model=MODEL), lambda found: found == count)


Absent = Callable[..., Awaitable[tuple[Mesh, Decode]]]


@pytest.fixture
async def absent(make_mesh: MeshMaker) -> AsyncIterator[Absent]:
    """A gateway whose conductor knows no instance, and one that may be registered."""
    decodes: list[Decode] = []

    async def make(**config: Any) -> tuple[Mesh, Decode]:
        mesh = await make_mesh(decodes=0, wait_ready=False, **(HOLDS | config))
        mesh.conductor.registered = False
        await until(mesh.status, lambda status: status.ready)
        decodes.append(decode := Decode("decode-0", mesh.says("Hello, world")))
        await decode.start()
        return mesh, decode

    yield make
    for decode in decodes:
        await decode.server.stop(0)


def register(mesh: Mesh, decode: Decode) -> None:
    mesh.conductor.registered = True
    mesh.decodes.append(decode)


async def in_line(mesh: Mesh, *names: str, **more: Any) -> list[asyncio.Task[httpx.Response]]:
    """Requests that came one after the other."""
    tasks = []
    before = await metric(mesh, "kvmesh_gateway_held_requests", model=MODEL)
    for number, name in enumerate(names, 1):
        tasks.append(asyncio.create_task(ask(mesh, name, **more)))
        await held(mesh, int(before) + number)
    return tasks


async def test_what_was_held_goes_on_in_order_when_the_first_instance_is_there(absent: Absent) -> None:
    mesh, decode = await absent()
    gone = (await mesh.http.get("/ready")).json()
    assert gone["status"] == "ready" and not gone["models"][MODEL]["ready"], "requests of it may come"
    tasks = await in_line(mesh, "r0", "r1", "r2", "r3")
    await seen(lambda: mesh.conductor.held == {MODEL: 4})
    assert await metric(mesh, "vllm:num_requests_waiting", model_name=MODEL) == 4
    assert not mesh.conductor.asked
    register(mesh, decode)
    answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [one.request_id.rpartition("-")[0] for one in mesh.conductor.asked] == ["r0", "r1", "r2", "r3"]
    assert all(not one.ttft_slo_ms for one in mesh.conductor.asked), "the SLO begins where it is placed"
    await held(mesh, 0)
    placed = "kvmesh_gateway_hold_seconds_count"
    assert await metric(mesh, placed, model=MODEL, outcome="placed") >= 4
    assert (await ask(mesh, "later")).status_code == 200


async def test_who_is_refused_for_load_in_its_turn_waits_on_before_all_others(absent: Absent) -> None:
    mesh, decode = await absent()
    tasks = await in_line(mesh, "r0", "r1", "r2")
    mesh.conductor.failures.extend(Overloaded("the TTFT would be 9 s", retry_after_ms=20) for _ in range(3))
    register(mesh, decode)
    assert [(await task).status_code for task in tasks] == [200] * 3
    names = [one.request_id.rpartition("-")[0] for one in mesh.conductor.asked]
    assert names == ["r0", "r0", "r0", "r0", "r1", "r2"]
    mesh.conductor.failures.append(Overloaded("the TTFT would be 9 s", retry_after_ms=20))
    assert (await ask(mesh, "r3")).status_code == 429, "nobody held it"


async def test_an_error_of_one_lets_the_next_one_go(absent: Absent) -> None:
    mesh, decode = await absent()
    tasks = await in_line(mesh, "r0")
    tasks += await in_line(mesh, "r1", prompt="x " * 600)  # longer than the context
    tasks += await in_line(mesh, "r2", "r3")
    mesh.conductor.failures.append(InvalidRequest("ttft_slo_ms=1: not even alone"))
    register(mesh, decode)
    assert [(await task).status_code for task in tasks] == [400, 400, 200, 200]


async def test_a_model_whose_last_instance_goes_holds_again(make_mesh: MeshMaker) -> None:
    """The catalog's look is older than that: the conductor's refusal tells."""
    mesh = await make_mesh(**HOLDS)
    assert (await ask(mesh, "before")).status_code == 200
    mesh.conductor.ready = False
    gone = [Unavailable("no ready decode instance (decode-0: silent for 3 s)") for _ in range(50)]
    mesh.conductor.failures.extend(gone)
    tasks = await in_line(mesh, "r0", "r1")
    tasks.append(asyncio.create_task(ask(mesh, "stream", stream=True)))
    await held(mesh, 3)
    mesh.conductor.failures.clear()
    mesh.conductor.ready = True
    answers = [await task for task in tasks]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert answers[2].text.rstrip().endswith("[DONE]")


async def test_one_whose_time_is_over_hears_so(absent: Absent) -> None:
    mesh, _ = await absent(hold_ms=400)
    answers = await asyncio.gather(ask(mesh, "r0"), ask(mesh, "r1", stream=True))
    for answer in answers:
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert "hold_ms=400" in answer.json()["error"]["message"]
    await held(mesh, 0)


async def test_a_request_has_no_more_than_its_own_time(absent: Absent) -> None:
    mesh, _ = await absent(timeout_s=0.5)
    assert (await ask(mesh, "r0")).status_code == 504
    await held(mesh, 0)


async def test_there_is_room_for_so_many(absent: Absent) -> None:
    mesh, decode = await absent(hold_requests=2)
    tasks = await in_line(mesh, "r0", "r1")
    refused = await ask(mesh, "r2")
    assert refused.status_code == 503 and "hold_requests=2" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 0
    tasks.pop().cancel()  # its client goes away
    await held(mesh, 1)
    tasks += await in_line(mesh, "r3")
    register(mesh, decode)
    assert [(await task).status_code for task in tasks] == [200, 200]


async def test_prompts_have_room_for_so_many_bytes(absent: Absent) -> None:
    mesh, decode = await absent(hold_bytes=100_000)
    tasks = await in_line(mesh, "r0")
    refused = await ask(mesh, "r1", prompt="x" * 90_000)
    assert refused.status_code == 503 and "hold_bytes=100000" in refused.json()["error"]["message"]
    tasks += await in_line(mesh, "r2")
    register(mesh, decode)
    assert [(await task).status_code for task in tasks] == [200, 200]


async def test_over_grpc_too_and_a_cancelled_call_leaves(absent: Absent) -> None:
    mesh, decode = await absent()
    asks = gateway_pb2.GenerateRequest(model=MODEL, text="Hi", max_tokens=4)
    leaving, staying = (mesh.stub.Generate(asks, timeout=60) for _ in range(2))
    reads = asyncio.create_task(leaving.read())
    stays = asyncio.create_task(staying.read())
    await held(mesh, 2)
    leaving.cancel()
    await asyncio.gather(reads, return_exceptions=True)
    await held(mesh, 1)
    register(mesh, decode)
    first = await stays
    assert first is not grpc.aio.EOF


async def test_a_gateway_that_stops_holds_nobody(absent: Absent) -> None:
    mesh, _ = await absent(stop_grace_ms=50)
    tasks = await in_line(mesh, "r0", "r1")
    await asyncio.wait_for(mesh.stop(), 30)
    answers = [await task for task in tasks]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert all("shutting down" in answer.json()["error"]["message"] for answer in answers)


async def test_a_pause_is_no_absence(make_mesh: MeshMaker) -> None:
    """A paused model's requests wait at its pause, in no line."""
    mesh = await make_mesh(**HOLDS)
    before = await metric(mesh, "kvmesh_gateway_hold_seconds_count", model=MODEL)
    mesh.conductor.failures.append(Paused("model is paused", retry_after_ms=20))
    assert (await ask(mesh, "r0")).status_code == 200
    assert await metric(mesh, "kvmesh_gateway_hold_seconds_count", model=MODEL) == before


async def test_without_the_setting_there_is_an_error_at_once(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(decodes=0, wait_ready=False)
    mesh.conductor.registered = False
    answer = await ask(mesh, "r0")
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert not (await mesh.status()).ready


async def test_a_conductor_that_cannot_be_reached_holds_nobody_anew(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(**HOLDS)
    await mesh.conductor.stop()
    answer = await ask(mesh, "r0")
    assert answer.status_code == 503 and "cannot be reached" in answer.json()["error"]["message"]
    await held(mesh, 0)


async def test_pools_read_of_a_real_gateway_what_they_read_of_vllm(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh()
    mesh.decodes[0].script = mesh.says("one two three four five six", eos=True)
    assert (await ask(mesh, "r0", max_tokens=20)).status_code == 200
    await mesh.quiet()
    text = (await mesh.http.get("/metrics")).text
    shown = {}
    for line in text.splitlines():
        if found := re.fullmatch(r"(vllm:\w+)\{([^}]*)\} (\S+)", line):
            shown[found[1], found[2]] = float(found[3])
    own = f'model_name="{MODEL}"'
    for name in ("time_to_first_token", "time_per_output_token", "inter_token_latency", "e2e_request_latency"):
        count, total = (shown[f"vllm:{name}_seconds_{part}", own] for part in ("count", "sum"))
        assert count >= 1 and total >= 0
        bounds = {key: value for key, value in shown.items() if key[0] == f"vllm:{name}_seconds_bucket"}
        mine = [value for (_, labels), value in bounds.items() if own in labels]
        assert mine == sorted(mine) and mine[-1] == count, "cumulative, +Inf last"
    prompt = shown["vllm:prompt_tokens_total", own]
    assert prompt == shown["vllm:prefix_cache_queries_total", own] > 0
    assert 0 <= shown["vllm:prefix_cache_hits_total", own] <= prompt
    types = dict(re.findall(r"# TYPE (vllm:\w+) (\w+)", text))
    assert types["vllm:time_per_output_token_seconds"] == "histogram" and types["vllm:prompt_tokens_total"] == "counter"
    assert json.loads((await mesh.http.get("/health")).text)["models"][MODEL]["ready"]
