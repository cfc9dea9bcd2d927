"""A running mesh whose conductor's decisions are read while it works: what `benchmarks.equals` measures."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import progress
from benchmarks.equals_figures import LoggedDecision, line_time, parse_decision
from benchmarks.overload_client import Ask, Clients, Seen
from benchmarks.overload_load import Shape, Workload
from kvmesh.cli.load import target
from kvmesh.cli.load.report import LoadSlo
from kvmesh.cli.up import plan
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
from tests.support.mesh.client import gateway_status, until
from tests.support.mesh.harness import Running

POOLS = ("prefill", "decode")
READY_S = 120.0
LOG_S = 15.0  # until a decision can be read in the log
PROMPTS, ANSWERS = (64, 512), (8, 32)  # tokens, uniform


@asynccontextmanager
async def ticking(text: str, more: Callable[[], str] = str) -> AsyncIterator[None]:
    """Tells each second how long this has taken; `more` adds what is known by then."""
    began = time.monotonic()

    async def tick() -> None:
        while True:
            progress.tell(f"{text}: {time.monotonic() - began:.0f} s {more()}")
            await asyncio.sleep(1)

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()
        progress.tell("")


class PlacementLog:
    """The conductor's decision log, read while it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._known_until = 0.0
        self.decisions: list[LoggedDecision] = []

    def read(self) -> None:
        """Takes in what has been written since the last time."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._known_until = line_time(line) or self._known_until
            if (decision := parse_decision(line)) is not None:
                self.decisions.append(decision)

    async def between(self, start: float, end: float) -> list[LoggedDecision]:
        """All decisions of a time that is over, the refusals among them."""

        async def complete() -> bool:
            self.read()
            return self._known_until >= end

        await until(complete, "the decision log", LOG_S)
        return [one for one in self.decisions if start <= one.at < end]


@dataclass
class LiveMesh:
    """A mesh that serves, and its clients. `apart`: instances that have a supervisor of their own, so that they can go
    for good or come later."""

    running: Running
    log: PlacementLog
    clients: Clients
    workload: Workload
    apart: dict[str, Mesh]
    model: str
    vocab: int
    block_tokens: int

    def of(self, pool: str) -> list[str]:
        """The instances of a pool that have been started, by name."""
        known = [*self.running.mesh.processes, *(name for name, mesh in self.apart.items() if mesh.processes[name].pid)]
        return sorted(name for name in known if name.startswith(pool))

    def pids(self, name: str) -> list[int]:
        """The front and the ranks of an instance."""
        front = self._supervisor(name).processes[name].pid
        return [front, *(child.pid for child in psutil.Process(front).children())]

    def _supervisor(self, name: str) -> Mesh:
        return self.apart.get(name, self.running.mesh)

    def kill(self, name: str) -> None:
        self._supervisor(name).kill(name)

    async def reborn(self, name: str) -> None:
        """The supervisor has started the killed instance again, and the conductor gives it work."""
        await asyncio.to_thread(self._supervisor(name).wait_ready, READY_S, [name])
        await self.running.ready(name)

    async def replace(self, old: str, new: str) -> None:
        """Kills `old` for good and starts `new`, until the conductor gives it work."""
        self.kill(old)
        await asyncio.to_thread(self.apart[old].stop)
        self.apart[new].start()
        await self.reborn(new)

    def asks(self, times: Sequence[float], slo: LoadSlo | None = None) -> list[Ask]:
        """One request at each time, with prompts that nobody has sent before."""
        return self.workload.asks(times, secrets.token_hex(8), slo or LoadSlo())

    async def closed(self, count: int, concurrency: int) -> list[Seen]:
        """So many requests, `concurrency` at once."""
        asks, seen = iter(self.asks([0.0] * count)), list[Seen]()

        async def client() -> None:
            for ask in asks:
                seen.append(await self.clients.send(ask))

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return seen

    async def open(self, rate: float, seconds: float) -> list[Seen]:
        """Requests at `rate` a second, each at a random moment of its slot; they wait for nobody."""
        return await self.open_until(rate, asyncio.Event(), seconds)

    async def open_until(self, rate: float, stop: asyncio.Event, most_s: float) -> list[Seen]:
        """The same until `stop` is set, or for `most_s`; returns when all have been answered."""
        rng, start = random.Random(rate), time.monotonic()
        tasks = list[asyncio.Task[Seen]]()
        try:
            for ask in self.asks([(n + rng.random()) / rate for n in range(round(rate * most_s))]):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), max(0.0, start + ask.at_s - time.monotonic()))
                if stop.is_set():
                    break
                tasks.append(asyncio.create_task(self.clients.send(ask)))
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def idle(self) -> None:
        """Nothing is under way in the gateway."""

        async def idle() -> bool:
            return not (await gateway_status(self.running.grpc)).requests

        await until(idle, "an idle gateway", READY_S)

    async def errors(self) -> dict[str, dict[str, Any]]:
        """The conductor's own book of predictions, by kind."""
        async with connect(self.running.mesh.addresses["conductor"]) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            status = await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=10)
        return {
            one.what: {"samples": one.samples, "bias": one.bias, "p50": one.p50, "p90": one.p90, "p99": one.p99}
            for one in status.errors
        }


