"""The SSD tier as its node sees it: futures, memory, removal, queues, deadlines, admission."""

from __future__ import annotations

import os
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.store_stats import Changes
from kvmesh.tiers.ssd import SsdTier
from kvmesh.tiers.ssd.format import PAGE
from tests.support.ssd_blocks import (
    BUCKET,
    WAIT_S,
    FaultyDisk,
    config,
    files,
    get,
    key,
    memory,
    payload,
    put,
    settle,
)

DIRECT = pytest.mark.parametrize("direct", ["auto", "off"])
LENGTHS = [1, 100, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 5 * PAGE + 77]


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────────


@DIRECT
@pytest.mark.parametrize("aligned", [True, False])
def test_blocks_of_any_length_come_back_from_and_to_any_memory(tmp_path: Path, direct: str, aligned: bool) -> None:
    with SsdTier(config(tmp_path, direct=direct)) as tier:
        for n, length in enumerate(LENGTHS):
            data = memory(length, aligned=aligned)
            data[:] = payload(n, length)
            assert tier.put(key(n), data).result(WAIT_S)
            assert tier.contains(key(n)) and tier.length(key(n)) == length
        for n, length in enumerate(LENGTHS):
            whole = memory(length + 2 * PAGE, aligned=aligned)
            whole[:] = b"\xaa" * len(whole)
            assert tier.get_into(key(n), whole[:length]).result(WAIT_S)
            assert bytes(whole[:length]) == payload(n, length)
            assert bytes(whole[length:]) == b"\xaa" * 2 * PAGE  # nothing beyond
        counts = tier.stats().counts
        assert (counts.stored, counts.hits, counts.misses) == (len(LENGTHS), len(LENGTHS), 0)
        assert counts.read_bytes == sum(LENGTHS)


@DIRECT
def test_many_at_once_lie_side_by_side_and_are_read_in_few_calls(tmp_path: Path, direct: str) -> None:
    disk = FaultyDisk()
    with SsdTier(config(tmp_path, direct=direct, threads=1, bucket_bytes=4 * BUCKET), disk=disk) as tier:
        put(tier, 99)  # opens the bucket
        disk.calls.clear()
        # Odd lengths, so that every payload has a page of its own to be padded, read back in one call all the same.
        blocks = [(key(n), payload(n, PAGE + n)) for n in range(20)]
        assert all(future.result(WAIT_S) for future in tier.put_many(blocks))
        assert disk.calls.pop("write") <= 2
        into = [(key(n), memory(PAGE + n, aligned=n % 3 > 0)) for n in range(20)]
        assert all(future.result(WAIT_S) for future in tier.get_many_into(into))
        assert disk.calls == {"read": 1}
        assert all(bytes(view) == payload(n, PAGE + n) for n, (_, view) in enumerate(into))


def test_what_is_not_here_is_a_miss_and_a_second_put_writes_nothing(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path)) as tier:
        assert not get(tier, 1) and tier.length(key(1)) is None and not tier.contains(key(1))
        assert put(tier, 1)
        wrote = tier.stats().counts.written_bytes
        assert put(tier, 1)
        counts = tier.stats().counts
        assert (counts.written_bytes, counts.present, counts.stored, counts.misses) == (wrote, 1, 1, 1)


def test_two_who_put_one_block_both_learn_when_it_is_there(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with SsdTier(config(tmp_path), disk=disk) as tier:
        put(tier, 99)
        disk.gate["write"] = gate = threading.Event()
        first = tier.put(key(1), payload(1))
        second = tier.put(key(1), payload(1))
        assert disk.waiting.acquire(timeout=WAIT_S)
        assert not second.done()
        gate.set()
        assert first.result(WAIT_S) and second.result(WAIT_S)
        assert tier.stats().counts.stored == 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda tier: tier.put(b"short", b"x"), "key='73686f7274'"),
        (lambda tier: tier.put(key(1), b""), "data='0 bytes'"),
        (lambda tier: tier.put(key(1), bytes(tier.config.limits.max_length + 1)), "must be 1..24"),
        (lambda tier: tier.put(key(1), memoryview(bytes(16))[::2]), "must be contiguous"),
        (lambda tier: tier.get_into(key(0), memory(4999)), "into='4999 bytes': the block has 5000"),
        (lambda tier: tier.get_into(key(0), memoryview(bytes(5000))), "must be writable"),
        (lambda tier: tier.remove([b"short"]), "must be 16 bytes"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, call: Any, said: str) -> None:
    with SsdTier(config(tmp_path)) as tier:
        put(tier, 0)
        with pytest.raises(InvalidRequest, match=said):
            call(tier)
        assert get(tier, 0) and not get(tier, 1)


