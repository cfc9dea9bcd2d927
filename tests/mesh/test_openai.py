"""The real `openai` client against a running mesh with the demo model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvmesh.rpc.channels import connect
from scripts.demo_corpus import heldout
from tests.support.mesh.client import prompt
from tests.support.mesh.harness import Running
from tests.support.reference import reference_logits

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]

MODEL = "demo-model"


@pytest_asyncio.fixture(loop_scope="session")
async def client(small_mesh: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{small_mesh.http}/v1", api_key="none", max_retries=0, timeout=60) as it:
        yield it


async def test_the_demo_model_answers_from_what_it_read(client: openai.AsyncOpenAI) -> None:
    """Wrong KV shows as wrong answers: this is the mesh's own recall, over contexts of several blocks."""
    questions = heldout(77, 24)

    async def ask(messages: list[dict[str, str]]) -> str:
        answer = await client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=40)  # type: ignore[arg-type]
        return (answer.choices[0].message.content or "").strip()

    right = 0
    for begin in range(0, len(questions), 8):
        batch = questions[begin : begin + 8]
        answers = await asyncio.gather(*(ask(q[0]) for q in batch))
        right += sum(a == q[1] for a, q in zip(answers, batch, strict=True))
    assert right >= 0.9 * len(questions)


async def test_prompts_are_scored_as_transformers_does(
    client: openai.AsyncOpenAI, small_mesh: Running, demo_path: Path
) -> None:
    """As lm-evaluation-harness asks: prompts of token ids at once, echoed, with one token that is left out, or none;
    again when their blocks are cached. And in vLLM's form."""
    asked = [prompt(40 + seed, length, 2000) for seed, length in enumerate((70, 130, 33))]
    right = []
    for ids in asked:
        raw = reference_logits(demo_path, ids)[:-1].log_softmax(-1)
        right.append((raw.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(), raw.max(-1).values.tolist()))
    for most in (1, 0):
        body: dict[str, Any] = {"prompt": asked, "echo": True, "logprobs": 1, "max_tokens": most, "temperature": 0}
        answer = await client.completions.create(model=MODEL, seed=1, **body)
        assert answer.usage is not None and answer.usage.completion_tokens == most * len(asked)
        for ids, (own, best), choice in zip(asked, right, answer.choices, strict=True):
            told = choice.logprobs
            assert told is not None and told.token_logprobs is not None and told.top_logprobs is not None
            assert len(told.token_logprobs) == len(ids) + most and told.token_logprobs[0] is None
            assert told.token_logprobs[1 : len(ids)] == pytest.approx(own, abs=1e-4)
            assert [max(top.values()) for top in told.top_logprobs[1 : len(ids)]] == pytest.approx(best, abs=1e-4)
    again = await client.completions.create(
        model=MODEL, prompt=asked[1], max_tokens=1, extra_body={"prompt_logprobs": 0}, temperature=0
    )
    scored = again.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    assert scored[0] is None
    found = [one[str(token)]["logprob"] for one, token in zip(scored[1:], asked[1][1:], strict=True)]
    assert found == pytest.approx(right[1][0], abs=1e-4)
    await small_mesh.settled()


async def test_streaming_equals_not_streaming_and_usage_is_true(client: openai.AsyncOpenAI) -> None:
    messages, *_ = heldout(5, 1)[0]
    plain = await client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=30)  # type: ignore[call-overload]
    stream = await client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, messages=messages, temperature=0, max_tokens=30, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    text, finish, usage = "", None, None
    async for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason or finish
        usage = chunk.usage or usage
    assert text == plain.choices[0].message.content
    assert finish == plain.choices[0].finish_reason
    assert usage is not None
    assert usage.prompt_tokens == plain.usage.prompt_tokens
    assert usage.completion_tokens == plain.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 64 * 64


