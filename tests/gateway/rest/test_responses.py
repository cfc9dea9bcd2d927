"""The real openai client's responses against a gateway on a real socket."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

from kvmesh.errors import InternalError
from kvmesh.services.gateway.api_keys import make_entry
from tests.gateway.conftest import Mesh, MeshMaker, seen
from tests.support.gateway import tokenizers_made
from tests.support.gateway.scripted import CACHED, MODEL, Run

TOOL = {
    "type": "function",
    "name": "look",
    "description": "Looks something up.",
    "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    "strict": False,
}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"what":"sea"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "deep"}


async def respond(mesh: Mesh, **more: Any) -> Any:
    return await mesh.client.responses.create(**{"model": MODEL, "input": "Hello"} | more)


def told(event: Any) -> Any:
    """Holds an event or a response against openai's own model of it, strictly."""
    type(event).model_validate(event.to_dict())
    return event


def prompts(mesh: Mesh) -> list[list[int]]:
    return [run.prompt for decode in mesh.decodes for run in decode.runs]


async def test_a_response(mesh: Mesh) -> None:
    answer = told(await respond(mesh, instructions="Be brief.", metadata={"a": "b"}, user="me"))
    assert answer.output_text == "Hello, world"
    assert (answer.status, answer.object, answer.model) == ("completed", "response", MODEL)
    assert answer.id.startswith("resp_")
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert message.content[0].annotations == []
    prompt = mesh.ids("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n")
    prompt += mesh.ids("<|im_start|>assistant\n")
    assert prompts(mesh) == [prompt]
    usage = answer.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (len(prompt), CACHED)
    assert usage.output_tokens == len(mesh.ids("Hello, world")) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.instructions, answer.metadata, answer.user) == ("Be brief.", {"a": "b"}, "me")
    assert (answer.tools, answer.tool_choice, answer.parallel_tool_calls) == ([], "auto", True)
    assert answer.completed_at >= answer.created_at


async def test_a_stream(mesh: Mesh) -> None:
    events = [told(event) async for event in await respond(mesh, stream=True)]
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == "Hello, world"
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert last.output_text == "Hello, world"
    assert last.usage.output_tokens == len(mesh.ids("Hello, world")) + 1
    assert events[0].response.status == "in_progress" and events[0].response.usage is None


async def test_the_clients_own_stream(mesh: Mesh) -> None:
    async with mesh.client.responses.stream(model=MODEL, input="Hello") as stream:
        async for event in stream:
            if event.type == "response.output_text.done":
                assert event.text == "Hello, world"
        final = await stream.get_final_response()
    assert final.output_text == "Hello, world"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut(mesh: Mesh, stream: bool) -> None:
    answer = await respond(mesh, max_output_tokens=2, stream=stream)
    if stream:
        events = [told(event) async for event in answer]
        assert events[-1].type == "response.incomplete"
        answer = events[-1].response
    told(answer)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.completed_at is None
    assert answer.output[0].status == "incomplete"
    assert answer.usage.output_tokens == 2


async def test_logprobs(mesh: Mesh) -> None:
    more: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = told(await respond(mesh, **more))
    found = answer.output[0].content[0].logprobs
    assert "".join(one.token for one in found) == "Hello, world"
    assert all(len(one.top_logprobs) == 2 for one in found)
    events = [told(event) async for event in await respond(mesh, **more, stream=True)]
    streamed = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.token for one in streamed] == [one.token for one in found]
    assert [one.token for one in events[-1].response.output[0].content[0].logprobs] == [one.token for one in found]


async def test_what_decode_is_told(mesh: Mesh) -> None:
    more = {"seed": 3, "top_k": 4, "priority": -4, "min_p": 0.25, "ignore_eos": True}
    await respond(mesh, temperature=0.5, top_p=0.75, service_tier="flex", prompt_cache_key="k", extra_body=more)
    sampling, asked = mesh.decodes[0].runs[0].start.sampling, mesh.conductor.asked[0]
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.5, 0.75, 3, 4)
    assert (sampling.min_p, sampling.ignore_eos) == (0.25, True)
    assert (asked.origin, asked.endpoint) == ("/k", "responses")


