"""What is offered to a mesh in `benchmarks.overload`, and what one run of it came to."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import psutil

from benchmarks.overload_client import CUT, Ask, Clients, Seen
from kvmesh.cli.load.report import LoadSlo
from kvmesh.quantiles import quantile
from kvmesh.sim.workloads.trace import TokenMaker
from tests.support.mesh.harness import Running

CUT_S = 20.0  # after its first token a request is given up
COMPUTED = "kvmesh_prefill_computed_tokens_total"
ENDED = "kvmesh_prefill_requests_total"


@dataclass(frozen=True)
class Shape:
    """Tokens of prompts and of answers, uniform between both, which are included."""

    prompts: tuple[int, int]
    answers: tuple[int, int]


class Workload:
    """Requests of one seed: every figure of the i-th depends on (seed, i) alone, so all modes get the same ones."""

    def __init__(self, model: str, vocab: int, shape: Shape, seed: int) -> None:
        self._model, self._shape, self._seed = model, shape, seed
        self._maker = TokenMaker(vocab, seed)
        self._made: list[tuple[bytes, int, int]] = []  # prompt as JSON, its tokens, those of the answer

    def asks(self, times: Sequence[float], salt: str, slo: LoadSlo) -> list[Ask]:
        """One request at each time. `salt`: shares no block with runs of another one."""
        found = []
        extra = {"ttft_slo_ms": int(slo.ttft_ms or 0), "tbt_slo_ms": int(slo.tbt_ms or 0)} if slo else {}
        for index, at_s in enumerate(times):
            prompt, tokens, answer = self._request(index)
            body = {
                "model": self._model, "max_tokens": answer, "temperature": 0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}, "cache_salt": salt, **extra,
                "logprobs": 0,  # so that a token that reads as no text is told at its time, too
            }  # fmt: skip
            written = orjson.dumps(body)[:-1] + b',"prompt":' + prompt + b"}"
            found.append(Ask(index, at_s, tokens, answer, written))
        return found

    def poisson(self, name: str, rate: float, seconds: float) -> list[float]:
        """Arrivals: so many a second in the mean."""
        source, at_s, times = random.Random(f"{self._seed}:{name}"), 0.0, []
        while (at_s := at_s + source.expovariate(rate)) < seconds:
            times.append(at_s)
        return times

    def _request(self, index: int) -> tuple[bytes, int, int]:
        while len(self._made) <= index:
            i = len(self._made)
            source = random.Random(f"{self._seed}:{i}")
            tokens, answer = source.randint(*self._shape.prompts), source.randint(*self._shape.answers)
            self._made.append((orjson.dumps(self._maker.noise(f"prompt:{i}", tokens)), tokens, answer))
        return self._made[index]


@dataclass(slots=True)
class Run:
    """One load on one mesh. `seconds`: of arrivals, of which those after the first `lead_s` count."""

    seconds: float
    lead_s: float
    seen: list[Seen] = field(default_factory=list)
    computed_tokens: int = 0  # by prefill, as its own counter says
    prefilled: int = 0  # handoffs that prefill has ended
    cpu_s: dict[str, float] = field(default_factory=dict)  # by service, and of this client
    wall_s: float = 0.0

    @property
    def counted(self) -> list[Seen]:
        """Those that arrived when the queues had found their length."""
        return [one for one in self.seen if one.sent_s >= self.lead_s]

    @property
    def taken(self) -> list[Seen]:
        """Not refused; cut ones may or may not have been computed."""
        return [one for one in self.seen if not one.refused]

    @property
    def for_refused(self) -> int:
        """Prompt tokens that were computed and belong to no request that was taken."""
        return max(0, self.computed_tokens - sum(one.prompt_tokens - one.cached_tokens for one in self.taken))

    @property
    def unknown(self) -> list[Seen]:
        """Neither answered nor refused nor cut."""
        return [one for one in self.seen if not one.ok and not one.refused and one.code != CUT]


async def offer(
    running: Running, clients: Clients, asks: Sequence[Ask], slo: LoadSlo, seconds: float, lead_s: float
) -> Run:
    """Send them all, wait until nothing is left of them in the mesh. Requests that can be good no more are cut when
    the last has been sent: nobody waits for what is late."""

    def hopeless(seen: Seen, first_token_at: float | None) -> bool:
        age_s = time.monotonic() - seen.sent_at
        if first_token_at is None:
            return age_s * 1000 > (slo.ttft_ms or 1e9)
        late = (first_token_at - seen.sent_at) * 1000 > (slo.ttft_ms or 1e9)
        return late or time.monotonic() - first_token_at > CUT_S

    run = Run(seconds, lead_s)
    before, started = await _counters(running), time.monotonic()
    cpu = cpu_s(running)
    run.seen = await clients.run(asks, hopeless if slo else None)
    run.wall_s = time.monotonic() - started
    run.cpu_s = {name: seconds - cpu[name] for name, seconds in cpu_s(running).items()}
    await running.settled()
    after = await _counters(running)
    run.computed_tokens, run.prefilled = (round(after[name] - before[name]) for name in (COMPUTED, ENDED))
    return run


async def _counters(running: Running) -> dict[str, float]:
    """Of all prefill instances together, all labels together."""
    found = dict.fromkeys((COMPUTED, ENDED), 0.0)
    async with httpx.AsyncClient(trust_env=False) as http:
        for name, process in running.mesh.processes.items():
            if not name.startswith(("prefill", "coupled")):
                continue
            for line in (await http.get(f"http://{process.spec.metrics}/metrics")).text.splitlines():
                metric = line.partition("{")[0].partition(" ")[0]
                if metric in found:
                    found[metric] += float(line.rpartition(" ")[2])
    return found


def cpu_s(running: Running) -> dict[str, float]:
    """Seconds of all processes of each service, and of this one as "client"."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    found = {"client": own.ru_utime + own.ru_stime}
    for name, process in running.mesh.processes.items():
        for pid in (process.pid, *running.rank_pids(name)):
            times = psutil.Process(pid).cpu_times()
            found[process.spec.service] = found.get(process.spec.service, 0.0) + times.user + times.system
    return found


