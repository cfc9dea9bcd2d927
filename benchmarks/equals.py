"""Equal instances get equal work: live meshes of the demo model on this machine, and how their conductor treats twins.

Which instance a request went to is read from the conductor's own decision log (`--decision-log`), which is exact and
costs the mesh nothing that could be measured. Five parts, each on meshes of its own:

- `shares`: closed and open arrivals; the share of the busiest instance of each pool, by requests and by tokens (of
  prefill: tokens computed; of decode: tokens made).
- `sessions`: paced conversations; the same shares, and how much of what earlier turns left was found cached.
- `slow`: an instance is slowed to a third (`benchmarks.slowing`), frozen, killed, or replaced by a newcomer: when its
  share has fallen to what it can do, when it is back, and what all requests' TTFT is meanwhile.
- `errors`: how far the conductor's predictions were off; `--pin` gives instances cores of their own, as far as there
  are cores.
- `retry`: clients that are refused for their TTFT SLO and come back exactly when they were told to, beside clients that
  come back every 50 ms.

    python -m benchmarks.equals                              # a quarter of an hour on two cores
    python -m benchmarks.equals --quick                      # four minutes
    python -m benchmarks.equals --only shares --fleets 6x6
    python -m benchmarks.equals --only errors --pin --json equals.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import platform
import random
import secrets
import signal
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import progress
from benchmarks.equals_figures import (
    Hits,
    InstanceShares,
    LoggedDecision,
    Try,
    able_share,
    binned,
    change_after,
    herd,
    is_right,
    left_cached,
    share_between,
    spread,
    told_against_right,
)
from benchmarks.equals_mesh import POOLS, LiveMesh, live_mesh, ticking
from benchmarks.overload_client import Ask, Seen
from benchmarks.overload_load import Shape
from benchmarks.slowing import slowed
from kvmesh.cli.load.report import LoadSlo, tbt_s
from kvmesh.quantiles import quantile
from kvmesh.sim.workloads.trace import TokenMaker

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("shares", "sessions", "slow", "errors", "retry")
FALL_S = {6.0: 3.0, 1.0: 15.0}  # by requests a second: within so long a slow instance's share has fallen
BACK_S = 15.0
DISTURBED = 2.0  # TTFT p90 meanwhile, in times of the undisturbed
CACHED = 0.95
TTFT_OFF = 0.20, 0.60  # p50 and p90 of the relative error
RIGHT = 0.9  # of refused clients
BUSY = 0.15  # of the cores: others that use more are told of
STOPPED_MS, RUNNING_MS = 20.0, 10.0
IMPATIENT_S = 0.05
IMPATIENT_CLIENTS = 200  # more of them would ask for more than the gateway can refuse
LOAD_S = 300.0  # much more than any disruption takes
Told = dict[str, Any]


# ── what is printed and kept ──────────────────────────────────────────────────────────────────────


@dataclass
class GoalReport:
    """Tables as they come, and every row as JSON with its goal."""

    rows: dict[str, list[Told]] = field(default_factory=dict)
    kept: int = 0
    judged: int = 0
    _widths: Sequence[int] = ()
    _part: str = ""

    def table(self, part: str, title: str, columns: Sequence[tuple[str, int]]) -> None:
        """Begins a table; one more column tells the goals and whether they are kept."""
        progress.tell("")
        self._part, self._widths = part, [width for _, width in columns]
        print(f"\n{title}")
        print("".join(f"{name:>{width}}" for name, width in columns) + "   goal", flush=True)

    def row(self, words: Sequence[str], goals: Sequence[tuple[str, bool]], told: Told) -> None:
        """One row; each goal is a text and whether it is kept."""
        progress.tell("")
        shown = "; ".join(f"{text}: {'yes' if kept else 'NO'}" for text, kept in goals)
        print(
            "".join(f"{word:>{width}}" for word, width in zip(words, self._widths, strict=True)) + f"   {shown}",
            flush=True,
        )
        told = {**told, "goals": dict(goals)}
        self.rows.setdefault(self._part, []).append(told)
        self.judged += len(goals)
        self.kept += sum(kept for _, kept in goals)

    def note(self, text: str) -> None:
        progress.tell("")
        print(text, flush=True)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}"


def after(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def quantile_of(values: Iterable[float], share: float) -> float | None:
    """Returns the quantile of values in any order; None where there are none."""
    ordered = sorted(values)
    return quantile(ordered, share) if ordered else None


# ── shares of what was placed ─────────────────────────────────────────────────────────────────────


def bare_id(request_id: str) -> str:
    """A request's id as the conductor knows it."""
    return request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")


