"""Conductor and store master with 1,000 instances that exist only in what they are told: part of benchmarks/sizing.py.

Real processes, real gRPC. Each window has calls of one kind at a stated rate; their CPU time is what is measured, so
what else the machine does, and this process that makes the calls, changes little of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from benchmarks import conductor_grpc
from benchmarks.conductor_grpc import Service, open_loop
from benchmarks.progress import tell
from benchmarks.sizing_costs import FLIGHT, IDLE, SATURATED, WIRE
from benchmarks.sizing_mesh import Clocks
from benchmarks.sizing_solve import Window
from kvmesh.rpc.leader_client import ServiceClient
from kvmesh.rpc.pb import common_pb2, conductor_pb2, store_pb2

BLOCK = 64
WAIT_S = 30.0
CONNECTIONS = 64
SETTLE_S = 0.5
ENDED: dict[str, Any] = {"output_tokens": 343, "ttft_us": 10**6, "tbt_us": 30_000}
Call = Callable[[], Awaitable[None]]


class Fleet:
    """What the windows call. Every call counts itself in `counts`."""

    def __init__(self, mesh: conductor_grpc.Mesh, conductor: str, store: str) -> None:
        self.mesh = mesh
        self.counts: dict[str, float] = {}
        self._turn = itertools.cycle(mesh.refs)
        self._asked = itertools.count()
        self._beats = itertools.count(1)
        # Each instance beats over a line of its own; some, in turns, make the servers wait on many sockets too.
        self._all = [
            (ServiceClient(conductor_grpc.CONDUCTOR, ("Heartbeat",)), ServiceClient(conductor_grpc.STORE, ("Beat",)))
            for _ in range(CONNECTIONS)
        ]
        for first, second in self._all:
            first.connect(conductor)
            second.connect(store)
        self._lines = itertools.cycle(self._all)

    async def close(self) -> None:
        """Its lines."""
        for line in itertools.chain.from_iterable(self._all):
            await line.close()

    def _count(self, **more: int) -> None:
        for event, n in more.items():
            self.counts[event] = self.counts.get(event, 0.0) + n

    async def beat(self) -> None:
        """The next instance's heartbeat at the conductor, nothing new in it."""
        await self._beat(next(self._turn))

    async def _beat(self, ref: common_pb2.InstanceRef, **said: Any) -> None:
        load = conductor_pb2.Load(free_pages=1 << 20, free_extents=1 << 20)
        request = conductor_pb2.HeartbeatRequest(
            instance=ref, seq=1_000_000 + next(self._beats), ready=True, load=load, **said
        )
        await next(self._lines)[0].call("Heartbeat", request, WAIT_S)
        self._count(conductor_beats=1)

    async def store_beat(self) -> None:
        """The next instance's heartbeat at the store master."""
        usage = store_pb2.StoreUsage(capacity_bytes=1 << 36, free_bytes=1 << 30, blocks=1 << 14)
        request = store_pb2.BeatRequest(instance=next(self._turn), seq=next(self._beats), usage=usage)
        await next(self._lines)[1].call("Beat", request, WAIT_S)
        self._count(store_beats=1)

    def announce(self, keys: int) -> Call:
        """The next prefill instance seals so many new blocks."""

        async def call() -> None:
            while (ref := next(self._turn)) not in self.mesh.refs[: self.mesh.half]:
                pass
            await self.mesh.announce(ref, [self.mesh.rng.randbytes(16) for _ in range(keys)])
            self._count(announcements=1, relayed=1, keys=keys)

        return call

    def schedule(self, keys: int) -> Call:
        """A request whose blocks all lie somewhere, and the two heartbeats that report its end."""

        async def call() -> None:
            request_id = f"s{next(self._asked)}"
            request = conductor_pb2.ScheduleRequest(
                request_id=request_id, model="m", prompt_tokens=keys * BLOCK + 1, max_tokens=343,
                block_keys=self.mesh.rng.choice(self.mesh.prompts)[: 16 * keys],
            )  # fmt: skip
            placement = (await self.mesh.conductor.Schedule(request, timeout=WAIT_S)).placement
            self._count(requests=1, blocks=keys)
            sample = conductor_pb2.PrefillSample(
                request_id=request_id, computed_tokens=1, cached_tokens=keys * BLOCK, duration_us=2000
            )
            outcome = conductor_pb2.RequestOutcome(request_id=request_id, outcome=conductor_pb2.OUTCOME_DONE, **ENDED)
            over = [request_id]
            await self._beat(placement.prefill, prefill_samples=[sample], finished_request_ids=over)
            await self._beat(placement.decode, outcomes=[outcome], finished_request_ids=over)

        return call


