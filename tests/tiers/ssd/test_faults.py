"""Disks that fail or are full: misses, never errors, never a wrong byte, and the tier works on as soon as it can."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvmesh.tiers.ssd import SsdTier
from kvmesh.tiers.ssd.format import PAGE
from kvmesh.tiers.ssd.writer import REST_NS
from tests.support.ssd_blocks import (
    BUCKET,
    WAIT_S,
    FaultyDisk,
    config,
    files,
    get,
    key,
    memory,
    open_descriptors,
    payload,
    put,
    settle,
    tier_threads,
)


def always(number: int) -> Callable[[], int]:
    return lambda: number


def once(number: int) -> Callable[[], int]:
    left = [number]
    return lambda: left.pop() if left else 0


def held(tier: SsdTier, numbers: Sequence[int]) -> list[int]:
    return [n for n in numbers if get(tier, n)]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_bucket_that_cannot_be_read_is_retired_and_its_blocks_are_misses(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with SsdTier(config(tmp_path), disk=disk) as tier:
        for n in range(60):
            put(tier, n)
        settle(tier)
        tier.take_changes()
        first = [n for n in range(60) if tier._core.brain.lookup(key(n)).bucket == 1]  # type: ignore[union-attr]
        disk.fail["read"] = once(errno.EIO)
        assert not get(tier, 3)
        assert held(tier, range(60)) == [n for n in range(60) if n not in first]
        settle(tier)
        assert set(tier.take_changes().removed) == {key(n) for n in first}
        stats = tier.stats()
        assert (stats.counts.retired, stats.counts.lost, stats.counts.failed, stats.counts.io_errors) == (
            1,
            len(first),
            1,
            1,
        )
        assert len(files(tmp_path)) == stats.buckets
        assert put(tier, 3) and get(tier, 3)
    with SsdTier(config(tmp_path)) as tier:
        assert held(tier, range(60)) == [n for n in range(60) if n not in first or n == 3]


def test_what_says_removed_is_said_again_when_its_bucket_is_lost(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with SsdTier(config(tmp_path), disk=disk) as tier:
        for n in range(30):
            put(tier, n)
        assert tier.remove([key(0), key(1)]).result(WAIT_S)  # they lie in bucket 1, this in bucket 2
        put(tier, 1)
        assert tier._core.brain.lookup(key(29)).bucket == 2  # type: ignore[union-attr]
        disk.fail["read"] = once(errno.EIO)
        assert not get(tier, 29)
        settle(tier)
        assert not tier.contains(key(0))
        assert put(tier, 50)
        shutil.copytree(tmp_path, tmp_path / "killed")
    for path in (tmp_path / "killed", tmp_path):
        shutil.rmtree(path / "killed", ignore_errors=True)
        with SsdTier(config(path)) as tier:
            assert not get(tier, 0) and get(tier, 2) and get(tier, 50)


def test_a_file_that_somebody_removed_or_cut_is_a_retired_bucket(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path, max_open_files=1)) as tier:
        for n in range(60):
            put(tier, n)
        settle(tier)
        os.truncate(files(tmp_path)[1], 2 * PAGE)
        files(tmp_path)[0].unlink()
        for n in range(60):
            get(tier, n)
        left = held(tier, range(60))
        assert 0 < len(left) < 30 and tier.stats().counts.retired == 2
        settle(tier)


def test_having_no_descriptors_left_is_not_the_buckets_fault(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with SsdTier(config(tmp_path, max_open_files=1), disk=disk) as tier:
        for n in range(60):
            put(tier, n)
        disk.fail["open"] = always(errno.EMFILE)
        assert not get(tier, 0)
        disk.fail.clear()
        assert held(tier, range(60)) == list(range(60))
        assert tier.stats().counts.retired == 0 and tier.stats().counts.failed == 1


def test_a_reader_of_an_evicted_bucket_ends_and_its_space_counts_until_then(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with SsdTier(config(tmp_path, capacity_bytes=5 * BUCKET, threads=1), disk=disk) as tier:
        for n in range(40):
            put(tier, n)
        disk.gate["read"] = gate = threading.Event()
        into = memory(5000)
        reading = tier.get_into(key(0), into)
        assert disk.waiting.acquire(timeout=WAIT_S)
        for n in range(40, 150):
            put(tier, n)
        assert not tier.contains(key(0)) and not reading.done()
        tier.check_integrity()  # of used bytes too
        assert tier.stats().used_bytes >= sum(path.stat().st_size for path in files(tmp_path)) + BUCKET // 2
        gate.set()
        assert reading.result(WAIT_S) and bytes(into) == payload(0)
        settle(tier)
        assert tier.stats().used_bytes == sum(path.stat().st_size for path in files(tmp_path))


def test_a_start_that_fails_for_another_reason_removes_nothing(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path)) as tier:
        for n in range(60):
            put(tier, n)
    before = {path: path.read_bytes() for path in files(tmp_path)}
    descriptors = open_descriptors()
    disk = FaultyDisk()
    disk.fail["open"] = lambda: errno.EMFILE if disk.calls["open"] > 2 else 0
    with pytest.raises(OSError, match="EMFILE"):
        SsdTier(config(tmp_path, direct="off"), disk=disk)
    assert {path: path.read_bytes() for path in files(tmp_path)} == before
    assert open_descriptors() == descriptors
    disk.fail["open"] = lambda: errno.EIO if disk.calls["open"] == 2 else 0
    disk.calls.clear()
    with SsdTier(config(tmp_path, direct="off"), disk=disk) as tier:
        assert tier.report.unusable == 1 and 30 <= len(held(tier, range(60))) < 60


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_write_error_retires_the_bucket_and_puts_rest(tmp_path: Path) -> None:
    now = [0]
    disk = FaultyDisk()
    with SsdTier(config(tmp_path), disk=disk, clock=lambda: now[0]) as tier:
        for n in range(30):
            put(tier, n)
        disk.fail["write"] = once(errno.EIO)
        assert not put(tier, 100)
        stats = tier.stats()
        assert stats.resting and (stats.counts.retired, stats.counts.failed) == (1, 1)
        wrote = disk.calls["write"]
        assert not put(tier, 101)  # refused at once, nothing is tried
        assert disk.calls["write"] == wrote and tier.stats().counts.no_room == 1
        assert 0 < len(held(tier, range(30))) < 30
        now[0] += REST_NS
        assert put(tier, 100) and get(tier, 100) and not tier.stats().resting
        settle(tier)


def test_a_disk_that_fails_for_good_is_not_hammered(tmp_path: Path) -> None:
    now = [0]
    disk = FaultyDisk()
    with SsdTier(config(tmp_path), disk=disk, clock=lambda: now[0]) as tier:
        put(tier, 1)
        disk.fail["write"] = disk.fail["reserve"] = always(errno.EIO)
        for _ in range(10):
            futures = tier.put_many([(key(n), payload(n)) for n in range(100, 200)])
            assert not any(future.result(WAIT_S) for future in futures)
        assert disk.calls["write"] < 10
        assert not tier.remove([key(1)]).result(WAIT_S) and not tier.contains(key(1))
    assert tier_threads() == []


def test_a_footer_or_sync_that_fails_costs_the_bucket_at_most(tmp_path: Path) -> None:
    for call in ("sync", "truncate"):
        disk = FaultyDisk()
        with SsdTier(config(tmp_path / call), disk=disk) as tier:
            put(tier, 0)
            disk.fail[call] = once(errno.EIO)
            for n in range(1, 40):
                put(tier, n)
            assert tier.stats().counts.retired == 1 and not get(tier, 0) and get(tier, 39)
            disk.fail[call] = once(errno.ENOMEM)  # not the medium: the bucket stays
            for n in range(40, 80):
                put(tier, n)
            assert tier.stats().counts.retired == 1
            there: list[bytes] = tier.keys()
            settle(tier)
        with SsdTier(config(tmp_path / call)) as tier:
            assert set(tier.keys()) == set(there)


def test_a_removal_that_cannot_be_synced_is_not_acknowledged(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with SsdTier(config(tmp_path), disk=disk) as tier:
        put(tier, 1)
        disk.fail["sync"] = once(errno.EIO)
        assert not tier.remove([key(1)]).result(WAIT_S)
        assert not tier.contains(key(1))
        assert tier.remove([key(1)]).result(WAIT_S)


def test_partial_writes_and_reads_are_carried_on(tmp_path: Path) -> None:
    class Short(FaultyDisk):
        def write(self, fd: int, data: Sequence[memoryview], offset: int) -> int:
            if self.calls.get("write", 0) % 3 == 0 and len(data[0]) > 2 * PAGE:
                return super().write(fd, [data[0][: 2 * PAGE]], offset)
            return super().write(fd, data[:1], offset)

        def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
            return super().read(fd, into[:1], offset)

    with SsdTier(config(tmp_path), disk=Short()) as tier:
        for n in range(10):
            assert put(tier, n, 5 * PAGE + n)
        assert all(get(tier, n, 5 * PAGE + n) for n in range(10))


def test_a_bug_in_a_thread_is_told_and_nobody_waits_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FaultyDisk):
        broken = False  # as a bug would be: no OSError

        def write(self, fd: int, data: Sequence[memoryview], offset: int) -> int:
            if self.broken:
                raise ZeroDivisionError
            return super().write(fd, data, offset)

        def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
            if self.broken:
                raise ZeroDivisionError
            return super().read(fd, into, offset)

    disk = Broken()
    with SsdTier(config(tmp_path / "a"), disk=disk) as tier:
        put(tier, 1)
        disk.broken = True
        assert not put(tier, 2) and not get(tier, 1) and not tier.remove([key(5)]).result(WAIT_S)
        disk.broken = False
        assert put(tier, 2) and put(tier, 3)
        assert held(tier, range(4)) == [1, 2, 3]
        settle(tier)
        shutil.copytree(tmp_path / "a", tmp_path / "killed")
    assert "a write failed" in caplog.text and "a read failed" in caplog.text
    for path in (tmp_path / "a", tmp_path / "killed"):
        with SsdTier(config(path)) as tier:
            assert held(tier, range(4)) == [1, 2, 3]


# ── full disks ───────────────────────────────────────────────────────────────────────────────────────


def test_a_full_disk_takes_the_oldest_blocks_and_the_tier_lives_on_smaller(tmp_path: Path) -> None:
    """Reservation fails when the disk holds three buckets."""

    class Full(FaultyDisk):
        def reserve(self, fd: int, size: int) -> None:
            if sum(path.stat().st_size for path in files(tmp_path)) + size > 3 * BUCKET:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().reserve(fd, size)

    with SsdTier(config(tmp_path), disk=Full()) as tier:
        for n in range(200):
            assert put(tier, n)
        left = held(tier, range(200))
        assert left == list(range(left[0], 200)) and len(left) >= 20
        assert tier.stats().counts.retired == tier.stats().counts.no_room == 0
        settle(tier)


def test_a_disk_that_fills_in_the_middle_of_a_record_keeps_what_was_whole(tmp_path: Path) -> None:
    now = [0]
    disk = FaultyDisk()
    with SsdTier(config(tmp_path), disk=disk, clock=lambda: now[0]) as tier:
        for n in range(5):
            put(tier, n)
        disk.fail["write"] = always(errno.ENOSPC)
        assert not put(tier, 5)
        assert not put(tier, 6)
        assert held(tier, range(7)) == list(range(5))
        assert tier.stats().counts.retired == 0 and tier.stats().counts.no_room == 2
        disk.fail.clear()
        now[0] += REST_NS
        assert put(tier, 6)
        settle(tier)
    with SsdTier(config(tmp_path)) as tier:
        assert held(tier, range(7)) == [0, 1, 2, 3, 4, 6]
        assert tier.report.walked == 1  # its footer found no space


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    path = tmp_path / "small"
    path.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", path], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mount.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def fill(path: Path) -> None:
    """To the last page."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(PAGE)):
            pass


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_really_full_disk(small_disk: Path, direct: str) -> None:
    """The tier was promised 16 MiB and finds three, then four; then somebody takes all that is left."""
    before = open_descriptors()
    (small_disk / "other").write_bytes(bytes(1 << 20))
    with SsdTier(config(small_disk / "tier", capacity_bytes=64 * BUCKET, direct=direct)) as tier:
        for n in range(600):
            assert put(tier, n)
            if n == 300:
                (small_disk / "other").unlink()
                assert 120 <= len(held(tier, range(301))) <= 240  # 20 of a bucket
        left = held(tier, range(600))
        assert left == list(range(left[0], 600)) and 240 < len(left) <= 320
        settle(tier)
        fill(small_disk / "more")
        assert all(put(tier, n) for n in range(600, 700))  # it has its own space to go round in
        assert len(held(tier, range(700))) == tier.stats().blocks
        settle(tier)
    assert open_descriptors() == before
    with SsdTier(config(small_disk / "tier", capacity_bytes=64 * BUCKET, direct=direct)) as tier:
        assert tier.stats().counts.corrupt == 0
        assert len(held(tier, range(700))) == tier.stats().blocks