def test_the_longest_block_fits(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path)) as tier:
        length = tier.config.limits.max_length
        for n in range(3):
            assert put(tier, n, length)
        assert all(get(tier, n, length) for n in range(3))
        settle(tier)
        assert tier.stats().buckets == 3


def test_old_blocks_make_room_hot_ones_stay_and_the_capacity_is_never_passed(tmp_path: Path) -> None:
    class Measuring(FaultyDisk):
        def reserve(self, fd: int, size: int) -> None:
            super().reserve(fd, size)  # in the one thread that makes and removes files
            most.append(sum(os.stat(path).st_blocks * 512 for path in files(tmp_path)))

    most: list[int] = []
    with SsdTier(config(tmp_path, capacity_bytes=6 * BUCKET), disk=Measuring()) as tier:
        told: set[bytes] = set()
        for n in range(400):
            assert put(tier, n)
            if n >= 5 and n % 10 == 0:
                assert get(tier, 3), n
            changes = tier.take_changes()
            told = told - set(changes.removed) | set(changes.sealed)
        settle(tier)
        assert 4 * BUCKET < max(most) <= 6 * BUCKET
        changes = tier.take_changes()
        told = told - set(changes.removed) | set(changes.sealed)
        assert told == set(tier.keys())
        stats = tier.stats()
        assert stats.evicted > 200 and stats.reinserted >= 4 and stats.used_bytes <= 6 * BUCKET
        assert len(tier.keys()) == stats.blocks == 400 - stats.evicted
        assert get(tier, 3) and get(tier, 399) and not get(tier, 0)
        # First in, first out, but for what was read.
        kept = [n for n in range(400) if tier.contains(key(n))]
        assert kept == [3, *range(kept[1], 400)]


def test_changes_are_announced_once_until_they_are_taken(tmp_path: Path) -> None:
    said = threading.Semaphore(0)
    with SsdTier(config(tmp_path), on_changes=said.release) as tier:
        assert not said.acquire(blocking=False)
        for n in range(3):
            put(tier, n)
        settle(tier)
        assert said.acquire(timeout=WAIT_S) and not said.acquire(blocking=False)
        assert tier.take_changes() == Changes(tuple(key(n) for n in range(3)), ())
        assert tier.remove([key(1)]).result(WAIT_S)
        settle(tier)
        assert said.acquire(timeout=WAIT_S)
        assert tier.take_changes() == Changes((), (key(1),))


def test_a_listener_that_fails_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    with SsdTier(config(tmp_path), on_changes=fail) as tier:
        assert put(tier, 1) and get(tier, 1)
        settle(tier)
    assert "on_changes" in caplog.text


# ── removal ──────────────────────────────────────────────────────────────────────────────────────────


def test_removed_blocks_are_missed_at_once_and_after_a_restart_and_can_be_put_again(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path)) as tier:
        for n in range(6):
            put(tier, n)
        future = tier.remove([key(1), key(2), key(77)])
        assert not tier.contains(key(1)) and not get(tier, 2)
        assert future.result(WAIT_S)
        assert tier.remove([]).result(WAIT_S)
        assert put(tier, 2)
        assert tier.stats().counts.removed == 3
    with SsdTier(config(tmp_path)) as tier:
        assert [n for n in range(6) if get(tier, n)] == [0, 2, 3, 4, 5]


def test_a_removal_of_many_keys_takes_many_records(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path)) as tier:
        for n in range(30):
            put(tier, n)
        assert tier.remove([key(n) for n in range(20_000)]).result(WAIT_S)
        settle(tier)
    with SsdTier(config(tmp_path)) as tier:
        assert tier.keys() == []