def fleet(instances: int, repeats: int, seconds: float) -> list[Window]:
    """All windows, of all repeats."""
    return asyncio.run(_fleet(instances, repeats, seconds))


async def _fleet(instances: int, repeats: int, seconds: float) -> list[Window]:
    with tempfile.TemporaryDirectory() as folder:
        async with contextlib.AsyncExitStack() as stack:
            tell(f"{instances:,} instances join")
            store = Service(folder, "store")
            stack.callback(store.close)
            conductor = Service(folder, "conductor", "--store", store.address, "--slo-ttft-ms", "1000000000")
            stack.callback(conductor.close)
            mesh = conductor_grpc.Mesh(instances, BLOCK, store, conductor)
            stack.push_async_callback(mesh.close)
            await mesh.build()
            one = Fleet(mesh, conductor.address, store.address)
            stack.push_async_callback(one.close)
            kinds = _kinds(one)
            for call, _ in kinds.values():  # connections and compiled code are made once
                if call is not None:
                    await asyncio.gather(*(call() for _ in range(CONNECTIONS)))
            found = []
            for repeat, (name, (call, rate)) in itertools.product(range(repeats), kinds.items()):
                tell(f"{instances:,} instances: {name}, {repeat + 1} of {repeats}")
                pids = {"conductor": conductor.process.pid, "store": store.process.pid}
                found.append(await _window(one, name, repeat, pids, call, rate, seconds))
            tell("")
            return found


def _kinds(one: Fleet) -> dict[str, tuple[Call | None, float]]:
    """Windows by name: what is called, and how often a second."""
    return {
        IDLE: (None, 0.0),
        "heartbeats": (one.beat, 400.0),
        "store heartbeats": (one.store_beat, 400.0),
        "announcements of 1 block": (one.announce(1), 200.0),
        "announcements of 64 blocks": (one.announce(64), 200.0),
        "requests of 4 blocks": (one.schedule(4), 60.0),
        "requests of 188 blocks": (one.schedule(188), 60.0),
        "requests of 1,000 blocks": (one.schedule(1000), 60.0),
        f"heartbeats, {SATURATED}": (one.beat, math.inf),
        f"store heartbeats, {SATURATED}": (one.store_beat, math.inf),
        f"announcements of 1 block, {SATURATED}": (one.announce(1), math.inf),
        f"announcements of 64 blocks, {SATURATED}": (one.announce(64), math.inf),
        f"requests of 4 blocks, {SATURATED}": (one.schedule(4), math.inf),
        f"requests of 1,000 blocks, {SATURATED}": (one.schedule(1000), math.inf),
    }


async def _window(
    one: Fleet, name: str, repeat: int, pids: dict[str, int], call: Call | None, rate: float, seconds: float
) -> Window:
    clocks = Clocks()
    one.counts = {}
    before, began = {service: clocks.read(pid) for service, pid in pids.items()}, time.monotonic()
    sent = _loopback_bytes()
    if call is None:
        await asyncio.sleep(seconds)
    elif rate == math.inf:
        await _closed_loop(call, seconds)
    else:
        await open_loop(call, rate, 0.0, seconds)
    await asyncio.sleep(SETTLE_S)
    cpu = {service: clocks.read(pid) - before[service] for service, pid in pids.items()}
    cpu[WIRE] = _loopback_bytes() - sent
    return Window(name, repeat, {"seconds": time.monotonic() - began, **one.counts}, cpu)


def _loopback_bytes() -> float:
    """Calls, answers, what the store master relays and TCP's own, of this machine's loopback so far."""
    return float(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


async def _closed_loop(call: Call, seconds: float) -> None:
    until = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < until:
            await call()

    await asyncio.gather(*(one() for _ in range(FLIGHT)))
