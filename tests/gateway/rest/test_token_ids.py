"""Token ids out of chats and completions, /inference/v1/generate, usage of each choice, best_of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import decode_pb2
from tests.gateway.conftest import Mesh
from tests.support.gateway.scripted import CACHED, MAX_CONTEXT, MODEL, Run

PROMPT = list(range(20, 60))
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30}
GENERATE: dict[str, Any] = {"model": MODEL, "token_ids": PROMPT, "sampling_params": {"max_tokens": 30}}
IDS, USAGE = {"return_token_ids": True}, {"include_usage": True}


async def post(mesh: Mesh, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await mesh.http.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def stream(mesh: Mesh, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends with [DONE]."""
    response = await mesh.http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def gained(chunks: list[dict[str, Any]], index: int = 0) -> list[int]:
    """What the chunks tell of a choice's tokens."""
    choices = (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)
    return [token for choice in choices for token in choice["token_ids"]]


async def test_ids_of_whole_answers(mesh: Mesh) -> None:
    said = [*mesh.ids("Hello, world"), mesh.eos]
    chat = await post(mesh, "/v1/chat/completions", CHAT | IDS)
    assert chat["choices"][0]["token_ids"] == said
    assert chat["prompt_token_ids"] == mesh.decodes[0].runs[0].prompt
    text = await post(mesh, "/v1/completions", TEXT | IDS | {"n": 2})
    assert [choice["token_ids"] for choice in text["choices"]] == [said] * 2
    assert [choice["prompt_token_ids"] for choice in text["choices"]] == [PROMPT] * 2
    assert "token_ids" not in (await post(mesh, "/v1/completions", TEXT))["choices"][0]


async def test_ids_of_streams(mesh: Mesh) -> None:
    """Those of tokens whose text shows later, or never, too."""
    said = [*mesh.ids("Zoë 🙂 ok"), mesh.eos]
    mesh.decodes[0].script = mesh.says("Zoë 🙂 ok")
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        chunks = await stream(mesh, path, body | IDS)
        assert gained(chunks) == said
        prompts = [chunk.get("prompt_token_ids") or chunk["choices"][0].get("prompt_token_ids") for chunk in chunks]
        assert prompts == [mesh.decodes[0].runs[-1].prompt] + [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        plain = await stream(mesh, path, body)
        assert "".join(texts(plain)) == "".join(texts(chunks)) == "Zoë 🙂 ok"
        assert all("token_ids" not in choice for chunk in plain for choice in chunk["choices"])


def texts(chunks: list[dict[str, Any]]) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]


async def test_ids_end_with_the_token_that_completes_a_stop(mesh: Mesh) -> None:
    mesh.decodes[0].script = mesh.says("one two three")
    answer = await post(mesh, "/v1/completions", TEXT | IDS | {"stop": " two"})
    [choice] = answer["choices"]
    said = choice["token_ids"]
    assert said == mesh.ids("one two three")[: len(said)] and choice["text"] == "one"
    assert answer["usage"]["completion_tokens"] == len(said)


async def test_logprobs_name_tokens_by_their_ids(mesh: Mesh) -> None:
    said = mesh.ids("Hello, world")
    more = {"return_tokens_as_token_ids": True}
    text = await post(mesh, "/v1/completions", TEXT | more | {"logprobs": 1})
    assert text["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in said]
    tops = text["choices"][0]["logprobs"]["top_logprobs"]
    assert all(f"token_id:{token}" in top for token, top in zip(said, tops, strict=True))
    chat = await post(mesh, "/v1/chat/completions", CHAT | more | {"logprobs": True, "top_logprobs": 1})
    content = chat["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in said]
    assert bytes(b for one in content for b in one["bytes"]) == b"Hello, world"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"])
async def test_usage_of_each_choice_in_each_chunk(mesh: Mesh, path: str) -> None:
    body: dict[str, Any] = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}.get(path, GENERATE)
    n = body | ({"n": 2} if "token_ids" not in body else {"sampling_params": {"max_tokens": 30, "n": 2}})
    chunks = await stream(mesh, path, n | {"stream_options": USAGE | {"continuous_usage_stats": True}})
    said = len(mesh.ids("Hello, world")) + 1
    last: dict[int, int] = {}
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        count = chunk["usage"]["completion_tokens"]
        assert count >= last.get(choice["index"], 0)
        assert chunk["usage"]["prompt_tokens_details"]["cached_tokens"] in (0, CACHED)
        last[choice["index"]] = count
    assert last == {0: said, 1: said}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 2 * said
    assert chunks[-1]["usage"]["prompt_tokens"] == chunks[0]["usage"]["prompt_tokens"]


# ── /inference/v1/generate ────────────────────────────────────────────────────────────────────────


async def test_token_ids_in_and_out(mesh: Mesh) -> None:
    params = {
        "max_tokens": 5, "n": 2, "temperature": 0.5, "top_k": -1, "seed": 7, "logprobs": 1, "min_tokens": 0,
        "detokenize": False, "stop_token_ids": [],
    }  # fmt: skip
    more = {"request_id": "mine", "kv_transfer_params": None, "features": None, "priority": -3, "cache_salt": "me"}
    answer = await post(mesh, "/inference/v1/generate", GENERATE | more | {"sampling_params": params})
    said = mesh.ids("Hello, world")[:5]
    assert answer["request_id"] == "mine" and answer["model"] == MODEL
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert choice["token_ids"][: len(said)] == said
        assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in said]
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["prompt_logprobs"] is None and answer["kv_transfer_params"] is None
    starts = [run.start for run in mesh.decodes[0].runs]
    assert [run.prompt for run in mesh.decodes[0].runs] == [PROMPT] * 2
    assert sorted(start.sampling.seed for start in starts) == [7, 8]
    assert {(start.sampling.temperature, start.sampling.top_k, start.priority) for start in starts} == {(0.5, 0, -3)}


