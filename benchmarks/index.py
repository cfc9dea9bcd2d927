"""The map of blocks against what it cannot beat: a plain dict in process, an empty call through gRPC.

    python -m benchmarks.index [--quick] [--json benchmarks/results/index.json]

For each number of blocks and of holders one map is filled, in this process and, by announcements, in a real store
master beside it. Contenders take turns within each round; medians are printed, and ratios, which travel better.

    dict          one `get` a key in a dict of ints; for announcements, one `d[key] = 1` or `del d[key]` a key
    mask          the bitset of holders of each key
    match         leading blocks for every holder of a prompt of so many blocks, as the conductor asks
    holders       names of the holders of each key, as the master answers
    announce      a batch that seals so many keys and removes as many, from each holder in turn
    empty call    Check of grpc.health.v1 in the same server, from the same client
    Lookup, Announce   the same over gRPC, --callers calls at a time

In process CPU time is told, over gRPC wall time and the master's CPU time; client and master share the machine's cores.
Blocks come in prompts of 512; every prompt has a holder, every eighth four, and every holder has a prompt: with few
blocks and many holders these are the blocks that everybody has.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.kvcache.announce import Announcement, snapshot_parts
from kvmesh.kvcache.block_map import BlockMap, Verdict
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import common_pb2, store_pb2, store_pb2_grpc
from kvmesh.rpc.protocol import PROTOCOL_VERSION

PROMPT = 512  # blocks
BATCHES = (1, 64, 512)
TIMEOUT_S = 30.0
Times = dict[str, list[float]]  # what → seconds for each call
Spent = tuple[float, float]


def new_keys(n: int, rng: random.Random) -> list[bytes]:
    packed = rng.randbytes(16 * n)
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


@dataclass
class World:
    """Who holds what: prompts of 512 keys, and the prompts of each holder."""

    prompts: list[list[bytes]]
    held: dict[str, list[int]]
    rng: random.Random

    @classmethod
    def make(cls, blocks: int, holders: int, rng: random.Random) -> World:
        prompts = [new_keys(min(PROMPT, blocks - at), rng) for at in range(0, blocks, PROMPT)]
        names = [f"prefill-{i}" for i in range(holders)]
        held: dict[str, set[int]] = {name: set() for name in names}
        for i in range(max(len(prompts), holders)):
            held[names[i % holders]].add(i % len(prompts))
        for i in range(0, len(prompts), 8):
            for name in rng.sample(names, min(3, holders)):
                held[name].add(i)
        return cls(prompts, {name: sorted(some) for name, some in held.items()}, rng)

    def snapshot(self, name: str) -> Iterator[Announcement]:
        keys = [key for prompt in self.held[name] for key in self.prompts[prompt]]
        return snapshot_parts(name, 1, 1, keys)

    def ask(self, n: int) -> list[bytes]:
        """The first `n` keys of a prompt that somebody holds."""
        return self.prompts[self.rng.randrange(max(1, len(self.prompts) - 1))][:n]


class Said:
    """Announcements of each of `names` in turn: so many keys sealed, and those removed that it sealed the time before.
    No more names than announcements in a round: only the first round, which is not measured, removes nothing."""

    def __init__(self, world: World, n: int, seqs: dict[str, int], names: Sequence[str]) -> None:
        self.world, self.n, self.seqs, self.names = world, n, seqs, cycle(names)
        self.before: dict[str, tuple[bytes, ...]] = {}

    def next(self) -> Announcement:
        name = next(self.names)
        sealed, removed = tuple(new_keys(self.n, self.world.rng)), self.before.get(name, ())
        self.before[name] = sealed
        self.seqs[name] = seq = self.seqs.get(name, 1) + 1
        return Announcement(name, 1, seq, sealed, removed)


# ── in this process ──────────────────────────────────────────────────────────────────────────────────


def in_process(world: World, rounds: int, keys_a_round: int) -> dict[str, Any]:
    """Fill a map, then time it beside a dict of the same keys, in CPU time: others use this machine too."""
    blocks, started = BlockMap(), time.thread_time()
    for name in world.held:
        for part in world.snapshot(name):
            verdict = blocks.apply(part)
        assert verdict is Verdict.APPLIED, verdict
    filled_s = time.thread_time() - started
    while blocks.sweep(1 << 20):
        pass
    facts = {
        "blocks": len(blocks),
        "replicas": blocks.replicas,
        "bytes_per_block": blocks.memory_bytes() / len(blocks),
        "fill_replicas_per_s": blocks.replicas / filled_s,
    }
    plain = dict.fromkeys((key for prompt in world.prompts for key in prompt), 1)
    everybody = sum(1 << slot for name in world.held if (slot := blocks.slot(name)) is not None)
    times: Times = {}
    seqs: dict[str, int] = {}
    names = list(world.held)
    for n in BATCHES:
        calls = min(4000, max(8, keys_a_round // n))
        said = Said(world, n, seqs, names[:calls])

        def get(keys: list[bytes]) -> None:
            found = plain.get
            for key in keys:
                found(key)

        def mask(keys: list[bytes]) -> None:
            found = blocks.mask
            for key in keys:
                found(key)

        def match(keys: list[bytes]) -> None:
            assert blocks.match(keys, everybody)

        def holders(keys: list[bytes]) -> None:
            found = blocks.holders
            for key in keys:
                found(key)

        def change(announcement: Announcement) -> None:
            for key in announcement.removed:
                plain.pop(key, None)
            for key in announcement.sealed:
                plain[key] = 1

        def announce(announcement: Announcement) -> None:
            assert blocks.apply(announcement) is Verdict.APPLIED

        for turn in range(rounds + 1):
            batches = [said.next() for _ in range(calls)]
            questions = [world.ask(n) for _ in range(calls)]
            contenders: list[tuple[str, Callable[[Any], None], Sequence[Any]]] = [
                ("dict get", get, questions),
                ("mask", mask, questions),
                ("match", match, questions),
                ("holders", holders, questions[: calls // 8]),
                ("dict change", change, batches),
                ("announce", announce, batches),
            ]
            for what, run, inputs in contenders:
                began = time.thread_time()
                for one in inputs:
                    run(one)
                if turn:
                    times.setdefault(f"{what} {n}", []).append((time.thread_time() - began) / len(inputs))
        # What these batches left behind goes, so that the next size starts from the same map.
        for name, left in said.before.items():
            seqs[name] += 1
            blocks.apply(Announcement(name, 1, seqs[name], (), left))
            for key in left:
                plain.pop(key, None)
    blocks.check_integrity()
    return {**facts, "call_us": medians_us(times)}


def medians_us(times: Times) -> dict[str, float]:
    return {what: round(statistics.median(some) * 1e6, 3) for what, some in times.items()}


# ── through gRPC ─────────────────────────────────────────────────────────────────────────────────────


class Master:
    """A store master in a process of its own. Members stay: their lease outlives the run."""

    def __init__(self, folder: str) -> None:
        ready = Path(folder) / "ready.json"
        ready.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "kvmesh.cli", "serve", "store", "--ready-file", str(ready),
                "--heartbeat-interval-ms", "1000", "--lease-ms", "3600000", "--log-level", "warning",
            ]
        )  # fmt: skip
        deadline = time.monotonic() + TIMEOUT_S
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the store master did not start (exit {self.process.poll()})")
            time.sleep(0.02)
        self.address: str = json.loads(ready.read_text())["address"]
        self.channel: grpc.aio.Channel = connect(self.address)
        self.stub: Any = store_pb2_grpc.StoreMasterStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    async def join(self, name: str) -> None:
        ref = common_pb2.InstanceRef(instance_id=name, address="127.0.0.1:9", incarnation=1)
        member = store_pb2.Member(instance=ref, role=common_pb2.ROLE_PREFILL, node_id="n", store_id=name)
        request = store_pb2.JoinRequest(protocol_version=PROTOCOL_VERSION, member=member)
        await self.stub.Join(request, timeout=TIMEOUT_S, wait_for_ready=True)

    async def announce(self, request: store_pb2.AnnounceRequest) -> None:
        answer = await self.stub.Announce(request, timeout=TIMEOUT_S)
        assert not answer.want_snapshot, answer

    async def lookup(self, request: store_pb2.LookupRequest) -> None:
        await self.stub.Lookup(request, timeout=TIMEOUT_S)

    async def empty(self, request: health_pb2.HealthCheckRequest) -> None:
        await self.health.Check(request, timeout=TIMEOUT_S)

    async def timed(self, call: Callable[[Any], Awaitable[None]], requests: Sequence[Sequence[Any]]) -> Spent:
        """Each list of requests one after the other, the lists side by side; seconds a request: wall, master's CPU."""

        async def one(mine: Sequence[Any]) -> None:
            for request in mine:
                await call(request)

        process, count = psutil.Process(self.process.pid), sum(map(len, requests))
        before, began = process.cpu_times(), time.perf_counter()
        await asyncio.gather(*map(one, requests))
        wall, after = time.perf_counter() - began, process.cpu_times()
        return wall / count, (after.user + after.system - before.user - before.system) / count

    def rss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    async def close(self) -> None:
        await self.channel.close()
        self.process.terminate()
        self.process.wait(20)