def told(runs: Sequence[Run], slo: LoadSlo) -> dict[str, Any]:
    """Figures of one point: all its runs together. Rates are per second of counted arrivals."""
    seconds = sum(run.seconds - run.lead_s for run in runs)
    counted = [one for run in runs for one in run.counted]
    everybody = [one for run in runs for one in run.seen]
    good = [one for one in counted if slo.kept(one)]
    refused = [one for one in counted if one.refused]
    waits = sorted(one.retry_after_s for one in everybody if one.refused)
    ttfts = sorted(one.ttft_s * 1000 for one in counted if one.ok)
    computed = sum(run.computed_tokens for run in runs)
    useful = sum(one.prompt_tokens - one.cached_tokens for one in everybody if slo.kept(one))
    wall_s = sum(run.wall_s for run in runs)
    return {
        "offered_per_s": len(counted) / seconds,
        "goodput_per_s": len(good) / seconds,
        "goodput_by_run": [sum(map(slo.kept, run.counted)) / (run.seconds - run.lead_s) for run in runs],
        "kept_of_taken": len(good) / max(1, len(counted) - len(refused)),
        "refused_per_s": len(refused) / seconds,
        "retry_after_s": [quantile(waits, p) for p in (0.5, 0.99)] if waits else None,
        "ttft_ms": [quantile(ttfts, p) for p in (0.5, 0.9, 0.99)] if ttfts else None,
        "late_ttft": sum(one.ttft_s * 1000 > (slo.ttft_ms or 1e9) for one in counted if not one.refused),
        "cut": sum(one.code == CUT for one in counted),
        "failed": sum(len(run.unknown) for run in runs),
        "failures": sorted({one.message for run in runs for one in run.unknown})[:3],
        "computed_tokens": computed,
        "tokens_for_refused": sum(run.for_refused for run in runs),
        "wasted": 1 - useful / computed if computed else 0.0,
        "cores": {name: sum(run.cpu_s[name] for run in runs) / wall_s for name in runs[0].cpu_s},
        "sent_late_ms_p99": quantile(sorted(one.late_s * 1000 for one in everybody), 0.99),
    }
