"""Stores that take turns: their servers, their clients, the rows and what is told of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import progress
from benchmarks.peers import mooncake_env
from benchmarks.peers.link import PeerMissing, Worker
from benchmarks.peers.store_base import room
from benchmarks.transfer_contest import size

START_S = 30.0
OPS = ("put", "get")
TURN_BYTES = 64 << 20  # a turn moves about so much, so that small values are timed often enough


@dataclass(frozen=True)
class Row:
    length: int
    batch: int
    clients: int

    @property
    def title(self) -> str:
        return f"{self.batch} × {size(self.length)}" + (f", {self.clients} clients" if self.clients > 1 else "")

    @property
    def room(self) -> int:
        return room(self.batch, self.length)

    @property
    def times(self) -> int:
        """Calls of one turn of one client."""
        return max(1, min(32, TURN_BYTES // (self.length * self.batch * self.clients)))

    @property
    def moved(self) -> int:
        """Bytes of one turn."""
        return self.length * self.batch * self.clients * self.times


@dataclass
class Contender:
    """A store with as many clients as any row needs."""

    title: str
    clients: list[Worker]

    def turn(self, op: str, row: Row) -> float:
        """Wall seconds from the first client's begin to the last one's end."""
        used = self.clients[: row.clients]
        for one in used:
            one.ask("turn", op=op, count=row.batch, length=row.length, times=row.times)
        spans = [one.answer("turn") for one in used]
        return max(end for _, end in spans) - min(start for start, _ in spans)

    def drop(self, row: Row) -> None:
        for one in self.clients[: row.clients]:
            one.call("drop")

    def check(self, row: Row, seed: int) -> None:
        for i, one in enumerate(self.clients[: row.clients]):
            if not one.call("check", count=row.batch, length=row.length, seed=seed + i):
                raise SystemExit(f"{self.title}: {row.title}: the bytes that came back differ")


@dataclass
class Result:
    row: Row
    turns: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # (op, title) → seconds, round by round

    def rate(self, op: str, title: str) -> float:
        """GB/s"""
        return self.row.moved / statistics.median(self.turns[op, title]) / 1e9

    def times(self, op: str, title: str, other: str) -> float:
        """How many times as fast `title` is as `other`."""
        pairs = zip(self.turns[op, other], self.turns[op, title], strict=True)
        return statistics.median(theirs / mine for theirs, mine in pairs)

    def plain(self) -> dict[str, Any]:
        told: dict[str, Any] = {"length": self.row.length, "batch": self.row.batch, "clients": self.row.clients}
        for (op, title), seconds in self.turns.items():
            told.setdefault(op, {})[title] = {
                "gb_per_s": round(self.rate(op, title), 3),
                "us_per_call": round(statistics.median(seconds) / self.row.times * 1e6, 1),
                "wall_s": [round(one, 6) for one in seconds],
            }
        return told


class Contest:
    """One row: bytes verified, one round to warm up, the rounds that count."""

    def __init__(self, row: Row, contenders: Sequence[Contender]) -> None:
        self.row = row
        self.contenders = contenders

    def run(self, rounds: int) -> Result:
        rng = random.Random(self.row.length + self.row.batch)
        result = Result(self.row)
        able = list(self.contenders)
        for round_ in range(-1, rounds + 1):
            progress.tell(f"{self.row.title}: round {max(round_, 0)} of {rounds}")
            for one in rng.sample(able, len(able)):
                try:
                    self._turns(one, round_, rng, result)
                except PeerMissing as err:
                    print(f"{one.title} is left out of {self.row.title}: {err}")
                    able.remove(one)
                    for op in OPS:
                        result.turns.pop((op, one.title), None)
        progress.tell("")
        return result

    def _turns(self, one: Contender, round_: int, rng: random.Random, result: Result) -> None:
        if round_ < 0:
            one.check(self.row, rng.randrange(1, 1 << 30))
            return
        for op in OPS:
            spent = one.turn(op, self.row)
            if round_:
                result.turns.setdefault((op, one.title), []).append(spent)
        one.drop(self.row)


# ── servers ──────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def contenders(rows: Sequence[Row]) -> Iterator[list[Contender]]:
    """Every store that can be had here, started; ended afterwards."""
    clients = max(row.clients for row in rows)
    nbytes = max(row.room for row in rows)
    held = 3 * max(row.moved for row in rows) + (256 << 20)  # of one contender, at any time
    with contextlib.ExitStack() as stack:
        made = [Contender("memcpy", _workers(stack, "benchmarks.peers.store_copy", clients, nbytes=nbytes))]
        for start in (_kvmesh, _mooncake, _redis):
            try:
                made += start(stack, clients, nbytes, held)
            except PeerMissing as err:
                print(f"without {start.__name__.strip('_').capitalize()}: {err}")
        yield made


def _workers(stack: contextlib.ExitStack, module: str, n: int, **words: Any) -> list[Worker]:
    env, python = words.pop("env", None), words.pop("python", sys.executable)
    made = []
    for i in range(n):
        worker = Worker(module, python=python, env=env)
        stack.callback(worker.close)
        worker.call("client", **{key: value(i) if callable(value) else value for key, value in words.items()})
        made.append(worker)
    return made


def _kvmesh(stack: contextlib.ExitStack, clients: int, nbytes: int, held: int) -> list[Contender]:
    master = stack.enter_context(service("store"))
    stack.enter_context(service("pool", "--store", master, "--memory-mb", str(held >> 20), "--instance-id", "pool-0"))
    module = "benchmarks.peers.store_kvmesh"
    return [
        Contender(
            f"kvmesh {name}", _workers(stack, module, clients, master=master, nbytes=nbytes, transports=transports)
        )
        for name, transports in (("shm", "shm,tcp"), ("tcp", "tcp"))
    ]


@contextlib.contextmanager
def service(name: str, *flags: str) -> Iterator[str]:
    """`kvmesh serve NAME`; its address."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready.json")
        argv = [sys.executable, "-m", "kvmesh.cli", "serve", name, "--ready-file", str(ready), *flags]
        argv += ["--log-level", "warning"]
        with running(argv) as process:
            deadline = time.monotonic() + START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise PeerMissing(f"kvmesh serve {name} did not start")
                time.sleep(0.02)
            yield str(json.loads(ready.read_text())["address"])


