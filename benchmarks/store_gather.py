"""Small blocks that lie side by side at their holder: a READ each, or one READ for all and copies out of staging."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.transfer_contest import size
from kvmesh.transfer import EngineConfig, Opcode, Region, TransferEngine, TransferRequest, TransferState
from kvmesh.transfer.memory import copy_runs

SIZES = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10)
BLOCKS = (8, 64)
TOTAL = max(SIZES) * max(BLOCKS)


def _holder(transport: str, pipe: Connection) -> None:
    with TransferEngine("holder", EngineConfig(transports=(transport,))) as engine:
        region = _touched(engine, TOTAL)
        pipe.send((engine.local_descriptor().encode(), region.base_offset))
        pipe.recv()


def _touched(engine: TransferEngine, nbytes: int) -> Region:
    region = engine.allocate(nbytes)
    assert region.memory is not None, "allocated memory has a view"
    region.memory[:] = bytes(range(256)) * (len(region.memory) // 256)
    return region


def measure(rounds: int) -> Any:
    """Microseconds for all of the blocks, both ways."""
    told = []
    print("\ngather: µs for all blocks of a row: one READ each, or one for all and copies")
    print(f"{'':6}{'':18}{'each':>9}{'gathered':>9}{'ratio':>8}")
    for transport in ("shm", "tcp"):
        here, there = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_holder, args=(transport, there))
        process.start()
        try:
            descriptor, base = here.recv()
            with TransferEngine("reader", EngineConfig(transports=(transport,))) as engine:
                told += _rows(engine, transport, engine.open_segment(descriptor), base, 4 * rounds)
        finally:
            here.send("end")
            process.join(10)
    return told


def _rows(engine: TransferEngine, transport: str, segment: str, base: int, rounds: int) -> list[dict[str, Any]]:
    target, staging = _touched(engine, 2 * TOTAL), _touched(engine, TOTAL)
    told = []
    for nbytes in SIZES:
        for count in BLOCKS:
            places = [target.address + 2 * i * nbytes for i in range(count)]  # apart: nobody can merge them
            ways = {
                "each": _each(engine, segment, base, places, nbytes),
                "gathered": _gathered(engine, segment, base, places, nbytes, staging),
            }
            spent: dict[str, list[float]] = {name: [] for name in ways}
            for round_ in range(rounds + 1):
                for name, way in ways.items():
                    start = time.perf_counter()
                    way()
                    if round_:
                        spent[name].append(time.perf_counter() - start)
            ratio = statistics.median(a / b for a, b in zip(spent["each"], spent["gathered"], strict=True))
            row = {"transport": transport, "length": nbytes, "count": count, "ratio": round(ratio, 2)}
            row |= {f"{name}_us": round(statistics.median(values) * 1e6, 1) for name, values in spent.items()}
            told.append(row)
            title = f"{count} × {size(nbytes)}"
            print(f"{transport:6}{title:18}{row['each_us']:9.0f}{row['gathered_us']:9.0f}{ratio:8.2f}", flush=True)
    return told


def _each(engine: TransferEngine, segment: str, base: int, places: list[int], nbytes: int) -> Callable[[], None]:
    reads = [TransferRequest(Opcode.READ, to, segment, base + i * nbytes, nbytes) for i, to in enumerate(places)]
    return lambda: _move(engine, reads)


def _gathered(
    engine: TransferEngine, segment: str, base: int, places: list[int], nbytes: int, staging: Region
) -> Callable[[], None]:
    read = [TransferRequest(Opcode.READ, staging.address, segment, base, nbytes * len(places))]
    sources = [staging.address + i * nbytes for i in range(len(places))]

    def way() -> None:
        _move(engine, read)
        copy_runs(places, sources, [nbytes] * len(places))

    return way


def _move(engine: TransferEngine, requests: list[TransferRequest]) -> None:
    batch = engine.allocate_batch(len(requests))
    engine.submit(batch, requests)
    if not engine.wait_sync(batch, 30.0):
        raise TimeoutError("the batch is not final")
    if any(status.state is not TransferState.COMPLETED for status in engine.statuses(batch)):
        raise RuntimeError("a READ failed")
    engine.free_batch(batch)
