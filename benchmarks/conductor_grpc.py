"""Decisions of a conductor process over gRPC at a stated rate: part of benchmarks/conductor.py."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.kvcache.announce import snapshot_parts
from kvmesh.kvcache.keys import split
from kvmesh.rpc.channels import connect
from kvmesh.rpc.fastpath.caller import FastCaller, control_calls
from kvmesh.rpc.leader_client import ServiceClient
from kvmesh.rpc.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, store_pb2, store_pb2_grpc
from kvmesh.rpc.protocol import PROTOCOL_VERSION

PROMPT = 100_000
TIMEOUT_S = 30.0
TASKS = 4  # that make calls, each with a connection of its own
LEASE_MS = 3_600_000
GRPC, DOOR = WAYS = "gRPC", "door"
STORE = store_pb2.DESCRIPTOR.services_by_name["StoreMaster"]
CONDUCTOR = conductor_pb2.DESCRIPTOR.services_by_name["Conductor"]
SLICE_S = 1.0  # decisions and empty calls are timed in turn, so long each
SEALS_PER_S = 10.0
Ask = Callable[[conductor_pb2.ScheduleRequest], Awaitable[conductor_pb2.ScheduleResponse]]
Call = Callable[[], Awaitable[None]]


class Service:
    """One service in a process of its own, ready."""

    def __init__(self, folder: str, name: str, *more: str) -> None:
        ready = Path(folder) / f"{name}.json"
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "kvmesh.cli", "serve", name, "--ready-file", str(ready), "--log-level", "warning",
                "--heartbeat-interval-ms", "1000", "--lease-ms", str(LEASE_MS), *more,
            ]
        )  # fmt: skip
        deadline = time.monotonic() + TIMEOUT_S
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the {name} did not start (exit {self.process.poll()})")
            time.sleep(0.02)
        told = json.loads(ready.read_text())
        self.address: str = told["address"]
        self._metrics: str = told["metrics"]

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def waited_s(self) -> float:
        """How long its main thread, that of the event loop, was ready to run and had no core; 0: not told here."""
        told = Path(f"/proc/{self.process.pid}/schedstat")
        return int(told.read_text().split()[1]) / 1e9 if told.exists() else 0.0

    def handled(self) -> dict[float, float]:
        """Schedule calls so far by how long they were in the service's hands, from the request as it was read to its
        answer: how many took at most so many seconds."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
        found = re.findall(r'kvmesh_conductor_schedule_seconds_bucket{le="([^"]+)"} (\S+)', text)
        return {float(bound): float(count) for bound, count in found}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


