"""Windows of a real mesh for benchmarks/sizing.py: idle, and under known work; throughput as services are added."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redis import Redis

from benchmarks.progress import tell
from benchmarks.sizing_load import Clients, Prompts, Work
from benchmarks.sizing_mesh import Measured, Reading, serving, started, watched, window
from benchmarks.sizing_solve import Window

DOORS = ("rest", "grpc")
CONTEXT = 8192
SETTLE_S = 0.5  # after the last request of a window: what it caused (announcements, reports) is part of it


@dataclass(frozen=True, slots=True)
class Load:
    """So many equal requests, so many at a time."""

    name: str
    prompt: int
    answer: int
    requests: int
    together: int


LOADS = (
    Load("short prompts, 1 token", 12, 1, 120, 8),
    Load("long prompts, 1 token", 4096, 1, 6, 2),
    Load("long answers, one at a time", 12, 96, 5, 1),
    Load("long answers, 16 at a time", 12, 96, 32, 16),
)
# Each mesh: its name, its settings, whether it works. Beats that come often tell what one costs.
FAST = {"heartbeat_interval_ms": 10, "heartbeats_per_s": 0}
MESHES: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("1P+1D, blocks of 16", {"block_tokens": 16}, True),
    ("1P+1D, blocks of 64", {"block_tokens": 64}, True),
    ("3P+3D", {"prefill": 3, "decode": 3}, False),
    ("1P+1D, conductor beats each 10 ms", {"flags": {"conductor": FAST}}, False),
    ("1P+1D, store beats each 10 ms", {"flags": {"store": FAST}}, False),
)
SETTINGS = (("1P+1D", 1, 1, 1), ("1P+2D", 1, 2, 1), ("2P+2D", 2, 2, 1), ("2P+2D, 2 gateways", 2, 2, 2))
THROUGHPUT = Load("throughput", 128, 64, 0, 32)
WARM_S = 2.0


@contextmanager
def long_model(model: Path) -> Iterator[Path]:
    """The same checkpoint with room for long prompts: what it answers does not matter here."""
    with tempfile.TemporaryDirectory() as folder:
        for file in model.iterdir():
            (Path(folder) / file.name).symlink_to(file.resolve())
        config = Path(folder) / "config.json"
        said = json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}
        config.unlink()
        config.write_text(json.dumps(said))
        yield Path(folder)


def works(load: Load, prompts: Prompts) -> list[Work]:
    """All of its requests."""
    return [prompts.make(load.prompt, load.answer) for _ in range(load.requests)]


def unit(model: Path, repeats: int, idle_s: float, seed: int) -> list[Window]:
    """All windows of all meshes."""
    found: list[Window] = []
    with long_model(model) as long:
        prompts = Prompts(long, seed)
        for name, settings, busy in MESHES:
            tell(f"{name}: starts")
            with tempfile.TemporaryDirectory() as folder, started(long, Path(folder), **settings) as measured:
                found += asyncio.run(_windows(measured, name, busy, prompts, repeats, idle_s))
    tell("")
    return found


async def _windows(
    measured: Measured, name: str, busy: bool, prompts: Prompts, repeats: int, idle_s: float
) -> list[Window]:
    await serving(measured)
    clients, found = _clients(measured), []
    try:
        if busy:  # connections, allocators and compiled code are made once
            for door in DOORS:
                for load in LOADS:
                    await clients.run(door, works(load, prompts)[:4], load.together)
        for repeat in range(repeats):
            tell(f"{name}: idle, {repeat + 1} of {repeats}")
            with watched(measured) as reading:
                await asyncio.sleep(idle_s)
            found.append(window(measured, reading, f"{name}: idle", repeat, {}))
            for door, load in [(door, load) for door in DOORS for load in LOADS] if busy else []:
                tell(f"{name}: {load.name}, {door}, {repeat + 1} of {repeats}")
                found.append(
                    await _window(measured, clients, door, f"{name}: {load.name}, {door}", load, prompts, repeat)
                )
    finally:
        await clients.close()
    return found


async def _window(
    measured: Measured, clients: Clients, door: str, group: str, load: Load, prompts: Prompts, repeat: int
) -> Window:
    some, block = works(load, prompts), measured.mesh.settings.block_tokens
    lengths = [prompts.count(one.text) if door == "rest" else len(one.ids) for one in some]
    with watched(measured) as reading:
        await clients.run(door, some, load.together)
        await asyncio.sleep(SETTLE_S)
    more = {"blocks": float(sum(length // block for length in lengths))}
    for event in ("requests", "prompt_tokens", "tokens"):
        more[f"{event}_{door}"] = reading.counts[event]
    more[f"steps_{door}"], more[f"blocks_{door}"] = reading.counts["steps"], more["blocks"]
    if reading.counts["requests"] != load.requests or reading.counts["tokens"] != load.requests * load.answer:
        raise RuntimeError(f"{group}: counted {reading.counts}, sent {load}")
    return window(measured, reading, group, repeat, more)


def _clients(measured: Measured) -> Clients:
    gateways = [measured.mesh.processes[name].spec for name in measured.of("gateway")]
    return Clients.of([spec.http for spec in gateways], [spec.address for spec in gateways])


def throughput(model: Path, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Closed loop over REST with as many services as SETTINGS say."""
    rows = []
    prompts = Prompts(model, seed)
    for name, prefill, decode, gateways in SETTINGS:
        tell(f"throughput: {name}")
        more: dict[str, Any] = {"prefill": prefill, "decode": decode, "gateways": gateways}
        with tempfile.TemporaryDirectory() as folder, started(model, Path(folder), **more) as measured:
            reading = asyncio.run(_closed(measured, prompts, seconds))
        rows.append({"services": name, **more, **_told(measured, reading)})
    tell("")
    return rows


