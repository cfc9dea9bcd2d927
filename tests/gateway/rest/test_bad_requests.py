"""Every bad request is answered by one small error that names the field and its value; none reaches the mesh."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.conftest import Mesh
from tests.support.gateway.scripted import MODEL

USER = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": USER}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Hi"}
HUGE = "x" * 1_000_000


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [fields]}


def call(**fields: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"} | fields}


CALL = call()
DEEP: dict[str, Any] = {}
for _ in range(500):
    DEEP = {"a": DEEP}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look"} | fields}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


# fields of a chat → field named, words in the message
CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "must be"),
    ({"model": 5}, "model", "model=5"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": "Hi"}, "messages", "must be a valid list"),
    ({"messages": [1]}, "messages.0", "messages.0=1: must be an object"),
    ({"messages": [None]}, "messages.0", "must be an object"),
    ({"stream": True, "stream_options": 5}, "stream_options", "must be an object"),
    ({"messages": USER * 5000}, "messages", "at most 4096"),
    (message(role="user"), "messages.0.content", "must be a string"),
    (message(content="Hi"), "messages.0.role", "required and missing"),
    (message(role="wizard", content="Hi"), "messages.0.role", "'wizard': must be one of"),
    (message(role="function", content="Hi"), "messages.0.role", "not supported"),
    (message(role="tool", content="Hi"), "messages.0.tool_call_id", "required and missing"),
    (message(role="user", content="Hi", tool_call_id="a"), "messages.0.tool_call_id", "of the role tool"),
    (message(role="user", content="Hi", tool_calls=[CALL]), "messages.0.tool_calls", "of the role assistant"),
    (message(role="user", content="Hi", reasoning_content="so"), "messages.0.reasoning_content", "of the role assist"),
    (message(role="user", content=None), "messages.0.content", "must be a string"),
    (message(role="user", content=7), "messages.0.content", "must be a string"),
    (message(role="user", content=[{"type": "image_url"}]), "messages.content.type", "not supported"),
    (message(role="user", content=[{"type": "text"}]), "messages.0.content", "text part"),
    (message(role="user", content="Hi", mood="bad"), "messages.0.mood", "unknown field"),
    (message(role="assistant", tool_calls=[{}]), "tool_calls.0.function", "must be an object"),
    (message(role="assistant", tool_calls=5), "messages.0.tool_calls", "must be a list"),
    (message(role="assistant", tool_calls=[CALL | {"id": 7}]), "tool_calls.0.id", "must be a string"),
    (message(role="assistant", tool_calls=[call(arguments="[1]")]), "tool_calls.0.function.arguments", "JSON object"),
    (message(role="assistant", tool_calls=[call(arguments="{")]), "tool_calls.0.function.arguments", "JSON object"),
    (message(role="assistant", tool_calls=[call(name="a b")]), "tool_calls.0.function.name", "must be 1 to 128"),
    (message(role="assistant", tool_calls=[call(mood=1)]), "tool_calls.0.function.mood", "unknown field"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0: must be between"),
    ({"max_tokens": -5}, "max_tokens", "max_tokens=-5"),
    ({"max_tokens": 1.5}, "max_tokens", "max_tokens=1.5"),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens='5'"),
    ({"max_tokens": True}, "max_tokens", "max_tokens=True"),
    ({"max_tokens": 10**30}, "max_tokens", "max_tokens=1e+30"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "must be between"),
    ({"temperature": -0.1}, "temperature", "temperature=-0.1"),
    ({"temperature": 2.1}, "temperature", "between 0.0 and 2.0"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"top_p": 0}, "top_p", "over 0"),
    ({"top_p": 1.01}, "top_p", "top_p=1.01"),
    ({"top_p": -1}, "top_p", "top_p=-1"),
    ({"top_k": -1}, "top_k", "top_k=-1"),
    ({"seed": -1}, "seed", "seed=-1"),
    ({"seed": 2**63}, "seed", "must be between"),
    ({"n": 0}, "n", "n=0"),
    ({"n": 65}, "n", "n=65"),
    ({"priority": 2**40}, "priority", "must be between"),
    ({"stop": [""]}, "stop", "not empty"),
    ({"stop": [5]}, "stop", "stop=5"),
    ({"stop": {"a": 1}}, "stop", "must be a string or a list"),
    ({"stop": ["x"] * 100_000}, "stop", "100000 stop strings; at most 16"),
    ({"stop": "x" * 257}, "stop", "at most 256 characters"),
    ({"stop": HUGE}, "stop", "at most 256 characters"),
    ({"logprobs": 3}, "logprobs", "logprobs=3"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs=21"),
    ({"top_logprobs": 2}, "top_logprobs", "only allowed with logprobs=true"),
    ({"stream": "yes"}, "stream", "'yes'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream=true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "must be"),
    ({"ignore_eos": 1}, "ignore_eos", "ignore_eos=1"),
    ({"cache_salt": "s" * 257}, "cache_salt", "at most 256"),
    ({"tools": {}}, "tools", "must be a list"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "must be an object"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools.0", "other tools are not supported"),
    ({"tools": [tool(name="")]}, "tools.0.function.name", "must be 1 to 128"),
    ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters", "must be a JSON Schema"),
    ({"tools": [tool(description=1)]}, "tools.0.function.description", "must be a string"),
    ({"tools": [tool(strict="yes")]}, "tools.0.function.strict", "must be true or false"),
    ({"tools": [tool(colour=1)]}, "tools.0.function.colour", "unknown field"),
    ({"tools": [tool(parameters=DEEP)]}, "tools.0.function.parameters", "nested deeper than"),
    ({"chat_template_kwargs": DEEP}, "chat_template_kwargs", "nested deeper than"),
    ({"tools": [tool()] * 2}, "tools", "two tools have this name"),
    ({"tools": [tool()] * 257}, "tools", "at most 256"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tool_choice": "always"}, "tool_choice", "must be auto, none, required"),
    ({"tools": [tool()], "tool_choice": named("other")}, "tool_choice", "no tool has this name; there are look"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "not for clients"),
    ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs.bos_token", "not for clients"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs", "must be an object"),
    ({"logit_bias": [5]}, "logit_bias", "must be an object"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias.5", "logit_bias.5=100.5: must be between -100.0 and 100.0"),
    ({"logit_bias": {"5": True}}, "logit_bias.5", "must be a number"),
    ({"logit_bias": {"05": 1}}, "logit_bias.05", "must be a token id"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "must be a token id"),
    ({"logit_bias": {HUGE: 1}}, "logit_bias." + "x" * 66 + "...", "must be a token id"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "301 tokens; at most 300"),
    ({"logit_bias": {"400": 1, "401": 1}}, "logit_bias.401", "outside the vocabulary of 401"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "frequency_penalty=2.5: must be between -2.0 and 2.0"),
    ({"presence_penalty": -3}, "presence_penalty", "presence_penalty=-3.0: must be between"),
    ({"presence_penalty": "1"}, "presence_penalty", "presence_penalty='1'"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty=0.0: must be between 0.01 and 10.0"),
    ({"repetition_penalty": 11}, "repetition_penalty", "repetition_penalty=11"),
    ({"min_p": 1.5}, "min_p", "min_p=1.5: must be between 0.0 and 1.0"),
    ({"min_p": -0.1}, "min_p", "min_p=-0.1"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort", "must be one of none, minimal"),
    ({"frobnicate": 1}, "frobnicate", "frobnicate=1: unknown field"),
    ({"prompt": "Hi"}, "prompt", "unknown field"),
    ({HUGE: HUGE}, "x" * 77 + "...", "unknown field"),
]
TEXTS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": [[]]}, "prompt", "must not be empty"),
    ({"prompt": ["a", ""]}, "prompt", "must not be empty"),
    ({"prompt": None}, "prompt", "must be a string"),
    ({"prompt": 5}, "prompt", "prompt=5"),
    ({"prompt": [1, "a"]}, "prompt", "token ids must be integers"),
    ({"prompt": [True]}, "prompt", "prompt=True"),
    ({"prompt": ["a", 1]}, "prompt", "all be strings"),
    ({"prompt": [[1], "a"]}, "prompt", "all be strings"),
    ({"prompt": [1.0]}, "prompt", "prompt=1.0"),
    ({"prompt": [-1]}, "prompt", "prompt=-1"),
    ({"prompt": [2**32]}, "prompt", f"prompt={2**32}"),
    ({"prompt": [3, 401]}, "prompt", "prompt=401: token id outside the vocabulary of 401"),
    ({"prompt": ["a"] * 65}, "prompt", "65 prompts"),
    ({"prompt": ["a"] * 10, "n": 7}, "n", "n=7"),
    ({"logprobs": 21}, "logprobs", "logprobs=21"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs=21: must be between 0 and 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs=-1: must be between 0 and 20"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0: must be between 1 and"),
    ({"best_of": 3, "n": 4}, "best_of", "best_of=3: must be between 4 and"),
    ({"best_of": 1000}, "best_of", "best_of=1000: must be between 1 and"),
    ({"best_of": 3, "stream": True}, "best_of", "best_of=3: not together with stream"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"messages": USER}, "messages", "unknown field"),
    ({"prompt": "long " * 4000}, "prompt", "leave no room for an answer"),
]
# raw bodies → words in the message
BODIES: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b'{"model":"tiny"}}', "not valid JSON"),
    (b"[]", "must be a JSON object"),
    (b'"text"', "must be a JSON object"),
    (b"\xff\xfe{}", "not valid JSON"),
    (b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}', "not valid JSON"),
    (b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', "not valid JSON"),
    (b'{"model":"tiny","messages":[{"role":"user","content":"\\udc00\\ud800"}]}', "not valid JSON"),
    (b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}],"temperature":NaN}', "not valid JSON"),
    (b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}],"temperature":Infinity}', "not valid JSON"),
    (b'{"model":"tiny","messages":[{"role":"user","content":"Hi"}],"top_p":1e999}', "not valid JSON"),
    (b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
]


async def refused(mesh: Mesh, path: str, content: bytes) -> dict[str, Any]:
    response = await mesh.http.post(path, content=content)
    assert response.status_code == 400, (content[:100], response.text)
    assert len(response.content) < 2000, "an error must not echo what it refuses"
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


async def refuses_all(
    mesh: Mesh, path: str, base: dict[str, Any], table: list[tuple[dict[str, Any], str, str]]
) -> None:
    wrong = []
    for fields, param, words in table:
        error = await refused(mesh, path, json.dumps(base | fields).encode())
        named = error["message"].startswith(f"{param}=") or error["message"].startswith(f"{param}:")
        if error["param"] != param or words not in error["message"] or not named:
            wrong.append((param, words, error))
    assert not wrong
    assert not mesh.conductor.asked


@pytest.mark.slow
async def test_chats(mesh: Mesh) -> None:
    await refuses_all(mesh, "/v1/chat/completions", CHAT, CHATS)


async def test_completions(mesh: Mesh) -> None:
    await refuses_all(mesh, "/v1/completions", TEXT, TEXTS)


async def test_missing_fields(mesh: Mesh) -> None:
    for path, body, field in (
        ("/v1/chat/completions", {"messages": USER}, "model"),
        ("/v1/chat/completions", {"model": MODEL}, "messages"),
        ("/v1/completions", {"model": MODEL}, "prompt"),
    ):
        error = await refused(mesh, path, json.dumps(body).encode())
        assert error["message"] == f"{field}: required and missing"


async def test_bodies_that_are_no_json(mesh: Mesh) -> None:
    for body, words in BODIES:
        error = await refused(mesh, "/v1/chat/completions", body)
        assert words in error["message"], error
        assert error["param"] == "body"


async def test_what_asks_for_nothing_is_taken(mesh: Mesh) -> None:
    """OpenAI's fields at the values that mean nothing, nulls, and those that have no effect here."""
    fields = {
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {}, "stop": None,
        "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "min_p": None,
        "user": "me", "metadata": {"a": "b"}, "store": False,
        "temperature": None, "max_tokens": None, "n": None, "seed": None, "logprobs": None, "stream": None,
        "stream_options": None, "modalities": ["text"], "parallel_tool_calls": True, "service_tier": "auto",
    }  # fmt: skip
    response = await mesh.http.post("/v1/chat/completions", json=CHAT | fields)
    assert response.status_code == 200, response.text
    response = await mesh.http.post("/v1/completions", json=TEXT | {"best_of": 1, "suffix": "", "echo": None})
    assert response.status_code == 200, response.text
    named = await mesh.http.post("/v1/chat/completions", json=CHAT | message(role="user", content="Hi", name="Bo"))
    assert named.status_code == 200, named.text


