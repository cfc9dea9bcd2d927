"""64 concurrent mixed requests, cancelled at random moments: the others are right, and everything comes back."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.mesh.client import Answer
from tests.support.mesh.harness import Running

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

REQUESTS = 64


def requests(seed: int) -> list[tuple[list[int], int]]:
    """(prompt, max_tokens): short and long, with and without shared prefixes."""
    rng = random.Random(seed)
    shared = [rng.randrange(20, 250) for _ in range(160)]
    out = []
    for i in range(REQUESTS):
        length = rng.choice([3, 30, 64, 65, 130, 300])
        head = shared[: rng.choice([0, 64, 128])] if i % 2 else []
        out.append((head + [rng.randrange(20, 250) for _ in range(length)], rng.choice([1, 2, 12, 40])))
    return out


async def test_random_cancels_leave_the_others_right_and_nothing_behind(small_mesh: Running) -> None:
    rng = random.Random(5)
    work = requests(9)
    expected: list[Answer] = []
    for p, n in work:
        expected.append(await small_mesh.client.generate(p, n))
    assert [a.error for a in expected] == [None] * REQUESTS
    assert [len(a.tokens) for a in expected] == [n for _, n in work]

    streams = await small_mesh.streams()

    victims = set(rng.sample(range(REQUESTS), REQUESTS // 2))
    stop_after = {i: rng.choice([-1, 0, 1, 2, 5]) for i in victims}  # tokens seen; -1: after a random delay

    async def one(i: int) -> Answer | None:
        p, n = work[i]
        if i not in victims:
            return await small_mesh.client.generate(p, n)
        task: asyncio.Task[Answer]

        def seen(tokens: int) -> None:
            if tokens >= stop_after[i] >= 0:
                task.cancel()

        task = asyncio.create_task(small_mesh.client.generate(p, n, on_token=seen))
        if stop_after[i] < 0:
            asyncio.get_running_loop().call_later(rng.random() * 0.8, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return None

    results = await asyncio.gather(*(one(i) for i in range(REQUESTS)))
    assert sum(r is None for r in results) >= REQUESTS // 4, "hardly anything was cancelled: the test tests nothing"
    for i, result in enumerate(results):
        if result is not None:
            assert (i, result.error, result.tokens) == (i, None, expected[i].tokens)
    await small_mesh.settled()
    assert await small_mesh.streams() == streams  # one a pair, opened by the first request and kept
    threads_before = small_mesh.threads()
    again = await small_mesh.client.generate(*work[0])
    assert again.tokens == expected[0].tokens
    await small_mesh.settled()
    assert small_mesh.threads() <= threads_before
