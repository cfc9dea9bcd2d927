"""Bursts and unfinished frames against a real mesh: what the clients get, and what it does to the instances.

    python -m benchmarks.attacks_burst http --requests 5000
    python -m benchmarks.attacks_burst grpc --requests 5000 --channels 50
    python -m benchmarks.attacks_burst frames
    python -m benchmarks.attacks_burst --json FILE          # all three

Each attack starts a mesh of its own (the demo model on loopback, 2 prefill and 2 decode instances) and sends its load
from a process beside it. While the load runs, and until the mesh has been quiet for a moment, the conductor is asked
which instances may get work and the gateway whether it is ready; the memory of all processes is read in the same round.
The figures are counts: what the clients were answered by status, connections that were refused or broke, how often an
instance was seen not to be ready and why, and statuses of `/ready`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc, doors_pb2, doors_pb2_grpc, gateway_pb2, gateway_pb2_grpc

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "demo-model"
READY_S = 120.0
LOOK_S = 0.2  # between two looks at the mesh
QUIET_S = 3.0  # the mesh is watched so long after the last answer
PATIENCE_S = 180.0  # of one client
DESCRIPTORS = 20_000
PROMPT_TOKENS, MAX_TOKENS = 32, 8
TOKEN_IDS = (20, 250)  # of prompts, letters of the demo model
CALLERS = 20  # of `unfinished_frames`
FRAMES = (15 << 20, (1 << 20) - 1)  # bytes: longer than a frame may be, and as long as it may
_HEADER = struct.Struct("<IIBBHI")  # see kvmesh/rpc/fastpath/frames.py
_HELLO, _CALL = 1, 2
_GREETING = b"kvmesh-door-1\0\0\0"


# ── clients: a process of their own ───────────────────────────────────────────────────────────────


class Tally:
    """What clients got. `refused`: no connection was made; `broken`: one was, and ended without an answer."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.refused = self.broken = self.late = self.unhinted = 0
        self.examples: dict[str, str] = {}
        self.retry_after_ms: list[int] = []
        self.seconds: list[float] = []

    def answered(self, status: str, text: str = "") -> None:
        self.statuses[status] += 1
        if text:
            self.examples.setdefault(status, text[:300])

    def figures(self) -> dict[str, Any]:
        waits, took = sorted(self.retry_after_ms), sorted(self.seconds)
        return {
            "statuses": dict(sorted(self.statuses.items())),
            "refused_connections": self.refused,
            "broken_connections": self.broken,
            "no_answer_in_time": self.late,
            "refusals_without_retry_after": self.unhinted,
            "retry_after_ms": [waits[0], waits[len(waits) // 2], waits[-1]] if waits else [],
            "last_answer_s": round(took[-1], 2) if took else 0.0,
            "examples": self.examples,
        }


async def _post(url: str, body: bytes, tally: Tally) -> None:
    host, _, port = url.removeprefix("http://").rpartition(":")
    began = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        tally.refused += 1
        return
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        told = await reader.read(-1)
    except OSError:
        tally.broken += 1
        return
    finally:
        writer.close()
    if not told:
        tally.broken += 1
        return
    tally.seconds.append(time.monotonic() - began)
    head, _, rest = told.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    status = first.split(b" ")[1].decode()
    fields = dict(line.lower().split(b": ", 1) for line in lines)
    if status == "429":
        tally.unhinted += b"retry-after" not in fields
        tally.retry_after_ms.append(int(fields.get(b"retry-after-ms", b"0")))
    if status == "200" and b'"error"' in rest:
        status = "200, then an error"
    tally.answered(status, "" if status == "200" else rest.decode(errors="replace"))


def _prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(*TOKEN_IDS) for _ in range(PROMPT_TOKENS)]


async def _load_http(url: str, n: int) -> Tally:
    tally = Tally()

    async def one(number: int) -> None:
        body = {"model": MODEL.name, "prompt": _prompt(number), "max_tokens": MAX_TOKENS, "ignore_eos": True}
        try:
            async with asyncio.timeout(PATIENCE_S):
                await _post(url, json.dumps(body).encode(), tally)
        except TimeoutError:
            tally.late += 1

    await asyncio.gather(*(one(number) for number in range(n)))
    return tally


async def _load_grpc(address: str, n: int, channels: int) -> Tally:
    tally = Tally()
    opened = [
        grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) for _ in range(channels)
    ]

    async def one(number: int) -> None:
        ids = struct.pack(f"<{PROMPT_TOKENS}I", *_prompt(number))
        request = gateway_pb2.GenerateRequest(token_ids=ids, max_tokens=MAX_TOKENS, ignore_eos=True)
        began = time.monotonic()
        try:
            stub = gateway_pb2_grpc.GatewayStub(opened[number % channels])
            async for _ in stub.Generate(request, timeout=PATIENCE_S):
                pass
        except grpc.aio.AioRpcError as error:
            details, code = error.details() or "", error.code()
            if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details.lower():
                tally.refused += 1
                return
            tally.answered(code.name, details)
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                trailing = dict(error.trailing_metadata() or ())
                tally.unhinted += "retry-after-ms" not in trailing and "kvmesh-error-bin" not in trailing
        else:
            tally.answered("OK")
        tally.seconds.append(time.monotonic() - began)

    await asyncio.gather(*(one(number) for number in range(n)))
    await asyncio.gather(*(channel.close(grace=None) for channel in opened))
    return tally


