"""What three tenants get of prefill, with and without fairness between them (docs/operate/quotas.md).

    greedy   --greedy connections, long prompts
    many     --many connections, short prompts
    modest   one short prompt at a time, with pauses

No two prompts share a block. Live: two meshes of one prefill and one decode instance, which differ in
`tenant_fairness` alone, are loaded in turns; tokens are those of prompts whose first token came within a turn.
Simulated: requests of such tenants at fixed rates, more than the instance can take, on the hardware of the other
simulations. Once more with admission and a TTFT SLO of SLO_S, where `greedy` and `modest` send prompts of one size:
size does not bring the modest one forward.

    python -m benchmarks.tenant_shares --rounds 2 --turn-s 10 --json benchmarks/results/tenant_shares.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks import progress
from benchmarks.paper_setup import Case, config_of, read
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.sim.report.records import DONE, Record
from kvmesh.sim.run import run
from kvmesh.sim.workloads.workload import SimRequest, key

ROOT = Path(__file__).resolve().parents[1]
TENANTS = ("greedy", "many", "modest")
PROMPTS = {"greedy": 1500, "many": 100, "modest": 100}
PAUSE_S = 0.25
WARM_S = 2.0  # of each turn, not counted
KEY = "sk-tenant-{}-000000000000"
SIM_PROMPTS = {"greedy": 16_384, "many": 1024, "modest": 1024}
SIM_RATES = {"greedy": 0.25, "many": 4.0, "modest": 0.3}  # requests a second
ADMITTED_PROMPTS = {"greedy": 8192, "many": 1024, "modest": 8192}
ADMITTED_RATES = {"greedy": 2.0, "many": 0.5, "modest": 0.1}
SLO_S = 10.0
SIM_S, SIM_WARM_S = 120.0, 30.0


@dataclasses.dataclass
class Tally:
    """What one tenant got: prompt tokens computed, seconds to the first token of each request, refusals."""

    tokens: int = 0
    ttft_s: list[float] = dataclasses.field(default_factory=list)
    refused: int = 0


Tallies = dict[str, Tally]


def figures(tallies: Tallies) -> dict[str, Any]:
    """Of each tenant: its share of the tokens, and how long it waited."""
    whole = sum(tally.tokens for tally in tallies.values())
    found = {}
    for who in TENANTS:
        tally = tallies[who]
        times = sorted(tally.ttft_s)
        found[who] = {
            "share": tally.tokens / max(1, whole),
            "tokens": tally.tokens,
            "requests": len(times),
            "refused": tally.refused,
            "ttft_p50_ms": 1000 * statistics.median(times) if times else None,
            "ttft_p99_ms": 1000 * times[min(len(times) - 1, int(0.99 * len(times)))] if times else None,
        }
    return found


# ── live ──────────────────────────────────────────────────────────────────────────────────────────


async def client(url: str, model: str, who: str, tallies: Tallies, counted: tuple[float, float], seed: int) -> None:
    """Asks until the turn is over."""
    rng, headers = random.Random(f"{who}{seed}{time.time()}"), {"authorization": f"Bearer {KEY.format(who)}"}
    async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as http:
        while time.perf_counter() < counted[1]:
            prompt = [rng.randrange(20, 250) for _ in range(PROMPTS[who])]
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
            start = time.perf_counter()
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code == 429:
                    tallies[who].refused += counted[0] <= start
                    await asyncio.sleep(PAUSE_S)
                    continue
                answer.raise_for_status()
                first = 0.0
                async for line in answer.aiter_lines():
                    first = first or (time.perf_counter() if line.startswith("data: {") else 0.0)
            if counted[0] <= first <= counted[1]:
                tallies[who].tokens += len(prompt)
                tallies[who].ttft_s.append(first - start)
            if who == "modest":
                await asyncio.sleep(PAUSE_S)


async def turn(url: str, model: str, options: argparse.Namespace, tallies: Tallies) -> None:
    """All tenants at once."""
    now = time.perf_counter()
    counted = now + WARM_S, now + WARM_S + options.turn_s
    connections = {"greedy": options.greedy, "many": options.many, "modest": 1}
    async with asyncio.timeout(options.turn_s + 120), asyncio.TaskGroup() as group:
        for who, count in connections.items():
            for n in range(count):
                group.create_task(client(url, model, who, tallies, counted, n))


@contextlib.contextmanager
def mesh_of(fair: bool) -> Iterator[tuple[str, str]]:
    """Yields the URL and the model's name of a running mesh."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        digests = {who: hashlib.sha256(KEY.format(who).encode()).hexdigest() for who in TENANTS}
        keys.write_text("".join(f'[[key]]\nname = "{who}"\nsha256 = "{one}"\n' for who, one in digests.items()))
        settings = MeshSettings(
            model=str(ROOT / "examples" / "demo-model"), http_port=0, grpc_port=0, run_dir=folder, log_level="warning",
            api_keys=str(keys), flags={"prefill": {"tenant_fairness": fair}},
        )  # fmt: skip
        with Mesh(settings) as mesh:
            mesh.wait_ready(180)
            with httpx.Client(base_url=mesh.url, timeout=10) as http:
                while http.get("/ready").status_code != 200:
                    time.sleep(0.1)
            yield mesh.url, settings.model_name


