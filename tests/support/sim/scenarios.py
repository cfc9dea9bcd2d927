"""Loads that an operator would try, in virtual time, on instances whose step times no conductor knows: what
`test_equals.py` asserts, as tables.

    python -m tests.support.sim.scenarios                  # all of them; about a minute
    python -m tests.support.sim.scenarios c0 sessions      # some
    python -m tests.support.sim.scenarios c0 --seed 3
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from math import inf, nan
from typing import Any

from kvmesh.services.conductor.settings import Settings
from kvmesh.sim.changes import ChangeNoticed, FreezePhase, JoinEvent, KillEvent, LeaveEvent, SlowPhase
from kvmesh.sim.cluster import Cluster
from kvmesh.sim.config import SimConfig
from kvmesh.sim.hardware.times import NodeSpec
from kvmesh.sim.report.records import DONE, Record
from kvmesh.sim.report.summary import Summary
from kvmesh.sim.run import run
from kvmesh.sim.workloads.sessions import SessionClients, SessionConfig
from kvmesh.sim.workloads.synthetic import LengthDistribution
from kvmesh.sim.workloads.workload import Clients, ClosedLoop, SimRequest, key

BLOCK = 16
NOISE = 0.3  # of a step's time, as live ones scatter on cores of their own
ANSWER = 32
Pieces = Sequence[tuple[int, int]]
Make = Callable[[], "Ran"]


@dataclass(frozen=True)
class Demo:
    """About what the demo model takes on one core, `scale` times as long."""

    scale: float = 1.0

    def prefill_s(self, pieces: Pieces) -> float:
        return self.scale * (0.004 + sum(4e-5 * new + 4e-9 * new * (cached + new / 2) for new, cached in pieces))

    def decode_s(self, batch: int, context_tokens: float) -> float:
        return self.scale * (0.0008 + 0.00015 * batch + 7e-8 * context_tokens)

    def mixed_s(self, pieces: Pieces, batch: int, context_tokens: float) -> float:
        return self.prefill_s(pieces) + self.decode_s(batch, context_tokens)


def node(scale: float = 1.0, **changes: Any) -> NodeSpec:
    """One instance of the demo."""
    told: dict[str, Any] = {
        "times": Demo(scale),
        "kv_tokens": 65_536,
        "dram_tokens": 65_536,
        "ssd_tokens": 0,
        "nic_bytes_per_s": 1e9,
        "ssd_read_bytes_per_s": 0.0,
        "kv_bytes_per_token": 4096,
    }
    return NodeSpec(**(told | changes))


def fleet(prefills: int, decodes: int, scale: float = 1.0, **changes: Any) -> SimConfig:
    """A live mesh with its defaults: conductors begin with their priors, and hear what heartbeats tell."""
    told: dict[str, Any] = {
        "prefill": (node(scale),) * prefills,
        "decode": (node(scale),) * decodes,
        "conductor": Settings(),
        "block_tokens": BLOCK,
        "chunk_tokens": 512,
        "batch_tokens": 1024,
        "long_tokens": 512,
        "layers": 8,
        "heartbeat_s": 0.2,
        "tick_s": 0.2,
        "told_max_tokens": ANSWER,
        "profiled": False,
        "noise": NOISE,
        "sample_s": 1.0,
    }
    return SimConfig(**(told | changes))


def prompts(count: int, seed: int, low: int = 100, high: int = 300, answer: int = ANSWER) -> Iterator[SimRequest]:
    """No two of them share a block. All at 0."""
    source = random.Random(f"prompts:{seed}")
    for index in range(count):
        tokens = source.randint(low, high)
        keys = tuple(key((index << 20) + n + 1) for n in range(tokens // BLOCK))
        yield SimRequest(index, 0.0, tokens, answer, keys)


def arrivals(rates: Sequence[tuple[float, float]], seed: int, **told: Any) -> Iterator[SimRequest]:
    """Poisson, of such prompts: so many a second until then, for each of `rates` (requests a second, seconds)."""
    source, at_s, left = random.Random(f"arrivals:{seed}"), 0.0, list(rates)
    for one in prompts(sys.maxsize, seed, **told):
        at_s += source.expovariate(left[0][0])
        while at_s >= left[0][1]:
            at_s = left.pop(0)[1]
            if not left:
                return
            at_s += source.expovariate(left[0][0])
        yield replace(one, at_s=at_s)


@dataclass
class Ran:
    """One run."""

    config: SimConfig
    summary: Summary
    records: list[Record] = field(default_factory=list)
    changes: list[ChangeNoticed] = field(default_factory=list)

    def p90_s(self, what: str = "ttft_s", from_s: float = 0.0, until_s: float = inf) -> float:
        """Of those that came then and are done: `ttft_s`, or another time of a record."""
        found = sorted(
            getattr(one, what) for one in self.records if from_s <= one.at_s < until_s and one.outcome == DONE
        )
        return found[int(0.9 * (len(found) - 1))] if found else nan

    def share(self, name: str, from_s: float, until_s: float = inf) -> float:
        """Of the requests of its pool that came then."""
        pool = pool_of(name)
        among = [getattr(one, pool) for one in self.records if from_s <= one.at_s < until_s and one.outcome == DONE]
        return among.count(name) / len(among) if among else nan


def pool_of(name: str) -> str:
    """Of an instance."""
    return "prefill" if name[0] == "p" else "decode"


def serve(config: SimConfig, requests: Clients | Iterator[SimRequest] | Sequence[SimRequest]) -> Ran:
    """Everything of one run."""
    ran = Ran(config, Summary(ttft_slo_s=config.conductor.slo_ttft_s, tbt_slos_s=(config.conductor.slo_tbt_s,)))

    def ended(record: Record) -> None:
        ran.summary.add(record)
        ran.records.append(record)

    def last(system: object) -> None:
        if isinstance(system, Cluster) and config.changes:
            ran.changes = system.changes_noticed()

    run(config, requests, sink=ended, last=last)
    return ran


# ── C0: equal instances ───────────────────────────────────────────────────────────────────────────

FAIR = {2: 0.60, 3: 0.45}  # the busiest of so many equals has at most so much
CONCURRENCY = (1, 4, 16, 32, 64)


WARM = 4  # lone requests, a second apart: somebody has tried the mesh before


class WarmLoop(ClosedLoop):
    """A closed loop that begins when a few lone requests have been answered. It is the load; they are not counted."""

    def __init__(self, requests: Iterator[SimRequest], in_flight: int) -> None:
        super().__init__(requests, in_flight)
        self._before = list(islice(requests, WARM))

    def first(self) -> Iterator[SimRequest]:
        yield from (replace(one, at_s=float(at)) for at, one in enumerate(self._before))
        yield from (replace(one, at_s=float(WARM)) for one in super().first())

    def after(self, index: int, now: float, *, done: bool) -> SimRequest | None:
        return super().after(index, now, done=done) if index >= WARM else None


def closed(prefills: int, decodes: int, in_flight: int, seed: int = 0, count: int = 300, **changes: Any) -> Ran:
    """So many requests under way at any time."""
    load = WarmLoop(prompts(WARM + count, seed), in_flight)
    return serve(fleet(prefills, decodes, changes.pop("scale", 1.0), seed=seed, **changes), load)


def paced_sessions(
    prefills: int,
    decodes: int,
    sessions: int = 24,
    turns: int = 7,
    seed: int = 0,
    *,
    system: int = 200,
    think_s: float = 1.0,
    start_s: float = 6.0,
    **changes: Any,
) -> Ran:
    """Agents with growing context, who begin within `start_s` and whose prompts begin with the same `system` tokens."""
    config = SessionConfig(
        sessions=sessions,
        turns=turns,
        start_s=start_s,
        think_s=think_s,
        block_tokens=BLOCK,
        system=LengthDistribution(system, 0.0),
        user=LengthDistribution(60, 0.5, 400),
        output=LengthDistribution(ANSWER, 0.3, 120),
    )
    return serve(fleet(prefills, decodes, seed=seed, told_max_tokens=128, **changes), SessionClients(config, seed))


POOLS = (("prefill", ("requests", "input", "computed")), ("decode", ("requests", "output")))  # and what is counted


def bursts(prefills: int, decodes: int, *, each: int = 6, times: int = 6, seed: int = 0, **changes: Any) -> Ran:
    """So many requests for each instance of the greater pool at one moment, and again, 2 s apart; lone ones before."""
    count = each * max(prefills, decodes)
    asked = [
        replace(one, at_s=float(one.index if one.index < WARM else WARM + 2 * ((one.index - WARM) // count)))
        for one in prompts(WARM + count * times, seed)
    ]
    return serve(fleet(prefills, decodes, seed=seed, **changes), asked)


def shares(ran: Ran) -> list[str]:
    """Of each instance: requests, and tokens (prompts' at prefill, computed ones; answers' at decode)."""
    found = []
    for pool, whats in POOLS:
        names = [f"{pool[0]}{n}" for n in range(len(getattr(ran.config, pool)))]
        for what in whats:
            found.append("/".join(f"{100 * ran.summary.share(pool, name, what):.0f}" for name in names))
    return found


# ── C4: what changes ──────────────────────────────────────────────────────────────────────────────


FILLING = 15.0, 20.0  # requests a second, until then: more samples of each instance than a model keeps


@dataclass(frozen=True)
class Strike:
    """A load of `rate` requests a second until `over_s`, and from when to when something happens to one of equal
    instances; the new share is to be seen within `late_s`. Before it all windows of samples are filled: the mesh is no
    newcomer."""

    rate: float
    from_s: float
    until_s: float
    over_s: float
    late_s: float
    seed: int = 0
    prefills: int = 2
    decodes: int = 2
    scale: float = 1.0  # of all step times

    def ran(self, **changes: Any) -> Ran:
        """The load on this fleet."""
        config = fleet(self.prefills, self.decodes, self.scale, seed=self.seed, **changes)
        return serve(config, arrivals((FILLING, (self.rate, self.over_s)), self.seed, answer=ANSWER // 4))

    def struck(self, what: str, name: str, times: float = 3.0) -> Ran:
        """`what`: "slow", "frozen", "killed", "replaced" (after half the phase), "joined" or "left"."""
        begin, end = self.from_s, self.until_s
        return {
            "slow": lambda: self.ran(slow=(SlowPhase(name, begin, end, times),)),
            "frozen": lambda: self.ran(freeze=(FreezePhase(name, begin, end),)),
            "killed": lambda: self.ran(kill=(KillEvent(name, begin),)),
            "replaced": lambda: self.ran(kill=(KillEvent(name, begin, (end - begin) / 2),)),
            "joined": lambda: self.ran(join=(JoinEvent(name, begin),)),
            "left": lambda: self.ran(leave=(LeaveEvent(name, begin),)),
        }[what]()

    def victim(self, letter: str) -> str:
        """Who has most of the requests of its pool before anything happens."""
        count = self.prefills if letter == "p" else self.decodes
        names = [f"{letter}{n}" for n in range(count)]
        return max(names, key=lambda name: undisturbed(self).share(name, 0.0, self.from_s))


@lru_cache(maxsize=32)
def undisturbed(phase: Strike) -> Ran:
    """The same load, and nothing happens."""
    return phase.ran()


OFTEN = Strike(6.0, 30.0, 50.0, 80.0, late_s=3.0)
SELDOM = Strike(1.0, 40.0, 140.0, 185.0, late_s=15.0)
BUSY = Strike(6.0, 30.0, 50.0, 80.0, late_s=3.0, scale=5.0)  # steps take five times as long: 25% of two instances' time


# ── C2: clients that obey Retry-After ─────────────────────────────────────────────────────────────


def burst(
    count: int = 30, seed: int = 0, *, prefills: int = 1, decodes: int = 1, tokens: int = 1000, slo_ms: float = 300.0
) -> Ran:
    """A mesh that knows its times, then `count` prompts at once, of which few can have their first token in time."""
    config = fleet(prefills, decodes, retries=5, seed=seed)
    warm = list(arrivals([(4.0, 15.0)], seed, low=tokens - 50, high=tokens))
    start_s = 20.0
    many = [replace(one, ttft_slo_s=slo_ms / 1000) for one in prompts(count, seed + 1, tokens - 50, tokens)]
    asked = [replace(one, index=len(warm) + n, at_s=start_s, keys=_own(one, n)) for n, one in enumerate(many)]
    return serve(config, [*warm, *asked])


def crowd(count: int = 1000, seed: int = 0, *, prefills: int = 2, decodes: int = 2, slo_ms: float = 300.0) -> Ran:
    """`count` clients, twice as many a second as can be served in time."""
    config = fleet(prefills, decodes, retries=8, seed=seed)
    source = random.Random(f"crowd:{seed}")
    warm = list(arrivals([(4.0, 15.0)], seed, low=350, high=450))
    each_s = Demo().prefill_s([(400, 0)])
    over_s = count * each_s / prefills / 2
    times = sorted(20.0 + source.random() * over_s for _ in range(count))
    many = [replace(one, ttft_slo_s=slo_ms / 1000) for one in prompts(count, seed + 1, 350, 450)]
    asked = [
        replace(one, index=len(warm) + n, at_s=at, keys=_own(one, n))
        for n, (at, one) in enumerate(zip(times, many, strict=True))
    ]
    return serve(config, [*warm, *asked])


def _own(one: SimRequest, number: int) -> tuple[bytes, ...]:
    return tuple(key((1 << 40) + (number << 20) + n) for n in range(len(one.keys)))


# ── tables ────────────────────────────────────────────────────────────────────────────────────────


def _show_c0(seed: int) -> None:
    print("  fleet  at once | requests %   prompt tokens %  computed %  | decode: requests %  tokens % | P90 TTFT ms")
    for size in (2, 3):
        for in_flight in CONCURRENCY:
            ran = closed(size, size, in_flight, seed)
            a, b, c, d, e = shares(ran)
            p90 = 1000 * ran.p90_s()
            print(f"  {size}P {size}D  {in_flight:7} | {a:12} {b:16} {c:11} | {d:19} {e:9} | {p90:6.0f}")


def _show_sessions(seed: int) -> None:
    print("  fleet  sessions | requests %   prompt tokens %  computed %  | decode: requests %  tokens % | left cached")
    for prefills, decodes, sessions, turns in ((3, 2, 24, 7), (2, 2, 12, 10), (3, 3, 48, 5)):
        ran = paced_sessions(prefills, decodes, sessions, turns, seed)
        a, b, c, d, e = shares(ran)
        name = f"{sessions}x{turns}"
        cached = ran.summary.left_cached
        print(f"  {prefills}P {decodes}D  {name:8} | {a:12} {b:16} {c:11} | {d:19} {e:9} | {cached:.3f}")


def _show_changes(seed: int) -> None:
    print("                         | share: able  meanwhile  later | noticed  back | then |  P90 (without), ms")
    print(
        "  what      load    node |                               | s        s    |      |  TTFT       TBT       | lost"
    )
    for label, phase in (("6/s", OFTEN), ("1/s", SELDOM), ("6/s busy", BUSY)):
        phase = replace(phase, seed=seed)
        plain = undisturbed(phase)
        for what in ("slow", "frozen", "killed", "replaced", "joined", "left") if phase.rate > 1 else ("slow",):
            for name in map(phase.victim, "pd"):
                ran = phase.struck(what, name)
                (found,) = ran.changes
                span = found.from_s, found.until_s
                later = ran.share(name, found.from_s + phase.late_s, found.until_s)
                then = ran.share(name, found.until_s + 15.0)
                times = [1000 * one.p90_s(kind, *span) for kind in ("ttft_s", "mean_tbt_s") for one in (ran, plain)]
                failed = sum(one.outcome != DONE for one in ran.records)
                print(
                    f"  {what:9} {label:8} {name:3} | {found.able:11.2f} {found.share:10.2f} {later:6.2f} | "
                    f"{found.noticed_s:7.1f} {found.back_s:5.1f} | {then:4.2f} | "
                    f"{times[0]:6.0f} ({times[1]:.0f})   {times[2]:6.1f} ({times[3]:.1f}) | {failed}"
                )


def _show_retries(seed: int) -> None:
    print(
        "  clients      | refused  told  right  placed when they came | told/right p10  p50  p90 | served  TTFT P90 s"
    )
    for name, make in (("30 at once", burst), ("60 on 2P 2D", burst_on_two), ("1000 in all", crowd)):
        ran = make(seed=seed)
        s = ran.summary
        refused = sum(bool(one.waits) for one in ran.records)
        p10, p50, p90 = (s.wait_ratio.quantile(q) for q in (0.1, 0.5, 0.9))
        print(
            f"  {name:12} | {refused:7} {s.waits['told']:5} {s.right_share:6.2f} {s.placed_share:22.2f} | "
            f"{p10:14.2f} {p50:5.2f} {p90:5.2f} | {s.outcomes[DONE]:6} {ran.p90_s(from_s=20.0):11.2f}"
        )


def burst_on_two(seed: int = 0) -> Ran:
    """Twice as many, on twice as many instances."""
    return burst(60, seed, prefills=2, decodes=2)


SHOWN: dict[str, tuple[str, Callable[[int], None]]] = {
    "c0": ("C0, closed loops on equal instances: shares of each", _show_c0),
    "sessions": ("C0, paced sessions", _show_sessions),
    "c4": ("C4, an instance that changes: its share, when that is noticed, what it costs", _show_changes),
    "c2": ("C2, clients that obey Retry-After", _show_retries),
}


def main() -> int:
    """Tables on standard output."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.sim.scenarios", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHOWN)}; by default all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.names or SHOWN:
        if name not in SHOWN:
            print(f"scenario={name!r}: choose of {', '.join(SHOWN)}", file=sys.stderr)
            return 2
        title, show = SHOWN[name]
        began = time.process_time()
        print(f"{title}")
        show(options.seed)
        print(f"  ({time.process_time() - began:.1f} s of CPU)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
