"""The real openai client against a gateway on a real socket."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from kvmesh.kvcache.keys import Namespace, chain
from kvmesh.services.gateway.api_keys import combined_salt
from tests.gateway.conftest import Mesh
from tests.support.gateway.scripted import BLOCK_TOKENS, CACHED, FINGERPRINT, MODEL, WEIGHTS_EPOCH, Run

HELLO = [{"role": "user", "content": "Hello"}]


async def chat(mesh: Mesh, **more: Any) -> Any:
    return await mesh.client.chat.completions.create(**{"model": MODEL, "messages": HELLO} | more)


async def complete(mesh: Mesh, **more: Any) -> Any:
    return await mesh.client.completions.create(**{"model": MODEL, "prompt": "Hello", "max_tokens": 30} | more)


async def test_a_chat(mesh: Mesh) -> None:
    answer = await chat(mesh)
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    prompt = mesh.ids("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.prompt_tokens_details.cached_tokens == CACHED
    assert answer.usage.completion_tokens == len(mesh.ids("Hello, world")) + 1
    assert mesh.decodes[0].runs[0].prompt == prompt


async def test_what_conductor_and_decode_are_told(mesh: Mesh) -> None:
    prompt = list(range(40))
    traceparent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    await complete(
        mesh, prompt=prompt, temperature=0.5, top_p=0.9, seed=2**63 - 1, max_tokens=5,
        presence_penalty=-0.5, frequency_penalty=1.5, logit_bias={"7": -100, "0": 2.5},
        extra_body={
            "top_k": 3, "min_p": 0.25, "repetition_penalty": 1.5, "ignore_eos": True, "cache_salt": "me",
            "priority": -4,
        },
        extra_headers={"traceparent": traceparent, "x-request-timeout-ms": "60000"},
    )  # fmt: skip
    asked, start = mesh.conductor.asked[0], mesh.decodes[0].runs[0].start
    salt = combined_salt("", "me")
    namespace = Namespace(fingerprint=FINGERPRINT, kv_dtype="float32", tenant_salt=salt, weights_epoch=WEIGHTS_EPOCH)
    assert asked.block_keys == start.block_keys == chain(namespace, prompt, BLOCK_TOKENS)
    assert (asked.prompt_tokens, asked.max_tokens, asked.priority, asked.model) == (40, 5, -4, MODEL)
    assert asked.request_id == start.request_id
    assert mesh.decodes[0].runs[0].prompt == prompt
    assert (start.model_fingerprint, start.weights_epoch) == (FINGERPRINT, WEIGHTS_EPOCH)
    sampling = start.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.ignore_eos) == (0.5, 3, 2**63 - 1, True)
    assert math.isclose(sampling.top_p, 0.9, rel_tol=1e-6)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 1.5)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert [(one.token_id, one.bias) for one in sampling.logit_bias] == [(7, -100.0), (0, 2.5)]
    assert 50_000 < start.deadline_ms <= 60_000
    assert start.traceparent.split("-")[1] == "ab" * 16
    assert mesh.conductor.asked[0].traceparent.split("-")[1] == "ab" * 16
    assert start.placement.decode.instance_id == "decode-0"


async def test_salts_keep_tenants_apart(mesh: Mesh) -> None:
    for salt in ("", "a", "b"):
        await complete(mesh, prompt=list(range(40)), extra_body={"cache_salt": salt})
    assert len({asked.block_keys for asked in mesh.conductor.asked}) == 3


async def test_a_streamed_chat(mesh: Mesh) -> None:
    mesh.decodes[0].script = mesh.says("Füchse 🦊 jump")
    stream = await chat(mesh, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Füchse 🦊 jump"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == CACHED
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) > 3, "token by token"


async def test_length_and_eos_are_told_apart(mesh: Mesh) -> None:
    answer = await complete(mesh, max_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2
    assert (await complete(mesh)).choices[0].finish_reason == "stop"


async def test_max_tokens_is_what_the_context_leaves(mesh: Mesh) -> None:
    await chat(mesh)
    await chat(mesh, max_completion_tokens=10**6)
    for run in mesh.decodes[0].runs:
        assert run.start.sampling.max_tokens == 512 - len(run.prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_cut_across_tokens_and_cancel_at_decode(mesh: Mesh, stream: bool) -> None:
    text = "The quick brown fox jumps over the lazy dog"

    async def endless(run: Run) -> None:
        await run.prefilled()
        tokens = mesh.ids(text) * 20
        for index, token in enumerate(tokens):
            await run.token(token, index)
        raise AssertionError("the gateway did not cancel")

    mesh.decodes[0].script = endless
    stop = ["brown f", "never"]
    answer = await chat(
        mesh, stop=stop, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    if stream:
        chunks = [chunk async for chunk in answer]
        content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        finish, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
    else:
        content, finish, usage = answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage
    assert content == "The quick "
    assert finish == "stop"
    assert usage.prompt_tokens_details.cached_tokens == CACHED, "known although decode never said Finished"
    upto = next(n for n in range(99) if "brown f" in mesh.tokenizer.decode(mesh.ids(text)[:n]))
    assert usage.completion_tokens == upto
    run = mesh.decodes[0].runs[0]
    await run.cancelled.wait()
    assert "stop string" in run.cancel_reason


async def test_chat_logprobs(mesh: Mesh) -> None:
    mesh.decodes[0].script = mesh.says("né 🐶")
    answer = await chat(mesh, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == "né 🐶"
    assert len(content) == len(mesh.ids("né 🐶")), "EOS is no token of the text"
    assert {entry.logprob for entry in content} == {-0.5}
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    assert any("\ufffd" in entry.token for entry in content), "part of a character"


async def test_streamed_logprobs_go_with_their_text(mesh: Mesh) -> None:
    mesh.decodes[0].script = mesh.says("one two END three", eos=False)
    stream = await chat(mesh, stream=True, logprobs=True, stop="END")
    entries, text = [], ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if chunk.choices[0].logprobs:
            entries += chunk.choices[0].logprobs.content
    assert text == "one two "
    shown = "".join(entry.token for entry in entries)
    assert shown.startswith("one two")
    assert "E" not in shown


async def test_completion_logprobs(mesh: Mesh) -> None:
    answer = await complete(mesh, logprobs=1, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:n])) for n in range(3)]
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))


@pytest.mark.parametrize("stream", [False, True])
async def test_many_prompts_times_n(mesh: Mesh, stream: bool) -> None:
    async def tell(run: Run) -> None:
        await run.answer([*run.prompt, *mesh.ids(str(run.start.sampling.seed)), mesh.eos])

    mesh.decodes[0].script = tell
    prompts = ["The fox ", mesh.ids("dog ")]
    found = []
    for prompt in (["The fox ", "dog "], prompts[0]):
        answer = await complete(mesh, prompt=prompt, n=2, seed=5, stream=stream)
        texts = {}
        if stream:
            async for chunk in answer:
                for choice in chunk.choices:
                    texts[choice.index] = texts.get(choice.index, "") + choice.text
        else:
            texts = {choice.index: choice.text for choice in answer.choices}
        found.append([texts[index] for index in sorted(texts)])
    assert found == [["The fox 5", "The fox 6", "dog 7", "dog 8"], ["The fox 5", "The fox 6"]]
    starts = [run.start for run in mesh.decodes[0].runs]
    assert len({start.request_id for start in starts}) == len(starts)
    assert len({start.slot for start in starts}) == len(starts)
    assert mesh.decodes[0].sessions == 1, "all of it in one stream"


async def test_seeds_differ_when_none_is_given(mesh: Mesh) -> None:
    await chat(mesh, n=3)
    assert len({run.start.sampling.seed for run in mesh.decodes[0].runs}) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(mesh: Mesh, stream: bool) -> None:
    for prompt in ("Say 🦊: ", mesh.ids("Say 🦊: ")):
        answer = await complete(mesh, prompt=prompt, echo=True, stream=stream)
        text = "".join([c.choices[0].text async for c in answer]) if stream else answer.choices[0].text
        assert text == "Say 🦊: Hello, world"


async def test_completion_default_is_16_tokens(mesh: Mesh) -> None:
    await mesh.client.completions.create(model=MODEL, prompt="x")
    assert mesh.decodes[0].runs[0].start.sampling.max_tokens == 16


async def test_models(mesh: Mesh) -> None:
    assert [model.id async for model in mesh.client.models.list()] == [MODEL]
    assert (await mesh.client.models.retrieve(MODEL)).owned_by == "kvmesh"
    with pytest.raises(openai.NotFoundError, match="not served here; served: tiny"):
        await mesh.client.models.retrieve("gpt-5")


async def test_an_unknown_model_is_not_found(mesh: Mesh) -> None:
    with pytest.raises(openai.NotFoundError, match="model='gpt-5'") as caught:
        await chat(mesh, model="gpt-5")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


async def test_text_parts_are_joined(mesh: Mesh) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    await chat(mesh, messages=[{"role": "user", "content": parts}])
    assert "user\nHello<|im_end|>" in mesh.tokenizer._inner.decode(
        mesh.decodes[0].runs[0].prompt, skip_special_tokens=False
    )


async def test_a_prompt_that_leaves_no_room(mesh: Mesh) -> None:
    with pytest.raises(openai.BadRequestError, match="512") as caught:
        await complete(mesh, prompt=[1] * 512)
    assert caught.value.code == "context_length_exceeded"
    assert (await complete(mesh, prompt=[1] * 511, max_tokens=9)).usage.completion_tokens == 1


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(mesh: Mesh) -> None:
    with pytest.raises(openai.BadRequestError, match="1000000 characters") as caught:
        await complete(mesh, prompt="ab" * 500_000)
    assert caught.value.code == "context_length_exceeded"


async def test_timings_are_told_when_asked_for(mesh: Mesh) -> None:
    header = {"x-kvmesh-timings": "1"}
    answer = await chat(mesh, extra_headers=header)
    stages = answer.model_extra["kvmesh"]
    assert set(stages["gateway"]) == {"tokenize_us", "schedule_us", "first_token_us", "first_write_us"}
    assert stages["choices"][0]["stages"]["transfer_us"] == 33
    assert stages["choices"][0]["decode_instance"] == "decode-0"
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = [c async for c in await chat(mesh, stream=True, extra_headers=header, **options)]
        assert "kvmesh" in (chunks[-1].model_extra or {})
        assert not any("kvmesh" in (chunk.model_extra or {}) for chunk in chunks[:-1])
    assert "kvmesh" not in ((await chat(mesh)).model_extra or {})
