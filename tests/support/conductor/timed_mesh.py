"""The real brain in virtual time, event by event, with clients that come again exactly when they are told."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvmesh.clock import Tick
from kvmesh.errors import Overloaded
from kvmesh.services.conductor.domain import (
    DecodeSample,
    Lane,
    Load,
    Outcome,
    Placed,
    PrefillSample,
    Refuse,
    RequestOutcome,
    Role,
)
from tests.support.conductor.brain import Brain, card

BEAT_S = 0.2
TICK_S = 0.1
PAGES = 1 << 19


@dataclass
class Client:
    """One request until it is answered, or given up. `came_at`, `told_s`: of each attempt, of each refusal."""

    name: str
    prompt: int
    output: int
    wants: dict[str, Any]
    obeys: bool = True
    came_at: list[float] = field(default_factory=list)
    told_s: list[float] = field(default_factory=list)
    placed_at: float | None = None
    refused: Refuse | None = None
    ttft_s: float = 0.0
    tbt_s: float = 0.0
    done: bool = False

    @property
    def right_s(self) -> float:
        """From its first refusal until it was placed."""
        assert self.placed_at is not None, f"{self.name} was not placed"
        return self.placed_at - self.came_at[0]

    @property
    def told_right(self) -> bool:
        """Whether what it was told first was within a factor of two."""
        return 0.5 <= self.told_s[0] / self.right_s <= 2.0


@dataclass
class Job:
    """A placed request. `left`: tokens of its answer."""

    client: Client
    name: str
    decode: str
    seconds: float
    left: int
    steps_s: list[float] = field(default_factory=list)


@dataclass
class Site:
    """One instance, `pace` times as slow as its equals: a line of prompts that it computes one after the other, or rows
    that each get a token a step."""

    pace: float
    line: list[Job] = field(default_factory=list)
    begun_at: float = 0.0
    rows: list[Job] = field(default_factory=list)
    samples: list[PrefillSample] = field(default_factory=list)
    outcomes: list[RequestOutcome] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether it computes."""
        return bool(self.line or self.rows)