def shares_of(
    live: LiveMesh, decisions: Iterable[LoggedDecision], tokens: dict[str, tuple[int, int]]
) -> dict[str, InstanceShares]:
    """By pool, of all placements; `tokens`: computed by prefill and made by decode, by request."""
    placed = [one for one in decisions if one.decode]
    return {
        pool: spread(live.of(pool), [(one.instance(pool), tokens.get(one.request_id, (0, 0))[side]) for one in placed])
        for side, pool in enumerate(POOLS)
    }


def tokens_of(seen: Iterable[Seen]) -> dict[str, tuple[int, int]]:
    return {
        bare_id(one.request_id): (one.prompt_tokens - one.cached_tokens, one.completion_tokens)
        for one in seen
        if one.ok
    }


def share_words(shares: dict[str, InstanceShares]) -> list[str]:
    """Counts, and the busiest by requests and by tokens, of each pool."""
    words = []
    for pool in POOLS:
        one = shares[pool]
        words += ["/".join(map(str, one.requests.values())), percent(one.by_requests), percent(one.by_tokens)]
    return words


def share_goals(shares: dict[str, InstanceShares]) -> list[tuple[str, bool]]:
    return [(f"{pool} ≤ {shares[pool].goal:.0%}", shares[pool].fair) for pool in POOLS]


def share_columns(instances: int) -> list[tuple[str, int]]:
    """The columns of `share_words`, wide enough for so many instances of a pool."""
    wide = max(10, 4 * instances + 3)
    return [(name, width) for pool in POOLS for name, width in ((pool, wide), ("requests", 10), ("tokens", 8))]


# ── 1. shares ─────────────────────────────────────────────────────────────────────────────────────


async def run_shares(args: argparse.Namespace, report: GoalReport) -> None:
    """Every fleet under every kind of arrivals, one after the other on one mesh."""
    shares_in = share_columns(max(max(fleet) for fleet in args.fleets))
    columns = [("fleet", 7), ("arrivals", 12), ("sent", 6), ("failed", 8), *shares_in, ("TTFT p50", 10), ("p90", 7)]
    report.table("shares", "shares: of the busiest instance of each pool (TTFT in ms)", columns)
    for prefill, decode in args.fleets:
        async with live_mesh(args, prefill, decode) as live:
            loads: list[tuple[str, Callable[[], Awaitable[list[Seen]]]]] = [
                (f"{n} at once", partial(live.closed, max(args.requests, 4 * n), n)) for n in args.concurrency
            ]
            loads += [
                (f"{rate:g}/s", partial(live.open, rate, min(args.requests / rate, args.seconds)))
                for rate in args.rates
            ]
            for name, load in loads:
                start = time.monotonic()
                async with ticking(f"{prefill}P {decode}D, {name}"):
                    seen = await load()
                decisions = await live.log.between(start, time.monotonic())
                shares = shares_of(live, decisions, tokens_of(seen))
                failed = sum(not one.ok for one in seen)
                ttfts = [quantile_of((one.ttft_s for one in seen if one.ok), q) for q in (0.5, 0.9)]
                report.row(
                    [f"{prefill}P {decode}D", name, str(len(seen)), str(failed), *share_words(shares), *map(ms, ttfts)],
                    share_goals(shares),
                    {"fleet": [prefill, decode], "arrivals": name, "sent": len(seen), "failed": failed,
                     "ttft_s": ttfts, **{pool: shares[pool].told() for pool in POOLS}},
                )  # fmt: skip


# ── 2. sessions ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SessionLoad:
    """Paced conversations: each turn is sent `pace_s` (half as much to half as much again) after the answer before."""

    prefill: int
    decode: int
    sessions: int
    turns: int
    pace_s: float
    first_tokens: int = 200
    turn_tokens: int = 100
    answer_tokens: int = 32


@dataclass(frozen=True, slots=True)
class TurnSeen:
    """One answered turn; `left`: tokens of its prompt that the turn before left cached."""

    request_id: str
    prompt: int
    cached: int
    left: int
    answer: int


