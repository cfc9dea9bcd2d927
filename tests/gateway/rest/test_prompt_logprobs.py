"""Log-probabilities of prompts: who is asked for them, and how clients are told them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.errors import Unavailable
from kvmesh.kvcache.keys import pack_tokens
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import decode_pb2, gateway_pb2
from tests.gateway.conftest import Mesh
from tests.support.gateway.scripted import MODEL, Run, scores

PROMPT = list(range(50, 70))  # a block of 16 and a rest
TEXT = {"model": MODEL, "prompt": PROMPT, "temperature": 0}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


async def post(mesh: Mesh, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    response = await mesh.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(mesh: Mesh, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
    response = await mesh.http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def vllm(mesh: Mesh, prompt: list[int], top: int) -> list[Any]:
    """`prompt_logprobs` of what the scripted decode says."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": mesh.tokenizer.piece(token)[0]}

    found: list[Any] = [None]
    for at, token in enumerate(prompt[1:], 1):
        found.append({str(token): entry(token, -at - 0.25, at)})
        for n in range(1, 1 + top):
            found[-1].setdefault(str(40 + n), entry(40 + n, -at - 0.25 - n / 4, n))
    return found


async def test_an_echo_is_scored(mesh: Mesh) -> None:
    """Before the answer's tokens stand the prompt's, the first without numbers; offsets are of the whole text. The end
    token of the answer has an entry, too: clients count on one for each."""
    text = "Say 🦊 and 🐶, both: "  # over a block
    ids = mesh.ids(text)
    said = mesh.ids("Hello, world")
    answer = await post(mesh, TEXT | {"prompt": text, "echo": True, "logprobs": 1})
    [choice] = answer["choices"]
    told = choice["logprobs"]
    assert choice["text"] == text + "Hello, world" and "prompt_logprobs" not in choice
    assert told["tokens"] == [mesh.tokenizer.piece(token)[0] for token in [*ids, *said, mesh.eos]]
    count = len(ids)
    assert told["token_logprobs"] == [None, *(-i - 0.25 for i in range(1, count))] + [-0.5] * (len(said) + 1)
    likely = mesh.tokenizer.piece(41)[0]
    assert told["top_logprobs"][:2] == [None, {likely: -1.5, mesh.tokenizer.piece(ids[1])[0]: -1.25}]
    offsets = told["text_offset"]
    assert offsets[0] == 0 and offsets[count] == len(text) and offsets[-1] == len(choice["text"])
    assert offsets == sorted(offsets) and {len(column) for column in told.values()} == {count + len(said) + 1}
    [run] = mesh.decodes[0].runs
    assert run.start.sampling.prompt_logprobs == 1 and run.start.block_keys
    assert not mesh.conductor.asked[0].block_keys, "no hit is of use to it"

    chunks = await stream(mesh, TEXT | {"prompt": text, "echo": True, "logprobs": 1})
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert len(parts[0]["tokens"]) == count
    joined = {name: [value for part in parts if part for value in part[name]] for name in told}
    assert joined == told


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prompt_alone(mesh: Mesh, streamed: bool) -> None:
    """What the engine makes beside it is not shown, not even that it was an end token."""
    mesh.decodes[0].script = mesh.says("")
    body = TEXT | {"echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
    if streamed:
        first, last = await stream(mesh, body)
        choice, usage = first["choices"][0] | {"finish_reason": last["choices"][0]["finish_reason"]}, None
    else:
        answer = await post(mesh, body)
        [choice], usage = answer["choices"], answer["usage"]
    assert choice["text"] == mesh.tokenizer.decode(PROMPT)
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"] == [] and choice["prompt_token_ids"] == PROMPT
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT)
    assert usage is None or (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 0)
    assert mesh.decodes[0].runs[0].start.sampling.max_tokens == 1


