"""n answers to one prompt: the prompt is computed once, whatever else is there to compute it, and they go on elsewhere
when an instance dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.mesh.client import pools, prompt
from tests.support.mesh.harness import Running, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

BLOCK, VOCAB = 16, 2000
PREFILLS = ("prefill-0", "prefill-1", "prefill-2")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    flags: dict[str, dict[str, Any]] = {
        "*": {"num_pages": 800, "num_extents": 400},
        "gateway": {"max_migrations": 2},
        "conductor": {"admission": "off"},
    }
    folder = tmp_path_factory.mktemp("several")
    async with running_mesh(demo_path, folder, prefill=3, decode=2, block_tokens=BLOCK, flags=flags) as mesh:
        yield mesh


async def counted(running: Running, name: str, metric: str, label: str = "") -> float:
    async with httpx.AsyncClient() as http:
        told = (await http.get(f"http://{running.mesh.processes[name].spec.metrics}/metrics")).text
    lines = (line for line in told.splitlines() if line.startswith(metric) and label in line)
    return sum(float(line.split()[-1]) for line in lines)


async def computed(running: Running) -> float:
    """Prompt tokens that all prefill instances have computed."""
    return sum([await counted(running, name, "kvmesh_prefill_computed_tokens_total") for name in PREFILLS])


async def stream(
    running: Running, on_token: Callable[[dict[int, list[int]], dict[str, Any]], None] | None = None, **body: Any
) -> tuple[dict[int, list[int]], dict[str, Any]]:
    """The tokens of each choice of a streamed completion, and its last chunk, which has usage and timings."""
    found: dict[int, list[int]] = {}
    last: dict[str, Any] = {}
    asked = {"model": "demo-model", "ignore_eos": True, "return_token_ids": True, "stream": True} | body
    asked["stream_options"] = {"include_usage": True}
    async with (
        httpx.AsyncClient(timeout=120) as http,
        http.stream(
            "POST", f"{running.http}/v1/completions", json=asked, headers={"x-kvmesh-timings": "1"}
        ) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
                assert "error" not in last, last
                for choice in last["choices"]:
                    found.setdefault(choice["index"], []).extend(choice["token_ids"])
                    if on_token is not None:
                        on_token(found, last)
    return found, last


async def test_a_prompt_is_computed_once_for_all_its_answers(running: Running) -> None:
    length, n = 1500, 8
    rest = length - (length - 1) // BLOCK * BLOCK  # the block with the last token, which gives an answer's first
    for seed in range(3):
        ids = prompt(300 + seed, length, VOCAB)
        body = {"prompt": ids, "max_tokens": 12, "temperature": 0.9, "seed": 40}
        before = await computed(running)
        answers, last = await stream(running, **body, n=n)
        assert await computed(running) - before == length + (n - 1) * rest
        assert len({one["prefill_instance"] for one in last["kvmesh"]["choices"]}) == 1
        assert last["usage"]["prompt_tokens"] == length and last["usage"]["completion_tokens"] == n * 12
        assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "none was cached before this request"
        before = await computed(running)
        again = await stream(running, **body, n=n)
        assert again[0] == answers
        cached = again[1]["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]  # 0: placed elsewhere, which evens loads out
        assert await computed(running) - before == length - cached + (n - 1) * rest
        for index in (0, n - 1):  # each is what is answered to its seed alone
            alone, _ = await stream(running, **body | {"seed": 40 + index, "cache_salt": f"alone-{index}"})
            assert alone[0] == answers[index]
    await running.settled()


async def test_prompts_of_one_request_do_not_gather(running: Running) -> None:
    """Only answers to the same prompt are siblings."""
    prompts = [prompt(900 + one, 600, VOCAB) for one in range(6)]
    before = await computed(running)
    answers, last = await stream(running, prompt=prompts, max_tokens=4, n=2, temperature=0.0)
    rest = 600 - 599 // BLOCK * BLOCK
    assert await computed(running) - before == 6 * (600 + rest)
    assert [answers[2 * one] for one in range(6)] == [answers[2 * one + 1] for one in range(6)]
    places = [one["prefill_instance"] for one in last["kvmesh"]["choices"]]
    assert places[::2] == places[1::2] and len(set(places)) > 1


async def test_answers_go_on_elsewhere_each_with_its_own_tokens(running: Running) -> None:
    """Kill -9 of the decode instance that has most of them, in the middle of four."""
    body = {"prompt": prompt(77, 200, VOCAB), "max_tokens": 160, "n": 4, "temperature": 0.8, "seed": 7}
    right, _ = await stream(running, **body, cache_salt="right")
    assert len({tuple(tokens) for tokens in right.values()}) == 4
    before = await counted(running, "gateway", "kvmesh_gateway_migrations_total{", 'outcome="moved"')
    all_go = asyncio.Event()

    def look(found: dict[int, list[int]], _: dict[str, Any]) -> None:
        if len(found) == 4 and min(map(len, found.values())) >= 8:
            all_go.set()

    asking = asyncio.create_task(stream(running, look, **body, cache_salt="struck"))
    await all_go.wait()
    held = {name: (await pools(running.mesh.addresses[name], "decode")).requests for name in ("decode-0", "decode-1")}
    victim = max(held, key=held.__getitem__)  # they may all be at one
    pid = running.pid(victim)
    running.kill(victim)
    found, last = await asking
    assert found == right
    moved = await counted(running, "gateway", "kvmesh_gateway_migrations_total{", 'outcome="moved"') - before
    assert moved == sum(one["migrations"] for one in last["kvmesh"]["choices"]) >= 1
    assert last["usage"]["prompt_tokens"] == 200 and last["usage"]["completion_tokens"] == 4 * 160
    await running.restarted(victim, pid)
    await running.settled()
