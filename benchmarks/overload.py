"""Overload of a live mesh: what comes of requests at up to three times what it can take, by mode of admission.

One mesh for each mode (`kvmesh serve conductor --admission`), all up all the time, those whose turn it is not idle;
every rate goes to all of them, one after the other in random order, with the same requests at the same moments. Loads
are open: Poisson arrivals that wait for nobody, prompts that nobody has sent before (each run has a salt of its own, so
that no cache helps), lengths uniform.

*Capacity* is what the mesh without admission answers per second at most, however late, while the rate of an open load
rises step by step (at even distances). *SLO*: TTFT within `--ttft-slack` times, and TBT (mean of the longest tenth of
a request's token intervals) within `--tbt-slack` times what the p90 is of requests that come one by one; every request
asks for it.
*Goodput*: requests per second whose TTFT and TBT were both within the SLO, as this client saw them. Times at which
queues still find their length (`--lead`) do not count. When the last request of a run has been sent, those that have
missed their TTFT are cut: nobody waits for them.

That refused requests cost no prefill is counted at the instances: tokens that prefill has computed, less the prompts
of those that were taken. *Wasted* is what of them was computed for requests that missed the SLO.

In the second part a burst of three times the capacity meets clients that honour Retry-After.

    python -m benchmarks.overload                          # about 8 minutes on two cores
    python -m benchmarks.overload --quick
    python -m benchmarks.overload --json benchmarks/results/overload.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import progress
from benchmarks.equal_cores import make_model
from benchmarks.overload_client import Clients, Seen, waited_s
from benchmarks.overload_load import Run, Shape, Workload, offer, told
from benchmarks.overload_show import show, show_retries
from kvmesh.cli.load import target
from kvmesh.cli.load.report import LoadSlo, tbt_s
from kvmesh.quantiles import quantile
from tests.support.mesh.harness import Running, running_mesh

CONTEXT = 2048
MODES = ("predicted", "early", "baseline", "off")
STEP = 1.25  # from one rate of the ramp to the next
ENOUGH = 0.85  # of what is offered: what answers less is at its capacity
Told = dict[str, Any]


@dataclass(frozen=True)
class Site:
    """One mesh and its clients."""

    running: Running
    clients: Clients


class Bench:
    """All meshes, and what is sent to them."""

    def __init__(self, sites: dict[str, Site], workload: Workload, args: argparse.Namespace) -> None:
        self.sites, self.workload, self._args = sites, workload, args
        self._rng = random.Random(args.seed)

    async def warm(self) -> None:
        """Threads, connections, and models of what work takes: some one by one, some at once, some quickly."""
        for name, site in self.sites.items():
            progress.tell(f"warming up: {name}")
            await self._one_by_one(site, 6)
            times = [0.02 * n for n in range(24)]
            await offer(site.running, site.clients, self.workload.asks(times, salt(), LoadSlo()), LoadSlo(), 1.0, 0.0)

    async def unloaded(self, count: int) -> list[Seen]:
        """One request at a time, at the mesh of the first mode."""
        progress.tell("one by one")
        return await self._one_by_one(next(iter(self.sites.values())), count)

    async def _one_by_one(self, site: Site, count: int) -> list[Seen]:
        found = []
        for ask in self.workload.asks([0.0] * count, salt(), LoadSlo()):
            found += await site.clients.run([ask])
        return found

    async def capacity(self, first: float, seconds: float) -> tuple[float, list[tuple[float, float]]]:
        """Answers a second at most, and (offered, answered) of each step. Of the last mode, which refuses least; at
        even distances, as chance has no part in it. Two steps in a row that bring no more end the ramp."""
        site, rate, steps = list(self.sites.values())[-1], first, list[tuple[float, float]]()
        while sum(answered < ENOUGH * offered for offered, answered in steps[-2:]) < 2:
            progress.tell(f"ramp: {rate:.1f} requests/s")
            times = [n / rate for n in range(round(rate * seconds))]
            started = time.monotonic()
            seen = await site.clients.run(self.workload.asks(times, salt(), LoadSlo()), lambda seen, first: True)
            await site.running.settled()
            ends = [one.sent_at + one.total_s - started for one in seen if one.ok]
            lead_s = seconds / 3
            steps.append((rate, sum(lead_s <= end <= seconds for end in ends) / (seconds - lead_s)))
            rate *= STEP
        return max(answered for _, answered in steps), steps

    async def point(self, share: float, rate: float, slo: LoadSlo) -> dict[str, list[Run]]:
        """This rate at every mesh, `--rounds` times."""
        args, runs = self._args, {name: list[Run]() for name in self.sites}
        for n in range(args.rounds):
            times = self.workload.poisson(f"{share}:{n}", rate, args.seconds)
            for name in self._rng.sample(list(runs), len(runs)):
                progress.tell(f"{share:g} x capacity, round {n + 1}/{args.rounds}: {name}")
                site, asks = self.sites[name], self.workload.asks(times, salt(), slo)
                runs[name].append(await offer(site.running, site.clients, asks, slo, args.seconds, args.lead))
        return runs

    async def retries(self, rate: float, seconds: float, slo: LoadSlo) -> list[Seen]:
        """A burst at the mesh of the first mode, by clients that come again when they were told to."""
        progress.tell("clients that honour Retry-After")
        site = next(iter(self.sites.values()))
        again = Clients(site.running.http, retries=True)
        times = self.workload.poisson("burst", rate, seconds)
        try:
            return await again.run(self.workload.asks(times, salt(), slo))
        finally:
            await again.close()
            await site.running.settled()


def salt() -> str:
    """No other run has it."""
    return secrets.token_hex(8)


def slo_of(alone: Sequence[Seen], ttft_slack: float, tbt_slack: float) -> tuple[LoadSlo, Told]:
    """Whole milliseconds, and what they were made of."""
    ttfts = sorted(one.ttft_s * 1000 for one in alone)
    tbts = sorted(tbt * 1000 for one in alone if (tbt := tbt_s(one)) is not None)
    ttft_ms, tbt_ms = quantile(ttfts, 0.9), quantile(tbts, 0.9)
    slo = LoadSlo(float(round(ttft_slack * ttft_ms)), float(round(tbt_slack * tbt_ms)))
    return slo, {"ttft_ms_p90": ttft_ms, "tbt_ms_p90": tbt_ms, "requests": len(alone)}


def served_again(seen: Sequence[Seen], slo: LoadSlo) -> Told:
    """Of clients that come again."""
    ok = [one for one in seen if one.ok]
    waits = sorted(map(waited_s, ok))
    return {
        "sent": len(seen),
        "answered": len(ok),
        "kept_slo_of_answered": sum(map(slo.kept, ok)) / max(1, len(ok)),
        "attempts": [sum(one.attempts == n for one in ok) for n in range(1, 1 + max(one.attempts for one in seen))],
        "attempts_mean": statistics.mean(one.attempts for one in seen),
        "waited_s": [quantile(waits, p) for p in (0.5, 0.9, 1.0)] if waits else None,
    }


async def run(args: argparse.Namespace, home: Path) -> Told:
    args.model = args.model or make_model(home / "model", layers=args.layers, hidden=args.hidden, context=CONTEXT)
    async with AsyncExitStack() as stack:
        progress.tell("starting a mesh for each mode")
        meshes = await asyncio.gather(
            *(stack.enter_async_context(mesh_of(mode, args, home / mode)) for mode in args.modes)
        )
        sites = {m: Site(one, Clients(one.http)) for m, one in zip(args.modes, meshes, strict=True)}
        there = target.find(meshes[0].http, None, None, None, None)
        shape = Shape(tuple(args.prompt_tokens), tuple(args.answer_tokens))
        bench = Bench(sites, Workload(there.model, there.vocab_size, shape, args.seed), args)
        await bench.warm()
        alone = await bench.unloaded(args.calibration)
        slo, unloaded = slo_of(alone, args.ttft_slack, args.tbt_slack)
        first = 0.8 / statistics.mean(one.ttft_s for one in alone)
        capacity, ramp = await bench.capacity(first, args.ramp_seconds)
        progress.tell("")
        print(f"unloaded p90: TTFT {unloaded['ttft_ms_p90']:.0f} ms, TBT {unloaded['tbt_ms_p90']:.1f} ms; ", end="")
        print(
            f"SLO: TTFT {slo.ttft_ms:.0f} ms, TBT {slo.tbt_ms:.0f} ms; capacity {capacity:.1f} requests/s", flush=True
        )
        points = []
        for share in args.shares:
            runs = await bench.point(share, share * capacity, slo)
            points.append({"share": share, **{name: told(some, slo) for name, some in runs.items()}})
        burst = await bench.retries(args.shares[-1] * capacity, args.seconds / 2, slo)
        for site in sites.values():
            await site.clients.close()
    progress.tell("")
    found = {
        "unloaded": unloaded,
        "slo_ms": {"ttft": slo.ttft_ms, "tbt": slo.tbt_ms},
        "capacity_per_s": capacity,
        "ramp": ramp,
        "points": points,
        "retries": served_again(burst, slo),
    }
    show(points, args.modes)
    show_retries(found["retries"])
    return found


def mesh_of(mode: str, args: argparse.Namespace, home: Path) -> Any:
    """One thread for each instance."""
    flags: dict[str, dict[str, Any]] = {
        "conductor": {"admission": mode},
        "*": {"num_pages": args.pages, "num_extents": args.pages},
    }
    return running_mesh(
        args.model,
        home,
        prefill=args.prefill,
        decode=args.decode,
        block_tokens=16,
        threads=1,
        dtype="bfloat16",
        memory_mb=256,
        flags=flags,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder; by default a random Llama of these sizes:")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--pages", type=int, default=2048, help="and extents, of each instance, 16 tokens each")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="the last one tells capacity")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0, 3.0], help="of the capacity")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[256, 1024])
    parser.add_argument("--answer-tokens", type=int, nargs=2, default=[16, 64])
    parser.add_argument("--seconds", type=float, default=7.0, help="of each run")
    parser.add_argument("--lead", type=float, default=2.0, help="of them, that do not count")
    parser.add_argument("--ramp-seconds", type=float, default=6.0, help="of each step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--calibration", type=int, default=32, help="requests one by one, that tell the SLO")
    parser.add_argument("--ttft-slack", type=float, default=4.0)
    parser.add_argument("--tbt-slack", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two modes, two rates, once")
    parser.add_argument("--json", default="", help="also write the results here")
    args = parser.parse_args()
    if args.quick:
        args.modes, args.shares, args.rounds = ["predicted", "off"], [1.0, 3.0], 1
        args.ramp_seconds, args.calibration, args.seconds, args.lead = 5.0, 16, 8.0, 2.0
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(run(args, Path(folder)))
    if args.json:
        said = {"machine": platform.machine(), "cpus": os.cpu_count(), "args": vars(args) | {"model": args.model.name}}
        Path(args.json).write_text(json.dumps(said | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
