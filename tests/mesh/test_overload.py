"""Far more requests than a live mesh can take: each ends in its tokens or in one refusal that says when to come again,
what is refused costs no prefill, and nothing of it all is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.mesh.client import Answer, pools, prompt, until
from tests.support.mesh.harness import Running

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]

MODEL, VOCAB = "demo-model", 2040
REQUESTS, TOKENS, LENGTH = 160, 8, 500
FIELDS = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
COMPUTED, ENDED = "kvmesh_prefill_computed_tokens_total", "kvmesh_prefill_requests_total"


async def prefilled(running: Running) -> tuple[int, int]:
    """Prompt tokens that prefill has computed, and requests that it has ended."""
    found = dict.fromkeys((COMPUTED, ENDED), 0.0)
    async with httpx.AsyncClient() as http:
        told = (await http.get(f"http://{running.mesh.processes['prefill-0'].spec.metrics}/metrics")).text
    for line in told.splitlines():
        if (name := line.partition("{")[0].partition(" ")[0]) in found:
            found[name] += float(line.rpartition(" ")[2])
    return round(found[COMPUTED]), round(found[ENDED])


async def flood(running: Running, slo_ms: int) -> list[httpx.Response]:
    """All at once, every prompt a new one."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=running.http, timeout=60, limits=limits) as http:

        async def ask(n: int) -> httpx.Response:
            body: dict[str, Any] = {"model": MODEL, "prompt": prompt(1000 + n, LENGTH + n, VOCAB), **FIELDS}
            return await http.post("/v1/completions", json={**body, "ttft_slo_ms": slo_ms, "tbt_slo_ms": 60_000})

        return await asyncio.gather(*(ask(n) for n in range(REQUESTS)))


async def test_a_flood_ends_in_tokens_or_refusals_that_cost_nothing(
    mesh: Callable[..., AbstractAsyncContextManager[Running]], demo_path: Path
) -> None:
    flags = {"*": {"num_pages": 3000, "num_extents": 3000}}
    async with mesh(demo_path, block_tokens=16, flags=flags) as running:
        for name in running.instances():
            await running.ready(name)
        alone = await one_by_one(running)
        before = await prefilled(running)
        # Several times what a prompt takes alone: what no instance could do even when idle is another refusal, and the
        # machine may be slower by then.
        answers = await flood(running, slo_ms=max(50, round(6000 * alone)))
        taken = {n: one for n, one in enumerate(answers) if one.status_code == 200}
        refused = [one for one in answers if one.status_code == 429]
        assert len(taken) + len(refused) == REQUESTS, {one.status_code for one in answers}
        assert taken and len(refused) > len(taken), "it was no overload"
        for one in refused:
            assert one.json()["error"]["code"] == "overloaded"
            assert int(one.headers["retry-after"]) >= 1
            assert 100 <= int(one.headers["retry-after-ms"]) <= 60_000
        told = {one.headers["retry-after-ms"] for one in refused}
        assert len(told) > len(refused) / 4, "they would all come back at once"
        for one in taken.values():
            assert one.json()["usage"]["completion_tokens"] == TOKENS
        await running.settled()

        async def counted() -> bool:
            computed, ended = await prefilled(running)
            return ended - before[1] == len(taken) and computed - before[0] == sum(LENGTH + n for n in taken)

        await until(counted, "the prompts that were taken, and no token more", 10)
        await answered_right(running, taken)
        await idle_and_open(running)


async def one_by_one(running: Running) -> float:
    """Seconds that a prompt takes when nothing else is there; the conductor learns it, too."""
    found = []
    for n in range(10):
        started = asyncio.get_running_loop().time()
        answer = await running.client.generate(prompt(n, LENGTH, VOCAB), 1)
        assert answer.error is None, answer.error
        found.append(asyncio.get_running_loop().time() - started)
    return sorted(found)[len(found) // 2]


async def answered_right(running: Running, taken: dict[int, httpx.Response]) -> None:
    """Asked again in peace, some of them bring the same text."""
    for n, one in list(taken.items())[:: max(1, len(taken) // 5)]:
        again: Answer = await running.client.generate(prompt(1000 + n, LENGTH + n, VOCAB), TOKENS)
        assert again.error is None, again.error
        assert one.json()["choices"][0]["text"] == again.text


async def idle_and_open(running: Running) -> None:
    """Nothing is held, and the next request is taken at once although it asks for no patience."""
    await running.settled()
    counters = await pools(running.mesh.addresses["decode-0"], "decode")
    assert counters.pages_free + counters.pages_cached == counters.pages_total
    answer = await running.client.generate(prompt(77, LENGTH, VOCAB), TOKENS, ttft_slo_ms=20_000, tbt_slo_ms=60_000)
    assert answer.error is None, answer.error
    assert len(answer.tokens) == TOKENS
