"""What the mesh adds to its own engine: TTFT by stage and CPU per token, beside one process as the floor.

Ours is a whole mesh (gateway, conductor, store master, one prefill, one decode) reached over HTTP; the floor is the
same runner in one process called directly (`LocalEngine`). Both get the same prompts, in one run, round by round in
turn; every prompt is new, so nothing is answered from a prefix cache.

`closed` arrivals keep N requests in flight: the next is sent when one ends (answers of different lengths, so that they
do not march in step). `burst` arrivals send all N at the same moment and wait for the last: the worst case of a queue.

    python -m benchmarks.mesh                         # demo model, 1, 16 and 64 concurrent requests
    python -m benchmarks.mesh --arrivals burst
    python -m benchmarks.mesh --concurrency 1 --rounds 20 --json benchmarks/results/mesh.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks import progress
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.quantiles import quantile

ROOT = Path(__file__).resolve().parents[1]
STAGES = (
    ("gateway", "receive → tokenized, hashed"),
    ("schedule", "asked → placed"),
    ("admit", "decode: received → prefill asked"),
    ("queue", "prefill: received → first chunk starts"),
    ("prefill", "first chunk → first token"),
    ("stream", "first token sampled → first byte written"),
    ("transfer", "first KV byte posted → last acknowledged"),
    ("exposed", "first token → KV complete at decode"),
    ("load", "landing → device pages"),
    ("first_decode", "joined the batch → second token"),
)


@dataclass
class Sample:
    """One request. Times in ms from when it was sent."""

    ttft: float
    done: float
    tokens: int
    stages: dict[str, float] = field(default_factory=dict)


Work = tuple[list[int], int]  # prompt, max_tokens


@dataclass
class Round:
    samples: list[Sample]
    wall_s: float
    cpu_s: dict[str, float]  # by service
    steady: list[Sample] = field(default_factory=list)  # those whose TTFT counts


# ── the floor: the engine in one process ──────────────────────────────────────────────────────────


def floor_process(pipe: Connection, model: str, pages: int, threads: int) -> None:
    """Serves `(work, concurrency)` over the pipe with (ttft_ms, done_ms) for each, until None."""
    import torch

    from kvmesh.testing.local_engine import GenerateParams, LocalEngine

    torch.set_num_threads(threads)
    engine = LocalEngine(model, num_pages=pages, max_batch=64)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        work, concurrency = order
        waiting = list(reversed(work))
        started: dict[int, int] = {}
        first: dict[int, float] = {}
        done: dict[int, float] = {}
        while waiting or engine.busy:
            while waiting and len(started) - len(done) < concurrency:
                prompt, max_tokens = waiting.pop()
                now = time.monotonic_ns()
                started[engine.submit(prompt, GenerateParams(max_tokens=max_tokens))] = now
            for token in engine.step():
                since = (token.at_ns - started[token.handle]) / 1e6
                first.setdefault(token.handle, since)
                if token.finish:
                    done[token.handle] = since
        pipe.send([(first[handle], done[handle]) for handle in started])


class Floor:
    def __init__(self, model: str, pages: int, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=floor_process, args=(theirs, model, pages, threads), daemon=True)
        self._process.start()
        assert self._pipe.recv() == "ready"

    def run(self, work: list[Work], concurrency: int) -> Round:
        before, start = psutil.Process(self._process.pid).cpu_times(), time.monotonic()
        self._pipe.send((work, concurrency))
        answers = self._pipe.recv()
        wall = time.monotonic() - start
        after = psutil.Process(self._process.pid).cpu_times()
        cpu = after.user + after.system - before.user - before.system
        samples = [Sample(a, b, n) for (a, b), (_, n) in zip(answers, work, strict=True)]
        return Round(samples, wall, {"engine": cpu})

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(10)


# ── ours: HTTP to the gateway ─────────────────────────────────────────────────────────────────────


async def request(host: str, port: int, model: str, prompt: list[int], max_tokens: int) -> Sample:
    """One streamed completion over a plain socket: the client must cost little, it shares the machine."""
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"x-kvmesh-timings: 1\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    start = time.monotonic()
    writer.write(head.encode() + body)
    first = last = 0.0
    timings: dict[str, Any] = {}
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {(await reader.read())[:500]!r}")
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        last = time.monotonic()
        first = first or last
        if b'"kvmesh"' in line:
            timings = json.loads(line[6:]).get("kvmesh") or timings
        elif b'"error"' in line[:20]:
            raise RuntimeError(line.decode())
    writer.close()
    return Sample((first - start) * 1e3, (last - start) * 1e3, max_tokens, stages(timings))


def stages(timings: dict[str, Any]) -> dict[str, float]:
    """The gateway's `kvmesh` object to stages in ms."""
    us: dict[str, float] = dict(timings.get("gateway", {}))
    for choice in timings.get("choices", [])[:1]:
        us.update(choice["stages"])
    first = us.get("first_token_us", 0.0)
    before = us.get("admit_us", 0.0) + us.get("queue_us", 0.0) + us.get("prefill_us", 0.0)
    found = {
        "gateway": us.get("tokenize_us", 0.0),
        "schedule": us.get("schedule_us", 0.0),
        "admit": us.get("admit_us", 0.0),
        "queue": us.get("queue_us", 0.0),
        "prefill": us.get("prefill_us", 0.0),
        "stream": max(first - before, 0.0) + us.get("first_write_us", 0.0),
        "transfer": us.get("transfer_us", 0.0),
        "exposed": us.get("exposed_transfer_us", 0.0),
        "load": us.get("load_us", 0.0),
        "first_decode": us.get("first_decode_us", 0.0),
    }
    return {key: value / 1e3 for key, value in found.items()}