# ── items and prompts ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (
            [{"role": "developer", "content": "D"}, {"role": "user", "content": [{"type": "input_text", "text": "U"}]}],
            [{"role": "developer", "content": "D"}, {"role": "user", "content": "U"}],
        ),
        (
            [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}, {"role": "user", "content": "V"}],
            [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}, {"role": "user", "content": "V"}],
        ),
        (
            [
                {"role": "user", "content": "U"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
                CALL,
                {**CALL, "call_id": "c2", "arguments": "{}"},
                RESULT,
                {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "far"}]},
            ],
            [
                {"role": "user", "content": "U"},
                {
                    "role": "assistant",
                    "content": "A",
                    "reasoning_content": "R",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"what":"sea"}'}},
                        {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "deep"},
                {"role": "tool", "tool_call_id": "c2", "content": "far"},
            ],
        ),
    ],
)
async def test_items_make_the_prompt_of_the_equal_chat(
    make_mesh: MeshMaker, tmp_path: Path, items: list[Any], messages: list[Any]
) -> None:
    mesh = await make_mesh(folder=tool_checkpoint(tmp_path))
    chat_tool = {"type": "function", "function": {name: TOOL[name] for name in ("name", "description", "parameters")}}
    more: Any = {"tools": [chat_tool]}
    await mesh.client.chat.completions.create(model=MODEL, messages=messages, **more)
    await respond(mesh, input=items, tools=[TOOL])
    first, second = prompts(mesh)
    assert first == second
    text = mesh.tokenizer.decode(first)
    assert text.startswith("T look") and all(message["content"] in text for message in messages)


def tool_checkpoint(folder: Path) -> Path:
    """A checkpoint whose template shows all that it is given."""
    template = (
        "{% for tool in tools or [] %}T {{ tool.function.name }} {% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }} {{ m.reasoning_content }} {{ m.tool_call_id }}"
        "{% for call in m.tool_calls or [] %} {{ call.id }} {{ call.function | tojson }}{% endfor %}\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    return tokenizers_made.save(tokenizers_made.byte_level(), folder / MODEL, chat_template=template)


async def test_developers_are_the_system_of_templates_that_know_none(make_mesh: MeshMaker, tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.content }}\n{% endif %}{% endfor %}"
    items: Any = [{"role": "developer", "content": "Dev."}, {"role": "user", "content": "You."}]
    for known in ("", "{# developer #}"):
        folder = tokenizers_made.save(
            tokenizers_made.byte_level(), tmp_path / (known[3:6] or "old"), chat_template=template + known
        )
        mesh = await make_mesh(folder=folder)
        await respond(mesh, input=items)
        assert prompts(mesh) == [mesh.ids("You.\n" if known else "Dev.\nYou.\n")]


