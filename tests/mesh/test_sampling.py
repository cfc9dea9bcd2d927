"""Penalties, bias and filters through the doors of a real mesh: the tokens of the engine alone, also when rows are
preempted and when an answer goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.direct import Direct
from tests.support.mesh.harness import Running, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

BLOCK, COUNT = 16, 97
# Numbers that a float32 holds exactly: they travel as such.
PENALISED = GenerateParams(COUNT, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.25)
KINDS = [
    PENALISED,
    replace(PENALISED, temperature=1.5, top_p=0.875, min_p=0.015625, seed=7),
    GenerateParams(COUNT, frequency_penalty=1.0),
    GenerateParams(COUNT, repetition_penalty=1.5),
    GenerateParams(COUNT, logit_bias=((40, 3.0), (41, 2.5), (42, -100.0)), presence_penalty=-1.0),
    GenerateParams(COUNT, temperature=0.75, min_p=0.125, seed=2**40),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", vocab_size=331)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One and one; four answers of 112 tokens need 28 of decode's 26 pages."""
    flags = {"decode": {"num_pages": 26, "num_extents": 64}}
    async with running_mesh(model, tmp_path_factory.mktemp("run"), block_tokens=BLOCK, flags=flags) as mesh:
        yield mesh


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(20, 60) for _ in range(16)]


def fields(p: GenerateParams) -> dict[str, object]:
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed")
    biases = [pb.LogitBias(token_id=token, bias=bias) for token, bias in p.logit_bias]
    return {name: getattr(p, name) for name in names} | {"logit_bias": biases}


def right(model: Path) -> list[list[int]]:
    engine = LocalEngine(model, block_tokens=BLOCK)
    return [engine.generate([prompt(n)], p)[0].token_ids for n, p in enumerate(KINDS)]


async def test_disaggregated_and_preempted(running: Running, model: Path) -> None:
    expected = right(model)
    asked = (running.client.generate(prompt(n), COUNT, **fields(p)) for n, p in enumerate(KINDS))
    answers = await asyncio.gather(*asked)
    assert [answer.error for answer in answers] == [None] * len(KINDS)
    assert [answer.tokens for answer in answers] == expected
    await running.settled()
    async with httpx.AsyncClient(base_url=f"http://{running.mesh.processes['decode-0'].spec.metrics}") as http:
        told = (await http.get("/metrics")).text
    [line] = [line for line in told.splitlines() if line.startswith("kvmesh_decode_preemptions_total")]
    assert float(line.split()[-1]) >= 1, "the pool was not small enough to show anything"


@pytest.mark.parametrize("kept", [1, 33])
async def test_an_answer_goes_on_elsewhere(running: Running, model: Path, kept: int) -> None:
    """What a gateway does after a crash: the prompt with what came of the answer, and how much of it is answer."""
    direct = await Direct.of(running)
    for n, p in enumerate(KINDS[:2]):
        [whole] = LocalEngine(model, block_tokens=BLOCK).generate([prompt(n)], replace(p, max_tokens=48))
        rest = await direct.generate(
            prompt(n) + whole.token_ids[:kept], 48 - kept, prefill="prefill-0", decode="decode-0",
            answered_tokens=kept, salt="again", **fields(p),
        )  # fmt: skip
        assert rest.error is None
        assert rest.tokens == whole.token_ids[kept:]
    refused = await direct.generate(prompt(0), 4, prefill="prefill-0", decode="decode-0", answered_tokens=16)
    assert "answered_tokens=16" in str(refused.error)