async def test_as_vllm_tells_them(mesh: Mesh) -> None:
    """In a completion's choices, at the top of a chat and of token ids; of a stream in the first chunk."""
    expected = vllm(mesh, PROMPT, 2)
    whole = await post(mesh, TEXT | {"prompt_logprobs": 2, "n": 2})
    assert [choice["prompt_logprobs"] for choice in whole["choices"]] == [expected] * 2
    chunks = await stream(mesh, TEXT | {"prompt_logprobs": 2})
    assert [chunk["choices"][0].get("prompt_logprobs") for chunk in chunks] == [expected] + [None] * (len(chunks) - 1)

    params = {"prompt_logprobs": 2, "max_tokens": 2}
    tokens = {"token_ids": PROMPT, "model": MODEL, "sampling_params": params}
    assert (await post(mesh, tokens, "/inference/v1/generate"))["prompt_logprobs"] == expected
    first, *rest = await stream(mesh, tokens, "/inference/v1/generate")
    assert first["prompt_logprobs"] == expected and not any("prompt_logprobs" in chunk for chunk in rest)

    chat = await post(mesh, CHAT | {"prompt_logprobs": 0}, "/v1/chat/completions")
    prompt = mesh.decodes[0].runs[-1].prompt
    assert chat["prompt_logprobs"] == vllm(mesh, prompt, 0)
    first, *rest = await stream(mesh, CHAT | {"prompt_logprobs": 0}, "/v1/chat/completions")
    assert first["prompt_logprobs"] == vllm(mesh, prompt, 0)
    assert not any("prompt_logprobs" in chunk for chunk in rest)


async def test_over_grpc(mesh: Mesh) -> None:
    request = gateway_pb2.GenerateRequest(model=MODEL, token_ids=pack_tokens(PROMPT), prompt_logprobs=1)
    answers = [answer async for answer in mesh.stub.Generate(request)]
    assert answers[0].prompt_logprobs == scores(len(PROMPT), 1)
    assert not any(answer.HasField("prompt_logprobs") for answer in answers[1:])


async def test_numbers_that_json_has_not(mesh: Mesh) -> None:
    async def script(run: Run) -> None:
        one = decode_pb2.Prefilled(slot=run.start.slot, prompt_logprobs=scores(2, 0))
        one.prompt_logprobs.logprobs = b"\x00\x00\x80\xff"  # -inf
        await run.send(decode_pb2.SessionResponse(prefilled=[one]))
        await run.token(30, 0, run.finished(1))

    mesh.decodes[0].script = script
    answer = await post(mesh, TEXT | {"prompt": [50, 51], "prompt_logprobs": 0, "max_tokens": 1})
    assert answer["choices"][0]["prompt_logprobs"][1]["51"]["logprob"] == -9999.0


async def test_more_than_the_gateway_tells(mesh: Mesh) -> None:
    """One error before any work, which counts the answers, too."""
    for body in ({"prompt_logprobs": 20, "n": 64}, {"logprobs": 20, "echo": True, "n": 64}):
        response = await mesh.http.post("/v1/completions", json=TEXT | body | {"prompt": PROMPT * 6})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "prompt_logprobs"
        assert "7680 prompt tokens x 21 are 161280; a request may ask for 131072" in error["message"]
    assert not mesh.conductor.asked


@pytest.mark.parametrize("missing", [False, True])
async def test_scores_of_another_prompt_are_not_told(mesh: Mesh, missing: bool) -> None:
    async def script(run: Run) -> None:
        one = decode_pb2.Prefilled(slot=run.start.slot)
        if not missing:
            one.prompt_logprobs.CopyFrom(scores(len(PROMPT) + 1, 1))
        await run.send(decode_pb2.SessionResponse(prefilled=[one]))
        await run.token(30, 0)

    mesh.decodes[0].script = script
    response = await mesh.http.post("/v1/completions", json=TEXT | {"prompt_logprobs": 1})
    assert response.status_code == 500
    assert "log-probabilities of " in response.json()["error"]["message"]


async def test_an_answer_that_goes_on_elsewhere_asks_once(mesh: Mesh) -> None:
    """An attempt that fails before the prompt was computed is asked again; what follows a token is not."""
    runs: list[pb.SamplingParams] = []

    async def script(run: Run) -> None:
        runs.append(run.start.sampling)
        if len(runs) == 1:
            await run.fail(Unavailable("not now"))
            return
        await run.prefilled()
        if len(runs) == 2:
            await run.token(30, 0)
            await run.fail(Unavailable("not any more"))
            return
        await run.token(31, 0, run.finished(1))

    mesh.decodes[0].script = script
    answer = await post(mesh, TEXT | {"prompt_logprobs": 1, "max_tokens": 2, "return_token_ids": True})
    assert answer["choices"][0]["token_ids"] == [30, 31]
    assert answer["choices"][0]["prompt_logprobs"] == vllm(mesh, PROMPT, 1)
    assert [one.HasField("prompt_logprobs") for one in runs] == [True, True, False]
    assert [bool(one.block_keys) for one in mesh.conductor.asked] == [False, False, True]
