"""The real brain in a closed loop: prefill and decode instances that behave as its models say, in virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from kvmesh.services.conductor.domain import Lane, Load, Outcome, Placed, Refuse, RequestOutcome, Role
from tests.support.conductor.brain import Brain, card

STEP_S = 0.1
BEAT_EVERY = 2
PRIORITY_STEP_S = 30.0


@dataclass
class Job:
    """A request on its way. `whole_s`: of its prompt, `left_s` still; `left_tokens`: of its answer."""

    name: str
    prompt: int
    output: int
    decode: str
    rank: float
    whole_s: float
    left_s: float
    left_tokens: float
    lane: Lane
    arrived_at: float
    ttft_s: float = 0.0


@dataclass
class Shown:
    """What is watched: every STEP_S."""

    rows: list[int] = field(default_factory=list)
    backlog_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)


class Driven:
    """Prompts are computed one after the other, the first in the line without a break; rows of a
    batch each get a token a step."""

    def __init__(self, prefills: int = 4, decodes: int = 2, *, seed: int = 0, **settings: Any) -> None:
        self.brain = Brain(seed, **settings)
        self.rng = random.Random(seed)
        self.lines: dict[str, list[Job]] = {}
        self.batches: dict[str, list[Job]] = {}
        self.coming: dict[str, int] = {}
        self.ended: dict[str, list[RequestOutcome]] = {}
        self.shown = Shown()
        self.done: list[Job] = []
        self.refused: list[Refuse] = []
        self.steps = 0
        model = card(max_context_tokens=1 << 20)
        for index in range(prefills):
            self.lines[f"p{index}"] = []
            self.brain.add(f"p{index}", Role.PREFILL, capacity=1 << 20, model=model)
        for index in range(decodes):
            self.batches[f"d{index}"] = []
            self.coming[f"d{index}"], self.ended[f"d{index}"] = 0, []
            self.brain.add(f"d{index}", Role.DECODE, capacity=1 << 20, max_running=256, model=model)
        self.report()

    def ask(self, prompt: int, output: int, **more: Any) -> Placed | Refuse:
        """One request, at this moment."""
        lane, priority = more.get("lane", Lane.INTERACTIVE), more.get("priority", 0)
        answer = self.brain.schedule(prompt, max_tokens=more.pop("max_tokens", 4 * output), **more)
        if isinstance(answer, Refuse):
            self.refused.append(answer)
            return answer
        name = more.get("request_id", f"r{self.brain.requests}")
        p, d = answer.prefill.instance_id, answer.decode.instance_id
        seconds = self._instance(p).prefill.predict(prompt, 0)
        rank = self.brain.now + PRIORITY_STEP_S * priority
        job = Job(name, prompt, output, d, rank, seconds, seconds, float(output), lane, self.brain.now)
        line = self.lines[p]
        line.append(job)
        line[1:] = sorted(line[1:], key=lambda j: j.rank)  # what has begun is not overtaken
        self.coming[d] += 1
        return answer

    def step(self) -> None:
        """STEP_S pass."""
        self.brain.now += STEP_S
        self.steps += 1
        for name, line in self.lines.items():
            self._compute(name, line)
        for name, batch in self.batches.items():
            self._decode(name, batch)
        if self.steps % BEAT_EVERY == 0:
            self.report()
        self.shown.rows.append(sum(map(len, self.batches.values())))
        self.shown.backlog_s.append(sum(job.left_s for line in self.lines.values() for job in line))

    def report(self) -> None:
        """Everybody's heartbeat."""
        for name in self.lines:
            self.brain.beat(name, self._prefill_load(name))
        for name in self.batches:
            self._beat_decode(name)

    def run(self, seconds: float) -> None:
        """Nobody comes."""
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def _instance(self, name: str) -> Any:
        return self.brain.state._fleet.named(name)

    def _compute(self, name: str, line: list[Job]) -> None:
        left = STEP_S
        while line and left > 0:
            job = line[0]
            took = min(left, job.left_s)
            job.left_s -= took
            left -= took
            if job.left_s <= 1e-9:
                del line[0]
                job.ttft_s = self.brain.now - left - job.arrived_at
                self.batches[job.decode].append(job)
                self.coming[job.decode] -= 1
                self.brain.beat(name, self._prefill_load(name), finished_request_ids=(job.name,))

    def _decode(self, name: str, batch: list[Job]) -> None:
        if not batch:
            self.shown.tbt_s.append(0.0)
            return
        step_s = self._instance(name).decode.predict(len(batch), self._context(batch))
        self.shown.tbt_s.append(step_s)
        for job in list(batch):
            job.left_tokens -= STEP_S / step_s
            if job.left_tokens <= 0:
                batch.remove(job)
                self.done.append(job)
                stay_s = self.brain.now - job.arrived_at
                self.ended[name].append(RequestOutcome(job.name, 0, Outcome.DONE, job.output, duration_s=stay_s))

    def _context(self, batch: list[Job]) -> int:
        return sum(job.prompt for job in batch)

    def _prefill_load(self, name: str) -> Load:
        tokens = round(sum(job.prompt * job.left_s / job.whole_s for job in self.lines[name]))
        return Load(queued_requests=len(self.lines[name]), queued_tokens=tokens, free_pages=1 << 19)

    def _beat_decode(self, name: str) -> None:
        batch, ended = self.batches[name], self.ended[name]
        load = Load(
            running_requests=len(batch),
            waiting_requests=self.coming[name],
            context_tokens=self._context(batch),
            free_pages=1 << 19,
            free_extents=1 << 19,
        )
        self.brain.beat(name, load, finished_request_ids=tuple(o.request_id for o in ended), outcomes=tuple(ended))
        ended.clear()