async def test_a_conversation_by_ids_makes_the_prompt_of_the_whole_one(mesh: Mesh) -> None:
    first = await respond(mesh, instructions="One.")
    second = await respond(mesh, previous_response_id=first.id, input="And?")
    third = await respond(mesh, previous_response_id=second.id, input="So?", instructions="Two.", stream=True)
    assert [event async for event in third][-1].response.previous_response_id == second.id
    turns = [
        {"role": "system", "content": "Two."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello, world"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Hello, world"},
        {"role": "user", "content": "So?"},
    ]
    chat: Any = turns
    await mesh.client.chat.completions.create(model=MODEL, messages=chat)
    assert prompts(mesh)[2] == prompts(mesh)[3]
    assert prompts(mesh)[1] == mesh.ids(
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHello, world<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_references_to_stored_items(mesh: Mesh) -> None:
    first = await respond(mesh)
    (given,) = (await mesh.client.responses.input_items.list(first.id)).data
    reference: Any = [{"type": "item_reference", "id": given.id}, {"id": first.output[0].id}]
    await respond(mesh, input=[*reference, {"role": "user", "content": "And?"}])
    await respond(mesh, previous_response_id=first.id, input="And?")
    assert prompts(mesh)[1] == prompts(mesh)[2]
    with pytest.raises(openai.BadRequestError, match=r"input\.0\.id='msg_x_0': no such item is stored"):
        await respond(mesh, input=[{"type": "item_reference", "id": "msg_x_0"}])


# ── tools, reasoning, forms ───────────────────────────────────────────────────────────────────────

THOUGHT = "<think>\nThe sea?\n</think>\n\nI look."
CALLED = '\n<tool_call>\n{"name": "look", "arguments": {"what": "sea"}}\n</tool_call>'


async def reading_mesh(make_mesh: MeshMaker, tmp_path: Path, text: str) -> Mesh:
    """A mesh whose model answers `text`, as Hermes and Qwen write answers."""
    mesh = await make_mesh(folder=tool_checkpoint(tmp_path), answer_parser=(f"{MODEL}=hermes",))
    mesh.decodes[0].script = mesh.says(text)
    return mesh


async def test_a_loop_with_tools(make_mesh: MeshMaker, tmp_path: Path) -> None:
    mesh = await reading_mesh(make_mesh, tmp_path, THOUGHT + CALLED + CALLED.replace("sea", "sky"))
    first = told(await respond(mesh, tools=[TOOL]))
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, sea, sky = first.output
    assert (reasoning.content[0].text.strip(), reasoning.summary) == ("The sea?", [])
    assert message.content[0].text.strip() == "I look."
    assert [json.loads(call.arguments) for call in (sea, sky)] == [{"what": "sea"}, {"what": "sky"}]
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    # By the id, by the items, and as a chat: one prompt.
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": call.name} for call in (sea, sky)
    ]
    await respond(mesh, previous_response_id=first.id, input=results, tools=[TOOL])
    whole: Any = [{"role": "user", "content": "Hello"}, *(item.to_dict() for item in first.output), *results]
    await respond(mesh, input=whole, tools=[TOOL])
    calls = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in (sea, sky)
    ]
    messages: Any = [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": message.content[0].text,
            "reasoning_content": reasoning.content[0].text,
            "tool_calls": calls,
        },
        *({"role": "tool", "tool_call_id": call.call_id, "content": "look"} for call in (sea, sky)),
    ]
    chat_tool: Any = {"type": "function", "function": {name: TOOL[name] for name in TOOL if name != "type"}}
    await mesh.client.chat.completions.create(model=MODEL, messages=messages, tools=[chat_tool])
    assert prompts(mesh)[1] == prompts(mesh)[2] == prompts(mesh)[3]


async def test_a_streamed_call(make_mesh: MeshMaker, tmp_path: Path) -> None:
    mesh = await reading_mesh(make_mesh, tmp_path, THOUGHT + CALLED)
    tools: Any = [TOOL]
    async with mesh.client.responses.stream(model=MODEL, input="Hello", tools=tools) as stream:
        kinds = [event.type async for event in stream if not event.type.endswith("delta")]
        final = await stream.get_final_response()
    assert kinds[2:] == [
        "response.output_item.added", "response.content_part.added", "response.reasoning_text.done",
        "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.content_part.added", "response.output_text.done",
        "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.function_call_arguments.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert json.loads(final.output[2].arguments) == {"what": "sea"}  # type: ignore[union-attr]
    assert (await mesh.client.responses.retrieve(final.id)).output[2].type == "function_call"


async def test_a_form(mesh: Mesh) -> None:
    class Place(pydantic.BaseModel):
        name: str
        deep: bool

    mesh.decodes[0].script = mesh.says('{"name":"sea","deep":true}')
    answer = await mesh.client.responses.parse(model=MODEL, input="Hello", text_format=Place)
    assert answer.output_parsed == Place(name="sea", deep=True)
    assert '"deep"' in mesh.decodes[0].runs[0].start.sampling.grammar
    await respond(mesh, text={"format": {"type": "json_object"}})
    assert mesh.decodes[0].runs[1].start.sampling.grammar
    wrong: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match=r"text\.format\.schema"):
        await respond(mesh, text=wrong)


# ── stored responses ──────────────────────────────────────────────────────────────────────────────


