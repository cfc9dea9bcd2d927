"""Slices of a trace on a real mesh of 2 prefill and 2 decode instances, for `benchmarks.fidelity`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import orjson
import psutil

from benchmarks.overload_client import Ask, Clients, Seen
from kvmesh.cli.load import target
from kvmesh.cli.load.load import LoadOutcome
from kvmesh.kvcache.keys import Namespace, chain, pack_tokens, split
from kvmesh.sim.workloads import trace
from kvmesh.sim.workloads.workload import SimRequest
from tests.support.mesh.harness import Running, running_mesh

BLOCK_TOKENS = 16
PAGES = 4096  # and extents, of each instance
WARM_UP = 24  # requests, before what is measured
WARM_UP_EVERY_S = 0.15
NEVER_MS = 600_000  # SLOs: nothing is refused
_ANY = Namespace(fingerprint="fidelity", kv_dtype="")


@dataclass(frozen=True)
class Slice:
    """Requests of a trace as they are sent: `times` in seconds from the first one, prompts as token ids."""

    name: str
    made: tuple[trace.Made, ...]
    times: tuple[float, ...]
    prompts: tuple[tuple[int, ...], ...]

    def requests(self) -> list[SimRequest]:
        """The same for a simulation: blocks that are equal have equal keys."""
        found = []
        for index, (made, at_s, prompt) in enumerate(zip(self.made, self.times, self.prompts, strict=True)):
            keys = tuple(split(chain(_ANY, pack_tokens(prompt), BLOCK_TOKENS)))
            found.append(SimRequest(index, at_s, len(prompt), made.output_tokens, keys))
        return found


def slices(
    path: Path, requests: int, rate: float, *, scale: Fraction, max_output: int, context: int, vocab: int
) -> tuple[Slice, Slice]:
    """The first `requests` of a trace, and as many that follow: each at the trace's own times, stretched so that `rate`
    requests a second arrive."""
    shape = trace.TraceShape(scale=scale, context_tokens=context, max_output=max_output)
    made = trace.fit(trace.between(trace.read(path), count=2 * requests), shape).made
    if len(made) < 2 * requests:
        raise SystemExit(f"requests={requests}: {path} holds {len(made)} that fit, two slices need twice as many")
    maker = trace.TokenMaker(vocab)

    def one(name: str, part: Sequence[trace.Made]) -> Slice:
        first, last = part[0].request.at_ms, part[-1].request.at_ms
        stretch = (len(part) - 1) / rate / (last - first)
        times = tuple((made.request.at_ms - first) * stretch for made in part)
        return Slice(name, tuple(part), times, tuple(tuple(maker.prompt(made, shape.block)) for made in part))

    return one("A", made[:requests]), one("B", made[requests:])


@dataclass(frozen=True)
class Live:
    """One run. `began_s`: on the clock of the decision log. `others`: cores that neither the mesh nor the client
    used, on average; what is above a few hundredths has disturbed it."""

    outcomes: tuple[LoadOutcome, ...]
    log: Path
    began_s: float
    others: float


async def serve(model: Path, part: Slice, home: Path) -> Live:
    """A mesh is started, warmed up with prompts that share nothing with the slice's, and served the slice; then it is
    stopped. So its caches hold nothing of the slice at first."""
    log = home / "decisions.jsonl"
    flags = {"*": {"num_pages": PAGES, "num_extents": PAGES}, "conductor": {"decision_log": str(log)}}
    async with running_mesh(
        model, home / "mesh", prefill=2, decode=2, block_tokens=BLOCK_TOKENS, flags=flags,
        slo_ttft_ms=NEVER_MS, slo_tbt_ms=NEVER_MS, log_level="warning",
    ) as running:  # fmt: skip
        name = target.find(running.http, None, None, None, None).model
        clients = Clients(running.http)
        try:
            few = [n * WARM_UP_EVERY_S for n in range(min(WARM_UP, len(part.made)))]
            await clients.run(_asks(part, few, name, "warm-up"))
            await running.settled()
            asks = _asks(part, part.times, name, "measured")
            own, all_ = _cpu_s(running), _busy_s()
            began_s = time.monotonic()
            outcomes = await clients.run(asks)
            took_s = time.monotonic() - began_s
            others = (_busy_s() - all_ - _cpu_s(running) + own) / took_s
            await running.settled()
        finally:
            await clients.close()
    failed = [one for one in outcomes if not one.ok]
    if failed:
        raise SystemExit(f"{part.name}: {len(failed)} requests failed: {failed[0].code}: {failed[0].message}")
    if silent := [one for one in outcomes if not one.ttft_s]:  # others may have tokens that came together
        raise SystemExit(f"{part.name}: {len(silent)} answers came without a token's time")
    return Live(tuple(outcomes), log, began_s, max(0.0, others))


def _busy_s() -> float:
    """Seconds of all cores of this machine that were used so far, whoever used them."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice + times.irq + times.softirq)


def _cpu_s(running: Running) -> float:
    """Likewise, by the mesh and this process."""
    used = [psutil.Process(pid).cpu_times() for pid in (*running.all_pids(), os.getpid())]
    return float(sum(one.user + one.system for one in used))


def _asks(part: Slice, times: Sequence[float], model: str, salt: str) -> list[Ask]:
    """One at each time; their bodies are written here, not while it is measured."""
    found = []
    for index, (at_s, made, prompt) in enumerate(zip(times, part.made, part.prompts, strict=False)):
        body = {
            "model": model, "prompt": prompt, "max_tokens": made.output_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt,
            "logprobs": 0,  # so that a token that reads as no text is told at its time, too
        }  # fmt: skip
        found.append(Ask(index, at_s, len(prompt), made.output_tokens, orjson.dumps(body)))
    return found


def live(model: Path, part: Slice, home: Path) -> Live:
    """`serve`, from outside of a loop; what `home` holds of an earlier run is taken instead."""
    kept = home / "run.json"
    if kept.exists():
        told = orjson.loads(kept.read_bytes())
        return Live(tuple(Seen(**one) for one in told.pop("outcomes")), home / "decisions.jsonl", **told)
    if home.exists():
        raise SystemExit(f"--keep: {home.name} in it holds no whole run: remove it")
    home.mkdir(parents=True)
    run = asyncio.run(serve(model, part, home))
    kept.write_bytes(orjson.dumps({"outcomes": run.outcomes, "began_s": run.began_s, "others": run.others}))
    return run
