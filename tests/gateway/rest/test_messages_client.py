"""Anthropic's own client, unmodified, against the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.gateway.conftest import TURN_S, Mesh
from tests.support.gateway.scripted import CACHED, MODEL, Run

anthropic = pytest.importorskip("anthropic", reason="needs Anthropic's client: pip install anthropic")

ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=mesh.url, api_key="none", max_retries=0, timeout=TURN_S) as made:
        yield made


async def test_a_message(mesh: Mesh, client: Any) -> None:
    message = await client.messages.create(**ASKED, system="Be brief.", tools=[TOOL], metadata={"user_id": "u"})
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello, world"}]
    assert (message.role, message.type, message.stop_reason, message.stop_details) == (
        "assistant",
        "message",
        "end_turn",
        None,
    )
    prompt = len(mesh.decodes[0].runs[0].prompt)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == prompt
    assert message.usage.cache_read_input_tokens == CACHED
    assert message._request_id
    again = [*ASKED["messages"], message.to_param(), {"role": "user", "content": "Go on"}]
    assert (await client.messages.create(**ASKED | {"messages": again})).stop_reason == "end_turn"


async def test_a_stream(mesh: Mesh, client: Any) -> None:
    async with client.messages.stream(**ASKED, stop_sequences=["wor"]) as stream:
        seen = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert seen[0] == "message_start" and seen[-1] == "message_stop"
    assert message.content[0].text == "Hello, "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "wor")
    assert message.usage.output_tokens == len(mesh.ids("Hello, wor"))


async def test_betas(mesh: Mesh, client: Any) -> None:
    message = await client.beta.messages.create(
        **ASKED,
        betas=["context-management-2025-06-27", "never-heard-of-2027-01-01"],
        context_management={"edits": []},
        thinking={"type": "adaptive"},
        output_config={"effort": "low"},
        mcp_servers=[],
    )
    assert message.content[0].text == "Hello, world"


async def test_a_count(mesh: Mesh, client: Any) -> None:
    counted = await client.messages.count_tokens(model=MODEL, messages=ASKED["messages"], system="Be brief.")
    await client.messages.create(**ASKED, system="Be brief.")
    assert counted.input_tokens == len(mesh.decodes[0].runs[0].prompt)


async def test_errors(mesh: Mesh, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here") as found:
        await client.messages.create(**ASKED | {"model": "claude"})
    assert found.value.type == "not_found_error" and found.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="temperature=3"):
        await client.messages.create(**ASKED, extra_body={"temperature": 3})

    async def stalls(run: Run) -> None:
        await run.prefilled()
        await run.token(mesh.ids("Hi")[0], 0)
        await run.cancelled.wait()

    mesh.decodes[0].script = stalls
    stream = await client.messages.create(**ASKED, stream=True, extra_headers={"x-request-timeout-ms": "2000"})
    with pytest.raises(anthropic.APIStatusError) as broken:
        [event async for event in stream]
    assert broken.value.body["error"]["type"] == "timeout_error"