@contextlib.contextmanager
def running(argv: Sequence[str], env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(
            argv, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, stdout=subprocess.DEVNULL
        )
    except OSError as err:
        raise PeerMissing(f"{argv[0]}: {err}") from err
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def accepts(port: int) -> None:
    """Returns when somebody listens there. PeerMissing: nobody does."""
    deadline = time.monotonic() + START_S
    while True:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > deadline:
            raise PeerMissing(f"nothing listens on port {port}")
        time.sleep(0.02)


@contextlib.contextmanager
def mooncake_master() -> Iterator[tuple[str, str, dict[str, str]]]:
    """(its address, Python of its environment, what must be in the environment). PeerMissing."""
    python, env, version = mooncake_env.ready()
    print(f"Mooncake: {mooncake_env.PACKAGE} {version}")
    port, metrics = free_port(), free_port()
    argv = [str(Path(python).with_name("mooncake_master")), "--rpc_port", str(port), "--metrics_port", str(metrics)]
    with running([*argv, "--default_kv_lease_ttl", "10000"], {**env, "GLOG_minloglevel": "3"}):
        accepts(port)
        yield f"127.0.0.1:{port}", python, env


def _mooncake(stack: contextlib.ExitStack, clients: int, nbytes: int, held: int) -> list[Contender]:
    master, python, env = stack.enter_context(mooncake_master())
    module = "benchmarks.peers.store_mooncake"
    node = Worker(module, python=python, env=env)
    stack.callback(node.close)
    node.call("node", master=master, port=free_port(), nbytes=held)
    more = {"python": python, "env": env, "port": lambda _: free_port()}
    return [Contender("Mooncake", _workers(stack, module, clients, master=master, nbytes=nbytes, **more))]


def _redis(stack: contextlib.ExitStack, clients: int, nbytes: int, held: int) -> list[Contender]:
    server = shutil.which("redis-server")
    if server is None:
        raise PeerMissing("no redis-server is installed")
    port = free_port()
    stack.enter_context(running([server, "--port", str(port), "--save", "", "--appendonly", "no"]))
    accepts(port)
    return [Contender("Redis", _workers(stack, "benchmarks.peers.store_redis", clients, port=port, nbytes=nbytes))]
