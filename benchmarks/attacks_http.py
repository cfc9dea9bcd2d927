"""Attacks on the REST port of a real mesh: what they do to the gateway's memory, and to others' requests.

    python -m benchmarks.attacks_http                # all three
    python -m benchmarks.attacks_http header|bodies|idle

Each attack starts a mesh of its own (the demo model on loopback), attacks it from a process beside it, and asks /health
from a third one at steady times, a new connection each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.quantiles import quantile

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "demo-model"
BODY_BYTES = 8 << 20
PATIENCE_S = 60.0
LOOK_S = 0.02  # between two looks at /health
QUIET_S = 1.0


# ── clients: processes of their own ───────────────────────────────────────────────────────────────


async def _answer(reader: asyncio.StreamReader) -> str:
    """The status of an answer, or how the connection ended."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            line = await reader.readline()
    except TimeoutError:
        return "late"
    except ConnectionError:
        return "reset"
    return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"


async def _header(host: str, port: int, nbytes: int) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection(host, port)
    answering = asyncio.create_task(_answer(reader))
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
    part, sent, start = b"a" * (64 << 10), 0, time.monotonic()
    with contextlib.suppress(ConnectionError):
        while sent < nbytes:
            writer.write(part)
            await writer.drain()
            sent += len(part)
        writer.write(b"\r\n\r\n")
    found = await answering
    writer.transport.abort()
    return {"sent_bytes": sent, "seconds": time.monotonic() - start, "answer": found}


async def _bodies(host: str, port: int, count: int, nbytes: int) -> dict[str, Any]:
    text = json.dumps({"model": MODEL.name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % nbytes
    )
    part, go = b" " * (256 << 10), asyncio.Event()

    async def one() -> str:
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError:
            return "refused"
        answering = asyncio.create_task(_answer(reader))
        with contextlib.suppress(ConnectionError):
            writer.write(head + text)
            await go.wait()
            left = nbytes - len(text)
            while left and not answering.done():
                writer.write(part[:left])
                await writer.drain()
                left -= min(left, len(part))
        found = await answering
        writer.transport.abort()
        return found

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    await asyncio.sleep(1)
    go.set()
    start = time.monotonic()
    statuses = Counter(await asyncio.gather(*tasks))
    return {"statuses": dict(statuses), "seconds": time.monotonic() - start}


async def _idle(host: str, port: int, count: int, others: int) -> dict[str, Any]:
    silent = []
    for number in range(count):
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /hea" if number % 2 else b"")
            silent.append((reader, writer))
    answers: Counter[str] = Counter()
    for _ in range(others):
        try:
            async with asyncio.timeout(10):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answers[await _answer(reader)] += 1
                writer.transport.abort()
        except (OSError, TimeoutError) as err:
            answers[type(err).__name__] += 1
    for _, writer in silent:
        writer.transport.abort()
    return {"opened": len(silent), "others": dict(answers)}


async def _health(host: str, port: int) -> dict[str, Any]:
    """Asks until its standard input ends."""
    stop = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    took: list[float] = []
    failed = 0

    async def one() -> None:
        nonlocal failed
        start = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            failed += await _answer(reader) != "200"
            took.append(time.monotonic() - start)
            writer.transport.abort()
        except OSError:
            failed += 1

    tasks: set[asyncio.Task[None]] = set()
    print("ready", flush=True)
    while not stop.done():
        tasks.add(asyncio.create_task(one()))
        await asyncio.sleep(LOOK_S)
    await asyncio.gather(*tasks)
    took.sort()
    return {
        "health_asked": len(took),
        "health_failed": failed,
        "health_p50_ms": round(quantile(took, 0.5) * 1000, 1),
        "health_p99_ms": round(quantile(took, 0.99) * 1000, 1),
        "health_longest_ms": round(took[-1] * 1000, 1),
    }


# ── the mesh and the measuring ────────────────────────────────────────────────────────────────────


def _lift_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def _mesh(descriptors: int = 0, **settings: Any) -> Iterator[Mesh]:
    """The smallest mesh; its processes have `descriptors` each, where that is given."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, limits[1]))
    try:
        with tempfile.TemporaryDirectory(prefix="kvmesh-attacks-") as folder:
            made = MeshSettings(model=str(MODEL), http_port=0, grpc_port=0, memory_mb=64, run_dir=folder, **settings)
            with Mesh(made) as mesh:
                mesh.wait_ready()
                yield mesh
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _client(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.attacks_http", *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=_lift_descriptors,
    )


def _memory_mb(pid: int, name: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


def _attack(mesh: Mesh, name: str, *args: object) -> dict[str, Any]:
    """The attack's own figures, /health beside it, and the gateway's memory before it and at its peak, in MB."""
    host, _, port = mesh.url.removeprefix("http://").rpartition(":")
    pid = mesh.processes["gateway"].pid
    watch = _client("--health", host, port)
    assert watch.stdout
    watch.stdout.readline()
    time.sleep(QUIET_S)
    before = _memory_mb(pid, "VmRSS:")
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak counts from here
    told, _ = _client(f"--{name}", host, port, *args).communicate(timeout=600)
    seen, _ = watch.communicate("", timeout=120)
    peak = _memory_mb(pid, "VmHWM:")
    time.sleep(QUIET_S)
    return {
        **json.loads(told),
        **json.loads(seen),
        "rss_before_mb": round(before, 1),
        "rss_peak_mb": round(peak, 1),
        "rss_after_mb": round(_memory_mb(pid, "VmRSS:"), 1),
    }


def long_header(nbytes: int = 160_000_000) -> dict[str, Any]:
    """One header of `nbytes`, as fast as it is taken."""
    with _mesh() as mesh:
        return _attack(mesh, "header", nbytes)


def many_bodies(count: int = 1000, nbytes: int = BODY_BYTES) -> dict[str, Any]:
    """`count` bodies of `nbytes` at once."""
    with _mesh() as mesh:
        return _attack(mesh, "bodies", count, nbytes)


def idle_connections(count: int = 1100, descriptors: int = 1024, others: int = 50) -> dict[str, Any]:
    """`count` connections that say nothing, or half a line, at a gateway of `descriptors`; then `others` that ask."""
    with _mesh(descriptors) as mesh:
        return _attack(mesh, "idle", count, others)


def main() -> None:
    """The command line; --header, --bodies, --idle and --health are the clients' own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attack", nargs="?", choices=("header", "bodies", "idle", "all"), default="all")
    for name in ("header", "bodies", "idle", "health"):
        parser.add_argument(f"--{name}", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, client in (("header", _header), ("bodies", _bodies), ("idle", _idle), ("health", _health)):
        if given := getattr(args, name):
            print(json.dumps(asyncio.run(client(given[0], *map(int, given[1:])))))  # type: ignore[operator]
            return
    attacks = {"header": long_header, "bodies": many_bodies, "idle": idle_connections}
    for name, attack in attacks.items():
        if args.attack in (name, "all"):
            print(name, json.dumps(attack(), indent=1), flush=True)


if __name__ == "__main__":
    main()