async def converse(live: LiveMesh, load: SessionLoad, name: str, seen: list[TurnSeen], failed: list[str]) -> None:
    """One conversation to its end, or to its first error."""
    rng, maker = random.Random(name), TokenMaker(live.vocab, 1)
    prompt, before = maker.noise(f"{name}:first", load.first_tokens), 0
    await asyncio.sleep(rng.uniform(0, load.pace_s))
    answered = 0
    for turn in range(load.turns):
        answer = await live.running.client.generate(prompt, load.answer_tokens)
        if answer.error is not None:
            failed.append(f"{name}, turn {turn}: {answer.error}")
            return
        left = left_cached(before, answered, len(prompt), live.block_tokens) if turn else 0
        seen.append(TurnSeen(bare_id(answer.request_id), len(prompt), answer.cached_tokens, left, len(answer.tokens)))
        before, answered = len(prompt), len(answer.tokens)
        prompt = [*prompt, *answer.tokens, *maker.noise(f"{name}:{turn}", load.turn_tokens)]
        await asyncio.sleep(load.pace_s * rng.uniform(0.5, 1.5))


def _count(seen: Sequence[TurnSeen]) -> str:
    return f"{len(seen)} answers"


async def run_sessions(args: argparse.Namespace, report: GoalReport) -> None:
    shares_in = share_columns(max(max(load.prefill, load.decode) for load in args.sessions))
    columns = [("fleet", 7), ("sessions", 10), ("pace", 7), ("failed", 8), *shares_in, ("left cached", 13)]
    report.table("sessions", "sessions: paced conversations", columns)
    for load in args.sessions:
        async with live_mesh(args, load.prefill, load.decode) as live:
            start, salt = time.monotonic(), secrets.token_hex(4)
            seen, failed = list[TurnSeen](), list[str]()
            what = f"{load.sessions} sessions of {load.turns} turns"
            async with ticking(what, partial(_count, seen)):
                names = [f"{salt}:{n}" for n in range(load.sessions)]
                await asyncio.gather(*(converse(live, load, name, seen, failed) for name in names))
            decisions = await live.log.between(start, time.monotonic())
            tokens = {one.request_id: (one.prompt - one.cached, one.answer) for one in seen}
            shares = shares_of(live, decisions, tokens)
            left = sum(one.left for one in seen)
            found = sum(min(one.cached, one.left) for one in seen) / left if left else 0.0
            fleet = f"{load.prefill}P {load.decode}D"
            report.row(
                [fleet, f"{load.sessions} × {load.turns}", f"{load.pace_s:g} s", str(len(failed)),
                 *share_words(shares), percent(found)],
                [*share_goals(shares), (f"cached ≥ {CACHED:.0%}", found >= CACHED)],
                {**dataclasses.asdict(load), "failed": failed[:3], "cached": found, "left_tokens": left,
                 **{pool: shares[pool].told() for pool in POOLS}},
            )  # fmt: skip


# ── 3. slow, frozen, killed, replaced ─────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Disruption:
    """What is done to one instance under an open load of `rate` requests a second: `before_s` undisturbed, then
    `during_s` (a killed or replaced one: until it serves again), then `after_s`."""

    what: str  # "slowed", "frozen", "killed", "replaced"
    pool: str
    rate: float
    before_s: float
    during_s: float
    after_s: float

    @property
    def fall_s(self) -> float:
        """The share has to have fallen within so long."""
        return FALL_S.get(self.rate, 3.0 if self.rate >= 6 else 15.0)


@dataclass
class Disrupted:
    """When it happened, on the monotonic clock, to whom, and what speed was left to it. `newcomer` is the instance that
    counts afterwards."""

    victim: str
    begun: float
    ended: float = 0.0
    speed: float = 0.0
    newcomer: str = ""


async def disrupt_instance(live: LiveMesh, how: Disruption, start: float) -> Disrupted:
    """Does it, at its time, to the instance of the pool that has got most of the work so far."""
    await asyncio.sleep(max(0.0, start + how.before_s - time.monotonic()))
    live.log.read()
    names = live.of(how.pool)
    counts = Counter(one.instance(how.pool) for one in live.log.decisions if one.at >= start)
    victim = replacement(live, how.pool)[0] if how.what == "replaced" else max(names, key=lambda name: counts[name])
    done = Disrupted(victim, time.monotonic(), newcomer=victim)
    match how.what:
        case "slowed":
            async with slowed(live.pids(victim)[1:], STOPPED_MS, RUNNING_MS) as pace:
                done.begun = time.monotonic()
                await asyncio.sleep(how.during_s)
            done.speed = pace.speed
        case "frozen":
            pids = live.pids(victim)
            try:
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(how.during_s)
            finally:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
        case "killed":
            live.kill(victim)
            await live.reborn(victim)
        case "replaced":
            done.newcomer = replacement(live, how.pool)[1]
            await live.replace(victim, done.newcomer)
        case other:
            raise ValueError(f"what={other!r}: no such disruption")
    done.ended = time.monotonic()
    return done