@asynccontextmanager
async def live_mesh(
    args: argparse.Namespace,
    prefill: int,
    decode: int,
    *,
    shape: Shape = Shape(PROMPTS, ANSWERS),
    apart: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> AsyncIterator[LiveMesh]:
    """A mesh as `kvmesh up` starts it. `apart` and `spare` are names among its instances: the latter are not started.
    Raises RuntimeError when a process of it is left afterwards."""
    pids: set[int] = set()
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = MeshSettings(
            model=str(args.model), prefill=prefill, decode=decode, http_port=0, grpc_port=0, run_dir=str(home),
            log_level="warning", flags={"conductor": {"decision_log": str(home / "decisions.jsonl")}},
        )  # fmt: skip
        ports = plan.Ports()
        specs = {spec.name: spec for spec in plan.plan(settings, home, ports)}
        parts = {
            name: Mesh(dataclasses.replace(settings, run_dir=str(home / name)), [specs[name]])
            for name in (*apart, *spare)
        }
        mesh = Mesh(settings, [spec for name, spec in specs.items() if name not in parts])
        for one in (mesh, *(parts[name] for name in apart)):
            stack.push_async_callback(asyncio.to_thread, one.stop)
            one.start()
        for name in spare:
            stack.push_async_callback(asyncio.to_thread, _stop_if_started, parts[name])
        started = [name for name in specs if name.startswith(POOLS) and name not in spare]
        async with ticking(f"starting {prefill}P {decode}D"):
            for one in (mesh, *(parts[name] for name in apart)):
                await asyncio.to_thread(one.wait_ready, READY_S)
            running = Running(mesh)
            stack.push_async_callback(running.client.close)
            for name in started:
                await running.ready(name)

            async def serving() -> bool:
                return bool((await gateway_status(running.grpc)).ready)

            await until(serving, "the gateway", READY_S)
        there = target.find(mesh.url, None, None, None, None)
        clients = Clients(mesh.url)
        stack.push_async_callback(clients.close)
        log = PlacementLog(home / "decisions.jsonl")
        workload = Workload(there.model, there.vocab_size, shape, args.seed)
        live = LiveMesh(running, log, clients, workload, parts, there.model, there.vocab_size, there.block_tokens)
        yield live
        for name in (*mesh.processes, *(name for pool in POOLS for name in live.of(pool))):
            with contextlib.suppress(psutil.NoSuchProcess):
                pids |= set(live.pids(name))
    if left := [pid for pid in pids if psutil.pid_exists(pid)]:
        raise RuntimeError(f"processes {left} are left of the mesh")


def _stop_if_started(mesh: Mesh) -> None:
    if any(one.pid for one in mesh.processes.values()):
        mesh.stop()
