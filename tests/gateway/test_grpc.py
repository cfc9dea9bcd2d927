"""kvmesh.v1.Gateway over real gRPC: the same path as REST."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.errors import (
    BodyTooLarge,
    DeadlinePassed,
    HandoffLost,
    InvalidRequest,
    KvmeshError,
    ModelNotFound,
    Overloaded,
)
from kvmesh.kvcache.keys import pack_tokens
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import common_pb2, gateway_pb2
from kvmesh.rpc.status import from_rpc_error
from tests.gateway.conftest import Mesh, MeshMaker, seen, until
from tests.support.gateway.scripted import CACHED, MODEL, Run


def asks(**fields: Any) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(**({"text": "Hi"} if "prompt" not in fields else {}) | fields)


async def generate(mesh: Mesh, request: gateway_pb2.GenerateRequest) -> list[gateway_pb2.GenerateResponse]:
    return [part async for part in mesh.stub.Generate(request, timeout=15)]


async def error_of(mesh: Mesh, request: gateway_pb2.GenerateRequest) -> KvmeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(mesh, request)
    return from_rpc_error(caught.value)


async def test_tokens_text_usage_and_timings(mesh: Mesh) -> None:
    mesh.decodes[0].script = mesh.says("Füchse 🦊")
    parts = await generate(mesh, asks(max_tokens=30, request_id="job"))
    assert "".join(part.text for part in parts) == "Füchse 🦊"
    assert [token for part in parts for token in part.token_ids] == [*mesh.ids("Füchse 🦊"), mesh.eos]
    assert [part.finish_reason for part in parts] == [""] * (len(parts) - 1) + ["stop"]
    last = parts[-1]
    assert last.usage.cached_tokens == CACHED
    assert last.usage.completion_tokens == len(mesh.ids("Füchse 🦊")) + 1
    assert last.timings.transfer_us == 33
    assert {part.request_id for part in parts} == {mesh.conductor.asked[0].request_id}
    assert last.request_id.startswith("job-")


async def test_every_kind_of_prompt(mesh: Mesh) -> None:
    chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="user", content="Hi")])
    for request in (asks(), gateway_pb2.GenerateRequest(token_ids=pack_tokens([5, 6])), asks(text="", chat=chat)):
        assert await generate(mesh, request)
    prompts = [run.prompt for run in mesh.decodes[0].runs]
    assert prompts == [mesh.ids("Hi"), [5, 6], mesh.ids("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")]


async def test_sampling_fields(mesh: Mesh) -> None:
    await generate(mesh, asks(temperature=0.0, top_p=0.5, top_k=2, seed=9, ignore_eos=True, priority=-1, max_tokens=3))
    start = mesh.decodes[0].runs[0].start
    sampling = start.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.0, 0.5, 2, 9)
    assert (sampling.ignore_eos, sampling.max_tokens, start.priority) == (True, 3, -1)
    biases = [common_pb2.LogitBias(token_id=5, bias=-100.0), common_pb2.LogitBias(token_id=400, bias=1.5)]
    penalties = {"presence_penalty": -2.0, "frequency_penalty": 0.5, "repetition_penalty": 1.25, "min_p": 0.25}
    await generate(mesh, asks(logit_bias=biases, **penalties))
    told = mesh.decodes[0].runs[1].start.sampling
    assert list(told.logit_bias) == biases
    assert {name: getattr(told, name) for name in penalties} == penalties
    await generate(mesh, asks())
    plain = mesh.decodes[0].runs[2].start.sampling
    assert (plain.temperature, plain.repetition_penalty, plain.answered_tokens) == (1.0, 1.0, 0)
    assert not plain.logit_bias


async def test_stops_and_logprobs(mesh: Mesh) -> None:
    mesh.decodes[0].script = mesh.says("one two END three")
    parts = await generate(mesh, asks(stop=["END"], logprobs=True, top_logprobs=1))
    assert "".join(part.text for part in parts) == "one two "
    assert parts[-1].finish_reason == "stop"
    entries = [entry for part in parts for entry in part.logprobs]
    assert {len(entry.top) for entry in entries} == {1}
    await asyncio.wait_for(mesh.decodes[0].runs[0].cancelled.wait(), 30)


# fields of a request → field named, words in the message
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"text": ""}, "prompt", "must not be empty"),
    ({"prompt": None}, "prompt", "required"),
    ({"token_ids": b"123"}, "token_ids", "3 bytes"),
    ({"token_ids": b""}, "prompt", "must not be empty"),
    ({"token_ids": pack_tokens([401])}, "prompt", "prompt=401"),
    ({"chat": gateway_pb2.Chat()}, "messages", "must not be empty"),
    ({"chat": gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(role="x")])}, "chat.messages.0.role", "'x'"),
    ({"temperature": float("nan")}, "temperature", "temperature=nan"),
    ({"temperature": float("inf")}, "temperature", "temperature=inf"),
    ({"temperature": -1.0}, "temperature", "temperature=-1"),
    ({"top_p": 0.0}, "top_p", "over 0"),
    ({"top_p": float("nan")}, "top_p", "nan"),
    ({"seed": 2**64 - 1}, "seed", "must be between"),
    ({"min_p": float("nan")}, "min_p", "min_p=nan"),
    ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty=2.5"),
    ({"frequency_penalty": float("-inf")}, "frequency_penalty", "=-inf: must be between"),
    ({"repetition_penalty": -1.0}, "repetition_penalty", "repetition_penalty=-1.0"),
    ({"logit_bias": [common_pb2.LogitBias(token_id=5, bias=float("nan"))]}, "logit_bias.5", "=nan: must be"),
    ({"logit_bias": [common_pb2.LogitBias(token_id=5)] * 2}, "logit_bias.5", "named twice"),
    ({"logit_bias": [common_pb2.LogitBias(token_id=401)]}, "logit_bias.401", "outside the vocabulary"),
    ({"logit_bias": [common_pb2.LogitBias(token_id=5)] * 301}, "logit_bias", "at most 300"),
    ({"stop": ["x"] * 10_000}, "stop", "10000"),
    ({"stop": [""]}, "stop", "not empty"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs=21: must be between 0 and 20"),
    ({"max_tokens": 2**32 - 1}, "max_tokens", "between"),
    ({"cache_salt": "x" * 300}, "cache_salt", "at most 256"),
    ({"request_id": "a b"}, "request_id", "'a b'"),
]


async def test_bad_requests(mesh: Mesh) -> None:
    wrong = []
    for fields, field, words in BAD:
        if {"token_ids", "chat", "prompt"} & fields.keys():
            request = gateway_pb2.GenerateRequest(**{k: v for k, v in fields.items() if k != "prompt"})
        else:
            request = asks(**fields)
        err = await error_of(mesh, request)
        if not isinstance(err, InvalidRequest) or err.field != field or words not in err.message:
            wrong.append((fields, err))
    assert not wrong
    assert not mesh.conductor.asked


async def test_messages_that_cannot_be_read(mesh: Mesh) -> None:
    """Text that is not UTF-8, and bytes that are no message: the caller's fault."""
    async with connect(str(mesh.told["address"])) as channel:
        for data in (b"\x1a\x02\xff\xfe", b"\x1a\x03\xed\xa0\x80", b"\xff" * 20):
            call: Any = channel.unary_stream("/kvmesh.v1.Gateway/Generate")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(data, timeout=10).read()
            err = from_rpc_error(refused.value)
            assert isinstance(err, InvalidRequest), err
            assert err.field == "message"
    assert not mesh.conductor.asked


