"""Three masters, Redis, five pool nodes, and the hand that strikes them.

Nodes differ: some have an SSD, some keep their memory over a kill -9, the READs of some misfare all their lives, and
some live beside the clients, on the same machine, so that all that is nearer than tcp is used too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from kvmesh.cli.up.plan import Ports
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import store_pb2, store_pb2_grpc
from kvmesh.transfer import TransferEngine
from tests.chaos import processes, rot, tmpfs
from tests.chaos.draining import call_off, drained
from tests.chaos.history import INF, Disturbance, History
from tests.chaos.nemesis import LEADER, NODE_FAULTS, Schedule, Step
from tests.chaos.network import Loopback, Namespaces, network
from tests.chaos.processes import Process

MASTERS = ("m0", "m1", "m2")
NODES = ("n0", "n1", "n2", "n3", "n4")
WITH_SSD = ("n0", "n2")
WARM = ("n1", "n4")
FAULTY = ("n0", "n1", "n3")
NEAR = ("n3", "n4")
NEAR_HOST = "host-near"  # node_id of what lives beside the clients
LEASE_MS = 1500  # of members at the master
LEADER_LEASE_MS = 1500
MEMORY_MB = 8  # little: blocks must go, or move to SSD
SSD_MB = 64
ASK_S = 1.0
CALL_OFF_S = 20.0
CAME_BACK = re.compile(r"warm segment: (\d+) of \d+ blocks are here again")


class Cluster:
    """All processes of one storm. Times are of `history.clock`."""

    def __init__(self, net: Loopback, folder: Path, seed: int) -> None:
        self.net = net
        self.kept = tmpfs.folder()
        self._seed = seed
        self.folder = folder
        ports = Ports()
        redis_port = ports.take()
        self.redis = processes.Redis("redis", net, redis_port, folder)
        self.masters = {
            name: processes.service("store", name, net, ports.take(), folder, self._master()) for name in MASTERS
        }
        self.nodes = {
            name: processes.service("pool", name, net, ports.take(), folder, self._node(name)) for name in NODES
        }
        self._channels: dict[str, grpc.aio.Channel] = {}

    def _master(self) -> dict[str, object]:
        return {
            "heartbeat_interval_ms": 250,
            "lease_ms": LEASE_MS,
            "redis": f"redis://{self.redis.address}",
            "leader_lease_ms": LEADER_LEASE_MS,
        }

    def _node(self, name: str) -> dict[str, object]:
        flags: dict[str, object] = {
            "store": self.store,
            "instance_id": name,
            "node_id": NEAR_HOST if name in NEAR else f"host-{name}",
            "memory_mb": MEMORY_MB,
            "transports": "shm,tcp" if name in NEAR else "tcp",
        }
        if name in WARM:
            flags["warm_segment"] = self.kept / name
        if name in FAULTY:
            flags["fault"] = f'{{"seed": {self._seed}, "rules": [{", ".join(NODE_FAULTS)}]}}'
        if name in WITH_SSD:
            flags |= {"ssd_path": self.folder / f"{name}.ssd", "ssd_capacity_mb": SSD_MB}
        return flags

    @property
    def store(self) -> str:
        """Addresses of the masters, as clients and nodes are told them."""
        return ",".join(master.address for master in self.masters.values())

    def all(self) -> list[Process]:
        return [self.redis, *self.masters.values(), *self.nodes.values()]

    async def start(self) -> None:
        """All are ready, one master leads, and it knows every node."""
        self.redis.start()
        await self.redis.ready()
        for process in (*self.masters.values(), *self.nodes.values()):
            process.start()
        for process in (*self.masters.values(), *self.nodes.values()):
            await process.ready()
        await self.settled(processes.READY_S)

    async def settled(self, timeout_s: float) -> store_pb2.GetStoreStatusResponse:
        """One master leads and every node has announced in full to it. AssertionError: what is missing."""
        deadline = time.monotonic() + timeout_s
        missing = "nobody leads"
        while time.monotonic() < deadline:
            told = await self.leader_status()
            if told is not None:
                known = {store.member.instance.instance_id for store in told.stores}
                missing = f"unknown: {sorted(set(NODES) - known)}, rebuilding: {list(told.rebuilding)}"
                if known >= set(NODES) and not told.rebuilding:
                    return told
            await asyncio.sleep(0.1)
        raise AssertionError(f"not settled within {timeout_s} s: {missing}")

    # ── masters ───────────────────────────────────────────────────────────────────────────────────

    async def statuses(self) -> dict[str, store_pb2.GetStoreStatusResponse]:
        """Of the masters that answer."""

        async def ask(name: str) -> store_pb2.GetStoreStatusResponse | None:
            stub = store_pb2_grpc.StoreMasterStub(self.channel(self.masters[name].address))
            with contextlib.suppress(grpc.aio.AioRpcError):
                return await stub.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=ASK_S)
            return None

        answers = await asyncio.gather(*map(ask, self.masters))
        return {name: answer for name, answer in zip(self.masters, answers, strict=True) if answer is not None}

    async def leaders(self) -> list[str]:
        return [name for name, told in (await self.statuses()).items() if told.leading]

    async def leader_status(self) -> store_pb2.GetStoreStatusResponse | None:
        leading = [told for told in (await self.statuses()).values() if told.leading]
        return max(leading, key=lambda told: told.term, default=None)

    def channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = connect(address)
        return self._channels[address]

    def came_back(self) -> dict[str, int]:
        """Blocks that nodes found in their memory after a kill, of all lives."""
        logs = {name: self.nodes[name].log.read_text(errors="replace") for name in WARM}
        return {name: sum(map(int, CAME_BACK.findall(text))) for name, text in logs.items()}

    async def close(self) -> None:
        await asyncio.gather(*(channel.close(grace=None) for channel in self._channels.values()))
        for process in self.all():
            process.end()
        tmpfs.drop(self.kept)


@asynccontextmanager
async def cluster(folder: Path, seed: int) -> AsyncIterator[Cluster]:
    """Started; on leaving, nothing of it is left."""
    with network(["redis", *MASTERS, *(node for node in NODES if node not in NEAR)]) as net:
        made = Cluster(net, folder, seed)
        try:
            await made.start()
            yield made
        finally:
            await made.close()


@dataclass(frozen=True)
class _Blow:
    step: Step
    target: str
    start: float


class Striker:
    """Carries out a schedule on a cluster and writes down what it did. Whatever happens, all is made good again."""

    def __init__(self, made: Cluster, history: History, schedule: Schedule, engines: Sequence[TransferEngine]) -> None:
        self._cluster = made
        self._history = history
        self._schedule = schedule
        self._engines = engines
        self._random = random.Random(f"strike {schedule.seed}")
        self._struck: set[str] = set()
        self.open: list[_Blow] = []

    async def run(self) -> None:
        """Until the last blow is made good."""
        start = self._history.clock()
        async with asyncio.TaskGroup() as group:
            for step in self._schedule.steps:
                group.create_task(self._step(step, start))

    async def _step(self, step: Step, start: float) -> None:
        await asyncio.sleep(max(0.0, start + step.at - self._history.clock()))
        target = await self._leader() if step.target == LEADER else step.target
        if target is None or target in self._struck:
            return
        self._struck.add(target)
        blow = _Blow(step, target, self._history.clock())
        self.open.append(blow)
        try:
            await getattr(self, f"_{step.blow.replace('-', '_')}")(target, step)
        finally:
            self.open.remove(blow)
            self._struck.discard(target)
            self._note(blow, self._history.clock())

    def give_up(self) -> None:
        """Of a storm that failed: what was under way is written down too."""
        for blow in self.open:
            self._note(blow, INF)

    def _note(self, blow: _Blow, end: float) -> None:
        step = blow.step
        if step.blow == "drain":
            return None  # told by itself: who drains can be asked, and has what it had
        words = f"{step.blow}{' ' + step.rule if step.rule else ''}{' from ' + step.peer if step.peer else ''}"
        if blow.target in NODES:
            harm = "memory" if step.blow in ("kill", "rot") else "reach"
            if step.peer in NODES:
                return self._add(f"({blow.target})", "reach", blow.start, end, words)  # clients and masters reach it
        else:
            harm = "master"
        return self._add(blow.target, harm, blow.start, end, words)

    def _add(self, target: str, harm: str, start: float, end: float, words: str) -> None:
        self._history.disturbances.append(Disturbance(target, harm, start, end, words))  # type: ignore[arg-type]

    async def _leader(self) -> str | None:
        leaders = [name for name in await self._cluster.leaders() if name not in self._struck]
        spare = [name for name in MASTERS if name not in self._struck]
        return leaders[0] if leaders else self._random.choice(spare) if spare else None

    def _process(self, name: str) -> Process:
        made = self._cluster
        return {**made.masters, **made.nodes, "redis": made.redis}[name]

    # ── blows ─────────────────────────────────────────────────────────────────────────────────────

    async def _kill(self, target: str, step: Step) -> None:
        process = self._process(target)
        await process.kill(rank_only=target in NODES and self._random.random() < 0.3)
        await asyncio.sleep(step.seconds)
        process.start()
        await process.ready()

    async def _rot(self, target: str, step: Step) -> None:
        """What it left behind does not stay as it was."""
        process, made = self._process(target), self._cluster
        await process.kill()
        await asyncio.sleep(step.seconds)
        if target in WITH_SSD:
            rot.disk(made.folder / f"{target}.ssd", self._random)
        if target in WARM:  # who reads by shm still reads what a dead node has leased: its memory stays
            rot.memory(made.kept / target, self._random, tables_only=target in NEAR)
        process.start()
        await process.ready()

    async def _drain(self, target: str, step: Step) -> None:
        """Its only copies move elsewhere; then it goes, and comes back as another."""
        began = self._history.clock()
        if await drained(self._cluster.store, target, step.seconds):
            await self.lose(target, began)
        await call_off(self._cluster.store, target, CALL_OFF_S)

    async def lose(self, target: str, began: float) -> None:
        """A node that has been drained since `began` is killed, and comes back with nothing of what it had."""
        process, made, went = self._process(target), self._cluster, self._history.clock()
        self._add(target, "drained", began, went, "drain")
        try:
            await process.kill()
            for folder in (made.kept / target, made.folder / f"{target}.ssd"):
                tmpfs.drop(folder)
            process.start()
            await process.ready()
        finally:
            self._add(target, "memory", went, self._history.clock(), "kill when drained")

    async def _restart_redis(self, target: str, step: Step) -> None:
        await self._kill(target, step)

    async def _freeze(self, target: str, step: Step) -> None:
        process = self._process(target)
        pids = process.pids()
        if len(pids) > 1 and self._random.random() < 0.5:
            pids = [self._random.choice(pids)]  # the front or the rank alone
        process.signal(signal.SIGSTOP, pids)
        try:
            await asyncio.sleep(step.seconds)
        finally:
            process.signal(signal.SIGCONT, pids)

    async def _cut(self, target: str, step: Step) -> None:
        net = self._links()
        await asyncio.to_thread(net.cut_one_way, target, step.peer) if step.peer else await asyncio.to_thread(
            net.cut, target
        )
        try:
            await asyncio.sleep(step.seconds)
        finally:
            net.heal(target)

    async def _cut_one_way(self, target: str, step: Step) -> None:
        await self._cut(target, step)

    async def _slow(self, target: str, step: Step) -> None:
        net = self._links()
        await asyncio.to_thread(net.slow, target, "4mbit")
        try:
            await asyncio.sleep(step.seconds)
        finally:
            net.heal(target)

    async def _reads(self, target: str, step: Step) -> None:
        """Of the clients' engines: what they read misfares."""
        script = f'{{"seed": {self._schedule.seed}, "rules": [{step.rule}]}}'
        for engine in self._engines:
            engine.fault.load(script)  # type: ignore[union-attr]
        try:
            await asyncio.sleep(step.seconds)
        finally:
            for engine in self._engines:
                engine.fault.clear()  # type: ignore[union-attr]
                engine.fault.thaw()  # type: ignore[union-attr]

    def _links(self) -> Namespaces:
        assert isinstance(self._cluster.net, Namespaces)
        return self._cluster.net