def replacement(live: LiveMesh, pool: str) -> list[str]:
    """The instance of the pool that can go for good, and the one that can come in its place."""
    return sorted(name for name in live.apart if name.startswith(pool))


async def disrupt(live: LiveMesh, how: Disruption) -> tuple[Told, list[tuple[str, bool]]]:
    """One disruption under load: what came of it, and the goals."""
    start, stop = time.monotonic(), asyncio.Event()
    fair = 1 / len(live.of(how.pool))
    load = asyncio.create_task(live.open_until(how.rate, stop, LOAD_S))
    try:
        async with ticking(f"{how.pool} {how.what} at {how.rate:g}/s"):
            done = await disrupt_instance(live, how, start)
            await asyncio.sleep(how.after_s)
            stop.set()
            end = time.monotonic()
            seen = await load
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    decisions = [one for one in await live.log.between(start, end) if one.decode]
    mine = (done.victim, done.newcomer)
    hits: Hits = [(one.at, one.instance(how.pool) in mine) for one in decisions]
    able = able_share(done.speed, round(1 / fair) - 1)
    fell = change_after(hits, done.begun, done.ended, able, falls=True)
    back = change_after(hits, done.ended, end, fair, falls=False)
    return _disrupted(how, done, start, end, hits, seen, able, fair, fell, back)


def _disrupted(
    how: Disruption, done: Disrupted, start: float, end: float, hits: Hits, seen: Sequence[Seen], able: float,
    fair: float, fell: float | None, back: float | None,
) -> tuple[Told, list[tuple[str, bool]]]:  # fmt: skip
    """Figures of one disruption, as JSON, and the goals."""
    times = ((start, done.begun), (done.begun, done.ended), (done.ended, end))
    phases = [[one for one in seen if low <= one.asked_at < high] for low, high in times]
    p90s = [quantile_of((one.ttft_s for one in phase if one.ok), 0.9) for phase in phases]
    settled = share_between(hits, (done.begun + done.ended) / 2, done.ended)
    width_s = max(1.0, 6 / how.rate)
    factor = p90s[1] / p90s[0] if p90s[0] and p90s[1] else math.inf
    told = {
        **dataclasses.asdict(how), "victim": done.victim, "newcomer": done.newcomer, "speed": done.speed,
        "seconds": [high - low for low, high in times], "able": able, "fair": fair, "bin_s": width_s,
        "shares": [binned(hits, low, high, width_s) for low, high in times],
        "share": [share_between(hits, low, high) for low, high in times], "settled": settled,
        "fell_s": fell, "back_s": back, "ttft_p90_s": p90s, "factor": None if math.isinf(factor) else factor,
        "tbt_p90_s": [quantile_of((t for one in phase if (t := tbt_s(one)) is not None), 0.9) for phase in phases],
        "failed": sum(not one.ok for one in seen), "sent": len(seen),
    }  # fmt: skip
    goals = [(f"fell ≤ {how.fall_s:g} s", fell is not None and fell <= how.fall_s)]
    if fell is not None:  # what never fell has nothing to come back from
        goals.append((f"back ≤ {BACK_S:g} s", back is not None and back <= BACK_S))
    goals += [(f"TTFT ≤ {DISTURBED:g}×", factor <= DISTURBED), ("none failed", told["failed"] == 0)]
    return told, goals


