"""A real mesh whose decode instances verify drafts: every answer is that of the engine alone, which drafts nothing,
with penalties, grammars, log-probabilities, stop strings and several answers to a prompt; when rows are preempted, and
when an instance is drained or killed in the middle."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from llguidance import LLMatcher

from kvmesh.testing.local_engine import GenerateParams, LocalCompletion, LocalEngine
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import Answer
from tests.support.mesh.harness import Running, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

BLOCK, MOST = 16, 96
DECODES = ("decode-0", "decode-1")
SCHEMA = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 4, "maxItems": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["tags", "age"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
KINDS = [
    GenerateParams(MOST),
    GenerateParams(MOST, temperature=0.75, top_p=0.875, seed=7),
    GenerateParams(
        MOST, temperature=1.0, seed=8, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.25
    ),
    GenerateParams(MOST, grammar=GRAMMAR),
    GenerateParams(MOST, temperature=1.0, seed=9, frequency_penalty=0.5, grammar=GRAMMAR),
]
FIELDS = (
    "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "grammar",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", family="qwen3", vocab_size=331)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """Pages for three answers at a time at each decode instance."""
    flags: dict[str, dict[str, Any]] = {
        "decode": {"num_pages": 26, "num_extents": 96, "stop_grace_ms": 0},
        "gateway": {"max_migrations": 4},
        "conductor": {"admission": "off"},
    }
    folder = tmp_path_factory.mktemp("run")
    async with running_mesh(model, folder, decode=2, block_tokens=BLOCK, flags=flags, speculate="suffix") as mesh:
        yield mesh


def prompt(seed: int) -> list[int]:
    """A text that repeats itself."""
    return [20 + seed, 41, 52 + seed, 63, 74] * 5


@pytest.fixture(scope="module")
def right(model: Path) -> list[LocalCompletion]:
    engine = LocalEngine(model, block_tokens=BLOCK)
    eos = frozenset(engine.config.eos_token_ids)
    asked = [replace(p, stop_token_ids=eos if p.grammar else frozenset()) for p in KINDS]
    return [engine.generate([prompt(n)], p)[0] for n, p in enumerate(asked)]


async def ask(running: Running, kind: int, **more: Any) -> Answer:
    p = KINDS[kind]
    fields = {name: getattr(p, name) for name in FIELDS} | {"ignore_eos": not p.grammar}
    return await running.client.generate(prompt(kind), p.max_tokens, timeout_s=120, **fields, **more)


async def counted(running: Running, metric: str, names: tuple[str, ...] = DECODES) -> float:
    total = 0.0
    for name in names:
        async with httpx.AsyncClient() as http:
            told = (await http.get(f"http://{running.mesh.processes[name].spec.metrics}/metrics")).text
        total += sum(float(line.split()[-1]) for line in told.splitlines() if line.startswith(metric))
    return total


def check(answers: list[Answer], kinds: list[int], right: list[LocalCompletion]) -> None:
    assert [str(answer.error) for answer in answers if answer.error] == []
    for kind, answer in zip(kinds, answers, strict=True):
        assert answer.tokens == right[kind].token_ids, kind
        if KINDS[kind].grammar:
            told = json.loads(answer.text)
            assert list(told) == ["tags", "age"] and 4 <= len(told["tags"]) <= 6 and 0 <= told["age"] <= 999


async def test_answers_are_the_engines_whatever_is_drafted_and_preempted(
    running: Running, right: list[LocalCompletion]
) -> None:
    """Each kind once, and then four times at once, when the answer may be drafted from the one before."""
    kinds = list(range(len(KINDS)))
    check(await asyncio.gather(*(ask(running, kind) for kind in kinds)), kinds, right)
    kinds = kinds * 4
    check(await asyncio.gather(*(ask(running, kind) for kind in kinds)), kinds, right)
    await running.settled()
    drafted = await counted(running, "kvmesh_decode_draft_tokens_total")
    kept = await counted(running, "kvmesh_decode_accepted_draft_tokens_total")
    assert drafted >= kept > MOST
    assert await counted(running, "kvmesh_decode_preemptions_total") >= 1, "the pools were not small enough"


async def test_log_probabilities_several_answers_and_stop_strings(
    running: Running, model: Path, right: list[LocalCompletion]
) -> None:
    engine = LocalEngine(model, block_tokens=BLOCK)
    params = [GenerateParams(MOST, temperature=0.5, seed=40 + index, logprobs=2) for index in range(3)]
    expected = [engine.generate([prompt(0)], p)[0] for p in params]
    body: dict[str, Any] = {
        "model": model.name, "prompt": prompt(0), "max_tokens": MOST, "temperature": 0.5, "seed": 40, "n": 3,
        "logprobs": 2, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    async with httpx.AsyncClient(timeout=120, base_url=running.http) as http:
        for _ in range(2):
            told = (await http.post("/v1/completions", json=body)).json()
            for choice, alone in zip(told["choices"], expected, strict=True):
                assert choice["token_ids"] == alone.token_ids
                found = [token.sampled.logprob for token in alone.tokens]
                assert choice["logprobs"]["token_logprobs"] == pytest.approx(found, abs=1e-3)
    whole = await ask(running, 0)
    assert whole.tokens == right[0].token_ids
    stop = whole.text[len(whole.text) // 2 :][:4]
    for _ in range(2):
        answer = await ask(running, 0, stop=[stop])
        assert answer.error is None and answer.finish == "stop"
        assert answer.text == whole.text[: whole.text.index(stop)]
    await running.settled()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
async def test_answers_go_on_elsewhere(running: Running, right: list[LocalCompletion], sig: signal.Signals) -> None:
    """Whoever goes on drafts from the answer so far."""
    going_on, going = asyncio.Event(), set[int]()  # soon: drafted answers are over in a few steps

    def token(number: int, tokens: int) -> None:  # several may come at once
        if tokens >= 2:
            going.add(number)
            if len(going) == 3:
                going_on.set()

    kinds = list(range(len(KINDS))) * 2
    asked = [
        asyncio.create_task(ask(running, kind, on_token=partial(token, number))) for number, kind in enumerate(kinds)
    ]
    async with asyncio.timeout(90):
        await going_on.wait()
    pid = running.pid("decode-0")
    running.kill("decode-0", sig)
    check(await asyncio.gather(*asked), kinds, right)
    await running.restarted("decode-0", pid)
    await running.settled()
    assert await counted(running, "kvmesh_gateway_migrations_total{", ("gateway",)) >= 1
    assert await counted(running, "kvmesh_decode_accepted_draft_tokens_total", ("decode-1",)) > 0