def cpu_seconds(mesh: Mesh) -> dict[str, float]:
    """CPU time so far of each service, ranks apart from their fronts."""
    found = {}
    for name, process in mesh.processes.items():
        front = psutil.Process(process.pid)
        times = front.cpu_times()
        found[name] = times.user + times.system
        for child in front.children():
            times = child.cpu_times()
            found[f"{name} rank"] = found.get(f"{name} rank", 0.0) + times.user + times.system
    return found


async def run_mesh(mesh: Mesh, work: list[Work], concurrency: int) -> Round:
    host, port = mesh.url.removeprefix("http://").split(":")
    samples: list[Sample | None] = [None] * len(work)
    left = iter(enumerate(work))

    async def client() -> None:
        for i, (prompt, max_tokens) in left:
            samples[i] = await request(host, int(port), mesh.settings.model_name, prompt, max_tokens)

    before, start = cpu_seconds(mesh), time.monotonic()
    await asyncio.wait_for(asyncio.gather(*(client() for _ in range(concurrency))), 300)
    wall = time.monotonic() - start
    after = cpu_seconds(mesh)
    cpu = {name: after[name] - before.get(name, 0.0) for name in after}
    return Round([s for s in samples if s is not None], wall, cpu)


# ── the run ───────────────────────────────────────────────────────────────────────────────────────