def test_a_block_removed_while_it_is_written_is_not_stored(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with SsdTier(config(tmp_path), disk=disk) as tier:
        put(tier, 99)
        disk.gate["write"] = gate = threading.Event()
        stored = tier.put(key(1), payload(1))
        assert disk.waiting.acquire(timeout=WAIT_S)
        waits = tier.put(key(2), payload(2))
        removed = tier.remove([key(1), key(2)])
        again = tier.put(key(1), payload(1))
        gate.set()
        assert not stored.result(WAIT_S) and not waits.result(WAIT_S)
        assert removed.result(WAIT_S) and again.result(WAIT_S)
        assert get(tier, 1) and not get(tier, 2)
    with SsdTier(config(tmp_path)) as tier:
        assert get(tier, 1) and not get(tier, 2)


# ── queues, deadlines, cancellation ──────────────────────────────────────────────────────────────────


def test_queues_are_bounded_and_say_so(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with SsdTier(config(tmp_path, queue_ops=4, threads=1), disk=disk) as tier:
        for n in range(10):
            put(tier, n)
        disk.gate["write"] = disk.gate["read"] = gate = threading.Event()
        writing = tier.put(key(20), payload(20))
        reading = tier.get_into(key(0), memory(5000))
        assert disk.waiting.acquire(timeout=WAIT_S) and disk.waiting.acquire(timeout=WAIT_S)
        puts = [tier.put(key(n), payload(n)) for n in range(21, 27)]
        gets = [tier.get_into(key(n), memory(5000)) for n in range(1, 7)]
        assert [future.done() for future in puts] == [future.done() for future in gets] == [False] * 4 + [True] * 2
        stats = tier.stats()
        assert (stats.waiting_puts, stats.waiting_gets, stats.counts.busy) == (4, 4, 4)
        gate.set()
        assert [future.result(WAIT_S) for future in puts] == [True] * 4 + [False] * 2
        assert [future.result(WAIT_S) for future in gets] == [True] * 4 + [False] * 2
        assert writing.result(WAIT_S) and reading.result(WAIT_S)
        assert put(tier, 25)  # refused before, and it left nothing behind


def test_waiting_bytes_are_bounded_but_one_block_always_passes(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path, queue_bytes=1)) as tier:
        assert put(tier, 1) and get(tier, 1)


def test_what_is_too_late_is_not_begun(tmp_path: Path) -> None:
    now = 1000
    disk = FaultyDisk()
    with SsdTier(config(tmp_path), disk=disk, clock=lambda: now) as tier:
        put(tier, 0)
        calls = dict(disk.calls)
        assert not tier.put(key(1), payload(1), deadline_ns=1000).result(WAIT_S)
        into = memory(5000)
        into[:] = bytes(5000)
        assert not tier.get_into(key(0), into, deadline_ns=999).result(WAIT_S)
        assert disk.calls == calls and bytes(into) == bytes(5000)
        assert tier.put(key(1), payload(1), deadline_ns=1001).result(WAIT_S)
        assert tier.get_into(key(0), into, deadline_ns=1001).result(WAIT_S)
        assert tier.stats().counts.expired == 2


def test_a_deadline_that_passes_during_the_io_does_not_free_the_memory_early(tmp_path: Path) -> None:
    now = [1000]
    disk = FaultyDisk()
    with SsdTier(config(tmp_path), disk=disk, clock=lambda: now[0]) as tier:
        put(tier, 0)
        disk.gate["read"] = gate = threading.Event()
        future = tier.get_into(key(0), memory(5000), deadline_ns=2000)
        assert disk.waiting.acquire(timeout=WAIT_S)
        now[0] = 3000
        assert not future.done() and not future.cancel()
        gate.set()
        assert future.result(WAIT_S)


def test_what_waits_can_be_cancelled(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with SsdTier(config(tmp_path, threads=1), disk=disk) as tier:
        put(tier, 0)
        put(tier, 1)
        disk.gate["write"] = disk.gate["read"] = gate = threading.Event()
        running = [tier.put(key(2), payload(2)), tier.get_into(key(0), memory(5000))]
        assert disk.waiting.acquire(timeout=WAIT_S) and disk.waiting.acquire(timeout=WAIT_S)
        into = memory(5000)
        into[:] = bytes(5000)
        waiting = [tier.put(key(3), payload(3)), tier.get_into(key(1), into)]
        assert all(future.cancel() for future in waiting)
        again = tier.put(key(3), payload(3))  # its cancelled twin lies in the queue still
        gate.set()
        wait(running, WAIT_S)
        settle(tier)
        assert bytes(into) == bytes(5000) and not again.result(WAIT_S) and not tier.contains(key(3))
        assert put(tier, 3) and get(tier, 3)


# ── admission ────────────────────────────────────────────────────────────────────────────────────────


def test_admission_asks_how_often_a_block_was_used(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path, admit_uses=3)) as tier:
        assert not put(tier, 1)  # once
        tier.note([key(1)])
        assert tier.uses(key(1)) == 2
        assert put(tier, 1)
        assert not get(tier, 2)
        assert tier.uses(key(2)) == 1 and tier.promote(key(1), key(2)) and not tier.promote(key(2), key(1))
        assert tier.stats().counts.not_admitted == 1