# ── what is watched ───────────────────────────────────────────────────────────────────────────────


class Watch:
    """Looks at a mesh again and again. `unready`: how often an instance was seen without `ready`, and its reasons."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.looks = self.failed_looks = 0
        self.unready: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        self.gateway: Counter[str] = Counter()
        self.gateway_reasons: dict[str, str] = {}
        self.rss_mb: dict[str, int] = {}
        self.states: dict[str, bool] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`, one look after another."""
        async with connect(self._mesh.addresses["conductor"]) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            while not stop.is_set():
                await asyncio.gather(self._look(stub), asyncio.to_thread(self._ready))
                self._memory()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), LOOK_S)

    async def _look(self, stub: Any) -> None:
        try:
            told = await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=10)
        except grpc.aio.AioRpcError:
            self.failed_looks += 1
            return
        self.looks += 1
        self.states = {one.instance.instance_id: one.ready for one in told.instances}
        for one in told.instances:
            if not one.ready:
                self.unready[one.instance.instance_id] += 1
                self.reasons[one.instance.instance_id] = one.not_ready_reason

    def _ready(self) -> None:
        try:
            with urllib.request.urlopen(f"{self._mesh.url}/ready", timeout=60) as answer:
                self.gateway[str(answer.status)] += 1
        except urllib.error.HTTPError as error:
            self.gateway[str(error.code)] += 1
            self.gateway_reasons[str(error.code)] = error.read().decode(errors="replace")[:300]
        except OSError as error:
            self.gateway[type(error).__name__] += 1

    def _memory(self) -> None:
        for name, process in self._mesh.processes.items():
            with contextlib.suppress(psutil.Error):
                found = psutil.Process(process.pid).memory_info().rss >> 20
                self.rss_mb[name] = max(found, self.rss_mb.get(name, 0))

    def figures(self) -> dict[str, Any]:
        return {
            "looks": self.looks,
            "failed_looks": self.failed_looks,
            "unready_looks": dict(self.unready),
            "unready_reasons": self.reasons,
            "states_after": self.states,
            "gateway_ready": dict(self.gateway),
            "gateway_reasons": self.gateway_reasons,
            "rss_mb_max": self.rss_mb,
        }