def compare(args: argparse.Namespace, mesh: Mesh, floor: Floor, concurrency: int, rng: random.Random) -> dict[str, Any]:
    ours: list[Round] = []
    base: list[Round] = []
    burst = args.arrivals == "burst"
    count = concurrency if burst else max(5 * concurrency, 24)
    for n in range(args.rounds + 1):
        work = []
        for _ in range(count):
            tokens = args.max_tokens if burst else rng.randint(args.max_tokens // 2, args.max_tokens * 3 // 2)
            work.append(([rng.randrange(20, 250) for _ in range(args.prompt_tokens)], tokens))
        one, two = floor.run(work, concurrency), asyncio.run(run_mesh(mesh, work, concurrency))
        if n:  # the first round warms both
            for r in (one, two):
                r.steady = r.samples if burst else r.samples[concurrency:]  # the first N came all at once
            base.append(one)
            ours.append(two)
        progress.tell(f"{concurrency} concurrent: round {n}/{args.rounds}")
    progress.tell("")
    mesh_ttft = [s.ttft for r in ours for s in r.steady]
    floor_ttft = [s.ttft for r in base for s in r.steady]
    tokens = sum(s.tokens for r in ours for s in r.samples)
    names = sorted({name for r in ours for name in r.cpu_s})
    return {
        "concurrency": concurrency,
        "requests": len(mesh_ttft),
        "floor_ttft_p50_ms": statistics.median(floor_ttft),
        "mesh_ttft_p50_ms": statistics.median(mesh_ttft),
        "added_ttft_p50_ms": statistics.median(mesh_ttft) - statistics.median(floor_ttft),
        "mesh_ttft_p90_ms": quantile(sorted(mesh_ttft), 0.9),
        "floor_ttft_p90_ms": quantile(sorted(floor_ttft), 0.9),
        "mesh_tokens_per_s": tokens / sum(r.wall_s for r in ours),
        "floor_tokens_per_s": tokens / sum(r.wall_s for r in base),
        "stages_p50_ms": {key: statistics.median(s.stages[key] for r in ours for s in r.steady) for key, _ in STAGES},
        "cpu_us_per_token": {name: 1e6 * sum(r.cpu_s.get(name, 0.0) for r in ours) / tokens for name in names},
        "floor_cpu_us_per_token": 1e6 * sum(r.cpu_s["engine"] for r in base) / tokens,
    }


def show(results: list[dict[str, Any]]) -> None:
    columns = [f"{r['concurrency']:>10}" for r in results]
    print(f"{'concurrent requests':<46}" + "".join(columns))

    def row(label: str, values: list[float], unit: str = "ms") -> None:
        print(f"{label + ' ' + unit:<46}" + "".join(f"{v:>10.2f}" for v in values))

    row("floor: TTFT p50, engine in one process,", [r["floor_ttft_p50_ms"] for r in results])
    row("mesh: TTFT p50,", [r["mesh_ttft_p50_ms"] for r in results])
    row("added TTFT p50,", [r["added_ttft_p50_ms"] for r in results])
    row("floor: TTFT p90,", [r["floor_ttft_p90_ms"] for r in results])
    row("mesh: TTFT p90,", [r["mesh_ttft_p90_ms"] for r in results])
    print("by stage, p50")
    for key, what in STAGES:
        row(f"  {key}: {what},", [r["stages_p50_ms"][key] for r in results])
    row("throughput mesh / floor", [r["mesh_tokens_per_s"] / r["floor_tokens_per_s"] for r in results], "×")
    print("CPU per token")
    row("  floor: engine,", [r["floor_cpu_us_per_token"] for r in results], "µs")
    for name in results[0]["cpu_us_per_token"]:
        row(f"  {name},", [r["cpu_us_per_token"].get(name, 0.0) for r in results], "µs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "examples" / "demo-model"))
    parser.add_argument("--concurrency", default="1,16,64", help="comma-separated")
    parser.add_argument("--arrivals", choices=("closed", "burst"), default="closed")
    parser.add_argument("--rounds", type=int, default=4, help="measured rounds")
    parser.add_argument("--prompt-tokens", type=int, default=192)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of each rank and of the floor")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="also write the results here")
    args = parser.parse_args()
    levels = [int(c) for c in args.concurrency.split(",")]
    blocks = -(-(args.prompt_tokens + args.max_tokens) // 64) * max(levels) * 2
    with tempfile.TemporaryDirectory() as run_dir:
        settings = MeshSettings(
            model=args.model, http_port=0, grpc_port=0, run_dir=run_dir, threads=args.threads,
            flags={"*": {"num_pages": blocks, "num_extents": blocks}}, log_level="warning",
        )  # fmt: skip
        with Mesh(settings) as mesh:
            floor = Floor(args.model, blocks, args.threads)
            mesh.wait_ready(180)
            time.sleep(2)  # registration reaches the gateway; not part of what is measured
            rng = random.Random(args.seed)
            results = [compare(args, mesh, floor, c, rng) for c in levels]
            floor.close()
    show(results)
    if args.json:
        told = {**vars(args), "model": Path(args.model).name}
        meta = {"machine": platform.machine(), "cpus": os.cpu_count(), "args": told}
        Path(args.json).write_text(json.dumps({**meta, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