async def test_sampling_parameters(client: openai.AsyncOpenAI) -> None:
    async def complete(**fields: object) -> openai.types.Completion:
        return await client.completions.create(  # type: ignore[call-overload,no-any-return]
            model=MODEL, prompt="The code of Mira is", max_tokens=12, **fields
        )

    one, two = await complete(seed=7, temperature=1.5), await complete(seed=7, temperature=1.5)
    assert one.choices[0].text == two.choices[0].text
    many = await complete(n=4, temperature=2.0, seed=1, extra_body={"ignore_eos": True})
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    assert len({c.text for c in many.choices}) > 1
    assert many.usage is not None
    assert many.usage.completion_tokens == 48
    scored = await complete(temperature=0, logprobs=3)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens) == scored.choices[0].text
    assert all(max(top.values()) <= 0 for top in logprobs.top_logprobs)
    full = await complete(temperature=0, extra_body={"ignore_eos": True})
    mark = full.choices[0].text[3:6]
    cut = await complete(temperature=0, stop=[mark], extra_body={"ignore_eos": True})
    assert cut.choices[0].text == full.choices[0].text[: full.choices[0].text.index(mark)]
    assert cut.choices[0].finish_reason == "stop"
    forced = await complete(temperature=0, logit_bias={"70": 100}, logprobs=0, extra_body={"ignore_eos": True})
    assert forced.choices[0].logprobs is not None
    assert len(set(forced.choices[0].logprobs.tokens or ())) == 1
    penalised = await complete(
        temperature=0, presence_penalty=2, frequency_penalty=2,
        extra_body={"ignore_eos": True, "repetition_penalty": 2, "min_p": 0.5, "top_k": 5},
    )  # fmt: skip
    assert penalised.choices[0].text != full.choices[0].text


async def test_salts_do_not_share_blocks(client: openai.AsyncOpenAI) -> None:
    prompt = [20 + i % 200 for i in range(130)]

    async def cached(salt: str) -> int:
        answer = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
        )
        return answer.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr,return-value]

    assert [await cached("x"), await cached("x"), await cached("y"), await cached("y")] == [0, 128, 0, 128]


async def test_models_and_errors(client: openai.AsyncOpenAI) -> None:
    assert [m.id for m in (await client.models.list()).data] == [MODEL]
    with pytest.raises(openai.NotFoundError, match="no-such"):
        await client.completions.create(model="no-such", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        await client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=MODEL, prompt=[20] * 100_000)
    assert long.value.code == "context_length_exceeded"


async def test_pages_beside_the_api(small_mesh: Running) -> None:
    async with httpx.AsyncClient(base_url=small_mesh.http, timeout=20) as http:
        for path in ("/health", "/ready", "/docs", "/openapi.json"):
            assert (await http.get(path)).status_code == 200, path
        metrics = (await http.get("/metrics")).text
        assert "kvmesh_gateway_requests_total" in metrics
        for name, process in small_mesh.mesh.processes.items():
            if name != "gateway":
                text = (await http.get(f"http://{process.spec.metrics}/metrics")).text
                assert f"kvmesh_{process.spec.service}_" in text, name
        big = await http.post("/v1/completions", content=b'{"prompt":"' + b"a" * 20_000_000 + b'"}')
        assert big.status_code == 413
        assert json.loads(big.content)["error"]["type"] == "invalid_request_error"


async def test_health_and_reflection_on_every_service(small_mesh: Running) -> None:
    for name, process in small_mesh.mesh.processes.items():
        service = {"store": "StoreMaster"}.get(process.spec.service, process.spec.service.capitalize())
        async with connect(small_mesh.mesh.addresses[name]) as channel:
            request = health_pb2.HealthCheckRequest(service=f"kvmesh.v1.{service}")
            health = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=30)
            assert health.status == health_pb2.HealthCheckResponse.SERVING, name
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=30)
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = await call.read()
            assert not isinstance(listed, type(grpc.aio.EOF))
            assert f"kvmesh.v1.{service}" in [s.name for s in listed.list_services_response.service]
            await call.done_writing()
            call.cancel()


async def test_a_client_that_goes_away_cancels_everywhere(small_mesh: Running) -> None:
    body = {"model": MODEL, "prompt": [30] * 200, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(base_url=small_mesh.http, timeout=30) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                break
    await small_mesh.settled()