def live(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of both meshes."""
    tallies: dict[bool, Tallies] = {fair: defaultdict(Tally) for fair in (False, True)}
    with mesh_of(False) as plain, mesh_of(True) as fair:
        for n in range(2 * options.rounds):
            which = (n + n // 2) % 2 == 1  # plain, fair, fair, plain, ...
            progress.tell(f"turn {n + 1}/{2 * options.rounds}")
            url, model = fair if which else plain
            asyncio.run(turn(url, model, options, tallies[which]))
    progress.tell("")
    return {name(which): figures(one) for which, one in tallies.items()}


# ── simulated ─────────────────────────────────────────────────────────────────────────────────────


def requests(block: int, seed: int, prompts: dict[str, int], rates: dict[str, float]) -> Iterator[SimRequest]:
    """Yields the requests of all tenants, by chance at fixed rates."""
    rng, arrivals, blocks = random.Random(seed), list[tuple[float, str]](), 0
    for who, rate in rates.items():
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(rate)) < SIM_S:
            arrivals.append((at_s, who))
    for index, (at_s, who) in enumerate(sorted(arrivals)):
        keys = tuple(key(blocks + n + 1) for n in range(prompts[who] // block))
        blocks += len(keys)
        yield SimRequest(index, at_s, prompts[who], 2, keys, tenant=who)


def simulated(seed: int, *, admitted: bool = False) -> dict[str, Any]:
    """Figures of one prefill and one decode instance, in virtual time; `admitted`: under the SLO."""
    found = {}
    load = (ADMITTED_PROMPTS, ADMITTED_RATES) if admitted else (SIM_PROMPTS, SIM_RATES)
    for fair in (False, True):
        config = config_of(read(), Case(prefill=1, decode=1, admission="predicted" if admitted else "off"))
        if admitted:
            config = dataclasses.replace(config, conductor=dataclasses.replace(config.conductor, slo_ttft_s=SLO_S))
        config = dataclasses.replace(config, tenant_fairness=fair)
        records: list[Record] = []
        run(config, requests(config.block_tokens, seed, *load), sink=records.append)
        tallies: Tallies = defaultdict(Tally)
        for one in records:
            tally = tallies[one.tenant]
            if one.outcome == DONE and SIM_WARM_S <= one.prefill_end_s <= SIM_S:
                tally.tokens += one.input_tokens - one.cached_tokens
            if one.at_s >= SIM_WARM_S:
                tally.refused += one.outcome != DONE
                tally.ttft_s += [one.ttft_s] if one.outcome == DONE else []
        found[name(fair)] = figures(tallies)
    return found


# ── both ──────────────────────────────────────────────────────────────────────────────────────────


def name(fair: bool) -> str:
    """Returns what a run is called."""
    return "fair" if fair else "as they come"


def show(title: str, found: dict[str, Any]) -> None:
    """Prints a table."""
    print(f"{title}\n| tenant | order | share of tokens | requests | refused | TTFT p50 | p99 |\n|{'---|' * 7}")
    for who in TENANTS:
        for order, one in found.items():
            row = one[who]
            times = [f"{row[k]:,.0f} ms" if row[k] is not None else "" for k in ("ttft_p50_ms", "ttft_p99_ms")]
            cells = [who, order, f"{row['share']:.0%}", f"{row['requests']:,}", f"{row['refused']:,}", *times]
            print(f"| {' | '.join(cells)} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each mesh")
    parser.add_argument("--turn-s", type=float, default=10.0)
    parser.add_argument("--greedy", type=int, default=12, help="connections")
    parser.add_argument("--many", type=int, default=12, help="connections")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-live", action="store_true")
    parser.add_argument("--json", default="", help="also write the results here")
    options = parser.parse_args()
    told: dict[str, Any] = {"machine": platform.machine(), "cpus": os.cpu_count(), "args": vars(options)}
    told["simulated"] = simulated(options.seed)
    show("Simulated", told["simulated"])
    told["admitted"] = simulated(options.seed, admitted=True)
    show(f"Simulated, TTFT SLO {SLO_S:g} s", told["admitted"])
    if not options.no_live:
        told["live"] = live(options)
        show("Live", told["live"])
    if options.json:
        Path(options.json).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