@contextlib.contextmanager
def _mesh(**settings: Any) -> Iterator[Mesh]:
    """A mesh that has answered a first request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most) if soft != resource.RLIM_INFINITY else most, hard))
    with tempfile.TemporaryDirectory(prefix="kvmesh-burst-") as folder:
        made = MeshSettings(
            model=str(MODEL),
            http_port=0,
            grpc_port=0,
            block_tokens=16,
            memory_mb=64,
            run_dir=folder,
            **{"prefill": 2, "decode": 2} | settings,
        )
        mesh = Mesh(made)
        mesh.start()
        try:
            mesh.wait_ready(READY_S)
            deadline = time.monotonic() + READY_S
            while asyncio.run(_load_http(mesh.url, 4)).statuses != {"200": 4}:
                if time.monotonic() > deadline:
                    raise RuntimeError("the mesh does not answer")
                time.sleep(0.2)
            yield mesh
        finally:
            mesh.stop()


async def _attack(mesh: Mesh, *load: str) -> dict[str, Any]:
    watch, stop = Watch(mesh), asyncio.Event()
    watching = asyncio.create_task(watch.run(stop))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.attacks_burst", *load, stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        told, _ = await process.communicate()
        await asyncio.sleep(QUIET_S)
    finally:
        stop.set()
        await watching
    return {**json.loads(told), **watch.figures()}


def burst_http(n: int = 5000, **settings: Any) -> dict[str, Any]:
    """`n` completions over HTTP at once, a connection each. `settings` of the mesh."""
    with _mesh(**settings) as mesh:
        found = asyncio.run(_attack(mesh, "load-http", mesh.url, str(n)))
        return {"attack": "burst_http", "requests": n, **found, **_after(mesh)}


def burst_grpc(n: int = 5000, channels: int = 50, **settings: Any) -> dict[str, Any]:
    """`n` calls of Generate at once over `channels` connections."""
    with _mesh(**settings) as mesh:
        found = asyncio.run(_attack(mesh, "load-grpc", mesh.addresses["gateway"], str(n), str(channels)))
        return {"attack": "burst_grpc", "requests": n, "channels": channels, **found, **_after(mesh)}


def _after(mesh: Mesh) -> dict[str, Any]:
    """Whether the mesh serves as before, and what its metrics tell of the way of heartbeats."""
    answers = asyncio.run(_load_http(mesh.url, 8)).statuses
    waits = {}
    for name in ("conductor", "store"):
        spec = mesh.processes[name].spec
        with urllib.request.urlopen(f"http://{spec.metrics}/metrics", timeout=10) as answer:
            waits[name] = quantile_s(answer.read().decode(), f"kvmesh_{name}_heartbeat_wait_seconds", 0.99)
    return {"served_after": dict(answers), "heartbeat_wait_p99_s": waits}


def quantile_s(metrics: str, name: str, share: float) -> float | None:
    """The upper bound of the bucket that holds this quantile; None: there is no such histogram, or it is empty."""
    buckets = []
    for line in metrics.splitlines():
        if line.startswith(f"{name}_bucket"):
            bound = line.partition('le="')[2].partition('"')[0]
            buckets.append((float(bound), float(line.rpartition(" ")[2])))
    total = max((count for _, count in buckets), default=0.0)
    return next((bound for bound, count in sorted(buckets) if count >= share * total), None) if total else None


# ── unfinished frames ─────────────────────────────────────────────────────────────────────────────


async def _fast_path(address: str, service: str) -> tuple[int, int]:
    """Life and port."""
    async with connect(address) as channel:
        told = await doors_pb2_grpc.DoorsStub(channel).FindDoor(doors_pb2.FindDoorRequest(service=service), timeout=10)
    return told.life, told.port


@contextlib.asynccontextmanager
async def _unfinished(host: str, port: int, life: int, nbytes: int) -> AsyncIterator[tuple[Any, Callable[[], int]]]:
    """A connection that has greeted, begun a frame of `nbytes` and sends all of it but the last byte, or as much as is
    taken. The reader and how much was sent."""
    reader, writer = await asyncio.open_connection(host, port)
    sent = 0

    async def fill() -> None:
        nonlocal sent
        with contextlib.suppress(OSError):
            writer.write(_HEADER.pack(24, 0, _HELLO, 0, 0, 0) + _GREETING + struct.pack("<Q", life))
            writer.write(_HEADER.pack(nbytes, 1, _CALL, 9, 0, 1000) + b"Heartbeat")
            left = nbytes - 10
            while left:
                piece = min(left, 1 << 16)
                writer.write(bytes(piece))
                await writer.drain()
                left, sent = left - piece, sent + piece

    task = asyncio.create_task(fill())
    try:
        yield reader, lambda: sent
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        writer.close()


def _has_ended(reader: asyncio.StreamReader) -> bool:
    return reader.at_eof() or reader.exception() is not None


async def _frames(mesh: Mesh) -> dict[str, Any]:
    found: dict[str, Any] = {}
    services = (("conductor", "kvmesh.v1.Conductor"), ("store", "kvmesh.v1.StoreMaster"))
    for (name, service), nbytes in itertools.product(services, FRAMES):
        address = mesh.addresses[name]
        life, port = await _fast_path(address, service)
        process = psutil.Process(mesh.processes[name].pid)
        before = process.memory_info().rss
        async with contextlib.AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(_unfinished(address.rpartition(":")[0], port, life, nbytes))
                for _ in range(CALLERS)
            ]
            most, began = 0, time.monotonic()
            while time.monotonic() < began + 15 and not all(map(_has_ended, (reader for reader, _ in opened))):
                for reader, _ in opened:
                    with contextlib.suppress(OSError, TimeoutError):
                        async with asyncio.timeout(0.005):
                            await reader.read(1 << 16)
                most = max(most, process.memory_info().rss - before)
                await asyncio.sleep(0.05)
            found[f"{name}, {nbytes >> 10} KiB"] = {
                "callers": CALLERS,
                "frame_bytes": nbytes,
                "grown_mb": round(most / (1 << 20), 1),
                "sent_mb": round(sum(sent() for _, sent in opened) / (1 << 20), 1),
                "ended_by_the_service": sum(_has_ended(reader) for reader, _ in opened),
                "after_s": round(time.monotonic() - began, 1),
            }
    return found


def unfinished_frames(**settings: Any) -> dict[str, Any]:
    """CALLERS connections to the fast paths of conductor and store master, each with a frame that never ends."""
    with _mesh(**{"prefill": 1, "decode": 1} | settings) as mesh:
        watch, stop = Watch(mesh), asyncio.Event()

        async def run() -> dict[str, Any]:
            watching = asyncio.create_task(watch.run(stop))
            try:
                return await _frames(mesh)
            finally:
                stop.set()
                await watching

        return {"attack": "unfinished_frames", **asyncio.run(run()), **watch.figures(), **_after(mesh)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", nargs="?", choices=("http", "grpc", "frames", "load-http", "load-grpc"))
    parser.add_argument("load", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--channels", type=int, default=50)
    parser.add_argument("--json", help="also write the figures here")
    args = parser.parse_args()
    if args.attack == "load-http":
        print(json.dumps(asyncio.run(_load_http(args.load[0], int(args.load[1]))).figures()))
        return
    if args.attack == "load-grpc":
        address, n, channels = args.load
        print(json.dumps(asyncio.run(_load_grpc(address, int(n), int(channels))).figures()))
        return
    attacks = {
        "http": lambda: burst_http(args.requests),
        "grpc": lambda: burst_grpc(args.requests, args.channels),
        "frames": unfinished_frames,
    }
    found = [attack() for name, attack in attacks.items() if args.attack in (None, name)]
    print(json.dumps(found, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
