"""Instances die and leave in the middle of answers: their clients notice a pause, and no other token.

200 streams at a mesh that loses a decode instance again and again, by SIGKILL and by SIGTERM, each time at a chance
position of a chance stream; every answer is the undisturbed one, each token once.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.mesh.client import Answer, pools
from tests.support.mesh.harness import Running, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

STREAMS, AT_ONCE, TOKENS = 200, 40, 96
SILENT_S = 4.0
DECODES, PREFILLS = ("decode-0", "decode-1", "decode-2"), ("prefill-0", "prefill-1")
STRIKES = ((signal.SIGKILL, "decode"), (signal.SIGTERM, "decode"), (signal.SIGKILL, "decode"), (signal.SIGKILL, "both"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    flags: dict[str, dict[str, Any]] = {
        "*": {"dtype": "float32"},
        "decode": {"stop_grace_ms": 100, "num_pages": 400, "num_extents": 200},
        "prefill": {"num_pages": 400, "num_extents": 200},
        "gateway": {"max_migrations": len(STRIKES), "token_timeout_s": SILENT_S},
        "conductor": {"admission": "off"},
    }
    folder = tmp_path_factory.mktemp("moved")
    async with running_mesh(demo_path, folder, prefill=2, decode=3, block_tokens=16, flags=flags) as mesh:
        yield mesh


def asked(index: int) -> dict[str, Any]:
    """Half of them greedy; of the others some penalised; some of all stop at a string."""
    rng = random.Random(index)
    fields: dict[str, Any] = {"prompt": [rng.randrange(20, 1900) for _ in range(rng.randrange(5, 120))]}
    if index % 2:
        fields |= {"temperature": 0.8, "seed": index, "top_p": 0.95}
    if index % 8 in (3, 4):
        fields |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.125}
    if index % 5 == 0:
        fields |= {"stop": ["the code of", "zz", ". A"], "ignore_eos": False}
    return fields


async def ask(running: Running, index: int, *, max_tokens: int = TOKENS, **more: Any) -> Answer:
    return await running.client.generate(max_tokens=max_tokens, timeout_s=120, **asked(index), **more)


async def migrations(running: Running) -> dict[str, float]:
    """By outcome, since the gateway's start."""
    async with httpx.AsyncClient() as http:
        told = (await http.get(f"http://{running.mesh.processes['gateway'].spec.metrics}/metrics")).text
    found: dict[str, float] = {}
    for line in told.splitlines():
        if line.startswith("kvmesh_gateway_migrations_total{"):
            outcome = line.partition('outcome="')[2].partition('"')[0]
            found[outcome] = found.get(outcome, 0.0) + float(line.split()[-1])
    return found


async def held_streams(running: Running) -> dict[str, int]:
    """By decode instance."""
    told = await asyncio.gather(*(pools(running.mesh.addresses[name], "decode") for name in DECODES))
    return {name: pool.requests for name, pool in zip(DECODES, told, strict=True)}


class Striker:
    """Ends an instance when a stream of chance has come to a position of chance; the next one while that one is on its
    way back, once those before it are: there is always somewhere to go."""

    def __init__(self, running: Running, strikes: Sequence[tuple[signal.Signals, str]], rng: random.Random) -> None:
        self._running = running
        self._strikes = list(strikes)
        self._rng = rng
        self._armed_at = 0  # the position, of any stream; 0: not now
        self._now = asyncio.Event()
        self.struck = 0

    def token(self, tokens: int) -> None:
        """A stream has so many."""
        if self._armed_at and tokens == self._armed_at:
            self._armed_at = 0
            self._now.set()

    async def run(self) -> None:
        away: dict[str, int] = {}
        for sig, kind in self._strikes:
            decode = self._rng.choice([name for name in DECODES if name not in away])
            names = [decode] + ([self._rng.choice(PREFILLS)] if kind == "both" else [])
            self._now.clear()
            self._armed_at = self._rng.randrange(1, TOKENS - 8)
            await self._now.wait()
            before = {name: self._running.pid(name) for name in names}
            for name in names:
                self._running.kill(name, sig)
            self.struck += 1
            await self._back(away)
            away = before
        await self._back(away)

    async def _back(self, away: Mapping[str, int]) -> None:
        for name, pid in away.items():
            await self._running.reborn(name, pid)
            await self._running.ready(name)


