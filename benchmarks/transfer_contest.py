"""Contenders that take turns within each round, and what is told of them.

Medians over the rounds; a ratio is the median of the rounds' ratios, since what else the machine does changes from one
round to the next and hits neighbours in a round alike.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks import progress
from benchmarks.peers.link import PeerMissing, Worker, room
from kvmesh.quantiles import quantile

SIZES = ((128, 64 << 10), (64, 1 << 20), (16, 16 << 20), (1, 256 << 20))
QUICK_SIZES = ((128, 64 << 10), (64, 1 << 20))
LATENCY_SIZES = (4 << 10, 64 << 10, 1 << 20)
THREADS = (1, 4)
OPS = ("write", "read")
Turn = tuple[float, float]  # wall seconds, CPU seconds of both ends


def size(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def row_title(count: int, length: int) -> str:
    return f"{count} × {size(length)}" if count > 1 else size(length)


@dataclass
class Contender:
    """A pair of processes; `threads` set: so many, whatever the row says."""

    title: str
    target: Worker
    source: Worker
    threads: int = 0
    alone: bool = False  # one process is both ends

    @classmethod
    def start(
        cls, title: str, module: str, nbytes: int, python: str = "", env: dict[str, str] | None = None, **options: Any
    ) -> Contender:
        more = {"python": python} if python else {}
        target = Worker(module, env=env, **more)
        source = Worker(module, env=env, **more)
        try:
            told = target.call("target", nbytes=nbytes, **options)
            source.call("source", nbytes=nbytes, told=told, **options)
        except PeerMissing:
            source.close()
            target.close()
            raise
        return cls(title, target, source)

    def turn(self, op: str, count: int, length: int, threads: int) -> Turn:
        before = 0.0 if self.alone else self.target.call("cpu")
        wall, cpu = self.source.call("run", op=op, count=count, length=length, threads=self.threads or threads)
        return wall, cpu + (0.0 if self.alone else self.target.call("cpu") - before)

    def check(self, op: str, count: int, length: int, threads: int, seed: int) -> None:
        """Moves a pattern not seen before and compares checksums."""
        fill, digest = ("fill_other", "digest_other") if self.alone else ("fill", "digest")
        ends: list[tuple[Worker, str, str]] = [(self.source, "fill", "digest"), (self.target, fill, digest)]
        (of, of_fill, of_digest), (to, to_fill, to_digest) = ends if op == "write" else ends[::-1]
        of.call(of_fill, seed=seed)
        to.call(to_fill, seed=0)
        self.turn(op, count, length, threads)
        words = {"count": count, "length": length}
        if of.call(of_digest, **words) != to.call(to_digest, **words):
            raise SystemExit(f"{self.title}: {op} of {row_title(count, length)}: the bytes differ")

    def close(self) -> None:
        self.source.close()
        if not self.alone:
            self.target.close()


@dataclass
class Result:
    """One row of one operation: turns of each contender, round by round."""

    op: str
    count: int
    length: int
    threads: int
    turns: dict[str, list[Turn]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.count * self.length

    def wall(self, title: str) -> float:
        return statistics.median(wall for wall, _ in self.turns[title])

    def rate(self, title: str) -> float:
        """GB/s"""
        return self.nbytes / self.wall(title) / 1e9

    def cpu_per_gb(self, title: str) -> float:
        return statistics.median(cpu for _, cpu in self.turns[title]) / self.nbytes * 1e9

    def times(self, title: str, other: str) -> float:
        """How many times as fast `title` is as `other`."""
        pairs = zip(self.turns[other], self.turns[title], strict=True)
        return statistics.median(theirs / mine for (theirs, _), (mine, _) in pairs)

    def best(self, titles: Sequence[str]) -> str:
        return min(titles, key=self.wall)

    def plain(self) -> dict[str, Any]:
        told = {
            title: {
                "gb_per_s": round(self.rate(title), 3),
                "cpu_s_per_gb": round(self.cpu_per_gb(title), 4),
                "wall_s": [round(wall, 6) for wall, _ in self.turns[title]],
            }
            for title in self.turns
        }
        return {"op": self.op, "count": self.count, "length": self.length, "threads": self.threads, "contenders": told}


class Clock:
    """Tells how far it is, once two seconds have passed."""

    def __init__(self, what: str, steps: int) -> None:
        self.what = what
        self.steps = steps
        self.done = 0
        self.start = time.monotonic()

    def step(self) -> None:
        self.done += 1
        spent = time.monotonic() - self.start
        if spent > 2:
            left = spent / self.done * (self.steps - self.done)
            progress.tell(f"{self.what}: {self.done} of {self.steps}, {left:.0f} s left")
        if self.done == self.steps:
            progress.tell("")


class Rival(Protocol):
    """Whoever can take a turn."""

    title: str

    def turn(self, op: str, count: int, length: int, threads: int) -> Turn: ...

    def check(self, op: str, count: int, length: int, threads: int, seed: int) -> None: ...


def compete(
    what: str,
    contenders: Sequence[Rival],
    sizes: Sequence[tuple[int, int]],
    rounds: int,
    keep: Callable[[Result], None],
    ops: Sequence[str] = OPS,
    threads: Sequence[int] = THREADS,
) -> None:
    """Every row: bytes verified, one round to warm up, `rounds` that count, bytes verified again."""
    rng = random.Random(1)
    rows = [Result(op, *row, n) for op in ops for row in sizes for n in threads]
    clock = Clock(what, len(rows) * (rounds + 3))
    for row in rows:
        words = (row.op, row.count, row.length, row.threads)
        row.turns = {c.title: [] for c in contenders}
        for round_ in range(rounds + 3):
            for contender in rng.sample(list(contenders), len(contenders)):
                if round_ in (0, rounds + 2):
                    contender.check(*words, seed=rng.randrange(1, 1 << 30))
                else:
                    turn = contender.turn(*words)
                    if round_ > 1:
                        row.turns[contender.title].append(turn)
            clock.step()
        keep(row)


def latencies(
    what: str, contenders: Sequence[Contender], rounds: int, times: int = 20, sizes: Sequence[int] = LATENCY_SIZES
) -> list[dict[str, Any]]:
    """Microseconds of one operation at a time: p50 and p99 over all rounds, by operation and size."""
    rows = [(op, n) for op in OPS for n in sizes]
    clock = Clock(what, len(rows) * rounds)
    told = []
    for op, length in rows:
        seconds: dict[str, list[float]] = {c.title: [] for c in contenders}
        for _ in range(rounds):
            for contender in contenders:
                seconds[contender.title] += contender.source.call("latency", op=op, length=length, times=times)
            clock.step()
        row: dict[str, Any] = {"op": op, "length": length}
        for title, values in seconds.items():
            ordered = sorted(values)
            row[title] = {
                "p50_us": round(quantile(ordered, 0.5) * 1e6, 1),
                "p99_us": round(quantile(ordered, 0.99) * 1e6, 1),
            }
        told.append(row)
    return told


def span(sizes: Sequence[tuple[int, int]]) -> int:
    """Bytes of memory that these rows and the latencies need."""
    return max([room(*row) for row in sizes] + [max(LATENCY_SIZES)])