async def test_a_field_of_a_later_build_is_passed_over(mesh: Mesh) -> None:
    async with connect(str(mesh.told["address"])) as channel:
        call: Any = channel.unary_stream("/kvmesh.v1.Gateway/Generate")
        assert await call(asks().SerializeToString() + b"\xf8\x3f\x05", timeout=10).read()


async def test_a_message_of_20_mb_is_refused_before_it_is_tokenized(mesh: Mesh) -> None:
    err = await error_of(mesh, asks(text="x" * 20_000_000))
    assert isinstance(err, BodyTooLarge)
    assert "larger than max (20000005 vs. 8388608)" in err.message  # gRPC itself, before it takes the bytes
    assert not mesh.conductor.asked


async def test_named_errors(mesh: Mesh) -> None:
    assert isinstance(await error_of(mesh, asks(model="other")), ModelNotFound)
    mesh.conductor.failures.append(Overloaded("full", retry_after_ms=1500))
    refused = await error_of(mesh, asks())
    assert isinstance(refused, Overloaded)
    assert refused.retry_after_ms == 1500

    async def fails(run: Run) -> None:
        await run.fail(HandoffLost("prefill went away"))

    async def silent(run: Run) -> None:
        await asyncio.Event().wait()

    mesh.decodes[0].script = fails
    assert isinstance(await error_of(mesh, asks()), HandoffLost)
    mesh.decodes[0].script = silent
    assert isinstance(await error_of(mesh, asks(timeout_ms=2_000)), DeadlinePassed)
    await asyncio.wait_for(mesh.decodes[0].runs[-1].cancelled.wait(), 30)
    assert (await mesh.status()).requests == 0


async def test_a_cancelled_call_cancels_the_request(mesh: Mesh) -> None:
    async def one_token(run: Run) -> None:
        await run.token(mesh.ids("Hi")[0], 0)
        await asyncio.Event().wait()

    mesh.decodes[0].script = one_token
    reading = mesh.stub.Generate(asks())
    assert (await reading.read()).text
    waiting = mesh.stub.Generate(asks())
    await seen(lambda: len(mesh.decodes[0].runs) == 2)
    for call in (reading, waiting):
        call.cancel()
    for run in mesh.decodes[0].runs:
        await asyncio.wait_for(run.cancelled.wait(), 30)
    await mesh.quiet()


async def test_status_and_health(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh()
    status = await mesh.status()
    assert (status.requests, status.streams, list(status.models), status.ready) == (0, 0, [MODEL], True)
    await generate(mesh, asks())
    assert (await mesh.status()).streams == 1
    async with connect(str(mesh.told["address"])) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="kvmesh.v1.Gateway"), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await mesh.conductor.stop()
        mesh.conductor.asked.clear()
        await error_of(mesh, asks(timeout_ms=2_000))

        async def look() -> Any:
            return await health.Check(health_pb2.HealthCheckRequest(service=""), timeout=30)

        await until(look, lambda answer: answer.status == health_pb2.HealthCheckResponse.NOT_SERVING)
    assert "cannot be reached" in (await mesh.status()).not_ready_reason


async def test_a_request_that_is_named_again_draws_the_same(mesh: Mesh) -> None:
    """As after the death of a gateway: what was not told follows from the name and the prompt."""

    async def seed(**fields: Any) -> int:
        await generate(mesh, asks(max_tokens=2, temperature=1.0, **fields))
        return int(mesh.decodes[0].runs[-1].start.sampling.seed)

    first = await seed(request_id="job")
    assert await seed(request_id="job") == first
    assert await seed(request_id="job-2") != first
    assert await seed(request_id="job", token_ids=pack_tokens([1, 2, 3]), text="") != first
    assert await seed(request_id="job", seed=7) == 7
    assert await seed() != await seed()