async def test_how_long_an_answer_may_be(mesh: Mesh) -> None:
    """16 tokens where nothing is said, as vLLM's SamplingParams have it; at most what the context leaves."""
    for params in ({}, {"max_tokens": None}, {"max_tokens": 7}, {"max_tokens": 10**6}):
        await post(mesh, "/inference/v1/generate", GENERATE | {"sampling_params": params})
    told = [run.start.sampling.max_tokens for run in mesh.decodes[0].runs]
    assert told == [16, 16, 7, MAX_CONTEXT - len(PROMPT)]


async def test_token_ids_streamed(mesh: Mesh) -> None:
    said = [*mesh.ids("Zoë 🙂"), mesh.eos]
    mesh.decodes[0].script = mesh.says("Zoë 🙂")
    chunks = await stream(mesh, "/inference/v1/generate", GENERATE | {"stream_options": USAGE})
    assert gained(chunks) == said
    assert len({chunk["request_id"] for chunk in chunks}) == 1
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1]["usage"]["completion_tokens"] == len(said)


async def test_the_only_model_need_not_be_named(mesh: Mesh) -> None:
    body = {name: value for name, value in GENERATE.items() if name != "model"}
    assert (await post(mesh, "/inference/v1/generate", body))["model"] == MODEL


NOT_GENERATED: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": "text"}, "token_ids"),
    ({"token_ids": [1, 4000]}, "prompt"),
    ({"token_ids": [1, -1]}, "token_ids"),
    ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ({"sampling_params": None}, "sampling_params"),
    ({"sampling_params": {"min_tokens": 3}}, "sampling_params.min_tokens"),
    ({"sampling_params": {"prompt_logprobs": 21}}, "sampling_params.prompt_logprobs"),
    ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
    ({"sampling_params": {"nothing": 21}}, "sampling_params.nothing"),
    ({"sampling_params": {"temperature": 9}}, "temperature"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"stream_options": {}}, "stream_options"),
    ({"other": 1}, "other"),
]


async def test_what_generate_refuses(mesh: Mesh) -> None:
    for more, field in NOT_GENERATED:
        response = await mesh.http.post("/inference/v1/generate", json=GENERATE | more)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == field, more


# ── best_of ───────────────────────────────────────────────────────────────────────────────────────


async def test_the_best_are_returned_and_all_are_counted(mesh: Mesh) -> None:
    """An answer's tokens are `seed + index` many and have the mean log-probability that `means` says of its index."""
    means = [-2.0, -0.25, -3.0, -1.0, -4.0, -5.0]

    async def script(run: Run) -> None:
        at = run.start.sampling.seed - 100
        assert run.start.sampling.logprobs
        await run.prefilled()
        count = 2 + at
        for index in range(count):
            tokens = decode_pb2.StepTokens(slot=[run.start.slot], token_id=[30 + at], token_index=[index])
            tokens.logprobs.append(pb.TokenLogprobs(logprob=means[at] + (0.125 if index % 2 else -0.125)))
            last = [run.finished(count)] if index == count - 1 else []
            await run.send(decode_pb2.SessionResponse(tokens=tokens, finished=last))

    mesh.decodes[0].script = script
    answer = await post(mesh, "/v1/completions", TEXT | IDS | {"n": 2, "best_of": 4, "seed": 100})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["token_ids"] for choice in answer["choices"]] == [[31] * 3, [33] * 5]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 2 + 3 + 4 + 5
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    one = await post(mesh, "/v1/completions", TEXT | IDS | {"best_of": 3, "seed": 100, "prompt": [PROMPT, PROMPT[:9]]})
    assert [choice["token_ids"] for choice in one["choices"]] == [[31] * 3, [33] * 5]
    assert [choice["prompt_token_ids"] for choice in one["choices"]] == [PROMPT, PROMPT[:9]]
