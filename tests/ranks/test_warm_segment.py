"""Real ranks whose memory outlives them: killed with kill -9 at any moment, and their files damaged."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvmesh.errors import ConfigError, KvmeshError
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.warm_segment import WarmSegment, host_region
from kvmesh.transfer import EngineConfig, TransferEngine, TransferRequest, segment_file
from kvmesh.transfer.api import Opcode
from tests.support.warm_life import EXTENTS, SHARD, Life, configure, content, life

ENTRY_BYTES, SUM_BYTES = 56, 28  # of a slot


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/kvmesh-test-{uuid.uuid4().hex}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


async def restored(one: Life) -> dict[bytes, bytes]:
    """Every block found after a start, with its bytes as a reader gets them: over the transfer engine."""
    await asyncio.wait_for(one.warm.settled.wait(), 20)
    segment = one.engine.open_segment(one.driver.client.ready.descriptor)
    found = {}
    assert one.region.memory is not None
    keys = one.store.keys()
    for key in keys:
        (extent,) = one.store.hold([key])
        batch = one.engine.allocate_batch(1)
        request = TransferRequest(Opcode.READ, one.region.address, segment, one.offset(extent), SHARD)
        one.engine.submit(batch, [request])
        await one.engine.wait(batch)
        found[key] = bytes(one.region.memory)
        one.engine.free_batch(batch)
        one.store.release((extent,))
    one.store.check_integrity()
    return found


def right(found: dict[bytes, bytes]) -> None:
    for key, data in found.items():
        assert data == content(key), key.hex()


class Victim:
    """A life in a process of its own, and what it has said."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_life", str(folder), str(seed)], stdout=subprocess.PIPE, text=True
        )

    def run_and_kill(self, blocks: int, more_s: float) -> list[str]:
        """Kill -9 when it has sealed so many, and so much later; what it said."""
        assert self.process.stdout is not None
        lines = []
        with self.process:
            for line in self.process.stdout:
                lines.append(line.strip())
                if line.startswith("sealed") and len([x for x in lines if x.startswith("sealed")]) >= blocks:
                    break
            ranks = psutil.Process(self.process.pid).children()
            time.sleep(more_s)  # the moment of the kill is random: nothing waits for it
            os.kill(self.process.pid, signal.SIGKILL)
            lines += [line.strip() for line in self.process.stdout]
            psutil.wait_procs(ranks, timeout=10)
        return lines


@pytest.mark.slow
async def test_the_memory_of_a_life_that_is_suspended_is_nobody_elses(folder: Path) -> None:
    """However long it sleeps, past every lease: a next life is refused, so nothing lies there that it could paint over
    when it wakes. Once it is dead its memory is believed as after any other death."""
    victim = Victim(folder, 1)
    assert victim.process.stdout is not None
    with victim.process:
        sealed = 0
        while sealed < 12:
            sealed += victim.process.stdout.readline().startswith("sealed")
        processes = [psutil.Process(victim.process.pid), *psutil.Process(victim.process.pid).children()]
        for one in processes:
            one.suspend()
        with pytest.raises(KvmeshError, match="another process that lives"):
            async with life(str(folder), time.time_ns()):
                pass
        for one in processes:
            one.resume()
        goes_on = [victim.process.stdout.readline() for _ in range(20)]
        assert all(goes_on), "it works on in its own memory"
        victim.process.kill()
        psutil.wait_procs(processes[1:], timeout=10)
    async with life(str(folder), time.time_ns()) as one:
        found = await restored(one)
        assert found
        right(found)


@pytest.mark.slow
async def test_after_kill_9_only_what_was_sealed_is_served(folder: Path) -> None:
    """Lives that go on from each other's memory, each killed at a random moment among pulls, seals and evictions."""
    rng, last, served = random.Random(3), {}, 0
    for seed in range(3):
        lines = Victim(folder, seed).run_and_kill(rng.randrange(20, 50), rng.random() * 0.02)
        assert sum(line.startswith("sealed") for line in lines) >= 20
        for line in lines:
            word, _, key = line.partition(" ")
            if word != "sealed":
                last[bytes.fromhex(key)] = word
        async with life(str(folder), time.time_ns()) as one:
            began = time.monotonic()
            found = await restored(one)
            assert time.monotonic() - began < 60
            right(found)
            assert all(last[key] == "seal" for key in found), "removed, and found again"
            served += len(found)
    assert served >= 3 * EXTENTS // 3


