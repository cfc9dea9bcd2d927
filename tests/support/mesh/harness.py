"""A real mesh for tests: `kvmesh up`'s own supervisor, and what tests ask of the running processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
from tests.support.mesh.client import MeshClient, gateway_status, leaks, pools, until
from tests.support.warm_processes import children

READY_S = 120.0
SETTLE_S = 60.0


class Running:
    """One running mesh and a client of it."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.http = mesh.url
        self.grpc = mesh.addresses["gateway"]
        self.client = MeshClient(self.grpc)
        self.left: list[str] = []  # what `settled` saw last

    def pid(self, name: str) -> int:
        return self.mesh.processes[name].pid

    def rank_pids(self, name: str) -> list[int]:
        return [child.pid for child in children(self.pid(name))]

    def all_pids(self) -> list[int]:
        return [p for name in self.mesh.processes for p in (self.pid(name), *self.rank_pids(name))]

    def threads(self) -> int:
        """Threads of every process of the mesh together."""
        return sum(psutil.Process(pid).num_threads() for pid in self.all_pids())

    def kill(self, name: str, sig: int = signal.SIGKILL) -> None:
        self.mesh.kill(name, sig)

    def instances(self) -> list[str]:
        return [name for name in self.mesh.processes if name.startswith(("prefill", "decode", "coupled"))]

    async def reborn(self, name: str, old_pid: int) -> None:
        """The supervisor has brought `name` back, ready."""

        async def new_pid() -> bool:
            return self.pid(name) not in (0, old_pid)

        await until(new_pid, f"a new {name}")
        await asyncio.to_thread(self.mesh.wait_ready, READY_S, [name])

    async def restarted(self, name: str, old_pid: int) -> None:
        """The supervisor has brought `name` back and the whole mesh is ready again."""
        await self.reborn(name, old_pid)
        await asyncio.to_thread(self.mesh.wait_ready, READY_S)

        async def ready() -> bool:
            return bool((await gateway_status(self.grpc)).ready)

        await until(ready, "the gateway", READY_S)

    async def settled(self) -> None:
        """Every pool is full again, no handoff, window, request or quarantine is left anywhere."""

        async def clean() -> bool:
            self.left = []
            for name in self.instances():
                self.left += [
                    f"{name}: {leak}" for leak in leaks(await pools(self.mesh.addresses[name], name.split("-")[0]))
                ]
            status = await gateway_status(self.grpc)
            if status.requests:
                self.left.append(f"gateway: requests {status.requests}")
            return not self.left

        try:
            await until(clean, "all pools back to full", SETTLE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.left}") from None

    async def streams(self) -> dict[str, int]:
        """Open Session and Handoff streams, as each instance counts them."""
        counts = {}
        for name in self.instances():
            counts[name] = (await pools(self.mesh.addresses[name], name.split("-")[0])).streams
        return counts

    async def busy(self, name: str) -> None:
        """The instance holds work."""

        async def works() -> bool:
            counters = await pools(self.mesh.addresses[name], name.split("-")[0])
            return bool(counters.handoffs or counters.requests)

        await until(works, f"work at {name}")

    async def cordon(self, *names: str, keep: bool = True) -> None:
        """Keeps new work away from these instances, or lets them have some again."""
        state = conductor_pb2.CORDON_STATE_CORDONED if keep else conductor_pb2.CORDON_STATE_UNSPECIFIED
        async with connect(self.mesh.addresses["conductor"]) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            for name in names:
                await stub.Cordon(conductor_pb2.CordonRequest(instance_id=name, state=state), timeout=30)

    async def ready(self, name: str) -> None:
        """The conductor gives work to the instance (again)."""

        async def placeable() -> bool:
            return any(i.instance.instance_id == name and i.ready for i in await self._told())

        await until(placeable, f"{name} ready at the conductor")

    async def queued(self, names: Collection[str]) -> str:
        """The name of one that the conductor has given work which it has not finished, whether or not it answers."""

        async def placed() -> str:
            told = await self._told()
            return next(
                (i.instance.instance_id for i in told if i.instance.instance_id in names and i.queue_ms > 0), ""
            )

        return str(await until(placed, f"work placed at one of {sorted(names)}"))

    async def _told(self) -> Sequence[conductor_pb2.InstanceStatus]:
        async with connect(self.mesh.addresses["conductor"]) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            return (await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=30)).instances


@asynccontextmanager
async def running_mesh(
    model: Path,
    run_dir: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    block_tokens: int = 64,
    memory_mb: int = 64,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Starts it, waits until it serves, and on the way out asserts that no process is left."""
    mesh = Mesh(
        MeshSettings(
            model=str(model),
            prefill=prefill,
            decode=decode,
            http_port=0,
            grpc_port=0,
            block_tokens=block_tokens,
            memory_mb=memory_mb,
            run_dir=str(run_dir),
            flags=flags or {},
            # float32: what most are compared with. A busy machine decodes slowly, and no test is about that by chance.
            **{"dtype": "float32", "slo_tbt_ms": 60_000, **settings},
        )
    )
    mesh.start()
    pids: list[int] = []
    try:
        await asyncio.to_thread(mesh.wait_ready, READY_S)
        running = Running(mesh)
        try:

            async def ready() -> bool:
                return bool((await gateway_status(running.grpc)).ready)

            await until(ready, "the gateway", READY_S)
            yield running
            pids = running.all_pids()
        finally:
            await running.client.close()
    finally:
        await asyncio.to_thread(mesh.stop)
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
