"""Grammars through a real mesh: answers validate and are those of the engine alone, also when rows are preempted, when
decode is killed in the middle, over two ranks, and over a device that runs behind the host."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from llguidance import LLMatcher

from kvmesh.errors import InvalidRequest
from kvmesh.rpc.protocol import MAX_GRAMMAR_BYTES
from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import Answer
from tests.support.mesh.direct import Direct
from tests.support.mesh.harness import Running, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(200), pytest.mark.asyncio(loop_scope="module")]

BLOCK, VOCAB, MOST = 16, 331, 160
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 3, "maxItems": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
KINDS = [
    GenerateParams(MOST, grammar=GRAMMAR),
    GenerateParams(MOST, temperature=1.0, seed=7, grammar=GRAMMAR),
    GenerateParams(MOST, temperature=0.75, top_p=0.875, seed=8, frequency_penalty=0.5, grammar=GRAMMAR),
    GenerateParams(MOST, temperature=1.0, seed=9, may_end=False, grammar=GRAMMAR),
    GenerateParams(48, temperature=1.0, seed=10),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24}
    return make_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", family="qwen3", vocab_size=VOCAB, **shape)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """Decode on one rank whose device runs behind the host, and on two ranks; pages for some answers at a time."""
    flags: dict[str, dict[str, Any]] = {
        "*": {"dtype": "float32"},
        "decode": {"num_pages": 30, "num_extents": 64},
        "decode-0": {"device": "cpu-staged", "async_steps": "on"},
        "decode-1": {"tensor_parallel": 2},
        "gateway": {"max_migrations": 4},
        "conductor": {"admission": "off"},
    }
    async with running_mesh(model, tmp_path_factory.mktemp("run"), decode=2, block_tokens=BLOCK, flags=flags) as mesh:
        yield mesh


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(20, 60) for _ in range(16)]


def fields(p: GenerateParams) -> dict[str, Any]:
    names = ("temperature", "top_p", "frequency_penalty", "seed", "grammar")
    return {name: getattr(p, name) for name in names} | {"ignore_eos": not p.grammar or not p.may_end}


@pytest.fixture(scope="module")
def right(model: Path) -> list[list[int]]:
    """Each kind's answer by the engine alone."""
    engine = LocalEngine(model, block_tokens=BLOCK)
    eos = frozenset(engine.config.eos_token_ids)
    asked = [replace(p, stop_token_ids=eos if p.grammar else frozenset()) for p in KINDS]
    return [engine.generate([prompt(n)], p)[0].token_ids for n, p in enumerate(asked)]


def check(answer: Answer, p: GenerateParams, expected: list[int], index: int) -> None:
    assert answer.error is None, index
    assert answer.tokens == expected, index
    if not p.grammar:
        assert answer.finish == "length"
        return
    assert answer.finish == "stop"
    told = json.loads(answer.text)
    assert list(told) == ["name", "tags", "age"] and 8 <= len(told["name"]) <= 20 and 0 <= told["age"] <= 999
    assert 3 <= len(told["tags"]) <= 5 and {"red", "green", "blue"} >= set(told["tags"])


@pytest.mark.parametrize("decode", ["decode-0", "decode-1"])
async def test_each_way_of_decoding_makes_the_same_tokens(
    running: Running, right: list[list[int]], decode: str
) -> None:
    direct = await Direct.of(running)
    asked = (
        direct.generate(prompt(n), p.max_tokens, prefill="prefill-0", decode=decode, salt=decode, **fields(p))
        for n, p in enumerate(KINDS)
    )
    answers = await asyncio.gather(*asked)
    assert [str(answer.error) for answer in answers if answer.error] == []
    assert [answer.tokens for answer in answers] == right


async def test_answers_validate_whatever_is_preempted_or_killed(running: Running, right: list[list[int]]) -> None:
    """Twelve answers at a time on 30 pages each; decode-0 is killed when some are in the middle."""
    going, halfway = 0, asyncio.Event()

    def token(tokens: int) -> None:
        nonlocal going
        going += tokens == 9
        if going == 6:
            halfway.set()

    indices = [n % len(KINDS) for n in range(20)]
    calls = [
        asyncio.create_task(
            running.client.generate(prompt(n), KINDS[n].max_tokens, on_token=token, timeout_s=90, **fields(KINDS[n]))
        )
        for n in indices
    ]
    await halfway.wait()
    pid = running.pid("decode-0")
    running.kill("decode-0")
    answers = await asyncio.gather(*calls)
    for n, answer in zip(indices, answers, strict=True):
        check(answer, KINDS[n], right[n], n)
    await running.restarted("decode-0", pid)
    await running.settled()
    preempted = 0.0
    for name in ("decode-0", "decode-1"):
        async with httpx.AsyncClient(base_url=f"http://{running.mesh.processes[name].spec.metrics}") as http:
            told = (await http.get("/metrics")).text
        lines = [line for line in told.splitlines() if line.startswith("kvmesh_decode_preemptions_total")]
        preempted += sum(float(line.split()[-1]) for line in lines)
    assert preempted >= 1, "the pools were not small enough to show anything"


@pytest.mark.parametrize("kept", [1, 2, 13, 40])
async def test_an_answer_goes_on_elsewhere(running: Running, right: list[list[int]], kept: int) -> None:
    """What a gateway does after a crash: the prompt with what came of the answer, and how much of it is answer."""
    direct = await Direct.of(running)
    for n, p in enumerate(KINDS[:3]):
        rest = await direct.generate(
            prompt(n) + right[n][:kept], MOST - kept, prefill="prefill-0", decode="decode-1",
            answered_tokens=kept, salt="again", **fields(p),
        )  # fmt: skip
        assert rest.error is None
        assert rest.tokens == right[n][kept:]


async def test_what_does_not_compile_or_is_too_long_is_refused_by_name(running: Running) -> None:
    free = asyncio.create_task(running.client.generate(prompt(1), 40))
    for text, why in (("no grammar {{{", "Expected"), ("x" * (MAX_GRAMMAR_BYTES + 1), "at most")):
        answer = await running.client.generate(prompt(0), 8, grammar=text)
        assert isinstance(answer.error, InvalidRequest), answer.error
        assert answer.error.field == "grammar" and why in answer.error.message and not answer.tokens
    refused = await (await Direct.of(running)).generate(
        prompt(0), 4, prefill="prefill-0", decode="decode-1", grammar="no grammar {{{"
    )
    assert isinstance(refused.error, InvalidRequest) and refused.error.field == "grammar"
    assert len((await free).tokens) == 40
    await running.settled()