def wire(said: Announcement) -> store_pb2.AnnounceRequest:
    return store_pb2.AnnounceRequest(
        announcement=store_pb2.Announcement(
            store_id=said.store_id,
            incarnation=said.incarnation,
            seq=said.seq,
            sealed=b"".join(said.sealed),
            removed=b"".join(said.removed),
            snapshot=said.snapshot,
            part=said.part,
            more=said.more,
        )
    )


async def through_grpc(world: World, rounds: int, calls: int, callers: int) -> dict[str, Any]:
    """The same map in a master; every row is timed beside empty calls."""
    with tempfile.TemporaryDirectory() as folder:
        master = Master(folder)
        try:
            return await drive(master, world, rounds, calls, callers)
        finally:
            await master.close()


async def drive(master: Master, world: World, rounds: int, calls: int, callers: int) -> dict[str, Any]:
    names = list(world.held)
    for name in names:
        await master.join(name)
    before = master.rss()
    for name in names:
        for part in world.snapshot(name):
            await master.announce(wire(part))
    status = await master.stub.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=TIMEOUT_S)
    facts = {
        "map_bytes_per_block": status.map_bytes / status.blocks,
        "rss_bytes_per_block": (master.rss() - before) / status.blocks,
    }
    seqs: dict[str, int] = {}
    times: Times = {}
    cpus: Times = {}
    for n in BATCHES:
        # Each caller speaks for holders of its own: batches of one holder must not overtake each other.
        each = max(2, calls // callers // (1 + n // 64))
        said = [Said(world, n, seqs, names[i::callers][:each]) for i in range(min(callers, len(names)))]
        for turn in range(rounds + 1):
            asked = [
                [store_pb2.LookupRequest(keys=b"".join(world.ask(n))) for _ in range(each)] for _ in range(callers)
            ]
            told = [[wire(one.next()) for _ in range(each)] for one in said]
            nothing = [[health_pb2.HealthCheckRequest()] * each] * callers
            rows: list[tuple[str, Any, Sequence[Sequence[Any]]]] = [
                (f"empty call {n}", master.empty, nothing),
                (f"Lookup {n}", master.lookup, asked),
                (f"Announce {n}", master.announce, told),
            ]
            for what, call, requests in rows:
                took, cpu = await master.timed(call, requests)
                if turn:
                    times.setdefault(what, []).append(took)
                    cpus.setdefault(what, []).append(cpu)
        for one in said:
            for name, left in one.before.items():
                seqs[name] += 1
                await master.announce(wire(Announcement(name, 1, seqs[name], (), left)))
    # The kernel counts the master's CPU time in ticks of 10 ms: only the mean over all rounds means something.
    cpu_us = {what: round(statistics.mean(some) * 1e6) for what, some in cpus.items()}
    return {**facts, "call_us": medians_us(times), "master_cpu_us": cpu_us}


# ── what is printed ──────────────────────────────────────────────────────────────────────────────────

LOCAL = [("mask", "dict get"), ("match", "dict get"), ("holders", "dict get"), ("announce", "dict change")]
REMOTE = [("Lookup", "empty call"), ("Announce", "empty call")]


def show(blocks: int, holders: int, local: dict[str, Any], remote: dict[str, Any]) -> None:
    print(
        f"\n{blocks:,} blocks, {holders:,} holders, {local['replicas']:,} replicas: "
        f"{local['bytes_per_block']:.0f} bytes a block, {local['bytes_per_block'] * blocks / local['replicas']:.0f} a "
        f"replica (master's memory grew by {remote['rss_bytes_per_block']:.0f} a block); "
        f"filled at {local['fill_replicas_per_s'] / 1e6:.2f} M replicas/s"
    )
    head = f"  {'':10} {'keys':>5} {'µs a call':>10} {'calls/s':>10} {'M keys/s':>9} {'limit, µs':>10} {'x limit':>8}"
    print(f"{head} {'master CPU, µs':>15}")
    for told, rows in ((local, LOCAL), (remote, REMOTE)):
        times, cpu = told["call_us"], told.get("master_cpu_us", {})
        for what, limit in rows:
            for n in BATCHES:
                us, least = times[f"{what} {n}"], times[f"{limit} {n}"]
                keys = n * (2 if what.lower() == "announce" else 1)
                line = f"  {what:10} {keys:5} {us:10.2f} {1e6 / us:10,.0f} {keys / us:9.2f} {least:10.2f}"
                print(line + f" {us / least:8.2f}" + (f" {cpu[f'{what} {n}']:15.0f}" if cpu else ""))


def summary(results: list[dict[str, Any]]) -> None:
    print("\nthousand calls/s (x limit)   in process: 64 keys matched, 128 announced   over gRPC: the same")
    for one in results:
        local, remote = one["in_process"], one["grpc"]
        line = f"{one['blocks']:9,} blocks {one['holders']:6,} holders {local['bytes_per_block']:6.0f} bytes a block"
        for times, rows in ((local["call_us"], (LOCAL[1], LOCAL[3])), (remote["call_us"], REMOTE)):
            for what, limit in rows:
                us = times[f"{what} 64"]
                line += f" {1e3 / us:8.2f} ({us / times[f'{limit} 64']:5.2f})"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", default="10000,100000,1000000", help="comma-separated")
    parser.add_argument("--holders", default="10,100,1000", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--calls", type=int, default=640, help="gRPC calls of each kind in a round, fewer when large")
    parser.add_argument("--callers", type=int, default=8, help="gRPC calls at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="seconds: a look that it runs")
    parser.add_argument("--json", default="", help="also write the results here")
    args = parser.parse_args()
    if args.quick:
        args.blocks, args.holders, args.rounds, args.calls = "10000,100000", "10,100", 2, 160
    results = []
    for blocks in map(int, args.blocks.split(",")):
        for holders in map(int, args.holders.split(",")):
            world = World.make(blocks, holders, random.Random(args.seed))
            local = in_process(world, args.rounds, 10_000 if args.quick else 40_000)
            remote = asyncio.run(through_grpc(world, args.rounds, args.calls, args.callers))
            show(blocks, holders, local, remote)
            results.append({"blocks": blocks, "holders": holders, "in_process": local, "grpc": remote})
            del world
            gc.collect()
    summary(results)
    if args.json:
        meta = {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "args": {k: v for k, v in vars(args).items() if k != "json"},
        }
        Path(args.json).write_text(json.dumps({**meta, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
