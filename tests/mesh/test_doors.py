"""Both doors of a running mesh: each parameter has its effect, gRPC needs nothing but reflection, SLOs refuse."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvmesh.errors import Overloaded
from tests.support.mesh.harness import Running
from tests.support.services import until

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]

MODEL = "demo-model"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest_asyncio.fixture(loop_scope="session")
async def client(small_mesh: Running) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{small_mesh.http}/v1", api_key="none", max_retries=0, timeout=60) as it:
        yield it


async def test_heartbeats_announcements_and_placements_go_past_grpc(
    small_mesh: Running, client: openai.AsyncOpenAI
) -> None:
    """By the doors of the control services, which everybody has found within moments."""

    async def calls(service: str) -> set[str]:
        async with httpx.AsyncClient() as http:
            told = (await http.get(f"http://{small_mesh.mesh.processes[service].spec.metrics}/metrics")).text
        found = re.findall(rf'^kvmesh_{service}_door_calls_total{{method="(\w+)"}} (\S+)$', told, re.MULTILINE)
        return {method for method, count in found if float(count) > 0}

    async def all_of_them() -> bool:
        await client.completions.create(model=MODEL, prompt="The code of Mira is" * 8, max_tokens=1)
        return await calls("conductor") | await calls("store") == {"Heartbeat", "Schedule", "Beat", "Announce"}

    await until(all_of_them)


async def test_top_k_and_top_p_narrow_down_to_the_likeliest(client: openai.AsyncOpenAI) -> None:
    async def text(**fields: Any) -> str:
        answer = await client.completions.create(model=MODEL, prompt="The code of Mira is", max_tokens=12, **fields)
        return str(answer.choices[0].text)

    greedy = await text(temperature=0)
    assert await text(temperature=2, seed=5, extra_body={"top_k": 1}) == greedy
    assert await text(temperature=2, seed=5, top_p=1e-6) == greedy
    assert await text(temperature=2, seed=5) != greedy


async def test_lengths_are_kept_under_both_names(client: openai.AsyncOpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer: Any = await client.chat.completions.create(
            model=MODEL, messages=HELLO, extra_body={name: 3, "ignore_eos": True, "priority": -2}
        )
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


async def test_chat_logprobs_and_usage_in_a_stream_of_two(client: openai.AsyncOpenAI) -> None:
    stream: Any = await client.chat.completions.create(
        model=MODEL, messages=HELLO, n=2, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    texts, scored = ["", ""], ["", ""]
    usage: Any = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            for one in (choice.logprobs.content if choice.logprobs else None) or []:
                scored[choice.index] += one.token
                assert one.logprob <= 0
                assert len(one.top_logprobs) == 2
                assert one.top_logprobs[0].logprob == pytest.approx(one.logprob), "greedy takes the likeliest"
    assert texts[0] == texts[1] == scored[0] == scored[1] != ""
    assert usage.completion_tokens == 12


def by_reflection(address: str) -> list[Any]:
    """Generate, asked by a client that holds no .proto: text, token ids and a chat."""
    with grpc.insecure_channel(address) as channel:
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("kvmesh.v1.Gateway").FindMethodByName("Generate")
        request: Any = message_factory.GetMessageClass(method.input_type)
        response: Any = message_factory.GetMessageClass(method.output_type)
        generate: Any = channel.unary_stream(
            "/kvmesh.v1.Gateway/Generate",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        prompts: list[dict[str, Any]] = [
            {"text": "Hello"},
            {"token_ids": struct.pack("<3I", 30, 31, 32)},
            {"chat": {"messages": HELLO}},
        ]
        return [
            list(generate(request(max_tokens=5, ignore_eos=True, temperature=0.0, **prompt), timeout=30))
            for prompt in prompts
        ]


async def test_generate_by_reflection_alone(small_mesh: Running) -> None:
    for parts in await asyncio.to_thread(by_reflection, small_mesh.grpc):
        assert sum(len(part.token_ids) for part in parts) == 5
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
        assert parts[-1].usage.completion_tokens == 5
        assert parts[-1].timings.prefill_us > 0
    await small_mesh.settled()


async def test_a_latency_that_cannot_be_met_is_429_with_retry_after(mesh: Callable[..., Any], demo_path: Path) -> None:
    async with mesh(demo_path, slo_ttft_ms=1) as tight:
        async with openai.AsyncOpenAI(base_url=f"{tight.http}/v1", api_key="none", max_retries=0, timeout=60) as client:
            with pytest.raises(openai.RateLimitError) as refused:
                await client.completions.create(model=MODEL, prompt=[20 + i % 90 for i in range(1500)], max_tokens=2)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert "ttft" in refused.value.message.lower()
        answer = await tight.client.generate([20 + i % 90 for i in range(1500)], max_tokens=2)
        assert isinstance(answer.error, Overloaded)
        assert answer.error.retry_after_ms > 0
        await tight.settled()
