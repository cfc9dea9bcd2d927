"""The conductor's decisions against what they cannot beat: a plain dict walk, an empty call; and the old way beside it.

    python -m benchmarks.conductor [--quick] [--json benchmarks/results/conductor.json]
    python -m benchmarks.conductor --json benchmarks/results/conductor.json --docs docs/conductor-speed.md

For each number of instances, prompt length and block size one brain is filled (half of the instances prefill, half
decode; conversations that share a system prompt, each held by one or a few of them) and asked, on one core:

    alone       decisions with nothing between them
    flowing     the same, with heartbeats (5 a second an instance, in a time in which --rate decisions come a second)
                and KV events between: instances compute what they were given, seal it, evict as much, and report
    decision    of `flowing`, the time of the decisions themselves; `all` includes what flows
    one by one  every instance is weighed, as it would be without columns and screen
    dict walk   `get` of the same keys in a dict of all of them: no index that looks at each key is faster

`events`: announcements of 64 sealed and 64 removed blocks, and heartbeats, each as fast as one core takes them.
`memory`: of the index, by its own count and as the process grows, for a million blocks.
`gRPC`, `door`: a real conductor and a real store master in processes of their own, asked over gRPC and then through the
conductor's door, as gateways ask it; heartbeats and announcements go by doors in both. Calls come at a stated rate
whether or not earlier ones are answered (so a late answer counts from when its call was due), from several tasks, with
empty calls (Check of grpc.health.v1) between them; client and servers share the cores.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks import conductor_grpc
from benchmarks.conductor_page import filled
from benchmarks.progress import tell
from kvmesh.kvcache.announce import Announcement, snapshot_parts
from kvmesh.kvcache.keys import Keys, split
from kvmesh.loading import LastingHeap
from kvmesh.quantiles import quantile
from kvmesh.rpc.brain_shell import Tick
from kvmesh.services.conductor import domain
from kvmesh.services.conductor.candidates import columns, select, selection
from kvmesh.services.conductor.domain import Blocks, Heartbeat, Load, Member, Placed, PrefillSample, Ref, Register, Role
from kvmesh.services.conductor.settings import Settings
from kvmesh.services.conductor.state import ConductorState

BEATS_PER_S, TICK_S = 5.0, 0.2
SYSTEM_SHARE = 0.05  # of a prompt: what all conversations begin with
HELD_SHARE = 0.75  # of a prompt: what some instance has of it
CAPACITY_TOKENS = 4_000_000
GOAL_PER_S = 1000


@dataclass
class World:
    """One brain, and the instances around it."""

    instances: int
    block: int
    prompt: int
    rng: random.Random
    now: float = 1000.0
    state: ConductorState = field(init=False)
    refs: list[Ref] = field(init=False)
    prompts: list[tuple[bytes, ...]] = field(init=False)

    def __post_init__(self) -> None:
        settings = Settings(slo_ttft_s=1e6, slo_tbt_s=1e6, lease_s=1e6, stall_s=1e9)
        self.state = ConductorState(settings, random.Random(1), self.now)
        half = self.instances // 2
        names = [f"prefill-{i}" for i in range(half)] + [f"decode-{i}" for i in range(self.instances - half)]
        self.refs = [Ref(name, f"{name}:1", 1) for name in names]
        self.half = half
        card = domain.ModelCard("m", "f", self.block, "bf16", 0, 1, (1,), 131_072, 0)
        self.load = Load(free_pages=1 << 20, free_extents=1 << 20)
        for i, ref in enumerate(self.refs):
            role = Role.PREFILL if i < half else Role.DECODE
            self.step(Register(ref, role, f"node-{i // 8}", card, CAPACITY_TOKENS // self.block, 256))
            self.step(Heartbeat(ref, 1, True, self.load))
        self.step(domain.MembersReset(1, tuple(Member(ref, f"node-{i // 8}") for i, ref in enumerate(self.refs))))
        self.seqs = dict.fromkeys(names, 0)
        self.queued: dict[str, deque[tuple[str, int, tuple[bytes, ...]]]] = {name: deque() for name in names}
        self.sealed: dict[str, deque[tuple[bytes, ...]]] = {name: deque() for name in names}
        self.ticked = self.now
        self.requests, self.beats, self.turn, self.beat_credit = 0, 1, 0, 0.0
        self.heap = LastingHeap()  # as in the service: garbage is collected between decisions, what stays is frozen
        self.fill()

    def keys(self, n: int) -> tuple[bytes, ...]:
        return tuple(split(self.rng.randbytes(16 * n)))

    def fill(self) -> None:
        """Conversations: each is held by one prefill instance, every eighth by four; the system prompt by all."""
        blocks = self.prompt // self.block
        system = self.keys(max(1, int(SYSTEM_SHARE * blocks)))
        self.prompts = [system + self.keys(blocks - len(system)) for _ in range(max(64, min(512, 200_000 // blocks)))]
        held: dict[str, list[bytes]] = {ref.instance_id: list(system) for ref in self.refs[: self.half]}
        for i, prompt in enumerate(self.prompts):
            for ref in self.rng.sample(self.refs[: self.half], min(self.half, 4 if i % 8 == 0 else 1)):
                held[ref.instance_id] += prompt[len(system) : int(HELD_SHARE * blocks)]
        for name, keys in held.items():
            self.seqs[name] += 1
            for part in snapshot_parts(name, 1, self.seqs[name], keys):
                self.step(Blocks(part))

    def step(self, event: Any) -> Any:
        return self.state.step(event, self.now)

    def ask(self) -> tuple[domain.Schedule, float]:
        """A decision, and the seconds that it took."""
        self.requests += 1
        keys = self.rng.choice(self.prompts)
        # As the service makes it of a message: the keys as they came, in one piece.
        request = domain.Schedule(f"r{self.requests}", 0, "m", self.prompt, 256, Keys.of(keys))
        began = time.perf_counter()
        (answer,) = self.step(request)
        took = time.perf_counter() - began
        assert isinstance(answer, Placed), answer
        work = request.request_id, self.prompt - answer.cached_tokens, keys
        self.queued[answer.prefill.instance_id].append(work)
        self.queued[answer.decode.instance_id].append((request.request_id, 0, ()))
        return request, took

    def flow(self, seconds: float) -> float:
        """Time passes: heartbeats and what they report; returns the seconds that this took."""
        self.now += seconds
        self.beat_credit += BEATS_PER_S * self.instances * seconds
        events: list[Any] = []
        while self.beat_credit >= 1:
            self.beat_credit -= 1
            events += self.beat(self.refs[self.turn])
            self.turn = (self.turn + 1) % self.instances
        if self.now - self.ticked >= TICK_S:
            self.ticked = self.now
            events.append(Tick())
        began = time.perf_counter()
        for event in events:
            self.step(event)
        self.heap.tick(0, began)
        return time.perf_counter() - began

    def beat(self, ref: Ref) -> list[Any]:
        """One instance has done all that it was given; it seals new blocks and evicts as many."""
        name, queued = ref.instance_id, self.queued[ref.instance_id]
        samples, finished, events = [], [], []
        while queued:
            request_id, computed, keys = queued.popleft()
            finished.append(request_id)
            if keys:
                samples.append(
                    PrefillSample(request_id, computed, self.prompt - computed, 1e-6 * computed + 1e-3, 0, 0.0)
                )
                new = keys[-max(1, computed // self.block // 8) :]
                self.sealed[name].append(new)
                gone = self.sealed[name].popleft() if len(self.sealed[name]) > 2 else ()
                self.seqs[name] += 1
                events.append(Blocks(Announcement(name, 1, self.seqs[name], new, gone)))
        self.beats += 1
        beat = Heartbeat(
            ref, self.beats, True, self.load, prefill_samples=tuple(samples), finished_request_ids=tuple(finished)
        )
        return [beat, *events]


def decisions(world: World, seconds: float, rate: float, *, flowing: bool) -> dict[str, float]:
    """For so long of this core's time."""
    took, flown, until = [], 0.0, time.perf_counter() + seconds
    for _ in range(20):
        world.ask()
        world.flow(1 / rate)
    gc.collect()
    while time.perf_counter() < until or len(took) < 50:
        took.append(world.ask()[1])
        if flowing:
            flown += world.flow(1 / rate)
        elif len(took) % 64 == 0:
            world.flow(2 / BEATS_PER_S)  # not counted: so that queues do not grow for ever
    took.sort()
    mean = sum(took) / len(took)
    return {
        "decisions": len(took),
        "per_s": 1 / mean,
        "all_per_s": len(took) / (sum(took) + flown),
        "p50_us": quantile(took, 0.5) * 1e6,
        "p99_us": quantile(took, 0.99) * 1e6,
    }