async def _closed(measured: Measured, prompts: Prompts, seconds: float) -> Reading:
    """THROUGHPUT.together requests in flight all the time."""
    await serving(measured)
    clients = _clients(measured)

    async def one(turn: int) -> None:
        while True:
            await clients.ask("rest", turn, prompts.make(THROUGHPUT.prompt, THROUGHPUT.answer))

    tasks = [asyncio.create_task(one(i)) for i in range(THROUGHPUT.together)]
    try:
        await asyncio.sleep(WARM_S)
        with watched(measured) as reading:
            await asyncio.sleep(seconds)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await clients.close()
    return reading


def _told(measured: Measured, reading: Reading) -> dict[str, Any]:
    """Rates, and cores by service: all of its processes together."""
    cores: dict[str, float] = {"client": reading.processes["client"] / reading.seconds}
    for service in ("gateway", "conductor", "store", "prefill", "decode"):
        for kind in ("", " rank"):
            names = [f"{name}{kind}" for name in measured.of(service) if f"{name}{kind}" in reading.processes]
            if names:
                cores[f"{service}{kind}"] = sum(reading.processes[name] for name in names) / reading.seconds
    return {
        "seconds": reading.seconds,
        "tokens_per_s": reading.counts["tokens"] / reading.seconds,
        "requests_per_s": reading.counts["requests"] / reading.seconds,
        "tokens_a_step": reading.counts["tokens"] / max(1.0, reading.counts["steps"]),
        "cores": cores,
        "others_cores": reading.others_cores,
    }


def redis(model: Path, idle_s: float) -> dict[str, float]:
    """Commands a second that two conductors and two store masters, idle, ask of their Redis, by its own count."""
    tell("redis")
    more: dict[str, Any] = {"masters": 2, "conductors": 2, "redis": "auto"}
    with tempfile.TemporaryDirectory() as folder, started(model, Path(folder), **more) as measured:
        asyncio.run(serving(measured))
        host, _, port = measured.mesh.addresses["redis"].rpartition(":")
        with contextlib.closing(Redis(host=host, port=int(port))) as client:
            before: Any = client.info("stats")
            with watched(measured) as reading:
                asyncio.run(asyncio.sleep(idle_s))
            after: Any = client.info("stats")
    asked = after["total_commands_processed"] - before["total_commands_processed"] - 1  # our own
    return {
        "conductors": 2, "masters": 2, "seconds": reading.seconds, "commands_per_s": asked / reading.seconds,
        "cores": reading.processes["redis"] / reading.seconds,
    }  # fmt: skip


def told(windows: list[Window]) -> list[dict[str, Any]]:
    """For the file."""
    return [asdict(one) for one in windows]