class Mesh:
    """Instances that exist only in what the two services are told."""

    def __init__(self, instances: int, block: int, store: Service, conductor: Service) -> None:
        self.rng, self.block, half = random.Random(4), block, instances // 2
        names = [f"prefill-{i}" for i in range(half)] + [f"decode-{i}" for i in range(instances - half)]
        self.refs = [common_pb2.InstanceRef(instance_id=n, address="127.0.0.1:9", incarnation=1) for n in names]
        self.roles = [common_pb2.ROLE_PREFILL] * half + [common_pb2.ROLE_DECODE] * (instances - half)
        self.half, self.seqs, self.beats = half, dict.fromkeys(names, 0), 1
        self.placed: dict[str, list[str]] = {name: [] for name in names}
        self.channels: list[grpc.aio.Channel] = [connect(a) for a in (store.address, conductor.address)]
        self.store: Any = store_pb2_grpc.StoreMasterStub(self.channels[0])
        self.conductor: Any = conductor_pb2_grpc.ConductorStub(self.channels[1])
        # Of heartbeats and announcements, as instances have them.
        self.lines = ServiceClient(STORE, ("Announce", "Beat")), ServiceClient(CONDUCTOR, ("Heartbeat",))
        for line, service in zip(self.lines, (store, conductor), strict=True):
            line.connect(service.address)
        self.asked = 0
        self.prompts: list[bytes] = []

    async def build(self) -> None:
        """Everybody joins, registers and is ready; prompts lie where they lie; the conductor has heard of all."""
        card = common_pb2.ModelCard(
            name="m",
            fingerprint="f",
            block_tokens=self.block,
            kv_dtype="bf16",
            vocab_size=1,
            kv_bytes_per_token=131_072,
        )
        for i, (ref, role) in enumerate(zip(self.refs, self.roles, strict=True)):
            member = store_pb2.Member(instance=ref, role=role, node_id=f"node-{i // 8}", store_id=ref.instance_id)
            joins = store_pb2.JoinRequest(protocol_version=PROTOCOL_VERSION, member=member)
            await self.store.Join(joins, timeout=TIMEOUT_S, wait_for_ready=True)
            request = conductor_pb2.RegisterInstanceRequest(
                protocol_version=PROTOCOL_VERSION, instance=ref, role=role, node_id=f"node-{i // 8}", model=card,
                capacity_blocks=4_000_000 // self.block, max_running_requests=256,
            )  # fmt: skip
            await self.conductor.Register(request, timeout=TIMEOUT_S, wait_for_ready=True)
            await self.beat(ref)
        blocks, told = PROMPT // self.block, 0
        self.prompts = [self.rng.randbytes(16 * blocks) for _ in range(64)]
        for prompt in self.prompts:
            keys = split(prompt[: 16 * (3 * blocks // 4)])
            await self.announce(self.rng.choice(self.refs[: self.half]), keys)
            told += len(keys)
        deadline = time.monotonic() + TIMEOUT_S
        while sum(i.indexed_blocks for i in (await self.status()).instances) < told:
            if time.monotonic() > deadline:
                raise RuntimeError("the conductor has not heard of all blocks")
            await asyncio.sleep(0.1)

    async def status(self) -> conductor_pb2.GetConductorStatusResponse:
        return await self.conductor.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=TIMEOUT_S)

    async def beat(self, ref: common_pb2.InstanceRef) -> None:
        """It has done all it was given."""
        finished, self.placed[ref.instance_id] = self.placed[ref.instance_id], []
        samples = [
            conductor_pb2.PrefillSample(request_id=r, computed_tokens=1000, cached_tokens=99_000, duration_us=2000)
            for r in finished
            if ref.instance_id.startswith("prefill")
        ]
        self.beats += 1
        load = conductor_pb2.Load(free_pages=1 << 20, free_extents=1 << 20)
        request = conductor_pb2.HeartbeatRequest(
            instance=ref, seq=self.beats, ready=True, load=load, prefill_samples=samples, finished_request_ids=finished
        )
        await self.lines[1].call("Heartbeat", request, TIMEOUT_S)

    async def announce(self, ref: common_pb2.InstanceRef, keys: list[bytes]) -> None:
        """It seals these."""
        name = ref.instance_id
        self.seqs[name] += 1
        for part in snapshot_parts(name, 1, self.seqs[name], keys) if self.seqs[name] == 1 else [None]:
            told = store_pb2.Announcement(store_id=name, incarnation=1, seq=self.seqs[name], sealed=b"".join(keys))
            if part is not None:
                told.sealed, told.snapshot, told.part, told.more = b"".join(part.sealed), True, part.part, part.more
            await self.lines[0].call("Announce", store_pb2.AnnounceRequest(announcement=told), TIMEOUT_S)

    async def schedule(self, ask: Ask) -> None:
        self.asked += 1
        request = conductor_pb2.ScheduleRequest(
            request_id=f"r{self.asked}", model="m", prompt_tokens=PROMPT, max_tokens=256,
            block_keys=self.rng.choice(self.prompts),
        )  # fmt: skip
        answer = await ask(request)
        for ref in (answer.placement.prefill, answer.placement.decode):
            self.placed[ref.instance_id].append(request.request_id)

    async def close(self) -> None:
        for line in self.lines:
            await line.close()
        for channel in self.channels:
            await channel.close()


async def open_loop(call: Callable[[], Awaitable[None]], rate: float, offset: float, seconds: float) -> list[float]:
    """`rate` calls a second from `offset` on, each when it is due; seconds from then to its answer."""
    took: list[float] = []
    began, calls = time.perf_counter() + offset, []

    async def one(due: float) -> None:
        await call()
        took.append(time.perf_counter() - due)

    for i in range(int(rate * seconds)):
        due = began + i / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        calls.append(asyncio.create_task(one(due)))
    await asyncio.gather(*calls)
    return took


async def measure(args: argparse.Namespace, block: int) -> list[dict[str, Any]]:
    """One conductor, one block size; both ways in turn."""
    with tempfile.TemporaryDirectory() as folder:
        async with contextlib.AsyncExitStack() as stack:
            store = Service(folder, "store")
            stack.callback(store.close)
            conductor = Service(folder, "conductor", "--store", store.address, "--slo-ttft-ms", "1000000000")
            stack.callback(conductor.close)
            mesh = Mesh(args.grpc_instances, block, store, conductor)
            stack.push_async_callback(mesh.close)
            await mesh.build()
            return [await drive(args, mesh, conductor, way) for way in WAYS]


async def through(caller: FastCaller) -> Ask:
    """By the conductor's door, as gateways ask."""
    deadline = time.monotonic() + TIMEOUT_S
    while not caller.by_door:
        if time.monotonic() > deadline:
            raise RuntimeError("the conductor has no door")
        caller.seek()
        await asyncio.sleep(0.01)

    async def ask(request: Any) -> Any:
        return await caller.call("Schedule", request, TIMEOUT_S)

    return ask


@dataclass
class Slice:
    """What the conductor's process took while its decisions were timed, all slices together."""

    spent_s: float = 0.0
    waited_s: float = 0.0


async def drive(args: argparse.Namespace, mesh: Mesh, conductor: Service, way: str) -> dict[str, Any]:
    """Decisions and empty calls in turn, SLICE_S of each, heartbeats and announcements all the while."""
    channels = [connect(conductor.address) for _ in range(TASKS)]
    callers = [control_calls(conductor.address, channel, CONDUCTOR) for channel in channels]
    asks = await decisions(mesh, channels, callers, way)
    nothings = [empty_call(channel) for channel in channels]
    slices = max(1, round(args.grpc_seconds / SLICE_S))
    taken, handled, done = Slice(), conductor.handled(), asyncio.Event()
    beside = [asyncio.create_task(one) for one in flow(mesh, args.grpc_beats, done)]
    asked: list[float] = []
    nothing: list[float] = []
    gc.collect()
    gc.disable()  # what this process makes in some seconds is little, and its own pauses are nobody's
    try:
        for _ in range(slices):
            before = conductor.cpu_s(), conductor.waited_s()
            asked += await in_turn(asks, args.grpc_rate)
            taken.spent_s += conductor.cpu_s() - before[0]
            taken.waited_s += conductor.waited_s() - before[1]
            nothing += await in_turn(nothings, args.grpc_rate)
    finally:
        done.set()
        gc.enable()
        await asyncio.gather(*beside)
    here = {bound: count - handled.get(bound, 0.0) for bound, count in conductor.handled().items()}
    for caller in callers:
        await caller.close()
    for channel in channels:
        await channel.close()
    return {
        "way": way,
        "instances": args.grpc_instances,
        "block": mesh.block,
        "rate": args.grpc_rate,
        "heartbeats_per_s": args.grpc_beats,
        "schedule": told(asked),
        "empty": told(nothing),
        "handled_within_ms": {f"p{share}": within(here, share) for share in (50, 90, 99)},
        "conductor_cpu_share": taken.spent_s / (slices * SLICE_S),
        "conductor_waited_share": taken.waited_s / (slices * SLICE_S),
    }


async def decisions(
    mesh: Mesh, channels: Sequence[grpc.aio.Channel], callers: Sequence[FastCaller], way: str
) -> list[Call]:
    """A call of each connection that asks for a placement."""
    calls: list[Call] = []
    for channel, caller in zip(channels, callers, strict=True):
        stub: Any = conductor_pb2_grpc.ConductorStub(channel)
        asking = await through(caller) if way == DOOR else partial(stub.Schedule, timeout=TIMEOUT_S)
        calls.append(partial(mesh.schedule, asking))
    return calls


def empty_call(channel: grpc.aio.Channel) -> Call:
    """A health check."""
    health: Any = health_pb2_grpc.HealthStub(channel)

    async def call() -> None:
        await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)

    return call


async def in_turn(calls: Sequence[Call], rate: float) -> list[float]:
    """For one slice, so many a second of all of them together; what each took."""
    each = rate / len(calls)
    found = await asyncio.gather(*(open_loop(one, each, i / rate, SLICE_S) for i, one in enumerate(calls)))
    return [took for some in found for took in some]


def flow(mesh: Mesh, beats_per_s: float, done: asyncio.Event) -> list[Coroutine[Any, Any, None]]:
    """Instances beat and announce until then."""
    turn = iter(range(1 << 40))

    async def beat() -> None:
        await mesh.beat(mesh.refs[next(turn) % len(mesh.refs)])

    async def seal() -> None:
        await mesh.announce(mesh.rng.choice(mesh.refs[: mesh.half]), split(mesh.rng.randbytes(16 * 64)))

    async def on(call: Call, rate: float) -> None:
        while not done.is_set():
            await open_loop(call, rate, 0.0, SLICE_S)

    return [on(beat, beats_per_s), on(seal, SEALS_PER_S)]


def told(some: list[float]) -> dict[str, float]:
    ordered = sorted(some)
    return {
        "calls": len(ordered),
        **{f"p{share}_ms": 1e3 * ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 99)},
    }


def within(counts: dict[float, float], share: int) -> float:
    """The least bound of the histogram, milliseconds, that so many of a hundred keep."""
    needed = counts[math.inf] * share / 100
    return 1e3 * min(bound for bound, count in counts.items() if count >= needed)


def show(found: dict[str, Any]) -> None:
    line = f"{found['way']}, {found['instances']:,} instances, prompts of {PROMPT:,} tokens "
    line += f"in blocks of {found['block']}, {found['rate']:.0f} decisions/s, "
    line += f"{found['heartbeats_per_s']:.0f} heartbeats/s: "
    for name in ("schedule", "empty"):
        one = found[name]
        line += f"{name} p50 {one['p50_ms']:.2f} p90 {one['p90_ms']:.2f} p99 {one['p99_ms']:.2f} ms; "
    handled = " ".join(f"{share} <= {bound:g}" for share, bound in found["handled_within_ms"].items())
    line += f"in the conductor's hands {handled} ms; "
    waited = f"{found['conductor_waited_share']:.3f} of the time for one"
    print(f"{line}the conductor took {found['conductor_cpu_share']:.2f} of a core, waited {waited}")
