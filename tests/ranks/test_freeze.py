"""A writer frozen in the middle of its push, the fence, re-used extents, and the writer awake again.

The writer's lease lies far in the future here: only the target's fence stands between its late bytes and the canary.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from kvmesh.ranks import protocol as m
from kvmesh.transfer import EngineConfig, TransferEngine, TransferRequest, TransferState
from kvmesh.transfer.api import Opcode
from tests.support.rank_driver import BLOCK, GREEDY, Driver, rank

PROMPT = tuple((5 * i) % 90 + 5 for i in range(BLOCK * 12))
BLOCKS = len(PROMPT) // BLOCK
CANARY = 0xA5


async def begin_and_freeze(writer: Driver, target: Driver, epoch: int) -> None:
    """Push a long prompt chunk by chunk; stop the writer after its first chunks."""
    ready = target.client.ready
    offsets = tuple(target.page_offset(p) for p in range(BLOCKS))
    writer.client.send(m.OpenSegment(ready.descriptor))
    target.client.send(m.OpenWindow(writer.name, epoch, offsets))
    far = time.monotonic_ns() + 3_600_000_000_000
    pages = tuple(range(BLOCKS))
    writer.client.send(m.PushOpen(1, epoch, ready.engine_name, pages, offsets, 0, 0, len(PROMPT), far))
    for n in range(BLOCKS):
        chunk = PROMPT[n * BLOCK : (n + 1) * BLOCK]
        last = GREEDY if n == BLOCKS - 1 else None
        writer.client.send(m.PrefillStep(n, (m.PrefillItem(1, chunk, n * BLOCK, pages[: n + 1], last),)))
        if n == 2:
            await writer.take(m.PrefillStepDone)
            os.kill(writer.client.pid, signal.SIGSTOP)


async def paint(engine: TransferEngine, target: Driver, epoch: int) -> None:
    """Another writer re-uses all extents but the first (as the next handoff would)."""
    ready = target.client.ready
    target.client.send(m.OpenWindow(engine.name, epoch, tuple(target.page_offset(p) for p in range(BLOCKS))))
    region = engine.allocate(ready.shard_bytes, "cpu:0")
    assert region.memory is not None
    region.memory[:] = bytes([CANARY]) * region.length
    batch = engine.allocate_batch(BLOCKS)
    requests = [
        TransferRequest(
            Opcode.WRITE, region.address, ready.engine_name, target.page_offset(p), ready.shard_bytes, epoch
        )
        for p in range(BLOCKS)
    ]
    target.client.send(m.Ping(1))  # the window is open once everything sent before is handled
    await asyncio.sleep(0)
    await target_has_window(engine, requests, batch)


async def target_has_window(engine: TransferEngine, requests: list[TransferRequest], batch: object) -> None:
    """The rank opens the window on its own time: submit until it is open."""
    async with asyncio.timeout(20):
        while True:
            engine.submit(batch, requests)  # type: ignore[arg-type]
            await engine.wait(batch)  # type: ignore[arg-type]
            states = {engine.status(batch, i).state for i in range(len(requests))}  # type: ignore[arg-type]
            engine.free_batch(batch)  # type: ignore[arg-type]
            if states == {TransferState.COMPLETED}:
                return
            batch = engine.allocate_batch(len(requests))


async def landing(engine: TransferEngine, target: Driver) -> bytes:
    """What lies in the extents now, read one-sided."""
    ready = target.client.ready
    region = engine.allocate(ready.shard_bytes * BLOCKS, "cpu:0")
    batch = engine.allocate_batch(1)
    read = TransferRequest(Opcode.READ, region.address, ready.engine_name, target.page_offset(0), region.length)
    engine.submit(batch, [read])
    await engine.wait(batch)
    assert engine.status(batch, 0).state is TransferState.COMPLETED
    assert region.memory is not None
    return bytes(region.memory[: region.length])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "without-fence"])
@pytest.mark.slow
async def test_no_late_byte_lands_after_the_fence(checkpoint: Path, transport: str, fenced: bool) -> None:
    """`without-fence` proves that the canary can die: the same story less the fence overwrites it."""
    async with rank("p", checkpoint, (transport,)) as writer, rank("d", checkpoint, (transport,)) as target:
        engine = TransferEngine("painter", EngineConfig(transports=(transport,)))
        try:
            engine.open_segment(target.client.ready.descriptor)
            await begin_and_freeze(writer, target, epoch=1)
            if fenced:
                target.client.send(m.Fence(writer.name, 1))
                assert await target.take(m.Fenced) == m.Fenced(writer.name, 1)
            await paint(engine, target, epoch=2)
            os.kill(writer.client.pid, signal.SIGCONT)
            ended = await writer.take(m.PushFailed if fenced else m.PushDone)
            found = await landing(engine, target)
        finally:
            os.kill(writer.client.pid, signal.SIGCONT)
            engine.close()
    intact = found == bytes([CANARY]) * len(found)
    assert intact == fenced
    if fenced:
        assert isinstance(ended, m.PushFailed)
        assert "window" in ended.cause
