"""How long a new leader takes to know all blocks again, from the death of the one before.

    python -m benchmarks.store_rebuild [--blocks 100000,1000000] [--nodes 8] [--rounds 3] [--json FILE]

Two masters (processes) with a redis-server of their own; nodes that join, beat and announce as real ones do, in this
process. The leader is killed with SIGKILL; told are medians in seconds since then:

    leads    another master leads (a lease of 2 s has to run out first, less what had passed of it)
    first    it has all blocks of one node: from here on it answers for that node
    all      ... of every node
    rebuild  all - leads
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.progress import tell
from kvmesh.cli.probe import health, redis_ready
from kvmesh.cli.up.plan import Ports
from kvmesh.kvcache.announce import Announcer
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.membership.announcing import Announcing
from kvmesh.membership.registrar import Registrar
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import common_pb2, store_pb2, store_pb2_grpc

TIMEOUT_S = 120.0
POLL_S = 0.01
ANNOUNCE_S = 0.05  # as announce_ms of instances


class Processes:
    """A Redis and two masters in `folder`."""

    def __init__(self, folder: Path) -> None:
        ports = Ports()
        self._redis_port = ports.take()
        self._ports = [ports.take(), ports.take()]
        self.addresses = [f"127.0.0.1:{port}" for port in self._ports]
        self._folder = folder
        redis = ["redis-server", "--port", str(self._redis_port), "--save", "", "--dir", str(folder)]
        self._log = (folder / "log").open("ab")
        self._redis = subprocess.Popen(redis, stdout=self._log)
        _until(lambda: redis_ready(f"127.0.0.1:{self._redis_port}"))
        self.masters = [self._master(port) for port in self._ports]

    def _master(self, port: int) -> subprocess.Popen[bytes]:
        argv = ["--port", str(port), "--redis", f"redis://127.0.0.1:{self._redis_port}", "--log-level", "error"]
        made = subprocess.Popen([sys.executable, "-m", "kvmesh.cli", "serve", "store", *argv], stderr=self._log)
        _until(lambda: health(f"127.0.0.1:{port}") == "SERVING")
        return made

    def kill(self, leader: int) -> None:
        self.masters[leader].send_signal(signal.SIGKILL)
        self.masters[leader].wait()

    def restart(self, which: int) -> None:
        self.masters[which] = self._master(self._ports[which])

    def close(self) -> None:
        for process in (*self.masters, self._redis):
            process.kill()
            process.wait()
        self._log.close()


def _until(what: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not what():
        if time.monotonic() > deadline:
            raise RuntimeError("a process did not start")
        time.sleep(0.02)


class Node:
    def __init__(self, name: str, masters: str, blocks: int, rng: random.Random) -> None:
        self._store = NodeStore(blocks, high_percent=100, low_percent=100)
        packed = rng.randbytes(16 * blocks)
        keys = [packed[i : i + 16] for i in range(0, len(packed), 16)]
        self._store.begin(keys)
        for key in keys:
            self._store.seal(key)
        ref = common_pb2.InstanceRef(instance_id=name, address="127.0.0.1:9", incarnation=1)
        registrar = Registrar.pool_node(ref, "here", masters, store_pb2.StoreUsage)
        announcer = Announcer(name, 1, self._store)
        joined = lambda: registrar.registered["store"]  # noqa: E731
        announcing = Announcing(announcer, registrar.masters, ANNOUNCE_S, joined, registrar.urge_store)
        self.run = (registrar.run(asyncio.Event()), announcing.run())


async def statuses(addresses: list[str]) -> list[store_pb2.GetStoreStatusResponse | None]:
    async def one(address: str) -> store_pb2.GetStoreStatusResponse | None:
        async with connect(address) as channel:
            with contextlib.suppress(grpc.RpcError):
                request = store_pb2.GetStoreStatusRequest()
                return await store_pb2_grpc.StoreMasterStub(channel).GetStatus(request, timeout=TIMEOUT_S)
        return None

    return await asyncio.gather(*map(one, addresses))


async def whole(addresses: list[str], nodes: int, blocks: int, *, above: int = 0) -> tuple[int, int, list[float]]:
    """Which master leads and its term, once it knows everything; and when: it led, had one node, had all."""
    times: list[float] = []
    while True:
        for which, told in enumerate(await statuses(addresses)):
            if told is None or not told.leading or told.term <= above:
                continue
            each = [store.blocks for store in told.stores]
            reached = [True, any(count == blocks // nodes for count in each), told.replicas == blocks // nodes * nodes]
            while len(times) < 3 and reached[len(times)]:
                times.append(time.monotonic())
            if len(times) == 3:
                return which, told.term, times
        await asyncio.sleep(POLL_S)


async def measure(blocks: int, nodes: int, rounds: int) -> dict[str, Any]:
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder))
        masters = ",".join(processes.addresses)
        tasks = [
            asyncio.create_task(part)
            for i in range(nodes)
            for part in Node(f"node-{i}", masters, blocks // nodes, rng).run
        ]
        found: dict[str, list[float]] = {"leads": [], "first": [], "all": [], "rebuild": []}
        cpu = []
        try:
            leader, term, _ = await whole(processes.addresses, nodes, blocks)
            for turn in range(rounds):
                tell(f"{blocks} blocks: {turn + 1} of {rounds}")
                other = psutil.Process(processes.masters[1 - leader].pid)
                before = sum(other.cpu_times()[:2])
                began = time.monotonic()
                processes.kill(leader)
                died = leader
                leader, term, times = await whole(processes.addresses, nodes, blocks, above=term)
                cpu.append(sum(other.cpu_times()[:2]) - before)
                for name, at in zip(("leads", "first", "all"), times, strict=True):
                    found[name].append(at - began)
                found["rebuild"].append(times[2] - times[0])
                await asyncio.to_thread(processes.restart, died)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            processes.close()
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    return {"blocks": blocks, "nodes": nodes, **medians, "master_cpu_s": round(statistics.median(cpu), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time until a new leader of the store knows all blocks again.")
    parser.add_argument("--blocks", default="100000,1000000")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # nodes complain about the master that is dead, as they should
    rows = [asyncio.run(measure(int(n), options.nodes, options.rounds)) for n in options.blocks.split(",")]
    columns = list(rows[0])
    print("".join(f"{column:>14}" for column in columns))
    for row in rows:
        print("".join(f"{row[column]:>14}" for column in columns))
    if options.json:
        told = {"arguments": {k: v for k, v in vars(options).items() if k != "json"}, "rows": rows}
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