async def test_damage_costs_the_blocks_that_are_damaged_and_no_others(folder: Path) -> None:
    rng = random.Random(11)
    keys = [rng.randbytes(16) for _ in range(EXTENTS * 9 // 10)]
    async with life(str(folder), 1) as one:
        for key in keys:
            assert await one.write(key)
        extents = {key: one.store.hold([key])[0] for key in keys}
    async with life(str(folder), 2) as one:
        found = await restored(one)
        assert set(found) == set(keys), "a clean end loses nothing"
        right(found)
    for name in os.listdir(folder):
        (folder / name).chmod(0o600)
    hurt = keys[:3]
    for key in hurt:
        flip(folder / "rank-0.kv", extents[key] * SHARD + rng.randrange(SHARD), rng)
    flip(folder / "table", 4096 + ENTRY_BYTES * extents[keys[4]] + rng.randrange(ENTRY_BYTES), rng)
    flip(folder / "rank-0.sums", 4096 + SUM_BYTES * extents[keys[6]] + rng.randrange(SUM_BYTES), rng)
    async with life(str(folder), 3) as one:
        found = await restored(one)
        assert set(found) == set(keys) - {*hurt, keys[4], keys[6]}
        right(found)
        for key in hurt:
            assert await one.write(key)
        right(await restored(one))


def flip(path: Path, at: int, rng: random.Random) -> None:
    fd = os.open(path, os.O_RDWR)
    (byte,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte ^ 1 << rng.randrange(8)]), at)
    os.close(fd)


@pytest.mark.parametrize(
    ("name", "how"),
    [("rank-0.kv", "cut"), ("rank-0.kv", "gone"), ("rank-0.sums", "head"), ("table", "cut"), ("table", "head")],
)
@pytest.mark.slow
async def test_files_that_are_not_whole_mean_a_cold_start(folder: Path, name: str, how: str) -> None:
    rng = random.Random(f"{name} {how}")
    keys = [rng.randbytes(16) for _ in range(4)]
    async with life(str(folder), 1) as one:
        for key in keys:
            assert await one.write(key)
    path = folder / name
    path.chmod(0o600)
    if how == "cut":
        os.truncate(path, rng.randrange(path.stat().st_size))
    elif how == "gone":
        path.unlink()
    else:
        flip(path, rng.randrange(96), rng)
    async with life(str(folder), 2) as one:
        assert not await restored(one)
        assert one.store.free == EXTENTS
        assert await one.write(keys[0])


def test_a_folder_in_use_or_on_a_disk_is_refused_by_its_setting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_file, "PATIENCE_S", 0.0)
    with (
        TransferEngine("a", EngineConfig(transports=("shm",))) as one,
        TransferEngine("b", EngineConfig(transports=("shm",))) as two,
    ):
        setting = configure(str(folder), 1, 1 << 20)
        _, warm = host_region(one, 1 << 20, "cpu:0", setting, "x", 16, lambda _: None)
        assert warm is not None
        (folder / "table").touch()
        for bad, why in ((str(folder), "another process that lives"), (f"{folder}/table", "File exists")):
            with pytest.raises(ConfigError, match=why) as refused:
                host_region(two, 1 << 20, "cpu:0", configure(bad, 1), "x", 16, lambda _: None)
            assert refused.value.field == "warm_segment" and bad in refused.value.message
        warm.close()


def test_sums_that_wait_are_no_more_than_extents_and_the_last_sealing_gets_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that gets no core while blocks are sealed again and again: what has been superseded is not summed."""
    go, begun, summed = threading.Event(), threading.Event(), list[m.WarmRow]()
    real = WarmSegment._sum

    def slow(self: WarmSegment, row: m.WarmRow) -> int:
        begun.set()
        go.wait()
        summed.append(row)
        return real(self, row)

    monkeypatch.setattr(WarmSegment, "_sum", slow)
    with TransferEngine("a", EngineConfig(transports=("shm",))) as one:
        region, warm = host_region(one, 1 << 20, "cpu:0", configure(str(folder), 1, 1 << 20), "x", 16, lambda _: None)
        assert warm is not None and region.memory is not None
        rows = [m.WarmRow(n % 16, (n % 16) * 4096, 4096, 7, n) for n in range(4000)]
        warm.handle(m.WarmSum(tuple(rows[:1])))
        begun.wait()
        for at in range(1, 4000, 10):
            warm.handle(m.WarmSum(tuple(rows[at : at + 10])))
        assert len(warm._waiting) == 16
        go.set()
        warm.close()
        assert summed[0] == rows[0] and sorted(summed[1:], key=lambda row: row.slot) == rows[-16:]
