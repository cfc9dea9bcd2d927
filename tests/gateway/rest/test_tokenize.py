"""/tokenize and /detokenize: what a prompt is to the engine, without computing anything."""

from __future__ import annotations

from typing import Any

from tests.gateway.conftest import Mesh, MeshMaker
from tests.support.gateway.scripted import MAX_CONTEXT, MODEL

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


async def post(mesh: Mesh, path: str, **body: Any) -> dict[str, Any]:
    response = await mesh.http.post(path, json={"model": MODEL} | body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_a_text(mesh: Mesh) -> None:
    found = await post(mesh, "/tokenize", prompt="Hello, wörld <|im_end|>", return_token_strs=True)
    ids = mesh.tokenizer.encode("Hello, wörld <|im_end|>", add_special_tokens=True)
    assert found["tokens"] == ids and found["count"] == len(ids) and found["max_model_len"] == MAX_CONTEXT
    assert found["token_strs"][-1] == "<|im_end|>" and len(found["token_strs"]) == len(ids)
    assert (await post(mesh, "/detokenize", tokens=ids)) == {"prompt": "Hello, wörld <|im_end|>"}
    bare = await post(mesh, "/tokenize", prompt="Hello", add_special_tokens=False)
    assert bare["tokens"] == mesh.ids("Hello") and "token_strs" not in bare
    assert not mesh.conductor.asked, "nobody was asked to compute anything"


async def test_a_chat_is_what_a_request_sends(mesh: Mesh) -> None:
    for more in ({}, {"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}):
        found = await post(mesh, "/tokenize", messages=HELLO, **more)
        await mesh.client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=more)  # type: ignore[arg-type]
        assert found["tokens"] == mesh.decodes[0].runs[-1].prompt
    shut = await post(mesh, "/tokenize", messages=HELLO, add_generation_prompt=False)
    assert shut["tokens"] == mesh.ids("<|im_start|>user\nHello<|im_end|>\n")


async def test_more_than_the_context_is_counted(mesh: Mesh) -> None:
    """So that a client learns by how much its text is too long."""
    found = await post(mesh, "/tokenize", prompt="a b " * 3000)
    assert found["count"] > found["max_model_len"]
    assert (await post(mesh, "/tokenize", prompt=""))["count"] == len(
        mesh.tokenizer.encode("", add_special_tokens=True)
    )
    assert (await post(mesh, "/detokenize", tokens=[]))["prompt"] == ""


async def test_the_model_need_not_be_named_where_there_is_one(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh()
    response = await mesh.http.post("/tokenize", json={"prompt": "Hello"})
    assert response.status_code == 200 and response.headers["x-request-id"]
    assert (await mesh.http.post("/tokenize", json={"prompt": "Hello", "model": "other"})).status_code == 404
    assert (await mesh.http.get("/tokenize")).status_code == 405


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "prompt"),
    ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"messages": HELLO, "tools": [TOOL, TOOL]}, "tools"),
    ("/tokenize", {"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
    ("/tokenize", {"messages": HELLO * 5000}, "messages"),
    ("/tokenize", {"prompt": "a", "more": 1}, "more"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [1, 401]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [1.5]}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
]


async def test_what_is_refused(mesh: Mesh) -> None:
    for path, body, field in REFUSED:
        response = await mesh.http.post(path, json={"model": MODEL} | body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == field, body
