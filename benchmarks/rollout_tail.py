"""The long tail of a rollout, simulated: what becomes of it where idle prefill decodes, and where answers are gathered.

    python -m benchmarks.rollout_tail [--prompts 256] [--samples 4] [--model llama3-70b] [--gpu a800] [--out FILE]

Four instances of 8 GPUs answer 256 prompts four times, all asked at once; the lengths of answers are log-normal.

- `apart`: two prefill and two decode. Prefill has nothing to do after the first seconds.
- `coupled`: all four do both, as `kvmesh up --coupled 4`: who has no prompts left decodes.
- `gathered`: likewise, and a trainer asks for `gather` every ten seconds.

Steps take what the simulator's roofline says (`kvmesh.sim.hardware`); who is freed is `plan_gather`'s decision, the
function that the conductor calls. An answer that moves has all its KV computed again where it goes: no block is found.
`free` are instance-seconds in which an instance has nothing to do before the last answer ends: a trainer may have them
only where they are told (`gathered` alone tells).
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvmesh.services.conductor.balance.gather import DecodeHolding, plan_gather
from kvmesh.sim.hardware.hardware import hardware
from kvmesh.sim.hardware.shapes import shape_of
from kvmesh.sim.hardware.times import NodeSpec, node_spec

INSTANCES, GPUS = 4, 8
MAX_RUNNING, CHUNK = 256, 2048
ALONE_CHUNK = 8192  # of prompts where no rows wait
GATHER_S = 10.0
MEAN, SPREAD, MOST = 1500, 1.2, 16_000  # tokens of an answer
PROMPT = 1500


@dataclass
class Answer:
    """One sample. `context` is what is to be computed before it goes on: its prompt, and what it has said."""

    context: int
    left: int
    began_s: float = 0.0


@dataclass
class TailInstance:
    """One instance: rows by the step at which they end, prompts that wait."""

    name: str
    spec: NodeSpec
    prefills: bool = True
    decodes: bool = True
    now: float = 0.0
    steps: int = 0
    context: float = 0.0
    rows: list[tuple[int, int, Answer]] = field(default_factory=list)
    prompts: deque[Answer] = field(default_factory=deque)
    landed: deque[Answer] = field(default_factory=deque)  # computed elsewhere, with no row yet
    part: int = 0  # tokens of the first prompt that are computed
    busy_s: float = 0.0
    freed_s: float | None = None
    number: int = 0

    @property
    def idle(self) -> bool:
        return not (self.rows or self.prompts or self.landed)

    @property
    def requests(self) -> int:
        return len(self.rows) + len(self.prompts) + len(self.landed)

    def join(self, answer: Answer) -> None:
        self.number += 1
        self.context += answer.context
        heapq.heappush(self.rows, (self.steps + answer.left, self.number, answer))

    def step(self, computed: Callable[[Answer], None]) -> list[Answer]:
        """Runs one step; returns what has ended. `computed` takes each prompt that is."""
        while self.landed and len(self.rows) < MAX_RUNNING:
            self.join(self.landed.popleft())
        room, pieces, done = CHUNK if self.rows else ALONE_CHUNK, [], []
        may = len(self.rows) + len(self.landed) < MAX_RUNNING or not self.decodes
        while self.prompts and room and may:
            first = self.prompts[0]
            size = min(room, first.context - self.part)
            pieces.append((size, self.part))
            room, self.part = room - size, self.part + size
            if self.part < first.context:
                break
            done.append(self.prompts.popleft())
            self.part = 0
        took = self.spec.times.mixed_s(pieces, len(self.rows), self.context)
        self.now, self.busy_s, self.steps = self.now + took, self.busy_s + took, self.steps + 1
        self.context += len(self.rows)
        ended = []
        while self.rows and self.rows[0][0] <= self.steps:
            _, _, answer = heapq.heappop(self.rows)
            self.context -= answer.context + answer.left
            ended.append(answer)
        for answer in done:
            computed(answer)
        return ended

    def give_up(self) -> list[Answer]:
        """Returns all that it has, as it is carried on elsewhere."""
        gone = [Answer(a.context + a.left - (end - self.steps), end - self.steps, a.began_s) for end, _, a in self.rows]
        gone += [*self.landed, *self.prompts]
        self.rows, self.context, self.part = [], 0.0, 0
        self.landed.clear()
        self.prompts.clear()
        return gone


@dataclass
class TailRun:
    """What one way took: `last_s` until the last answer ended, `half_s` and `most_s` until half and 95% had."""

    way: str
    half_s: float
    most_s: float
    last_s: float
    free_s: float  # instance-seconds without work before the end
    told_free_s: float  # of these, of instances that `gather` has freed
    moved: int
    computed_again_tokens: int


def simulate(way: str, spec: NodeSpec, lengths: Sequence[Sequence[int]]) -> TailRun:
    apart = way == "apart"
    instances = [
        TailInstance(f"i{n}", spec, prefills=not apart or n < 2, decodes=not apart or n >= 2) for n in range(INSTANCES)
    ]
    waiting = 0
    prompts: dict[int, list[Answer]] = {}
    for number, samples in enumerate(lengths):
        at = [one for one in instances if one.prefills]
        first = Answer(PROMPT, samples[0])  # computed once for all samples
        prompts[id(first)] = [first, *(Answer(PROMPT, left) for left in samples[1:])]
        at[number % len(at)].prompts.append(first)
        waiting += len(samples)
    ends: list[float] = []
    lives: list[float] = []
    moved = again = 0
    gather_at = GATHER_S

    def computed(holder: TailInstance) -> Callable[[Answer], None]:
        def take(answer: Answer) -> None:
            able = [one for one in instances if one.decodes and one.freed_s is None]
            for sample in prompts.pop(id(answer), [answer]):
                to = holder if holder.decodes else min(able, key=lambda one: one.requests)
                to.now = max(to.now, holder.now) if to.idle else to.now
                sample.began_s = sample.began_s or holder.now
                to.landed.append(sample)

        return take

    while len(ends) < waiting:
        one = min((one for one in instances if not one.idle), key=lambda one: one.now)
        if way == "gathered" and one.now >= gather_at:
            gather_at += GATHER_S
            at_work = [i for i in instances if i.freed_s is None]
            left_s = sum(lives) / len(lives) if lives else 1.0
            held = [holding(i, left_s) for i in at_work]
            plan = plan_gather(held, lambda tokens: spec.times.prefill_s([(int(tokens), 0)]))
            for freed in (i for i in at_work if i.name in plan.freed):
                freed.freed_s = one.now
                kept = [i for i in at_work if i.name in plan.kept]
                for answer in freed.give_up():
                    to = min(kept, key=lambda one: one.requests)
                    to.now = max(to.now, one.now) if to.idle else to.now
                    to.prompts.append(answer)
                    moved, again = moved + 1, again + answer.context
            continue
        for answer in one.step(computed(one)):
            ends.append(one.now)
            lives.append(one.now - answer.began_s)
    ends.sort()
    last_s = ends[-1]
    free_s = sum(last_s - one.busy_s for one in instances)
    told_s = sum(last_s - one.freed_s for one in instances if one.freed_s is not None)
    return TailRun(
        way, ends[len(ends) // 2], ends[len(ends) * 95 // 100], last_s, free_s, told_s, moved, again
    )  # fmt: skip


def holding(one: TailInstance, left_s: float) -> DecodeHolding:
    """What the conductor knows of an instance: rows, contexts, room, how long answers have taken so far."""
    room = max(0.0, one.spec.kv_tokens - one.context)
    prompts = sum(answer.context for answer in (*one.prompts, *one.landed))
    return DecodeHolding(
        one.name, one.requests, one.context + prompts, room, MAX_RUNNING, False, left_s, one.spec.times.decode_s
    )  # fmt: skip


def answer_lengths(prompts: int, samples: int, seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    median = MEAN / 2.718281828 ** (SPREAD**2 / 2)
    return [
        [max(8, min(MOST, round(median * rng.lognormvariate(0, SPREAD)))) for _ in range(samples)]
        for _ in range(prompts)
    ]


def main(say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--model", default="llama3-70b")
    parser.add_argument("--gpu", default="a800")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    spec = node_spec(hardware(args.gpu), GPUS, shape_of(args.model))
    lengths = answer_lengths(args.prompts, args.samples)
    runs = [simulate(way, spec, lengths) for way in ("apart", "coupled", "gathered")]
    for run in runs:
        say(
            f"{run.way:9s} half {run.half_s:6.1f} s  95% {run.most_s:6.1f} s  last {run.last_s:6.1f} s  free "
            f"{run.free_s:6.0f} instance-s, told {run.told_free_s:6.0f}; {run.moved} answers moved, "
            f"{run.computed_again_tokens} tokens computed again"
        )
    if args.out is not None:
        command = f"python -m benchmarks.rollout_tail --prompts {args.prompts} --samples {args.samples}"
        told = {"command": f"{command} --model {args.model} --gpu {args.gpu}", "runs": [asdict(run) for run in runs]}
        args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