async def test_a_20_mb_body_is_refused_and_not_kept(mesh: Mesh) -> None:
    body = json.dumps(CHAT | message(role="user", content="x" * 20_000_000)).encode()
    response = await mesh.http.post("/v1/chat/completions", content=body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"

    async def chunks() -> Any:
        for at in range(0, len(body), 1 << 16):
            yield body[at : at + (1 << 16)]

    response = await mesh.http.post("/v1/chat/completions", content=chunks())  # no content-length
    assert response.status_code == 413
    assert (await mesh.http.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_a_client_that_waits_for_100_continue_is_told_at_once(mesh: Mesh) -> None:
    host, port = mesh.told["http"].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20000000\r\n"
        b"Expect: 100-continue\r\n\r\n"
    )
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    await writer.wait_closed()


async def test_bad_headers(mesh: Mesh) -> None:
    for header, value in (
        ("x-request-id", "a b"),
        ("x-request-id", "x" * 129),
        ("x-request-id", ""),
        ("x-request-timeout-ms", "0"),
        ("x-request-timeout-ms", "-5"),
        ("x-request-timeout-ms", "1.5"),
        ("x-request-timeout-ms", "9" * 30),
    ):
        response = await mesh.http.post("/v1/chat/completions", json=CHAT, headers={header: value})
        assert response.status_code == 400, (header, value)
        assert response.json()["error"]["param"] == header


async def test_request_ids(mesh: Mesh) -> None:
    response = await mesh.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "job-7"})
    assert response.headers["x-request-id"] == "job-7"
    assert response.json()["id"].startswith("chatcmpl-job-7-")
    response = await mesh.http.post("/v1/chat/completions", json=CHAT | {"n": 0})
    assert len(response.headers["x-request-id"]) == 32
    await mesh.http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "job-7"})
    ids = [asked.request_id for asked in mesh.conductor.asked]
    assert len(set(ids)) == 2
    assert all(request_id.startswith("job-7-") for request_id in ids)


async def test_paths_that_do_not_exist(mesh: Mesh) -> None:
    for method, path, status, words in (
        ("GET", "/v2", 404, "GET /v2: no such endpoint; see /docs"),
        ("GET", "/v1/chat/completions", 405, "GET /v1/chat/completions: this endpoint takes POST; see /docs"),
        ("POST", "/health", 405, "POST /health: this endpoint takes GET; see /docs"),
    ):
        response = await mesh.http.request(method, path)
        assert response.status_code == status
        assert response.headers.get("allow", "") == ("" if status == 404 else words.split(" takes ")[1].split(";")[0])
        assert response.json()["error"] | {"code": "not_found", "message": words} == response.json()["error"]
