"""/v1/messages and /v1/messages/count_tokens over HTTP: bodies, prompts, answers, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.errors import ConfigError, InternalError, KvmeshError, Overloaded, Unavailable
from kvmesh.rpc.pb import common_pb2
from kvmesh.services.gateway.api_keys import make_entry
from kvmesh.services.gateway.config import GatewayConfig
from kvmesh.services.gateway.rest.system_text import DROP, KEEP, LAST, VolatileLines
from tests.gateway.conftest import Mesh, MeshMaker
from tests.support.gateway import tokenizers_made
from tests.support.gateway.scripted import CACHED, MODEL, Run

USER: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "messages": USER}
TOOL = {"name": "look", "description": "Looks", "input_schema": {"type": "object", "properties": {"at": {}}}}
HUGE = "x" * 1_000_000
# Everything that a chat may hold, and told so that a different chat reads different.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call {{ c.id }}>{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% if m.tool_call_id %}<for {{ m.tool_call_id }}>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{{ reasoning_effort or '' }}{% endif %}"
)
NO_LATE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{% endfor %}"
)


def changed(**fields: Any) -> dict[str, Any]:
    return BODY | fields


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*USER, {"role": "assistant", "content": [*blocks]}, *USER]}


def result(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", **fields}]}]}


async def post(mesh: Mesh, body: Any, path: str = "/v1/messages", **more: Any) -> httpx.Response:
    return await mesh.http.post(path, json=body, **more)


@pytest.fixture
async def talking(make_mesh: MeshMaker, tmp_path: Path) -> Mesh:
    """A mesh whose template tells all of a chat."""
    folder = tokenizers_made.save(tokenizers_made.byte_level(), tmp_path / MODEL, chat_template=TEMPLATE)
    return await make_mesh(folder=folder)


async def prompt(mesh: Mesh, body: dict[str, Any], path: str = "/v1/messages") -> str:
    """What the engine was given."""
    response = await post(mesh, body, path)
    assert response.status_code == 200, response.text
    return mesh.tokenizer.decode(mesh.decodes[0].runs[-1].prompt)


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_whole_answer(mesh: Mesh) -> None:
    mesh.decodes[0].script = mesh.says("Hello there")
    response = await post(mesh, BODY, headers={"x-request-id": "job-1", "x-kvmesh-timings": "1"})
    told = response.json()
    prompt_tokens = len(mesh.decodes[0].runs[0].prompt)
    assert told.pop("kvmesh")["choices"][0]["decode_instance"] == "decode-0"
    assert told.pop("id").startswith("msg_job-1-")
    assert response.headers["request-id"] == response.headers["x-request-id"] == "job-1"
    assert told == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt_tokens - CACHED,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": CACHED,
            "output_tokens": len(mesh.ids("Hello there")) + 1,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }


async def test_a_streamed_answer(mesh: Mesh) -> None:
    mesh.decodes[0].script = mesh.says("Hello there")
    response = await post(mesh, changed(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = [frame.split("\n") for frame in response.text.split("\n\n")[:-1]]
    names = [name.removeprefix("event: ") for name, _ in frames]
    found = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [one["type"] for one in found] == names
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert "".join(one["delta"]["text"] for one in found[3:-3]) == "Hello there"
    start, last = found[0]["message"], found[-2]
    assert (start["content"], start["stop_reason"], start["usage"]["cache_read_input_tokens"]) == ([], None, CACHED)
    assert start["usage"]["input_tokens"] == last["usage"]["input_tokens"]
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == len(mesh.ids("Hello there")) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_ended(mesh: Mesh, stream: bool) -> None:
    mesh.decodes[0].script = mesh.says("one two STOP three")

    async def ended(**fields: Any) -> tuple[str, str | None]:
        response = await post(mesh, changed(stream=stream, **fields))
        told = (
            response.json() if not stream else json.loads(response.text.split("data: ")[-2].partition("\n")[0])["delta"]
        )
        return told["stop_reason"], told["stop_sequence"]

    assert await ended() == ("end_turn", None)
    assert await ended(max_tokens=2) == ("max_tokens", None)
    assert await ended(stop_sequences=["nowhere", "STOP", "OP"]) == ("stop_sequence", "STOP")
    assert await ended(stop_sequences=["P", "OP t"]) == ("stop_sequence", "P")

    async def endless(run: Run) -> None:
        await run.answer(mesh.ids("x") * 1000, common_pb2.FINISH_REASON_LENGTH)

    mesh.decodes[0].script = endless
    assert await ended(max_tokens=100_000) == ("model_context_window_exceeded", None)


# ── prompts ───────────────────────────────────────────────────────────────────────────────────────

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
CALL = {"at": "the sea", "n": 1.5, "deep": {"a": [None, True]}}
TURNS: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "\nBe kind.", "cache_control": {}}],
    "tools": [{"name": "look", "description": "Looks", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "What is there?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I had better look.", "signature": "abc"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "call_1", "name": "look", "input": CALL, "caller": {"type": "direct"}},
                {"type": "tool_use", "id": "call_2", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "a fox"},
                {
                    "type": "tool_result",
                    "tool_use_id": "call_2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "too "}, {"type": "text", "text": "dark"}],
                },
                {"type": "text", "text": "And now"},
                {"type": "text", "text": "?", "citations": None},
            ],
        },
        {"role": "system", "content": "It is late."},
    ],
}
SAME: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "look", "description": "Looks", "parameters": SCHEMA}}],
    "messages": [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "What is there?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "I had better look.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": json.dumps(CALL)}},
                {"id": "call_2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "a fox"},
        {"role": "tool", "tool_call_id": "call_2", "content": "Error: too dark"},
        {"role": "user", "content": "And now?"},
        {"role": "system", "content": "It is late."},
    ],
}


async def test_the_prompt_is_that_of_the_same_chat(talking: Mesh) -> None:
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {}),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
        ),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "xhigh"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tool_choice": {"type": "tool", "name": "look"}, "stream": True}, {"tool_choice": "required"}),
    ]
    for more, same in pairs:
        ours = await prompt(talking, changed(**TURNS, **more))
        theirs = await prompt(talking, {"model": MODEL, **SAME, **same}, "/v1/chat/completions")
        first, second = talking.decodes[0].runs[-2:]
        assert ours == theirs and first.prompt == second.prompt, (more, same)
        assert first.start.block_keys == second.start.block_keys and first.start.block_keys
    for part in ("a fox", "I had better look", '"deep": {"a": [null, true]}', "too dark", "<for call_2>", "Be kind"):
        assert part in ours


async def test_counted_as_read(talking: Mesh) -> None:
    for more in ({}, TURNS, {"thinking": {"type": "disabled"}}, {"system": "Be brief.", "max_tokens": 9}):
        body = changed(**more)
        await post(talking, body)
        read = len(talking.decodes[0].runs[-1].prompt)
        body.pop("max_tokens")
        before = len(talking.conductor.asked)
        response = await post(talking, body, "/v1/messages/count_tokens?beta=true", headers={"x-request-id": "c"})
        assert (response.status_code, response.json()) == (200, {"input_tokens": read})
        assert response.headers["request-id"] == "c"
        assert len(talking.conductor.asked) == before, "nothing is generated"


async def test_late_system_messages_where_the_template_takes_none(make_mesh: MeshMaker, tmp_path: Path) -> None:
    template = NO_LATE_SYSTEM + TEMPLATE
    mesh = await make_mesh(
        folder=tokenizers_made.save(tokenizers_made.byte_level(), tmp_path / MODEL, chat_template=template)
    )
    late = {"role": "system", "content": "It is late."}
    told = await prompt(mesh, changed(system="Be brief.", messages=[*USER, late]))
    assert told == await prompt(
        mesh, changed(system="Be brief.", messages=[{"role": "user", "content": "Hi\n\nIt is late."}])
    )
    answer = {"role": "assistant", "content": "Yes"}
    told = await prompt(mesh, changed(messages=[*USER, answer, late, *USER]))
    assert told == await prompt(
        mesh, changed(messages=[*USER, answer, {"role": "user", "content": "It is late."}, *USER])
    )


# ── attribution ───────────────────────────────────────────────────────────────────────────────────


def claude_code(nonce: str) -> dict[str, Any]:
    """A body as Claude Code sends it, but for its length."""
    return {
        "model": MODEL,
        "max_tokens": 20,
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.197.{nonce}; cc_entrypoint=cli; cch={nonce};",
            },
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "\nYou help with software.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": "Available agents: none"},
        ],
        "tools": [TOOL],
        "metadata": {"user_id": json.dumps({"session_id": nonce})},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }


BETA = {"anthropic-beta": "claude-code-20250219,never-heard-of-2027-01-01", "anthropic-version": "2023-06-01"}


@pytest.mark.parametrize("handling", [KEEP, LAST, DROP, ""])
async def test_attribution_does_not_spoil_prefix_hits(make_mesh: MeshMaker, tmp_path: Path, handling: str) -> None:
    folder = tokenizers_made.save(tokenizers_made.byte_level(), tmp_path / MODEL, chat_template=TEMPLATE)
    mesh = await make_mesh(folder=folder, **({"volatile_system": handling} if handling else {}))
    for nonce in ("fa0", "1c7"):
        response = await post(mesh, claude_code(nonce), "/v1/messages?beta=true", headers=BETA)
        assert response.status_code == 200, response.text
    first, second = (run.prompt for run in mesh.decodes[0].runs)
    text = mesh.tokenizer.decode(first)
    shared = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
    kept = mesh.tokenizer.decode(first[:shared])
    if handling == KEEP:
        assert "You are an agent." not in kept and "fa0" in text
    elif handling == LAST:
        assert kept.endswith(
            "You are an agent.\nYou help with software.\nx-anthropic-billing-header: cc_version=2.1.197."
        )
    else:
        assert first == second and "billing" not in text and "You are an agent.\nYou help" in text


def test_volatile_lines() -> None:
    dated = VolatileLines(LAST, (r"Today is \d+", "x-billing"))
    assert dated.apply(("You are kind.\nToday is 27.\nBe brief.",)) == "You are kind.\nBe brief.\nToday is 27.\n"
    assert dated.apply(("x-billing: 1", "You are kind.\n")) == "You are kind.\nx-billing: 1"
    assert dated.apply(("x-billing: 1",)) == "x-billing: 1"
    assert VolatileLines(DROP, ("x-billing",)).apply(("x-billing: 1\nBe x-billing.",)) == "Be x-billing."
    assert VolatileLines(KEEP, ("x",)).apply(("x", "y")) == VolatileLines(DROP, ()).apply(("x", "y")) == "xy"
    for field, value in (("volatile_system", "first"), ("volatile_patterns", ("(",))):
        with pytest.raises(ConfigError, match=f"^{field}="):
            GatewayConfig(**{field: value})  # type: ignore[arg-type]


# ── what is passed over, and what is refused ──────────────────────────────────────────────────────

HARMLESS: list[dict[str, Any]] = [
    {"metadata": {"user_id": "u"}},
    {"service_tier": "standard_only"},
    {"service_tier": None},
    {"mcp_servers": []},
    {"container": None},
    {"context_management": {"edits": []}, "cache_control": {"type": "ephemeral"}, "diagnostics": {}},
    {"brand_new_in_2027": {"a": 1}},
    {"inference_geo": "global"},
    {"output_config": {"effort": "xhigh", "format": None}},
    {"output_format": None},
    {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {}}}}},
    {"tools": []},
    {
        "tools": [
            {**TOOL, "type": "custom", "defer_loading": True, "eager_input_streaming": True, "input_examples": [{}]}
        ]
    },
    {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    {"thinking": {"type": "between_tools"}},
    {"stop_sequences": None, "temperature": None, "top_k": None, "system": None, "thinking": None},
    {"temperature": 1, "top_p": 0.5, "top_k": 3},
    {"system": ""},
    result(),
    result(content=[]),
    result(content=[{"type": "tool_reference", "tool_name": "look"}]),
]

# fields of a body → field named, words in the message
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model=None: must be"),
    ({"max_tokens": 0}, "max_tokens=0: must be between"),
    ({"max_tokens": "5"}, "max_tokens='5'"),
    ({"messages": []}, "messages=[]: must not be empty"),
    ({"messages": "Hi"}, "messages='Hi': must be a list"),
    ({"messages": [1]}, "messages.0=1: must be an object"),
    ({"messages": USER * 5000}, "at most 4096"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role='tool': must be one of user"),
    ({"messages": [{"role": "user"}]}, "messages.0.content=None: must be a string or a list"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0=5: must be an object"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text=None"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "content.0.type='image': not supp",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document': not supported"),
    ({"messages": [*USER, {"role": "assistant", "content": "So"}]}, "no prefill"),
    ({"messages": [{"role": "system", "content": [{"type": "image"}]}]}, "messages.0.content.0.type='image'"),
    (assistant({"type": "tool_use", "id": "a", "name": "", "input": {}}), "messages.1.content.0.name=''"),
    (assistant({"type": "tool_use", "id": 5, "name": "f", "input": {}}), "messages.1.content.0.id=5"),
    (assistant({"type": "tool_use", "id": "a", "name": "f", "input": []}), "content.0.input=[]: must be an object"),
    (assistant({"type": "thinking"}), "messages.1.content.0.thinking=None"),
    (assistant({"type": "server_tool_use"}), "'server_tool_use': not supported"),
    (result(content=5), "messages.0.content.0.content=5"),
    (result(content=[{"type": "image"}]), "messages.0.content.0.content.0.type='image'"),
    (result(is_error="no"), "messages.0.content.0.is_error='no'"),
    (result(tool_use_id=None), "messages.0.content.0.tool_use_id=None"),
    ({"system": 5}, "system=5: must be a string or a list"),
    ({"system": [{"type": "image"}]}, "system.0.type='image'"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema=None"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type='web_search_20250305'"),
    ({"tools": [TOOL, TOOL]}, "tools='look': two tools"),
    ({"tools": [TOOL] * 300}, "300 tools; at most 256"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice='f': no tool"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"tool_choice": "any"}, "tool_choice='any': must be an object"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type='some'"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: required"),
    ({"thinking": {"type": "enabled", "budget_tokens": "9"}}, "thinking.budget_tokens='9'"),
    ({"thinking": {"type": "deep"}}, "thinking.type='deep'"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort='huge'"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: required"),
    ({"output_format": {"type": "json_schema", "schema": [None]}}, "output_format.schema="),
    ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type='xml'"),
    ({"output_format": {"type": "json_schema", "schema": {"not": {}}}}, "output_format.schema#/not"),
    ({"stop_sequences": [""]}, "stop_sequences='': a stop must"),
    ({"stop_sequences": ["x"] * 100_000}, "stop_sequences"),
    ({"stop_sequences": [HUGE]}, "at most 256 characters"),
    ({"temperature": 2.5}, "temperature=2.5"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers=[1 items]: not supported"),
    ({"container": "c"}, "container='c': not supported"),
    ({"compaction": {}}, "compaction={}: not supported"),
    ({"inference_geo": "eu"}, "inference_geo='eu': not supported"),
    ({"temprature": 1}, "temprature=1: unknown field; is temperature meant?"),
    ({f"f{n}": 1 for n in range(40)}, "unknown field, as 39 others are"),
    ({"service_tier": 5}, "service_tier=5"),
    ({"stream": "yes"}, "stream='yes'"),
    ({"system": "x " * 3000}, "prompt is too long: messages"),
]


async def test_what_asks_for_nothing(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(answer_parser=("tiny=hermes",))  # a family whose calls can be forced
    for fields in HARMLESS:
        response = await post(mesh, changed(**fields))
        assert response.status_code == 200, (fields, response.text)


async def test_what_is_refused(mesh: Mesh) -> None:
    for fields, words in REFUSED:
        response = await post(mesh, changed(**fields), headers={"x-request-id": "job"})
        told = response.json()
        assert response.status_code == 400, (list(fields), response.text)
        assert (told["type"], told["error"]["type"], told["request_id"]) == ("error", "invalid_request_error", "job")
        assert words in told["error"]["message"] and len(response.text) < 500, (words, told)
    bodies: list[Any] = [[], 5, "x"]
    for body in bodies:
        assert "body: must be a JSON object" in (await post(mesh, body)).text
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    for fields in (
        {"tools": [{**TOOL, "input_schema": deep}]},
        assistant({"type": "tool_use", "input": deep, "name": "f"}),
    ):
        assert "nested deeper than 64" in (await post(mesh, changed(**fields))).text
    assert not mesh.conductor.asked
    missing = {name: value for name, value in BODY.items() if name != "max_tokens"}
    assert "max_tokens: required and missing" in (await post(mesh, missing)).text


async def test_a_body_that_is_too_long_or_no_json(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(max_body_bytes=2048)
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = await post(mesh, changed(system="x" * 3000), path)
        assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")
        response = await mesh.http.post(path, content=b"{")
        assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


# ── errors ────────────────────────────────────────────────────────────────────────────────────────


async def test_keys(make_mesh: MeshMaker, tmp_path: Path) -> None:
    key, entry = make_entry("alice")
    (tmp_path / "keys.toml").write_text(entry)
    mesh = await make_mesh(api_keys=str(tmp_path / "keys.toml"))
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = await post(mesh, BODY, path, headers={"x-api-key": "wrong"})
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
        for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
            assert (await post(mesh, BODY, path, headers=headers)).status_code == 200
    assert (await mesh.http.get("/v1/models", headers={"x-api-key": key})).status_code == 200


async def test_unknown_models(mesh: Mesh) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = await post(mesh, changed(model="claude"), path)
        assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
        assert "served: tiny" in response.json()["error"]["message"]


async def test_errors_of_the_mesh(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(max_retries=0, session_timeout_ms=200)
    for err, status, kind in [
        (Overloaded("full", retry_after_ms=1500), 429, "rate_limit_error"),
        (Unavailable("nobody", retry_after_ms=1500), 529, "overloaded_error"),
        (InternalError("broken"), 500, "api_error"),
    ]:

        async def fails(run: Run, err: KvmeshError = err) -> None:
            await run.fail(err)

        mesh.decodes[0].script = fails
        response = await post(mesh, BODY)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind), response.text
        assert response.headers.get("retry-after") == ("2" if status in (429, 529) else None)


async def test_a_deadline(mesh: Mesh) -> None:
    async def silent(run: Run) -> None:
        await run.cancelled.wait()

    mesh.decodes[0].script = silent
    response = await post(mesh, BODY, headers={"x-request-timeout-ms": "100"})
    assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout_error")


async def test_an_error_in_mid_stream(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(max_migrations=0, max_retries=0)

    async def broken(run: Run) -> None:
        await run.prefilled()
        await run.token(mesh.ids("Hi")[0], 0)
        await run.fail(InternalError("the engine broke"))

    mesh.decodes[0].script = broken
    response = await post(mesh, changed(stream=True), headers={"x-request-id": "job"})
    assert response.status_code == 200
    name, data = response.text.split("\n\n")[-2].split("\n")
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["error"]["type"], told["request_id"]) == ("error", "api_error", "job")
    assert "message_stop" not in response.text
    await mesh.quiet()