def one_by_one(world: World, seconds: float) -> dict[str, float]:
    """Without the screen: everybody is weighed."""
    few = columns.FEW
    selection.FEW = columns.FEW = select.FEW = 1 << 30
    try:
        took: list[float] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or len(took) < 2:
            took.append(world.ask()[1])
    finally:
        selection.FEW = columns.FEW = select.FEW = few
    world.flow(2 / BEATS_PER_S)
    return {"per_s": len(took) / sum(took)}


def dict_walk(world: World, seconds: float) -> float:
    """Seconds for the keys of one prompt."""
    plain = dict.fromkeys((key for prompt in world.prompts for key in prompt), 1)
    calls, until, spent = 0, time.perf_counter() + seconds, 0.0
    while time.perf_counter() < until:
        keys = world.rng.choice(world.prompts)
        began = time.perf_counter()
        get = plain.get
        for key in keys:
            get(key)
        spent += time.perf_counter() - began
        calls += 1
    return spent / calls


def cell(instances: int, prompt: int, block: int, seconds: float, rate: float) -> dict[str, Any]:
    """One row of the table."""
    world = World(instances, block, prompt, random.Random(1))
    alone = decisions(world, seconds, rate, flowing=False)
    flowing = decisions(world, seconds, rate, flowing=True)
    world.heap.close()
    return {
        "instances": instances,
        "prompt": prompt,
        "block": block,
        "keys": prompt // block,
        "alone": alone,
        "flowing": flowing,
        "one_by_one": one_by_one(world, seconds / 4),
        "dict_walk_us": dict_walk(world, seconds / 10) * 1e6,
    }


