"""A closed loop around a conductor's brain in virtual time: instances that compute what they are given, one prompt at a
time and a batch of rows, report it, and take the roles that they are told.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvmesh.clock import Tick
from kvmesh.services.conductor.costs.models import DECODE_PRIOR
from kvmesh.services.conductor.domain import (
    Action,
    Lead,
    Load,
    OrderEnded,
    Placed,
    PrefillSample,
    Register,
    Role,
    SwitchRole,
)
from tests.support.conductor.brain import Brain, card

STEP_S = 0.1
BEAT_S = 0.4
MAX_RUNNING = 32
PAGES = 1 << 20


@dataclass
class Job:
    name: str
    prompt: int
    output: int
    decode: str
    prefill_left_s: float
    tokens_left: float


@dataclass
class Site:
    """One instance."""

    role: Role
    prompts: list[Job] = field(default_factory=list)
    rows: list[Job] = field(default_factory=list)
    samples: list[PrefillSample] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)


class Loop:
    """`switched`: every order of a role, with its time."""

    def __init__(self, prefills: int, decodes: int, **settings: object) -> None:
        self.brain = Brain(**settings)
        self.sites: dict[str, Site] = {}
        self.switched: list[tuple[float, SwitchRole]] = []
        self.others: list[Action] = []
        for n in range(prefills + decodes):
            self.sites[f"i{n}"] = Site(Role.PREFILL if n < prefills else Role.DECODE)
            self._register(f"i{n}")
            self.brain.beat(f"i{n}")
        self.brain.step(Lead(1))
        self.started = self.brain.now
        self._beat_at = self.brain.now
        self._owed = 0.0

    @property
    def pools(self) -> tuple[int, int, int]:
        """Prefill, decode, both."""
        roles = [site.role for site in self.sites.values()]
        return roles.count(Role.PREFILL), roles.count(Role.DECODE), roles.count(Role.BOTH)

    @property
    def waiting(self) -> int:
        """Requests for their turn."""
        prompts = sum(len(site.prompts) for site in self.sites.values())
        return prompts + sum(max(0, len(site.rows) - MAX_RUNNING) for site in self.sites.values())

    def run(self, seconds: float, rate: float, prompt: int, output: int) -> None:
        """So many requests a second of that shape."""
        until = self.brain.now + seconds
        while self.brain.now < until:
            self._owed += rate * STEP_S
            for _ in range(int(self._owed)):
                self._ask(prompt, output)
            self._owed %= 1.0
            for name, site in self.sites.items():
                self._work(name, site)
            self.brain.now += STEP_S
            if self.brain.now >= self._beat_at:
                self._beat_at = self.brain.now + BEAT_S
                for name, site in self.sites.items():
                    self._beat(name, site)
            for action in self.brain.step(Tick()):
                self._obey(action)

    def _register(self, name: str) -> None:
        ref, role = self.brain.refs.get(name), self.sites[name].role
        if ref is None:
            self.brain.register(name, role, capacity=PAGES, max_running=MAX_RUNNING, switchable=True)
        else:
            self.brain.step(Register(ref, role, "node", card(), PAGES, MAX_RUNNING, switchable=True))

    def _ask(self, prompt: int, output: int) -> None:
        answer = self.brain.schedule(prompt, max_tokens=output)
        if isinstance(answer, Placed):
            seconds = 0.01 + 50e-6 * prompt + 1.25e-9 * prompt**2
            job = Job(f"r{self.brain.requests}", prompt, output, answer.decode.instance_id, seconds, output)
            self.sites[answer.prefill.instance_id].prompts.append(job)

    def _work(self, name: str, site: Site) -> None:
        left_s = STEP_S
        while site.prompts and left_s > 0:
            job = site.prompts[0]
            used_s = min(left_s, job.prefill_left_s)
            left_s, job.prefill_left_s = left_s - used_s, job.prefill_left_s - used_s
            if job.prefill_left_s <= 1e-9:
                site.prompts.pop(0)
                seconds = 0.01 + 50e-6 * job.prompt + 1.25e-9 * job.prompt**2
                site.samples.append(PrefillSample(job.name, job.prompt, 0, seconds, job.prompt * 1024, 0.001))
                self.sites[job.decode].rows.append(job)
        running = site.rows[:MAX_RUNNING]
        if running:
            step_s = DECODE_PRIOR.at(len(running), sum(job.prompt for job in running))
            for job in running:
                job.tokens_left -= STEP_S / step_s
            site.finished += [job.name for job in running if job.tokens_left <= 0]
            site.rows = [job for job in site.rows if job.tokens_left > 0]

    def _beat(self, name: str, site: Site) -> None:
        running = site.rows[:MAX_RUNNING]
        load = Load(
            queued_requests=len(site.prompts),
            queued_tokens=sum(job.prompt for job in site.prompts),
            running_requests=len(running),
            waiting_requests=len(site.rows) - len(running),
            context_tokens=sum(job.prompt for job in running),
            free_pages=PAGES,
            free_extents=PAGES,
        )
        samples, finished = tuple(site.samples), tuple(site.finished)
        self.brain.beat(name, load, prefill_samples=samples, finished_request_ids=finished)
        site.samples, site.finished = [], []

    def _obey(self, action: Action) -> None:
        if not isinstance(action, SwitchRole):
            self.others.append(action)
            return
        self.switched.append((self.brain.now - self.started, action))
        self.sites[action.ref.instance_id].role = action.role
        self.brain.step(OrderEnded(action.number))
        self._register(action.ref.instance_id)

    def gaps(self) -> Iterator[float]:
        """Between switches."""
        times = [at for at, _ in self.switched]
        return (b - a for a, b in itertools.pairwise(times))
