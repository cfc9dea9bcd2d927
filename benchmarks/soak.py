"""Minutes of mixed load on a coupled mesh and on a disaggregated one, at once: nothing leaks, nothing differs.

Requests of a trace slice (shared prefixes), long prompts that fill much of the context, and cancels at random moments
go to both meshes (`benchmarks.equal_cores`), each request to both at the same time. Greedy answers must be equal, token
by token. At the end every pool of every instance must be full again: no page, extent, window or handoff is lost. Memory
of every process is watched: after a warm-up, in which pools and bounded tables fill, the mean of the last third may
exceed that of the first by `--growth-mb` or `--growth-percent`, whichever is more; the slope is printed.

    python -m benchmarks.soak                       # 10 minutes
    python -m benchmarks.soak --minutes 0.5

Leaves with 1 when anything of that is not so, and says what.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import progress
from benchmarks.equal_cores import COUPLED, PAIR, TRACE, VOCAB, block_of, equal_meshes, make_model, slice_of
from kvmesh.sim.workloads.trace import TokenMaker
from tests.support.mesh.client import Answer
from tests.support.mesh.harness import Running

SAMPLE_S = 1.0
ANSWER_S = 60.0  # much more than any answer takes
MEGA = 1 << 20


@dataclass(frozen=True)
class Work:
    """One request. `cancel_s`: given up so long after it was sent; None: never."""

    prompt: list[int]
    max_tokens: int
    cancel_s: float | None


@dataclass
class Soak:
    """What came of it. `memory`: by process, (seconds since the start, bytes)."""

    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    def fault(self, text: str) -> None:
        """Told at once, and again at the end."""
        progress.tell("")
        print(f"WRONG: {text}", file=sys.stderr, flush=True)
        self.faults.append(text)


def works(args: argparse.Namespace, rng: random.Random) -> Iterator[Work]:
    """Without end: the slice again and again, each time with other tokens."""
    made, block = slice_of(args.trace, args.requests, args.scale, args.context, args.max_output), block_of(args.scale)
    for seed in itertools.count(args.seed):
        maker = TokenMaker(VOCAB, seed)
        for one in made:
            cancel_s = rng.expovariate(1 / args.cancel_after) if rng.random() < args.cancels else None
            if rng.random() < args.long:
                length = rng.randint(args.context // 2, args.context - args.max_output - 1)
                yield Work(maker.noise(f"long:{rng.random()}", length), rng.randint(1, args.max_output), cancel_s)
            yield Work(maker.prompt(one, block), one.output_tokens, cancel_s)


async def ask(running: Running, work: Work) -> Answer | None:
    """None: it was given up."""
    try:
        async with asyncio.timeout(work.cancel_s):
            return await running.client.generate(work.prompt, work.max_tokens, timeout_s=ANSWER_S)
    except TimeoutError:
        return None


async def client(meshes: dict[str, Running], todo: Iterator[Work], until: float, soak: Soak) -> None:
    """One request at a time, to both meshes, until the time is over."""
    while time.monotonic() < until:
        work = next(todo)
        answers = dict(zip(meshes, await asyncio.gather(*(ask(one, work) for one in meshes.values())), strict=True))
        judge(work, answers, soak)


def judge(work: Work, answers: dict[str, Answer | None], soak: Soak) -> None:
    """Two whole answers must be one."""
    told = f"prompt of {len(work.prompt)} tokens from {work.prompt[:4]}"
    for name, answer in answers.items():
        if answer is None:
            soak.done["cancelled"] += 1
        elif answer.error is not None:
            soak.fault(f"{name}: {told}: {answer.error}")
        elif len(answer.tokens) != work.max_tokens:
            soak.fault(f"{name}: {told}: {len(answer.tokens)} tokens, not {work.max_tokens}")
        else:
            soak.done["answered"] += 1
            soak.done["cached tokens"] += answer.cached_tokens
    whole = [answer.tokens for answer in answers.values() if answer is not None and answer.error is None]
    if len(whole) == 2:
        soak.done["compared"] += 1
        if whole[0] != whole[1]:
            at = next((i for i, (a, b) in enumerate(zip(*whole, strict=False)) if a != b), min(map(len, whole)))
            soak.fault(f"{told}: answers differ from token {at} on: {whole[0][at:]} and {whole[1][at:]}")


async def watch(meshes: dict[str, Running], started: float, soak: Soak) -> None:
    """Resident memory of every process, each second, until cancelled."""
    while True:
        for mesh, running in meshes.items():
            for name in running.mesh.processes:
                front = running.pid(name)
                pids = {f"{mesh} {name}": front}
                pids |= {f"{mesh} {name} rank {i}": pid for i, pid in enumerate(running.rank_pids(name))}
                for told, pid in pids.items():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        rss = psutil.Process(pid).memory_info().rss
                        soak.memory.setdefault(told, []).append((time.monotonic() - started, rss))
        progress.tell(f"{time.monotonic() - started:.0f} s, {soak.done['answered']} answers, {len(soak.faults)} wrong")
        await asyncio.sleep(SAMPLE_S)


def growth(samples: list[tuple[float, int]], warm_s: float) -> dict[str, float]:
    """MB of the first and the last third after the warm-up, and MB a minute of a straight line through it."""
    kept = np.array([sample for sample in samples if sample[0] >= warm_s], dtype=np.float64)
    third = max(1, len(kept) // 3)
    slope = float(np.polyfit(kept[:, 0], kept[:, 1], 1)[0]) if len(kept) > 1 else 0.0
    first, last = (float(part[:, 1].mean()) / MEGA for part in (kept[:third], kept[-third:]))
    return {"first_mb": first, "last_mb": last, "mb_per_minute": slope * 60 / MEGA}


def judge_memory(args: argparse.Namespace, soak: Soak) -> dict[str, dict[str, float]]:
    """Prints a line for each process; one that grew is a fault."""
    found = {name: growth(samples, 60 * args.minutes * args.warm) for name, samples in soak.memory.items()}
    print(f"{'memory, MB':<34}{'first third':>12}{'last third':>12}{'a minute':>10}")
    for name, told in found.items():
        print(f"{name:<34}{told['first_mb']:>12.1f}{told['last_mb']:>12.1f}{told['mb_per_minute']:>+10.2f}")
        allowed = max(args.growth_mb, told["first_mb"] * args.growth_percent / 100)
        if told["last_mb"] - told["first_mb"] > allowed:
            soak.fault(f"{name} grew from {told['first_mb']:.1f} to {told['last_mb']:.1f} MB")
    return found


async def run(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    """The whole of it; `faults` of what it returns is empty when all is well."""
    model = make_model(home / "model", layers=args.layers, hidden=args.hidden, context=args.context)
    soak, todo = Soak(), works(args, random.Random(args.seed))
    async with equal_meshes(model, home, args.pages) as meshes:
        assert list(meshes) == [COUPLED, PAIR]
        started = time.monotonic()
        watching = asyncio.create_task(watch(meshes, started, soak))
        until = started + 60 * args.minutes
        await asyncio.gather(*(client(meshes, todo, until, soak) for _ in range(args.clients)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        progress.tell("")
        for name, running in meshes.items():
            try:
                await running.settled()
            except AssertionError as error:
                soak.fault(f"{name}: {error}")
    memory = judge_memory(args, soak)
    print(", ".join(f"{count:,} {name}" for name, count in sorted(soak.done.items())))
    print(f"{len(soak.faults)} things are wrong" if soak.faults else "all well")
    return {"done": dict(soak.done), "faults": soak.faults, "memory": memory}


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=4, help="requests in flight at each mesh")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=200, help="of the slice, which is sent again and again")
    parser.add_argument("--scale", default="1/32", help="of all lengths")
    parser.add_argument("--max-output", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--pages", type=int, default=320, help="of each half, 16 tokens each")
    parser.add_argument("--cancels", type=float, default=0.2, help="share of requests that are given up")
    parser.add_argument("--cancel-after", type=float, default=0.3, help="seconds, on average")
    parser.add_argument("--long", type=float, default=0.1, help="long prompts for each request of the trace")
    parser.add_argument("--warm", type=float, default=0.3, help="share of the time before memory is judged")
    parser.add_argument("--growth-mb", type=float, default=12.0)
    parser.add_argument("--growth-percent", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="also write the results here")
    return parser.parse_args(words)


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        told = asyncio.run(run(args, Path(folder)))
    if args.json:
        said = {"args": vars(args) | {"trace": args.trace.name}}
        Path(args.json).write_text(json.dumps(said | told, indent=1) + "\n")
    sys.exit(1 if told["faults"] else 0)


if __name__ == "__main__":
    main()