def events(seconds: float) -> dict[str, float]:
    """Announcements and heartbeats a second, of 1,000 instances, on this core."""
    world = World(1000, 64, 100_000, random.Random(2))
    said, until, spent = 0, time.perf_counter() + seconds, 0.0
    before: dict[str, tuple[bytes, ...]] = {}
    while time.perf_counter() < until:
        batch = []
        for ref in world.rng.sample(world.refs[: world.half], 64):
            name, new = ref.instance_id, world.keys(64)
            world.seqs[name] += 1
            batch.append(Blocks(Announcement(name, 1, world.seqs[name], new, before.get(name, ()))))
            before[name] = new
        began = time.perf_counter()
        for event in batch:
            world.step(event)
        spent += time.perf_counter() - began
        said += len(batch)
    beats, until, beaten = 0, time.perf_counter() + seconds, 0.0
    while time.perf_counter() < until:
        batch = [Heartbeat(ref, 10 + beats, True, world.load) for ref in world.refs]
        began = time.perf_counter()
        for event in batch:
            world.step(event)
        world.step(Tick())
        beaten += time.perf_counter() - began
        beats += len(batch)
    return {
        "announcements_per_s": said / spent,
        "keys_per_s": 128 * said / spent,
        "heartbeats_per_s": beats / beaten,
    }


def memory(blocks: int) -> dict[str, float]:
    """Of so many blocks at 1,000 instances, one in eight with a second holder."""
    world = World(1000, 512, 4000, random.Random(3))
    truth = world.state._index.truth
    gc.collect()
    process, at_first, counted = psutil.Process(), len(truth), truth.memory_bytes()
    before = process.memory_info().rss
    names = [ref.instance_id for ref in world.refs[: world.half]]
    for i in range(0, blocks, 1000):
        keys = world.keys(1000)
        for name in world.rng.sample(names, 2 if i % 8000 == 0 else 1):
            world.seqs[name] += 1
            world.step(Blocks(Announcement(name, 1, world.seqs[name], keys)))
    del keys
    gc.collect()
    added = len(truth) - at_first
    return {
        "blocks": added,
        "counted_bytes_per_block": (truth.memory_bytes() - counted) / added,
        "rss_bytes_per_block": (process.memory_info().rss - before) / added,
    }