async def test_retrieve_and_delete(mesh: Mesh) -> None:
    made = await respond(mesh)
    assert (await mesh.client.responses.retrieve(made.id)) == made
    await mesh.client.responses.delete(made.id)
    for call in (mesh.client.responses.retrieve, mesh.client.responses.delete, mesh.client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="no such response is stored"):
            await call(made.id)
    with pytest.raises(openai.BadRequestError, match="no such response is stored") as caught:
        await respond(mesh, previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    gone = await respond(mesh, store=False)
    with pytest.raises(openai.NotFoundError):
        await mesh.client.responses.retrieve(gone.id)


async def test_a_conversation_that_has_lost_a_turn_is_refused(mesh: Mesh) -> None:
    first = await respond(mesh)
    second = await respond(mesh, previous_response_id=first.id)
    await mesh.client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match=first.id):
        await respond(mesh, previous_response_id=second.id)


async def test_input_items(mesh: Mesh) -> None:
    first = await respond(mesh, input=[{"role": "user", "content": "a"}, CALL, RESULT])
    second = await respond(mesh, previous_response_id=first.id, input="b")
    page = await mesh.client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in page.data] == [
        "message", "function_call", "function_call_output", "message", "message",
    ]  # fmt: skip
    assert [told(item).id for item in page.data][3] == first.output[0].id
    names = [item.id async for item in mesh.client.responses.input_items.list(second.id, order="asc", limit=2)]
    assert names == [item.id for item in page.data] and len(set(names)) == 5
    back = [item.id async for item in mesh.client.responses.input_items.list(second.id, limit=3)]
    assert back == names[::-1]
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nothing"):
        answer = await mesh.http.get(f"/v1/responses/{second.id}/input_items?{query}")
        assert answer.status_code == 400 and query.partition("=")[0] in answer.json()["error"]["message"]


async def test_tenants_see_their_own_alone(make_mesh: MeshMaker, tmp_path: Path) -> None:
    keys, text = {}, ""
    for name in ("ann", "bob"):
        keys[name], table = make_entry(name)
        text += table
    (tmp_path / "keys.toml").write_text(text)
    mesh = await make_mesh(api_keys=str(tmp_path / "keys.toml"))
    ann, bob = (mesh.client.with_options(api_key=keys[name]) for name in ("ann", "bob"))
    made = await ann.responses.create(model=MODEL, input="Hello")
    assert (await ann.responses.retrieve(made.id)).id == made.id
    missing = made.id.replace("resp_", "resp_0")
    for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel, bob.responses.input_items.list):
        errors = []
        for response_id in (made.id, missing):
            with pytest.raises(openai.NotFoundError) as caught:
                await call(response_id)
            errors.append(caught.value.message.replace(response_id, "ID"))
        assert errors[0] == errors[1]
    with pytest.raises(openai.BadRequestError, match="no such response is stored"):
        await bob.responses.create(model=MODEL, input="x", previous_response_id=made.id)
    reference: Any = [{"type": "item_reference", "id": made.output[0].id}]
    with pytest.raises(openai.BadRequestError, match="no such item is stored"):
        await bob.responses.create(model=MODEL, input=reference)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        assert (await mesh.http.request(method, f"/v1/responses/{made.id}{path}")).status_code == 401
    header = {"x-api-key": keys["ann"]}
    assert (await mesh.http.get(f"/v1/responses/{made.id}", headers=header)).status_code == 200


# ── cancel and failures ───────────────────────────────────────────────────────────────────────────


def endless(mesh: Mesh) -> Any:
    async def script(run: Run) -> None:
        await run.prefilled()
        for index, token in enumerate(mesh.ids("Hello, world")):
            await run.token(token, index)
        await run.cancelled.wait()

    return script


async def test_cancel_a_stream(mesh: Mesh) -> None:
    mesh.decodes[0].script = endless(mesh)
    stream = await respond(mesh, stream=True)
    events = []
    async for event in stream:
        events.append(told(event))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        if text == "Hello, world":
            break
    name = events[0].response.id
    under_way = told(await mesh.client.responses.retrieve(name))
    assert (under_way.status, under_way.output_text) == ("in_progress", "Hello, world")
    cancelled = told(await mesh.client.responses.cancel(name))
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hello, world")
    events += [told(event) async for event in stream]
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    await mesh.decodes[0].runs[0].cancelled.wait()
    await mesh.quiet()
    assert (await mesh.client.responses.retrieve(name)).status == "cancelled"
    assert (await mesh.client.responses.cancel(name)).status == "cancelled"


