"""Load on the OpenAI API of a mesh: streamed completions of token-id prompts, at given times or so many at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvmesh.cli.load.target import LoadTarget, client


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `at_s`: when to send it, from the start of the load; None: as soon as its turn comes. `prompt`
    makes the token ids when it is sent."""

    index: int
    prompt: Callable[[], list[int]]
    max_tokens: int
    at_s: float | None = None


@dataclass(slots=True)
class LoadOutcome:
    """What became of one request, as this client saw it. Times in seconds; `code` is "" when all went well, else the
    error's name. `gaps`: between arrivals of tokens after the first; tokens that arrive together have none."""

    index: int
    sent_s: float  # from the start of the load
    late_s: float = 0.0  # sent so long after its time
    status: int = 0  # HTTP; 0: no answer
    code: str = ""
    message: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    request_id: str = ""

    @property
    def ok(self) -> bool:
        return not self.code


class Generator:
    """Sends jobs and keeps what became of them. `results` and `in_flight` may be looked at while it runs."""

    def __init__(self, target: LoadTarget, *, salt: str = "", timeout_s: float = 600.0, concurrency: int = 0) -> None:
        """`salt`: the requests share cached KV only with others of this salt. `concurrency`: at most so many at
        once; 0: no limit."""
        self._target = target
        self._salt = salt
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._stop = asyncio.Event()
        self._start = 0.0
        self._end = 0.0
        self.results: list[LoadOutcome] = []
        self.in_flight = 0
        self.dropped = 0  # in flight when it was stopped: neither answered nor failed

    @property
    def wall_s(self) -> float:
        """From the first request's time until the last one ended, or now."""
        return (self._end or time.monotonic()) - self._start if self._start else 0.0

    def stop(self) -> None:
        """Send nothing more and drop what is in flight; `run` returns soon."""
        self._stop.set()

    async def run(self, jobs: Iterable[Job], duration_s: float | None = None) -> None:
        """Send all `jobs`, in order; none after `duration_s`. Returns when the last has ended."""
        self._start, self._end = time.monotonic(), 0.0
        tasks: set[asyncio.Task[None]] = set()
        failures: list[BaseException] = []

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not task.cancelled() and (err := task.exception()) is not None:
                failures.append(err)

        stopped = asyncio.create_task(self._stop.wait())
        slots = asyncio.Semaphore(self._concurrency) if self._concurrency else None
        try:
            async with client(self._target, self._timeout_s) as http:
                async for job in self._paced(iter(jobs), duration_s, slots, stopped):
                    task = asyncio.create_task(self._one(http, job, slots))
                    tasks.add(task)
                    task.add_done_callback(ended)
                rest = asyncio.gather(*tasks, return_exceptions=True)
                either: set[asyncio.Future[Any]] = {rest, stopped}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                self.dropped = len(tasks)
                rest.cancel()
                await asyncio.gather(rest, return_exceptions=True)
        finally:
            stopped.cancel()
            self._end = time.monotonic()
        if failures:  # no request's fault: those end in a LoadOutcome
            raise failures[0]

    async def _paced(
        self,
        jobs: Iterator[Job],
        duration_s: float | None,
        slots: asyncio.Semaphore | None,
        stopped: asyncio.Task[Any],
    ) -> AsyncIterator[Job]:
        """Yields each job when its time has come and a slot is free."""
        for job in jobs:
            if job.at_s is not None and (left := self._start + job.at_s - time.monotonic()) > 0:
                await asyncio.wait({stopped}, timeout=left)
            if slots is not None and not stopped.done():
                turn = asyncio.ensure_future(slots.acquire())
                await asyncio.wait({turn, stopped}, return_when=asyncio.FIRST_COMPLETED)
                turn.cancel()
            elif job.at_s is None:
                await asyncio.sleep(0)  # a job without a time and without a limit must not starve the loop
            late = duration_s is not None and time.monotonic() - self._start >= duration_s
            if stopped.done() or late:
                return
            yield job

    async def _one(self, http: httpx.AsyncClient, job: Job, slots: asyncio.Semaphore | None) -> None:
        prompt = job.prompt()
        sent = time.monotonic()
        outcome = LoadOutcome(job.index, sent - self._start, prompt_tokens=len(prompt))
        if job.at_s is not None:
            outcome.late_s = max(0.0, outcome.sent_s - job.at_s)
        self.in_flight += 1
        try:
            await self._ask(http, prompt, job.max_tokens, outcome, sent)
        except httpx.TimeoutException:
            outcome.code, outcome.message = "timeout", f"no answer within {self._timeout_s:g} s"
        except httpx.HTTPError as err:
            outcome.code, outcome.message = "unreachable", str(err) or type(err).__name__
        except ValueError as err:
            outcome.code, outcome.message = "not_understood", str(err)
        finally:
            self.in_flight -= 1
            if slots is not None:
                slots.release()
        outcome.total_s = time.monotonic() - sent
        self.results.append(outcome)

    async def _ask(
        self, http: httpx.AsyncClient, prompt: list[int], max_tokens: int, outcome: LoadOutcome, sent: float
    ) -> None:
        body: dict[str, Any] = {
            "model": self._target.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._salt:
            body["cache_salt"] = self._salt
        async with http.stream("POST", f"{self._target.url}/v1/completions", json=body) as answer:
            outcome.status = answer.status_code
            if answer.status_code != 200:
                _refused(await answer.aread(), outcome)
                return
            arrivals: list[float] = []
            done = False
            async for data, at in _events(answer):
                if data == b"[DONE]":
                    done = True
                    break
                _take(json.loads(data), at - sent, outcome, arrivals)
        if not done and not outcome.code:
            outcome.code, outcome.message = "broken_off", "the answer ended in the middle"
        if arrivals:
            outcome.ttft_s = arrivals[0]
            outcome.gaps = [b - a for a, b in itertools.pairwise(arrivals)]


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[bytes, float]]:
    """Data of each server-sent event and when it arrived."""
    rest = b""
    async for chunk in answer.aiter_raw():
        at = time.monotonic()
        *whole, rest = (rest + chunk).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: "):
                yield event[6:], at


def _take(event: dict[str, Any], at_s: float, outcome: LoadOutcome, arrivals: list[float]) -> None:
    if "error" in event:
        _failed(event["error"], outcome)
        return
    outcome.request_id = event.get("id") or outcome.request_id
    usage = event.get("usage")
    if usage:
        outcome.prompt_tokens = usage["prompt_tokens"]
        outcome.completion_tokens = usage["completion_tokens"]
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    # A token may read as no text at all; the frame that only tells the finish is no token.
    if any(not choice.get("finish_reason") or choice.get("text") for choice in event.get("choices", [])):
        arrivals.append(at_s)


def _refused(body: bytes, outcome: LoadOutcome) -> None:
    try:
        told = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        told = {"code": f"http_{outcome.status}", "message": f"HTTP {outcome.status}"}
    _failed(told, outcome)


def _failed(told: Any, outcome: LoadOutcome) -> None:
    told = told if isinstance(told, dict) else {"message": str(told)}
    outcome.code = str(told.get("code") or told.get("type") or f"http_{outcome.status}")
    outcome.message = str(told.get("message", ""))