def show(rows: list[dict[str, Any]]) -> None:
    head = f"{'instances':>9} {'prompt':>7} {'block':>5} {'keys':>5} | {'alone/s':>8} {'p50 us':>7} {'p99 us':>7} |"
    head += f" {'flowing/s':>9} {'all/s':>7} {'p99 us':>7} | {'one by one/s':>12} {'ratio':>6} | {'dict walk us':>12}"
    print(f"\n{head} {'x walk':>6}")
    for r in rows:
        a, f, old, walk = r["alone"], r["flowing"], r["one_by_one"]["per_s"], r["dict_walk_us"]
        line = f"{r['instances']:9,} {r['prompt']:7,} {r['block']:5} {r['keys']:5,} | "
        line += f"{a['per_s']:8,.0f} {a['p50_us']:7.0f} {a['p99_us']:7.0f} | "
        line += f"{f['per_s']:9,.0f} {f['all_per_s']:7,.0f} {f['p99_us']:7.0f} | {old:12,.1f}"
        print(f"{line} {a['per_s'] / old:6.1f} | {walk:12.0f} {1e6 / a['per_s'] / walk:6.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", default="10,100,1000,10000", help="comma-separated; empty: gRPC alone")
    parser.add_argument("--prompts", default="4000,100000", help="tokens, comma-separated")
    parser.add_argument("--blocks", default="64,512", help="tokens of a block, comma-separated")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure of a row")
    parser.add_argument("--rate", type=float, default=1000.0, help="decisions a second while heartbeats flow")
    parser.add_argument("--memory-blocks", type=int, default=1_000_000, help="0: not measured")
    parser.add_argument("--events-s", type=float, default=2.0, help="seconds for the events; 0: not measured")
    parser.add_argument("--grpc-instances", type=int, default=1000, help="0: not measured")
    parser.add_argument("--grpc-rate", type=float, default=100.0, help="Schedule calls a second, as many empty ones")
    parser.add_argument(
        "--grpc-beats", type=float, default=200.0, help="Heartbeat calls a second, all instances together"
    )
    parser.add_argument("--grpc-seconds", type=float, default=10.0)
    parser.add_argument("--quick", action="store_true", help="a minute: a look that it runs")
    parser.add_argument("--json", default="", help="also write the results here")
    parser.add_argument("--docs", default="", help="fill this page from --json, measure nothing")
    args = parser.parse_args()
    if args.docs:
        fill(parser, Path(args.docs), Path(args.json))
        return
    if args.quick:
        args.instances, args.seconds, args.events_s, args.memory_blocks = "10,1000", 0.5, 0.5, 100_000
        args.grpc_instances, args.grpc_seconds = min(args.grpc_instances, 100), 3.0
    results = measured(args)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


def fill(parser: argparse.ArgumentParser, page: Path, results: Path) -> None:
    """The page's tables from a run's results; nothing is measured."""
    for needed in (page, results):
        if not needed.is_file():
            parser.error(f"{needed}: no such file")
    page.write_text(filled(page.read_text(), json.loads(results.read_text())))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for, printed as it comes."""
    told = {name: value for name, value in vars(args).items() if name not in ("json", "docs")}
    results: dict[str, Any] = {"machine": platform.machine(), "cpus": os.cpu_count(), "args": told, "rows": []}
    sizes = [[int(one) for one in some.split(",") if one] for some in (args.instances, args.prompts, args.blocks)]
    for instances in sizes[0]:
        for prompt in sizes[1]:
            for block in sizes[2]:
                tell(f"{instances:,} instances, prompts of {prompt:,} tokens, blocks of {block}")
                results["rows"].append(cell(instances, prompt, block, args.seconds, args.rate))
                gc.collect()
    tell("")
    if results["rows"]:
        show(results["rows"])
    if args.events_s:
        results["events"] = found = events(args.events_s)
        print(
            f"\nevents, 1,000 instances: {found['announcements_per_s']:,.0f} announcements/s of 64 + 64 blocks "
            f"({found['keys_per_s'] / 1e6:.2f} M keys/s), {found['heartbeats_per_s']:,.0f} heartbeats/s"
        )
    if args.memory_blocks:
        results["memory"] = found = memory(args.memory_blocks)
        print(
            f"memory, {found['blocks']:,} blocks: {found['counted_bytes_per_block']:.0f} bytes a block as the index "
            f"counts, {found['rss_bytes_per_block']:.0f} as the process grows"
        )
    if args.grpc_instances:
        for block in sizes[2]:
            tell(f"gRPC, blocks of {block}")
            for found in uvloop.run(conductor_grpc.measure(args, block)):
                tell("")
                conductor_grpc.show(found)
                results.setdefault("grpc", []).append(found)
    return results


if __name__ == "__main__":
    main()