async def run_slow(args: argparse.Namespace, report: GoalReport) -> None:
    """All disruptions on one mesh, which is warm when they begin."""
    columns = [
        ("", 18), ("rate", 6), ("victim", 20), ("before", 8), ("settled", 9), ("able", 6), ("after", 7), ("fell", 8),
        ("back", 8), ("p90 before", 12), ("during", 8), ("after", 7), ("TBT p90 during", 16), ("failed", 8),
    ]  # fmt: skip
    report.table("slow", "slow: shares of one instance under an open load (TTFT and TBT in ms)", columns)
    replaced = [how.pool for how in args.disruptions if how.what == "replaced"]
    apart, spare = [f"{pool}-1" for pool in replaced], [f"{pool}-2" for pool in replaced]
    sizes = {pool: 2 + (pool in replaced) for pool in POOLS}
    async with live_mesh(args, sizes["prefill"], sizes["decode"], apart=apart, spare=spare) as live:
        async with ticking("warming up"):
            await live.closed(48, 4)
            await live.open(6.0, 4.0)
        for how in args.disruptions:
            told, goals = await disrupt(live, how)
            victim = told["victim"] if told["victim"] == told["newcomer"] else f"{told['victim']}→{told['newcomer']}"
            share, p90s = told["share"], told["ttft_p90_s"]
            back = "-" if told["fell_s"] is None else after(told["back_s"])
            report.row(
                [f"{how.pool} {how.what}", f"{how.rate:g}/s", victim, percent(share[0]), percent(told["settled"]),
                 percent(told["able"]), percent(share[2]), after(told["fell_s"]), back,
                 *map(ms, p90s), ms(told["tbt_p90_s"][1]), str(told["failed"])],
                goals, told,
            )  # fmt: skip
            parts = [" ".join("-" if one is None else f"{100 * one:.0f}" for one in part) for part in told["shares"]]
            report.note(f"{'':18}  share, % in each {told['bin_s']:g} s: {' | '.join(parts)}")


# ── 4. prediction errors ──────────────────────────────────────────────────────────────────────────


def pin(live: LiveMesh) -> tuple[int, int]:
    """Gives each instance a core, the last ones share when there are too few; all other processes get the rest, or
    all. Returns the number of instances and of cores they have."""
    cores = sorted(os.sched_getaffinity(0))
    names = [name for pool in POOLS for name in live.of(pool)]
    for number, name in enumerate(names):
        _bind(live.pids(name), {cores[number % len(cores)]})
    rest = set(cores[len(names) :]) or set(cores)
    for name, process in live.running.mesh.processes.items():
        if name not in names:
            _bind([process.pid], rest)
    return len(names), min(len(names), len(cores))