async def test_no_token_is_lost_nor_told_twice(running: Running) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(index: int, **more: Any) -> Answer:
        async with gate:
            return await ask(running, index, **more)

    right = await asyncio.gather(*(one(index, cache_salt="right") for index in range(STREAMS)))
    assert [answer.error for answer in right] == [None] * STREAMS
    striker = Striker(running, STRIKES, random.Random(20))
    striking = asyncio.create_task(striker.run())
    found = await asyncio.gather(*(one(index, cache_salt="struck", on_token=striker.token) for index in range(STREAMS)))
    assert [str(answer.error) for answer in found if answer.error] == []
    for index, (answer, expected) in enumerate(zip(found, right, strict=True)):
        assert (answer.tokens, answer.text, answer.finish) == (expected.tokens, expected.text, expected.finish), index
        assert answer.prompt_tokens == expected.prompt_tokens == len(asked(index)["prompt"])
        at = 0
        for first, tokens in answer.parts:  # no gap, nothing twice
            assert first == at, (index, answer.parts)
            at += tokens
        assert at == len(answer.tokens)
    assert striker.struck == len(STRIKES), "the streams were over before all had been struck"
    await striking
    told = await migrations(running)
    assert told.pop("moved") >= 2 * len(STRIKES)  # of 40 at a time a third are with one instance; at the end fewer
    assert not told
    await running.settled()


async def test_prefill_dies_while_it_computes_what_goes_on(running: Running) -> None:
    """Most of decode's streams are moved at once; a prefill instance that computes them is killed as well."""
    long = partial(ask, running, max_tokens=2 * TOKENS)  # so that they still go when who holds them is known
    right = await asyncio.gather(*(long(index, cache_salt="a") for index in range(24)))
    before, pids = await migrations(running), {}
    going, all_go = 0, asyncio.Event()

    def token(tokens: int) -> None:
        nonlocal going
        going += tokens == 12
        if going == 20:
            all_go.set()

    calls = [asyncio.create_task(long(index, cache_salt="b", on_token=token)) for index in range(24)]
    await all_go.wait()
    held = await held_streams(running)
    for name in PREFILLS:  # so that what comes to them is surely unfinished
        running.kill(name, signal.SIGSTOP)
    try:
        for name in sorted(held, key=lambda name: held[name])[1:]:
            pids[name] = running.pid(name)
            running.kill(name)
        victim = await running.queued(PREFILLS)
        pids[victim] = running.pid(victim)
        running.kill(victim)
    finally:
        for name in PREFILLS:
            running.kill(name, signal.SIGCONT)
    found = await asyncio.gather(*calls)
    assert [str(answer.error) for answer in found if answer.error] == []
    assert [answer.tokens for answer in found] == [answer.tokens for answer in right]
    assert (await migrations(running))["moved"] - before.get("moved", 0.0) >= 5
    for name, pid in pids.items():
        await running.restarted(name, pid)
    await running.settled()


async def test_a_frozen_instance_is_left_and_holds_nothing_afterwards(running: Running) -> None:
    right = await asyncio.gather(*(ask(running, index, cache_salt="c") for index in range(24)))
    before, going, all_go = await migrations(running), set(), asyncio.Event()

    def token(index: int, tokens: int) -> None:
        going.add(index)
        if len(going) == len(right):
            all_go.set()

    calls = [
        asyncio.create_task(ask(running, index, cache_salt="d", on_token=partial(token, index))) for index in range(24)
    ]
    await all_go.wait()
    held = await held_streams(running)
    frozen = max(DECODES, key=lambda name: held[name])
    pids = [running.pid(frozen), *running.rank_pids(frozen)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        found = await asyncio.gather(*calls)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert [str(answer.error) for answer in found if answer.error] == []
    assert [answer.tokens for answer in found] == [answer.tokens for answer in right]
    assert (await migrations(running))["moved"] - before.get("moved", 0.0) >= 1
    await running.ready(frozen)
    await running.settled()