class TimedMesh:
    """`seconds`: what a prompt of so many tokens takes at an instance of pace 1; `step_s`: a step of so many rows.
    `late`: how late clients are, at most, as a share of what they were told. `cores` are shared by all instances, each
    of which keeps one busy; 0: each has its own."""

    def __init__(
        self,
        prefills: list[float],
        decodes: list[float],
        *,
        seconds: Callable[[int], float] = lambda tokens: 0.010 + 50e-6 * tokens,
        step_s: Callable[[int], float] = lambda rows: 0.005 + 0.0001 * rows,
        late: float = 0.0,
        noise: float = 0.0,
        cores: int = 0,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        self.brain = Brain(seed, **settings)
        self.rng = random.Random(seed)
        self.sites: dict[str, Site] = {}
        self.clients: list[Client] = []
        self._seconds, self._step_s, self._late, self._noise, self._cores = seconds, step_s, late, noise, cores
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        model = card(max_context_tokens=1 << 20)
        for role, paces in ((Role.PREFILL, prefills), (Role.DECODE, decodes)):
            for n, pace in enumerate(paces):
                name = f"{role.value[0]}{n}"
                self.sites[name] = Site(pace)
                self.brain.add(name, role, capacity=1 << 20, max_running=256, model=model)
                self._at(BEAT_S * self.rng.random(), lambda name=name: self._beats(name))  # type: ignore[misc]
        self._at(0.0, self._ticks)

    def run(self, seconds: float) -> None:
        """So much time passes."""
        until = self.brain.now + seconds
        while self._events and self._events[0][0] <= until:
            when, _, what = heapq.heappop(self._events)
            self.brain.now = max(self.brain.now, when)
            what()
        self.brain.now = until

    def measure(self, rounds: int = 16, output: int = 16) -> None:
        """Requests of several sizes come and are answered, and batches of several sizes are told of."""
        for n in range(rounds):
            for index in range(len(self.sites)):
                self.ask(f"m{n}-{index}", (100, 300, 1000, 2000)[n % 4], output=output)
            for name, site in self.sites.items():
                if name[0] == "d":
                    rows = 2 * n + 1
                    self._tell(name, decode_samples=(DecodeSample(rows, 100 * n, self._step_s(rows) * site.pace),))
            self.run(1.0)
        self.clients.clear()

    def ask(
        self, name: str, prompt: int, delay_s: float = 0.0, *, output: int = 16, obeys: bool = True, **wants: Any
    ) -> Client:
        """A client that comes in `delay_s` for the first time."""
        client = Client(name, prompt, output, wants, obeys)
        self.clients.append(client)
        self._at(delay_s, lambda: self._come(client))
        return client

    def _at(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.brain.now + delay_s, next(self._numbers), what))

    def _come(self, client: Client) -> None:
        client.came_at.append(self.brain.now)
        batch = client.wants.get("lane") is Lane.BATCH  # waits at the gateway, under one id
        name = client.name if batch else f"{client.name}-{len(client.came_at)}"
        keys = (client.name.encode().ljust(16, b"."),) if client.prompt >= 16 else ()
        answer = self.brain.schedule(
            client.prompt, request_id=name, keys=keys, max_tokens=client.output, **client.wants
        )
        if isinstance(answer, Placed):
            client.placed_at, client.refused = self.brain.now, None
            self._place(client, name, answer)
            return
        client.refused = answer
        if isinstance(answer.error, Overloaded):
            client.told_s.append(answer.error.retry_after_ms / 1000)
            if client.obeys:
                self._at(client.told_s[-1] * (1 + self._late * self.rng.random()), lambda: self._come(client))

    def _place(self, client: Client, name: str, placed: Placed) -> None:
        at = placed.prefill.instance_id
        site = self.sites[at]
        seconds = self._seconds(client.prompt) * site.pace * self.rng.lognormvariate(0.0, self._noise)
        site.line.append(Job(client, name, placed.decode.instance_id, seconds, client.output))
        if len(site.line) == 1:
            self._begin(at)
        else:  # what has begun is not overtaken
            site.line[1:] = sorted(site.line[1:], key=lambda job: job.client.wants.get("priority", 0))

    def _slower(self) -> float:
        busy = sum(site.busy for site in self.sites.values())
        return max(1.0, busy / self._cores) if self._cores else 1.0

    def _begin(self, at: str) -> None:
        job = self.sites[at].line[0]
        self.sites[at].begun_at = self.brain.now
        job.seconds *= self._slower()
        self._at(job.seconds, lambda: self._computed(at))

    def _computed(self, at: str) -> None:
        site = self.sites[at]
        job = site.line.pop(0)
        job.client.ttft_s = self.brain.now - job.client.came_at[-1]
        site.samples.append(PrefillSample(job.name, job.client.prompt, 0, job.seconds, 1024, 1e-6))
        if site.line:
            self._begin(at)
        site.finished.append(job.name)
        rows = self.sites[job.decode].rows
        rows.append(job)
        if len(rows) == 1:
            self._step(job.decode)

    def _step(self, at: str) -> None:
        site = self.sites[at]
        took_s = self._step_s(len(site.rows)) * site.pace * self._slower()
        self._at(took_s, lambda rows=tuple(site.rows): self._stepped(at, rows, took_s))  # type: ignore[misc]

    def _stepped(self, at: str, rows: tuple[Job, ...], took_s: float) -> None:
        site = self.sites[at]
        for job in rows:
            job.left -= 1
            job.steps_s.append(took_s)
            if job.left <= 0:
                site.rows.remove(job)
                site.finished.append(job.name)
                site.outcomes.append(self._outcome(job))
        if site.rows:
            self._step(at)

    def _outcome(self, job: Job) -> RequestOutcome:
        client = job.client
        client.done, client.tbt_s = True, sum(job.steps_s) / len(job.steps_s)
        slowest = sorted(job.steps_s)[-math.ceil(len(job.steps_s) / 10) :]
        stay_s = self.brain.now - client.came_at[-1]
        ends = sum(slowest) / len(slowest), client.tbt_s, stay_s
        return RequestOutcome(job.name, 0, Outcome.DONE, client.output, client.ttft_s, *ends)

    def _tell(self, at: str, **more: Any) -> None:
        site = self.sites[at]
        samples, outcomes, finished = tuple(site.samples), tuple(site.outcomes), tuple(site.finished)
        site.samples, site.outcomes, site.finished = [], [], []
        tokens = sum(job.client.prompt for job in site.line)
        if site.line:
            first = site.line[0]
            tokens -= int(first.client.prompt * min(1.0, (self.brain.now - site.begun_at) / first.seconds))
        context = sum(job.client.prompt for job in site.rows)
        load = Load(len(site.line), tokens, len(site.rows), PAGES, context, PAGES)
        self.brain.beat(at, load, prefill_samples=samples, outcomes=outcomes, finished_request_ids=finished, **more)

    def _beats(self, at: str) -> None:
        rows = self.sites[at].rows
        context = sum(job.client.prompt for job in rows)
        took_s = self._step_s(len(rows)) * self.sites[at].pace * self._slower()
        self._tell(at, decode_samples=(DecodeSample(len(rows), context, took_s),) if rows else ())
        self._at(BEAT_S, lambda: self._beats(at))

    def _ticks(self) -> None:
        self.brain.step(Tick())
        self._at(TICK_S, self._ticks)