def _bind(pids: Iterable[int], cores: set[int]) -> None:
    """Every thread that a process has now; those that it starts later inherit it."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)


def client_errors(seen: Iterable[Seen], decisions: Iterable[LoggedDecision]) -> Told:
    """How far predicted TTFTs were off what clients saw, which is longer by the gateway's part."""
    predicted = {one.request_id: one.ttft_s for one in decisions if one.decode}
    off = []
    for one in seen:
        foretold = predicted.get(bare_id(one.request_id), 0.0)
        if one.ok and foretold > 0:
            off.append((one.ttft_s - foretold) / foretold)
    sizes = sorted(map(abs, off))
    if not off:
        return {"samples": 0, "bias": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    p50, p90, p99 = (quantile(sizes, share) for share in (0.5, 0.9, 0.99))
    return {"samples": len(off), "bias": statistics.median(off), "p50": p50, "p90": p90, "p99": p99}


async def run_errors(args: argparse.Namespace, report: GoalReport) -> None:
    """After a sparse, a moderate and a full load on each mesh: instances that share all cores, and with `--pin`
    instances with a core each."""
    columns = [("cores", 30), ("kind", 30), ("samples", 9), ("bias", 8), ("p50", 7), ("p90", 8), ("p99", 9)]
    report.table("errors", "errors: |measured - predicted| / predicted, bias: median of the signed one", columns)
    cores = len(os.sched_getaffinity(0))
    pinned = (2, 2) if cores >= 4 else (1, 1)
    for fleet, own in [((2, 2), False), *([(pinned, True)] if args.pin else [])]:
        async with live_mesh(args, *fleet) as live:
            where = f"{fleet[0]}P {fleet[1]}D share {cores}"
            if own:
                count, had = pin(live)
                where = f"{fleet[0]}P {fleet[1]}D, {had} cores for {count}"
            start, loads = time.monotonic(), dict[str, list[Seen]]()
            async with ticking(f"errors, {where}"):
                loads["1 at a time"] = await live.closed(args.requests // 2, 1)
                loads["6/s"] = await live.open(6.0, args.requests / 8)
                loads["8 at once"] = await live.closed(args.requests, 8)
            decisions = await live.log.between(start, time.monotonic())
            for kind, told in (await live.errors()).items():
                goals = []
                if kind == "ttft":
                    goals = [(f"p50 < {TTFT_OFF[0]:.0%}, p90 < {TTFT_OFF[1]:.0%}",
                              told["p50"] < TTFT_OFF[0] and told["p90"] < TTFT_OFF[1])]  # fmt: skip
                _error_row(report, where, kind, told, goals)
            for name, seen in loads.items():
                _error_row(report, where, f"ttft of clients, {name}", client_errors(seen, decisions), [])


def _error_row(report: GoalReport, where: str, kind: str, told: Told, goals: Sequence[tuple[str, bool]]) -> None:
    words = [where, kind, str(told["samples"]), f"{told['bias']:+.0%}"]
    report.row([*words, *(f"{told[q]:.0%}" for q in ("p50", "p90", "p99"))], goals, {"on": where, "kind": kind, **told})


# ── 5. clients that come again ────────────────────────────────────────────────────────────────────


@dataclass
class ReturningClient:
    """Its attempts, and when it was answered on the clock of all (None: it gave up)."""

    tries: list[Try] = field(default_factory=list)
    answered_s: float | None = None
    error: str = ""

    @property
    def refusals(self) -> int:
        return sum(not one.placed for one in self.tries)


async def come_back(live: LiveMesh, ask: Ask, obey: bool, give_up: float) -> ReturningClient:
    """Sends the request until it is answered: after each refusal exactly as late as was told, or (not `obey`) after
    IMPATIENT_S. A refusal that tells no time is for good."""
    client, began = ReturningClient(), time.monotonic()
    while time.monotonic() < give_up:
        seen = await live.clients.send(ask)
        client.tries.append(Try(seen.sent_at, not seen.refused, seen.retry_after_s))
        if not seen.refused or not seen.retry_after_s:
            client.error = seen.code
            client.answered_s = time.monotonic() - began if seen.ok else None
            return client
        await asyncio.sleep(seen.retry_after_s if obey else IMPATIENT_S)
    return client


def served_per_s(clients: Iterable[ReturningClient]) -> float:
    """How many were answered a second, from the first attempts to the last answer."""
    done = [one.answered_s for one in clients if one.answered_s is not None]
    return len(done) / max(done) if done else 0.0


def retry_told(clients: Sequence[ReturningClient], per_s: float) -> Told:
    """What came of clients that obey, when the mesh can take `per_s` of them a second."""
    refused = [one for one in clients if one.tries and not one.tries[0].placed]
    waits = told_against_right([one.tries[0].told_s for one in refused], per_s)
    returned = [one for one in refused if len(one.tries) > 1]
    done = [one.answered_s for one in clients if one.answered_s is not None]
    return {
        "clients": len(clients),
        "per_s": per_s,
        "answered": len(done),
        "refused_at_once": len(refused),
        "placed_when_told": sum(one.tries[1].placed for one in returned) / len(refused) if refused else 1.0,
        "right": sum(is_right(told, right) for told, right in waits) / len(waits) if waits else 1.0,
        "told_over_right": [quantile_of((told / right for told, right in waits), q) for q in (0.1, 0.5, 0.9)],
        "told_s": [quantile_of((told for told, _ in waits), q) for q in (0.0, 0.5, 1.0)],
        "right_s": [quantile_of((right for _, right in waits), q) for q in (0.0, 0.5, 1.0)],
        "refusals": dict(sorted(Counter(one.refusals for one in clients).items())),
        "attempts": sum(len(one.tries) for one in clients),
        "herd": herd(one.at for client in clients for one in client.tries[1:]),
        "done_s": max(done, default=None),
        "errors": dict(Counter(one.error for one in clients if one.error)),
        "waits": waits,
    }


async def run_retry(args: argparse.Namespace, report: GoalReport) -> None:
    """So many clients at the same moment, of whom few can be served within their SLO."""
    columns = [
        ("clients", 9), ("wait", 10), ("answered", 10), ("refused at once", 17), ("placed when told", 18),
        ("told s (least, p50, most)", 27), ("right s", 19), ("told/right p10, p50, p90", 26), ("attempts", 10),
        ("herd", 6), ("all done", 10),
    ]  # fmt: skip
    title = f"retry: {args.prompt_tokens}-token prompts with ttft_slo_ms={args.ttft_slo_ms}"
    report.table("retry", title, columns)
    shape = Shape((args.prompt_tokens, args.prompt_tokens), (8, 8))
    slo = LoadSlo(float(args.ttft_slo_ms), 60_000.0)
    async with live_mesh(args, 2, 2, shape=shape) as live:
        async with ticking("warming up"):
            await live.closed(16, 1)
        found: list[tuple[bool, list[ReturningClient]]] = []
        for count in args.clients:
            for obey in (True, False) if count <= IMPATIENT_CLIENTS else (True,):
                give_up = time.monotonic() + 20 + 0.1 * count
                asks = live.asks([0.0] * count, slo)
                async with ticking(f"{count} clients, {'as told' if obey else 'every 50 ms'}"):
                    found.append((obey, await asyncio.gather(*(come_back(live, ask, obey, give_up) for ask in asks))))
                    await live.idle()
        # Last, as it leaves the conductor with samples of a full mesh alone.
        async with ticking("what the mesh can take"):
            began = time.monotonic()
            seen = await live.closed(60 if args.quick else 120, 8)
            per_s = sum(one.ok for one in seen) / (time.monotonic() - began)
        per_s = max(per_s, *(served_per_s(clients) for _, clients in found))
        for obey, clients in found:
            _retry_row(report, {"obey": obey, "best_s": len(clients) / per_s, **retry_told(clients, per_s)})
        report.note(f"right: when the mesh takes {per_s:.1f} of them a second, the most that it has taken here")


def _retry_row(report: GoalReport, told: Told) -> None:
    def seconds(values: Sequence[float | None]) -> str:
        return ", ".join("-" if one is None else f"{one:.2f}" for one in values)

    obey, done = told["obey"], told["done_s"]
    goals = []
    if obey:
        goals = [
            (f"right ≥ {RIGHT:.0%} ({told['right']:.0%})", told["right"] >= RIGHT),
            (f"placed when told ≥ {RIGHT:.0%}", told["placed_when_told"] >= RIGHT),
            ("all answered", told["answered"] == told["clients"]),
        ]
    report.row(
        [str(told["clients"]), "as told" if obey else "50 ms", str(told["answered"]), str(told["refused_at_once"]),
         percent(told["placed_when_told"]) if obey else "", seconds(told["told_s"]),
         seconds(told["right_s"]), seconds(told["told_over_right"]), str(told["attempts"]), str(told["herd"]),
         "-" if done is None else f"{done:.1f} s"],
        goals, told,
    )  # fmt: skip
    refused = sorted(times for times, count in told["refusals"].items() for _ in range(count))
    often = ", ".join(f"{quantile(refused, q):.0f}" for q in (0.1, 0.5, 0.9, 1.0))
    report.note(f"{'':9}  times refused, p10, p50, p90, most: {often}; at best all are done in {told['best_s']:.1f} s")
    if told["errors"]:
        report.note(f"{'':9}  failed: {told['errors']}")


# ── the run ───────────────────────────────────────────────────────────────────────────────────────

RUNS: dict[str, Callable[[argparse.Namespace, GoalReport], Awaitable[None]]] = {
    "shares": run_shares, "sessions": run_sessions, "slow": run_slow, "errors": run_errors, "retry": run_retry,
}  # fmt: skip

DISRUPTIONS = (
    Disruption("slowed", "prefill", 6.0, 8.0, 14.0, 18.0),
    Disruption("slowed", "decode", 6.0, 8.0, 14.0, 18.0),
    Disruption("slowed", "prefill", 1.0, 15.0, 30.0, 20.0),
    Disruption("slowed", "decode", 1.0, 15.0, 30.0, 20.0),
    *(Disruption(what, pool, 6.0, 6.0, 8.0, 16.0) for what in ("frozen", "killed", "replaced") for pool in POOLS),
)
QUICK_DISRUPTIONS = (
    Disruption("slowed", "prefill", 6.0, 5.0, 10.0, 12.0),
    Disruption("slowed", "decode", 6.0, 5.0, 10.0, 12.0),
    Disruption("slowed", "prefill", 1.0, 8.0, 20.0, 14.0),
)
SESSIONS = (SessionLoad(3, 2, 24, 7, 3.0), SessionLoad(2, 2, 12, 10, 1.5))
QUICK_SESSIONS = (SessionLoad(3, 2, 24, 4, 2.0),)


def fleet_of(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition("x")
    return int(prefill), int(decode)


def session_load_of(text: str) -> SessionLoad:
    """PREFILLxDECODE:SESSIONSxTURNS:PACE."""
    fleet, sessions, pace = text.split(":")
    return SessionLoad(*fleet_of(fleet), *fleet_of(sessions), float(pace))


def disruption_of(text: str) -> Disruption:
    """WHAT:POOL:RATE[:BEFORE:DURING:AFTER], times in seconds."""
    what, pool, rate, *times = text.split(":")
    if what not in ("slowed", "frozen", "killed", "replaced") or pool not in POOLS:
        raise argparse.ArgumentTypeError(f"disruption={text!r}: WHAT:POOL:RATE[:BEFORE:DURING:AFTER]")
    before, during, rest = map(float, times or (8, 14, 18))
    return Disruption(what, pool, float(rate), before, during, rest)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `--quick` sets what was not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated")
    parser.add_argument("--quick", action="store_true", help="one fleet, fewer loads")
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo-model", help="checkpoint folder")
    parser.add_argument("--fleets", type=fleet_of, nargs="+", metavar="PxD", help="of shares, as 2x2 3x3")
    parser.add_argument("--concurrency", type=int, nargs="+", help="closed arrivals: requests at once")
    parser.add_argument("--rates", type=float, nargs="*", help="open arrivals: requests a second")
    parser.add_argument("--requests", type=int, help="of each load")
    parser.add_argument("--seconds", type=float, default=20.0, help="of an open load at most")
    parser.add_argument(
        "--sessions", type=session_load_of, nargs="+", metavar="PxD:SESSIONSxTURNS:PACE", help="as 3x2:24x7:3"
    )
    parser.add_argument(
        "--disruptions", type=disruption_of, nargs="+", metavar="WHAT:POOL:RATE[:BEFORE:DURING:AFTER]",
        help="as slowed:prefill:6 (what: slowed, frozen, killed, replaced)",
    )  # fmt: skip
    parser.add_argument("--pin", action="store_true", help="errors: also with a core for each instance")
    parser.add_argument("--clients", type=int, nargs="+", help="retry: so many at once")
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="retry: of each prompt")
    parser.add_argument("--ttft-slo-ms", type=int, default=300, help="retry: of each request")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args(words)
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(PARTS):
        parser.error(f"only={','.join(sorted(unknown))}: choose among {','.join(PARTS)}")
    defaults = {
        "fleets": ([(2, 2), (3, 3)], [(2, 2)]),
        "concurrency": ([1, 4, 16, 32, 64], [1, 4, 16, 32]),
        "rates": ([3.0, 6.0, 12.0], [6.0]),
        "requests": (120, 80),
        "sessions": (list(SESSIONS), list(QUICK_SESSIONS)),
        "disruptions": (list(DISRUPTIONS), list(QUICK_DISRUPTIONS)),
        "clients": ([30, 1000], [30]),
    }
    for name, (whole, quick) in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else whole)
    return args


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does: by cancelling it, so that its processes are stopped."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def run(args: argparse.Namespace) -> Told:
    report, began = GoalReport(), time.monotonic()
    seconds, others = dict[str, float](), dict[str, float]()
    with ended_by_sigterm():
        for part in args.only:
            others[part] = await asyncio.to_thread(psutil.cpu_percent, 1.0) / 100
            if others[part] > BUSY:
                report.note(
                    f"\nother processes keep {others[part]:.0%} of the cores busy: figures are not the mesh's alone"
                )
            at = time.monotonic()
            await RUNS[part](args, report)
            seconds[part] = time.monotonic() - at
    report.note(f"\n{report.kept} of {report.judged} goals kept, {time.monotonic() - began:.0f} s in all")
    return {
        "seconds": seconds,
        "cores_busy_before": others,
        "kept": report.kept,
        "judged": report.judged,
        **report.rows,
    }


def main() -> None:
    args = parse()
    try:
        found = asyncio.run(run(args))
    except (KeyboardInterrupt, asyncio.CancelledError):
        progress.tell("")
        raise SystemExit(130) from None
    if args.json:
        said = {"machine": platform.machine(), "cpus": os.cpu_count(), "quick": args.quick, "load": os.getloadavg()}
        args.json.write_text(json.dumps(said | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