async def test_cancel_what_is_not_streamed(mesh: Mesh) -> None:
    mesh.decodes[0].script = endless(mesh)
    making = asyncio.create_task(respond(mesh, extra_headers={"x-request-id": "mine/1"}))
    await seen(lambda: mesh.decodes[0].runs)
    name = "resp_" + mesh.decodes[0].runs[0].start.request_id
    assert name.startswith("resp_mine/1-")
    assert (await mesh.client.responses.cancel(name)).status == "cancelled"
    answer = told(await making)
    assert answer.status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        await mesh.client.responses.cancel("resp_nothing")


async def test_what_has_ended_cannot_be_cancelled(mesh: Mesh) -> None:
    made = await respond(mesh)
    with pytest.raises(openai.BadRequestError, match="it is completed") as caught:
        await mesh.client.responses.cancel(made.id)
    assert caught.value.code == "response_not_cancellable"


async def test_a_failure_in_mid_stream(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(max_migrations=0, max_retries=0)

    async def script(run: Run) -> None:
        await run.prefilled()
        for index, token in enumerate(mesh.ids("Hello")):
            await run.token(token, index)
        await run.fail(InternalError("lost"))

    mesh.decodes[0].script = script
    events = [told(event) async for event in await respond(mesh, stream=True)]
    last = events[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error" and "lost" in last.response.error.message
    assert last.response.output_text == "Hello"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (await mesh.client.responses.retrieve(last.response.id)).status == "failed"


async def test_a_failure_before_the_first_byte_is_an_error(mesh: Mesh) -> None:
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        await respond(mesh, input="x " * 2000, stream=True)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        await mesh.client.responses.create(model="other", input="x")


# ── bodies ────────────────────────────────────────────────────────────────────────────────────────


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"nothing": 1}, "nothing"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": None}, "input"),
    ({"input": [{"type": "computer_call"}]}, "input.0.type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
    ({"input": [{"role": "user", "content": "x", "more": 1}]}, "input.0.more"),
    ({"input": [{**CALL, "arguments": "{"}]}, "input.0.arguments"),
    ({"input": [{**CALL, "name": "a b"}]}, "input.0.name"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input.0.output"),
    ({"tools": [{"type": "mcp"}]}, "tools.0.type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"include": ["everything"]}, "include"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"more": 1}}, "reasoning.more"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"temperature": 3}, "temperature"),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"previous_response_id": "x" * 300}, "previous_response_id"),
    ({"user": "x" * 300}, "user"),
]


async def test_wrong_bodies_are_named(mesh: Mesh) -> None:
    for body, field in WRONG:
        answer = await mesh.http.post("/v1/responses", json={"model": MODEL, "input": "x"} | body)
        assert answer.status_code == 400, (body, answer.text)
        error = answer.json()["error"]
        assert error["param"] == field and error["message"].startswith(field), (body, error)


async def test_what_asks_for_nothing_is_taken(mesh: Mesh) -> None:
    body = {
        "model": MODEL, "input": "Hello", "background": False, "conversation": None, "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "low"}, "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"], "client_metadata": {"a": "b"},
        "stream_options": {"include_obfuscation": False}, "max_tool_calls": 3, "tools": [{"type": "web_search"}],
        "tool_choice": "auto", "store": False, "prompt_cache_key": "key", "safety_identifier": "s",
    }  # fmt: skip
    answer = (await mesh.http.post("/v1/responses", json=body)).json()
    assert answer["output"][0]["content"][0]["text"] == "Hello, world"
    assert (answer["tools"], answer["store"], answer["max_tool_calls"]) == ([], False, 3)
    assert answer["reasoning"] == {"effort": "low", "summary": "auto"}
    assert answer["text"]["verbosity"] == "low"


async def test_timings(mesh: Mesh) -> None:
    body = {"model": MODEL, "input": "Hello"}
    answer = await mesh.http.post("/v1/responses", json=body, headers={"x-kvmesh-timings": "1"})
    assert answer.json()["kvmesh"]["choices"][0]["decode_instance"] == "decode-0"
    Response.model_validate_json(answer.content)
    assert json.loads(answer.content)["id"].startswith("resp_")
