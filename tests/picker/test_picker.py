"""The endpoint picker over real gRPC, with a real conductor beside it."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.rpc.pb import conductor_pb2
from kvmesh.rpc.pb import envoy_external_processor_pb2 as pb
from kvmesh.telemetry import names, spans
from tests.picker.conftest import MODEL, TIMEOUT_S, PickerMesh, picker_mesh
from tests.support.ext_proc import (
    BUFFERED,
    FULL_DUPLEX,
    NONE,
    ProxyAnswer,
    body_message,
    headers_message,
    post,
    response_message,
)
from tests.support.services import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

A, B, C = "127.0.0.1:7101", "127.0.0.1:7102", "127.0.0.1:7103"
ENGINES = {"a": A, "b": B, "c": C}
MAX_BODY = 256 << 10


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[PickerMesh]:
    """Three engines; nothing of one test is left when the next begins."""
    async with picker_mesh({}, max_body_bytes=MAX_BODY, body_timeout_s=1.0) as made:
        for name, address in ENGINES.items():
            await made.add(name, address, seen=False)
        await made.sees(C)
        yield made


def prompt(seed: int, words: int = 120) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(words))


def completion(text: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": text, "max_tokens": 8, **more}


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


async def nothing_pending(mesh: PickerMesh) -> None:
    async def none() -> bool:
        return not any([await mesh.pending(name) for name in ENGINES])

    await until(none)


async def placed(mesh: PickerMesh, body: Any, answered_by: str = "", status: int = 200, **more: Any) -> ProxyAnswer:
    """One request from its headers to the end of its answer. `answered_by` "": the choice itself."""
    stream = mesh.proxy.open()
    await stream.send(headers_message(more.pop("headers", post()), **more))
    await stream.send(body_message(json.dumps(body).encode()))
    answer = ProxyAnswer.of(await stream.read(2))
    await stream.send(response_message(status, answered_by or answer.endpoints[0]))
    assert [one.WhichOneof("response") for one in await stream.read()] == ["response_headers"]
    assert await stream.end() == []
    return answer


async def test_whole_pieces_and_buffered_bodies_get_one_answer(mesh: PickerMesh) -> None:
    for mode, pieces in ((FULL_DUPLEX, 1), (FULL_DUPLEX, 7), (BUFFERED, 1)):
        body = completion(prompt(1, 4000))
        answer = await mesh.proxy.ask(body, mode=mode, pieces=pieces)
        assert set(answer.endpoints) == {A, B, C}
        if mode == FULL_DUPLEX:  # the body goes on as it came
            assert answer.ended and len(answer.body) > 20_000
            assert json.loads(answer.body) == body
    await nothing_pending(mesh)


def response(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": text, "max_output_tokens": 8, "store": False, **more}


def message(text: str, **more: Any) -> dict[str, Any]:
    return {**chat(text), "metadata": {"user_id": "somebody"}, **more}


def ids(text: str, **more: Any) -> dict[str, Any]:
    params = {"max_tokens": 8, "structured_outputs": {"json": {}}}  # the engine judges what kvmesh does not know
    return {"model": MODEL, "token_ids": list(text.encode()), "sampling_params": params, **more}


ASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "/v1/completions": completion,
    "/v1/chat/completions": chat,
    "/v1/responses": response,
    "/v1/messages?beta=true": message,
    "/inference/v1/generate": ids,
}


@pytest.mark.parametrize("path", ASKS)
async def test_a_prefix_goes_where_it_was_computed(mesh: PickerMesh, path: str) -> None:
    ask = ASKS[path]
    first = await placed(mesh, ask(prompt(2)), headers=post(path))
    await nothing_pending(mesh)
    for tail in range(4):
        again = await placed(mesh, ask(prompt(2) + f" and {tail}"), headers=post(path))
        assert again.endpoints[0] == first.endpoints[0]
        await nothing_pending(mesh)
    assert await believed_cached(mesh, ask(prompt(2)), path) > 0
    await nothing_pending(mesh)


async def test_one_chat_is_one_prefix_whatever_its_interface(mesh: PickerMesh) -> None:
    await placed(mesh, chat(prompt(4)), headers=post("/v1/chat/completions"))
    await nothing_pending(mesh)
    told = []
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages?beta=true"):
        told.append(await believed_cached(mesh, ASKS[path](prompt(4)), path))
        await nothing_pending(mesh)
    assert told[0] == told[1] == told[2] > 0


async def test_what_a_fallback_has_answered_is_learnt_there(mesh: PickerMesh) -> None:
    body = completion(prompt(3))
    answer = await mesh.proxy.ask(body)
    other = answer.endpoints[1]
    await placed(mesh, body, answered_by=other)
    await nothing_pending(mesh)
    assert (await placed(mesh, completion(prompt(3) + " more"))).endpoints[0] == other
    await nothing_pending(mesh)


async def believed_cached(mesh: PickerMesh, body: Any, path: str = "/v1/completions") -> int:
    """Of the next request of that body: the tokens that the conductor takes to be at the engine it chose."""
    seen: list[int] = []

    def emit(name: str, own: Any, parent: Any, *rest: Any) -> None:
        if name == names.SPAN_PLACE:
            seen.append(rest[2][names.PREDICTED_CACHED_TOKENS])

    spans.use(None, emit)
    try:
        await placed(mesh, body, headers=post(path, traceparent=f"00-{7:032x}-{8:016x}-01"))
    finally:
        spans.use(None)
    (found,) = seen
    return found


@pytest.mark.parametrize(("status", "learnt"), [(200, True), (400, False), (429, False), (500, False)])
async def test_what_an_engine_refuses_is_not_learnt_there(mesh: PickerMesh, status: int, learnt: bool) -> None:
    body = completion(prompt(1000 + status))
    await placed(mesh, body, status=status)
    await nothing_pending(mesh)
    assert (await believed_cached(mesh, body) > 0) == learnt
    await nothing_pending(mesh)


async def test_a_request_that_nobody_answers_reserves_nothing(mesh: PickerMesh) -> None:
    stream = mesh.proxy.open()
    await stream.send(headers_message(post()), body_message(json.dumps(completion(prompt(4))).encode()))
    answer = ProxyAnswer.of(await stream.read(2))
    name = next(name for name, address in ENGINES.items() if address == answer.endpoints[0])
    assert await mesh.pending(name) > 0
    stream.call.cancel()  # the proxy has died
    await nothing_pending(mesh)


async def test_only_what_the_proxy_allows_is_picked(mesh: PickerMesh) -> None:
    body = completion(prompt(5))
    first = (await placed(mesh, body)).endpoints[0]  # where the prefix is, from now on
    others = sorted({A, B, C} - {first})
    for _ in range(3):
        assert (await placed(mesh, body, subset=[others[0], "10.9.9.9:1"])).endpoints == [others[0]]
    assert set((await mesh.proxy.ask(body, subset=others)).endpoints) == set(others)
    for subset in ([], ["10.9.9.9:1"]):
        refused = await mesh.proxy.ask(body, subset=subset)
        assert (refused.status, refused.error["code"]) == (503, "unavailable")
        assert refused.endpoints == []
    await nothing_pending(mesh)


async def test_an_slo_that_cannot_be_met_is_429(mesh: PickerMesh) -> None:
    refused = await mesh.proxy.ask(completion(prompt(6, 1000)), headers=post(x_kvmesh_ttft_slo_ms="1"))
    assert (refused.status, refused.error["code"]) == (429, "overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (post("/v1/embeddings"), {"model": MODEL, "input": "x"}),  # no prompt that is known
        (post(), completion(prompt(7), n=10**9, beam="wide")),  # the engine's own fields
        (post(), completion("")),  # the engine refuses these
        (post(), completion([10**9])),
        (post(), completion(prompt(7, 4000))),  # longer than its context
        (post("/v1/chat/completions"), {"model": MODEL, "messages": "none"}),
        (post(), {"prompt": "x"}),  # of no model
        (post("/inference/v1/generate"), {"token_ids": [1], "sampling_params": {}}),
        (post("/v1/responses"), response("x", previous_response_id="resp_1")),  # the engine has the rest
        (post("/v1/responses"), response("x") | {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        (post("/v1/messages"), {"model": MODEL, "messages": [], "max_tokens": 8}),
        (post(content_encoding="gzip"), gzip.compress(b"{}")),
        ({":method": "GET", ":path": "/v1/models"}, None),
        ({":method": "POST", ":path": "/metrics", "content-type": "text/plain"}, b"no JSON"),
    ],
)
async def test_bodies_without_a_known_prompt_go_by_load(mesh: PickerMesh, headers: dict[str, str], body: Any) -> None:
    for mode in (FULL_DUPLEX, BUFFERED):
        answer = await mesh.proxy.ask(body, headers=headers, mode=mode)
        assert set(answer.endpoints) == {A, B, C}


async def test_no_body_is_waited_for_where_none_is_sent(mesh: PickerMesh) -> None:
    stream = mesh.proxy.open()
    await stream.send(headers_message(post(), mode=NONE))
    assert len(ProxyAnswer.of(await stream.read()).endpoints) == 3
    await stream.end()


@pytest.mark.parametrize(
    ("messages", "status", "param"),
    [
        ([headers_message(post()), body_message(b"{nope")], 400, "body"),
        ([headers_message(post()), body_message(b"\xff\xfe\x00")], 400, "body"),
        ([headers_message(post()), body_message(b"[1, 2]")], 400, "body"),
        ([headers_message(post(), mode=BUFFERED), body_message(b"[" * 100_000)], 400, "body"),
        ([headers_message(post()), *[body_message(bytes(100_000), end=False)] * 3], 413, "body"),
        ([headers_message(post(content_length=str(MAX_BODY + 1)))], 413, "body"),
        ([headers_message(post(content_length="9" * 30))], 413, "body"),
        ([body_message(b"{}")], 400, "request_body"),
        ([response_message()], 400, "response_headers"),
        ([pb.ProcessingRequest()], 400, "request"),
        ([headers_message(post()), headers_message(post())], 400, "request_headers"),
        ([headers_message(post()), response_message()], 400, "response_headers"),
        ([headers_message(post(), end=True), body_message(b"{}")], 400, "request_body"),
    ],
)
async def test_what_is_wrong_gets_one_clear_answer(
    mesh: PickerMesh, messages: list[pb.ProcessingRequest], status: int, param: str
) -> None:
    stream = mesh.proxy.open()
    await stream.send(*messages)
    answers = await stream.end()
    (last,) = [one for one in answers if one.WhichOneof("response") == "immediate_response"]
    answer = ProxyAnswer.of([last])
    assert answers[-1] == last
    assert (answer.status, answer.error["param"]) == (status, param)
    assert answer.error["message"]


async def test_a_subset_that_is_none_is_refused(mesh: PickerMesh) -> None:
    message = headers_message(post())
    told = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    told.fields["x-gateway-destination-endpoint-subset"].number_value = 7
    stream = mesh.proxy.open()
    await stream.send(message)
    answer = ProxyAnswer.of(await stream.end())
    assert (answer.status, answer.error["param"]) == (400, "x-gateway-destination-endpoint-subset")


async def test_a_body_that_does_not_come_is_given_up(mesh: PickerMesh) -> None:
    stream = mesh.proxy.open()
    await stream.send(headers_message(post()), body_message(b"{", end=False))
    (answer,) = await stream.read()
    assert answer.immediate_response.status.code == 504  # as the house says it of deadlines
    assert b"body_timeout_s=1" in answer.immediate_response.body


async def test_a_model_that_nobody_serves_is_named(mesh: PickerMesh) -> None:
    refused = await mesh.proxy.ask(completion(prompt(8)) | {"model": "other"})
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert "'other'" in refused.error["message"] and MODEL in refused.error["message"]


async def test_an_observer_is_told_nothing(mesh: PickerMesh) -> None:
    message = headers_message(post())
    message.observability_mode = True
    stream = mesh.proxy.open()
    await stream.send(message, body_message(b"{}"), response_message(end=True))
    assert await stream.end() == []


async def test_streams_side_by_side(mesh: PickerMesh) -> None:
    async def one(number: int) -> list[str]:
        body = completion(prompt(number % 7) + f" {number}", session=f"s{number % 7}")
        return (await mesh.proxy.ask(body, pieces=1 + number % 3)).endpoints

    found = await asyncio.gather(*(one(number) for number in range(100)))
    assert all(set(endpoints) == {A, B, C} for endpoints in found)
    await nothing_pending(mesh)


async def test_health_metrics_and_the_span(mesh: PickerMesh) -> None:
    health: Any = health_pb2_grpc.HealthStub(mesh.proxy.channel)
    for name in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        told = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
        assert told.status == health_pb2.HealthCheckResponse.SERVING, name

    seen: list[tuple[str, int, dict[str, Any]]] = []

    def emit(name: str, own: Any, parent: Any, *rest: Any) -> None:
        seen.append((name, parent.trace_id, dict(rest[2] or {})))

    spans.use(None, emit)
    try:
        await placed(mesh, completion(prompt(9)), headers=post(traceparent=f"00-{7:032x}-{8:016x}-01"))
    finally:
        spans.use(None)
    found = {name: attributes for name, trace_id, attributes in seen if trace_id == 7}
    assert found["kvmesh.pick"]["kvmesh.outcome"] == "picked"
    assert found["kvmesh.pick"]["kvmesh.prompt_tokens"] > 100
    assert "kvmesh.place" in found  # the conductor's is below it

    def read() -> str:
        with urllib.request.urlopen(f"http://{mesh.picker.metrics}/metrics", timeout=TIMEOUT_S) as page:
            return str(page.read().decode())

    text = await asyncio.to_thread(read)
    for line in (
        'kvmesh_picker_decisions_total{by="placement",outcome="picked"}',
        'kvmesh_picker_decisions_total{by="none",outcome="body_too_large"}',
        "kvmesh_picker_served_total{endpoint=",  # whether the second of one answer is the second of the next is chance
        'kvmesh_picker_releases_total{outcome="told"}',
        'kvmesh_picker_prompt_chars_total{found="known"}',
        'kvmesh_picker_endpoints_count{kind="engine"} 3.0',
    ):
        assert line in text


async def test_a_conductor_is_asked_for_releases_it_can_take(mesh: PickerMesh) -> None:
    async def refused(**fields: Any) -> str:
        request = conductor_pb2.ReleaseRequest(requests=[conductor_pb2.ReleasedRequest(**fields)])
        with pytest.raises(Exception, match=r"requests\.") as caught:
            await mesh.stub.Release(request, timeout=TIMEOUT_S)
        return str(caught.value)

    assert "request_id" in await refused(outcome=conductor_pb2.OUTCOME_DONE)
    assert "outcome" in await refused(request_id="r")


async def test_engines_go_and_the_conductor_goes() -> None:
    async with picker_mesh({}, schedule_timeout_ms=200) as mesh:
        refused = await mesh.proxy.ask(completion(prompt(1)))
        assert refused.status == 503
        health: Any = health_pb2_grpc.HealthStub(mesh.proxy.channel)
        states = {}
        for name in ("liveness", "readiness"):
            request = health_pb2.HealthCheckRequest(service=name)
            states[name] = (await health.Check(request, timeout=TIMEOUT_S)).status
        assert states == {"liveness": health_pb2.HealthCheckResponse.SERVING, "readiness": 2}
        await mesh.add("a", A)
        await mesh.add("b", B)
        await mesh.add("a", A, ready=False)

        async def alone() -> bool:
            return (await mesh.proxy.ask(completion(prompt(1)))).endpoints == [B]

        await until(alone)
        await mesh.conductor.stop()
        # Nobody places any more; what was known last still serves.
        assert (await mesh.proxy.ask(completion(prompt(1)))).endpoints == [B]
