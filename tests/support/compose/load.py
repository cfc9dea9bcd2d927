"""Continuous load through the real `openai` client, and what became of each request.

Clients do what one behind a load balancer sees: each request goes to some gateway that says it is ready. A request has
one of three ends: the right tokens; one clear error, which is the gateway's own JSON with a code; or, when the gateway
itself has died, a broken connection. Anything else is a failure of the test: wrong or missing text, or no end.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import openai

from tests.support.compose.containers import Container, Containers

MODEL = "demo-model"
HANG_S = 75.0  # the longest that any request may take: keepalive (20 s), a migration or two, and the answer
LOOK_S = 0.4
WINDOW_S = 3.0
STEP_S = 0.1
BROKEN = "connection"
WRONG = "wrong"
HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Question:
    """`answer`: what the undisturbed mesh said, greedy, end-of-sequence ignored."""

    prompt: str
    max_tokens: int
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """`outcome`: "ok", or why not. Times are monotonic seconds. `gap_s`: the longest wait between two pieces."""

    begun: float
    ended: float
    outcome: str
    gap_s: float
    detail: str = ""


async def ask(client: openai.AsyncOpenAI, question: Question) -> tuple[str, float]:
    """The streamed answer, and the longest wait between two pieces of it."""
    stream = await client.completions.create(
        model=MODEL, prompt=question.prompt, max_tokens=question.max_tokens, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    text, last, gap = "", time.monotonic(), 0.0
    async with stream:
        async for chunk in stream:
            now = time.monotonic()
            gap, last = max(gap, now - last), now
            if chunk.choices:
                text += chunk.choices[0].text
    return text, gap


@dataclass
class Load:
    """Clients that ask one question after another, until `stop`."""

    containers: Containers
    questions: Sequence[Question]
    clients: int = 8
    pause_s: float = 0.2  # their thinking: what starts meanwhile needs some of the machine, too
    done: list[Done] = field(default_factory=list)
    gateways: list[str] = field(default_factory=list)
    _stopped: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _open: dict[str, openai.AsyncOpenAI] = field(default_factory=dict)

    async def __aenter__(self) -> Load:
        await self._look_once()
        self._tasks = [asyncio.create_task(self._look())]
        self._tasks += [asyncio.create_task(self._ask_on(number)) for number in range(self.clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped = True
        clients = self._tasks[1:]
        await asyncio.wait(clients, timeout=HANG_S + 5)
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._open.values():
            await client.close()
        for result in results:
            if isinstance(result, Exception):
                raise result

    def at(self, address: str) -> openai.AsyncOpenAI:
        """The client of the gateway there."""
        if address not in self._open:
            self._open[address] = openai.AsyncOpenAI(
                base_url=f"http://{address}:8000/v1", api_key="none", max_retries=0,
                http_client=httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(HANG_S, connect=2.0)),
            )  # fmt: skip
        return self._open[address]

    # ── figures ──────────────────────────────────────────────────────────────────────────────────

    def goodput(self, begin: float, end: float) -> float:
        """Right answers a second that ended in [begin, end)."""
        return sum(one.outcome == "ok" and begin <= one.ended < end for one in self.done) / max(1e-9, end - begin)

    def since(self, begin: float) -> Counter[str]:
        """Outcomes of requests that ended since."""
        return Counter(one.outcome for one in self.done if one.ended >= begin)

    def disturbed(self, begin: float, end: float, wanted: float) -> tuple[float, float]:
        """Of the time from `begin` to `end`: seconds at which fewer than `wanted` right answers a second came within
        WINDOW_S before, and seconds since the last such moment."""
        low, last, moment = 0.0, begin, begin + STEP_S
        while moment <= end:
            if self.goodput(moment - WINDOW_S, moment) < wanted:
                low, last = low + STEP_S, moment
            moment += STEP_S
        return low, end - last

    # ── clients ──────────────────────────────────────────────────────────────────────────────────

    async def _ask_on(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stopped:
            if not self.gateways:
                await asyncio.sleep(LOOK_S)
                continue
            self.done.append(await self._one(rng.choice(self.gateways), rng.choice(self.questions)))
            await asyncio.sleep(self.pause_s * rng.uniform(0.5, 1.5))

    async def _one(self, address: str, question: Question) -> Done:
        begun = time.monotonic()
        gap, detail = 0.0, ""
        try:
            async with asyncio.timeout(HANG_S):
                text, gap = await ask(self.at(address), question)
            outcome = "ok" if text == question.answer else WRONG
            if outcome == WRONG:
                detail = f"{question.prompt[-40:]!r}: {text!r} in place of {question.answer!r}"
        except TimeoutError:
            outcome = HUNG
        except openai.APIConnectionError as err:
            refused = isinstance(err.__cause__, httpx.ConnectError | httpx.ConnectTimeout)
            hung = isinstance(err, openai.APITimeoutError) and not refused
            outcome, detail = (HUNG if hung else BROKEN), repr(err.__cause__)
        except openai.APIError as err:
            outcome, detail = str(err.code or _code(err) or "unnamed"), str(err)
        except httpx.TransportError as err:  # in the middle of a stream
            outcome, detail = BROKEN, repr(err)
        return Done(begun, time.monotonic(), outcome, gap, detail)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(AssertionError):
                await self._look_once()

    async def _look_once(self) -> None:
        found = [one for one in await self.containers.of("gateway") if one.address and not one.paused]
        ready = await asyncio.gather(*(is_ready(one) for one in found))
        self.gateways = [one.address for one, good in zip(found, ready, strict=True) if good]


def _code(err: openai.APIError) -> str:
    body = err.body if isinstance(err.body, dict) else {}
    return str(body.get("code", ""))


async def is_ready(gateway: Container) -> bool:
    """As a load balancer looks at it."""
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=1.0) as client:
            return (await client.get(f"http://{gateway.address}:8000/ready")).status_code == 200
    except (httpx.HTTPError, json.JSONDecodeError):
        return False
