"""kill -9 of each service amid requests, and frozen ranks: tokens or one clear error, then it serves again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import KvmeshError
from tests.support.mesh.client import Answer
from tests.support.mesh.harness import Running

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

MeshFactory = Callable[..., AbstractAsyncContextManager[Running]]
DEADLINE_S = 30.0
STORE_LEASE_S = 2.0  # of its members, and of the conductor's


def prompts(count: int, length: int = 90) -> list[list[int]]:
    return [[(i * 131 + j * j * 7 + j) % 230 + 20 for j in range(length)] for i in range(count)]


async def load_and_strike(
    running: Running, strike: Callable[[], None], after_tokens: int
) -> tuple[list[Answer], set[int]]:
    """12 requests at once; `strike` once one of them has made `after_tokens` tokens.

    Returns the answers, and the indices of the requests that had made a token when it struck: those were placed.
    """
    struck = False
    running_at_strike: set[int] = set()
    placed: set[int] = set()

    def seen(index: int, tokens: int) -> None:
        nonlocal struck
        placed.add(index)
        if tokens >= after_tokens and not struck:
            struck = True
            running_at_strike.update(placed)
            strike()

    calls = [
        running.client.generate(
            prompt, 48, on_token=partial(seen, i), timeout_s=DEADLINE_S, timeout_ms=int(DEADLINE_S * 1000)
        )
        for i, prompt in enumerate(prompts(12))
    ]
    async with asyncio.timeout(DEADLINE_S + 10):
        answers = await asyncio.gather(*calls)
    assert struck
    return answers, running_at_strike


@pytest.mark.parametrize("service", ["gateway", "conductor", "store", "prefill-0", "decode-0"])
async def test_kill_of_a_service_in_the_middle_of_requests(service: str, small_mesh: Running) -> None:
    expected = [await small_mesh.client.generate(p, 48) for p in prompts(12)]
    before = small_mesh.pid(service)
    answers, placed = await load_and_strike(small_mesh, lambda: small_mesh.kill(service), after_tokens=3)
    for answer, right in zip(answers, expected, strict=True):
        if answer.error is None:
            assert answer.tokens == right.tokens
        else:
            assert isinstance(answer.error, KvmeshError)
            assert answer.error.message
            assert answer.tokens == right.tokens[: len(answer.tokens)]
    if service == "store":
        assert [a.error for a in answers] == [None] * 12, "no request needs the master"
    if service == "conductor":
        assert [answers[i].error for i in placed] == [None] * len(placed), "a request that runs needs no conductor"
    await small_mesh.restarted(service, before)
    again = await small_mesh.client.generate(prompts(1)[0], 48)
    assert (again.error, again.tokens) == (None, expected[0].tokens)
    await small_mesh.settled()


async def test_while_no_master_answers_new_requests_are_served_with_what_there_is(small_mesh: Running) -> None:
    """Frozen for longer than anybody's term: prefixes that lie here are found, new ones computed."""
    long = prompts(1, 150)[0]
    first = await small_mesh.client.generate(long, 8, cache_salt="frozen")
    fresh = [await small_mesh.client.generate(p, 8, cache_salt="before") for p in prompts(4)]
    pid = small_mesh.pid("store")
    os.kill(pid, signal.SIGSTOP)
    try:
        during = []
        until = asyncio.get_running_loop().time() + 2.5 * STORE_LEASE_S
        while asyncio.get_running_loop().time() < until:
            again = await small_mesh.client.generate(long, 8, cache_salt="frozen")
            assert (again.error, again.tokens) == (None, first.tokens)
            assert again.cached_tokens >= 128, "its blocks are known without a master"
            during.append(again)
        new = await asyncio.gather(
            *(small_mesh.client.generate(p, 8, cache_salt="during") for p in prompts(4)),
        )
        assert [(a.error, a.tokens) for a in new] == [(None, a.tokens) for a in fresh]
        assert len(during) > 3
    finally:
        os.kill(pid, signal.SIGCONT)
    after = await small_mesh.client.generate(long, 8, cache_salt="frozen")
    assert (after.error, after.tokens) == (None, first.tokens)
    await small_mesh.settled()


async def load_until_busy(running: Running, name: str, max_tokens: int, salt: str) -> list[asyncio.Future[Answer]]:
    """Six new prompts of 500 tokens at a time, until `name` is seen to hold work: a round may end between two looks."""
    busy = asyncio.ensure_future(running.busy(name))
    calls: list[asyncio.Future[Answer]] = []
    while not busy.done():
        fresh = f"{salt}{len(calls)}"
        calls += [
            asyncio.ensure_future(running.client.generate(p, max_tokens, cache_salt=fresh)) for p in prompts(6, 500)
        ]
        waits: list[asyncio.Future[Any]] = [busy, asyncio.gather(*calls[-6:])]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await busy
    return calls


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_frozen_prefill_ranks_past_the_lease(transport: str, demo_path: Path, mesh: MeshFactory) -> None:
    """Their handoffs end, the extents serve others, and nothing they write after waking up is seen."""
    flags = {
        "prefill": {"transports": transport, "prefill_chunk_tokens": 32, "rank_silence_ms": 1500},
        "decode": {"transports": transport, "lease_ms": 1000, "num_pages": 40, "num_extents": 8},
    }
    async with mesh(demo_path, prefill=2, decode=1, flags=flags) as running:
        expected = [await running.client.generate(p, 8, cache_salt="a") for p in prompts(6, 500)]
        frozen = running.rank_pids("prefill-0")
        try:
            calls = await load_until_busy(running, "prefill-0", 8, salt="b")
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            for i, answer in enumerate(await asyncio.gather(*calls)):
                if answer.error is None:
                    assert answer.tokens == expected[i % 6].tokens
                else:
                    assert isinstance(answer.error, KvmeshError)
            # the pages of the frozen writer's handoffs now carry other requests
            during = await load_until_busy(running, "decode-0", 30, salt="c")
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
        for i, answer in enumerate(await asyncio.gather(*during)):
            assert answer.error is None
            assert answer.tokens[:8] == expected[i % 6].tokens
        await running.ready("prefill-0")
        await running.settled()
