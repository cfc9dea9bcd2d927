"""What a start finds after a crash, a torn write, or damage: every block that is whole, and no byte that is wrong."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmesh.tiers.ssd import RecoveryReport, SsdTier
from kvmesh.tiers.ssd.format import PAGE, footer_bytes, record_bytes
from tests.support.ssd_blocks import BUCKET, WAIT_S, FaultyDisk, config, files, get, key, put, settle

LENGTHS = [PAGE, 5000, 1, 3 * PAGE, 9000, PAGE + 1]
DIRECT = pytest.mark.parametrize("direct", ["auto", "off"])
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class Crashed:
    """A folder as a kill left it, with one bucket that was being written; and as a clean end left it."""

    killed: Path
    closed: Path
    offsets: list[int]

    def copy(self, to: Path, *, closed: bool = False) -> Path:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.closed if closed else self.killed, to)
        return to

    @property
    def end(self) -> int:
        return self.offsets[-1] + record_bytes(LENGTHS[-1])


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Crashed:
    path = tmp_path_factory.mktemp("crashed")
    tier = SsdTier(config(path / "closed"))
    offsets, at = [], PAGE
    for n, length in enumerate(LENGTHS):
        assert put(tier, n, length)
        offsets.append(at)
        at += record_bytes(length)
    shutil.copytree(path / "closed", path / "killed")
    tier.close()
    assert files(path / "killed")[0].stat().st_size == BUCKET  # reserved
    assert files(path / "closed")[0].stat().st_size == at + footer_bytes(len(LENGTHS), 0)
    return Crashed(path / "killed", path / "closed", offsets)


def recovered(path: Path, *, verify: str = "open", direct: str = "auto") -> tuple[list[int], RecoveryReport]:
    """Which blocks are served, by number; then the tier must work on, and a second start find the same."""
    with SsdTier(config(path, verify=verify, direct=direct)) as tier:
        report = tier.report
        held = [n for n, length in enumerate(LENGTHS) if get(tier, n, length)]
        assert put(tier, 1000) and get(tier, 1000)
        settle(tier)
    with SsdTier(config(path, direct=direct)) as tier:
        assert tier.report.walked == 0
        assert sorted(tier.keys()) == sorted([key(n) for n in held] + [key(1000)])
        assert [n for n, length in enumerate(LENGTHS) if get(tier, n, length)] == held
    return held, report


@DIRECT
def test_after_a_kill_all_that_was_acknowledged_is_there(crashed: Crashed, tmp_path: Path, direct: str) -> None:
    held, report = recovered(crashed.copy(tmp_path / "x"), direct=direct)
    assert held == list(range(len(LENGTHS)))
    assert (report.blocks, report.walked, report.footers, report.verified, report.corrupt) == (6, 1, 0, 6, 0)
    assert report.torn_bytes == BUCKET - crashed.end


def interesting() -> list[int]:
    """Around every border: file, headers, payloads, paddings."""
    at, cuts = PAGE, {0, 1, PAGE - 1, PAGE, PAGE + 1}
    for length in LENGTHS:
        end = at + record_bytes(length)
        for border in (at, at + 80, at + PAGE, at + PAGE + length // 2, at + PAGE + length, end):
            cuts.update((border - 1, border, border + 1))
        at = end
    return sorted(cuts)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.slow
def test_a_torn_tail_costs_what_was_torn_and_nothing_else(crashed: Crashed, tmp_path: Path, closed: bool) -> None:
    for cut in interesting():
        path = crashed.copy(tmp_path / "x", closed=closed)
        os.truncate(files(path)[0], cut)
        held, _ = recovered(path)
        whole = [n for n, at in enumerate(crashed.offsets) if at + record_bytes(LENGTHS[n]) <= cut]
        assert held == whole, cut


@pytest.mark.slow
def test_a_tail_of_zeros_or_garbage_costs_what_it_covers(crashed: Crashed, tmp_path: Path) -> None:
    """The size is there (it was reserved, or the file system wrote it first), the bytes are not."""
    for fill in (b"\0", b"\xa5"):
        for cut in interesting()[4:]:
            path = crashed.copy(tmp_path / "x")
            with files(path)[0].open("r+b") as file:
                file.seek(cut)
                file.write(fill * (crashed.end - cut))
            held, report = recovered(path)
            # Padding may be anything; headers are known by their first 80 bytes, payloads by all.
            whole = [n for n, at in enumerate(crashed.offsets) if at + PAGE + LENGTHS[n] <= cut]
            assert held == whole, (fill, cut)
            assert report.corrupt <= 1


@pytest.mark.parametrize("n", range(len(LENGTHS)))
def test_a_damaged_header_of_an_open_bucket_costs_its_block(crashed: Crashed, tmp_path: Path, n: int) -> None:
    path = crashed.copy(tmp_path / "x")
    flip(files(path)[0], crashed.offsets[n] + 13)
    held, report = recovered(path)
    assert held == [m for m in range(len(LENGTHS)) if m != n]
    assert report.damaged_pages == record_bytes(LENGTHS[n]) // PAGE


@pytest.mark.parametrize("n", range(len(LENGTHS)))
def test_a_damaged_header_of_a_closed_bucket_costs_nothing(crashed: Crashed, tmp_path: Path, n: int) -> None:
    path = crashed.copy(tmp_path / "x", closed=True)
    flip(files(path)[0], crashed.offsets[n] + 13)
    held, report = recovered(path)
    assert held == list(range(len(LENGTHS))) and report.footers == 1


@pytest.mark.parametrize("verify", ["open", "all"])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("n", range(len(LENGTHS)))
def test_a_damaged_payload_is_never_served(crashed: Crashed, tmp_path: Path, n: int, closed: bool, verify: str) -> None:
    path = crashed.copy(tmp_path / "x", closed=closed)
    flip(files(path)[0], crashed.offsets[n] + PAGE + LENGTHS[n] - 1)
    held, report = recovered(path, verify=verify)
    assert held == [m for m in range(len(LENGTHS)) if m != n]
    at_start = not closed or verify == "all"
    assert (report.corrupt, report.verified) == ((1, 5) if at_start else (0, 0))


@pytest.mark.parametrize("at", [0, 17, 20, PAGE - 1, PAGE + 3, PAGE + 60])
def test_a_damaged_footer_costs_nothing(crashed: Crashed, tmp_path: Path, at: int) -> None:
    path = crashed.copy(tmp_path / "x", closed=True)
    flip(files(path)[0], crashed.end + at)
    held, report = recovered(path)
    assert held == list(range(len(LENGTHS)))
    # Zeros behind entries and trailer say nothing.
    assert report.walked == (at != PAGE - 1)


def test_a_damaged_bucket_header_costs_the_bucket(crashed: Crashed, tmp_path: Path) -> None:
    path = crashed.copy(tmp_path / "x", closed=True)
    flip(files(path)[0], 20)
    held, report = recovered(path)
    assert held == [] and report.unusable == 1


@given(st.data())
@FEW
def test_any_flipped_bit_costs_one_block_at_most(crashed: Crashed, tmp_path: Path, data: st.DataObject) -> None:
    closed = data.draw(st.booleans())
    path = crashed.copy(tmp_path / "x", closed=closed)
    bit = data.draw(st.integers(8 * PAGE, 8 * files(path)[0].stat().st_size - 1))
    flip(files(path)[0], bit // 8, bit % 8)
    held, _ = recovered(path)
    assert len(held) >= len(LENGTHS) - 1


def test_pages_of_a_payload_are_never_taken_for_records(tmp_path: Path) -> None:
    """A block that holds a copy of its own bucket: where its header is damaged, the walk goes through the copy."""
    with SsdTier(config(tmp_path / "a", bucket_bytes=4 * BUCKET)) as tier:
        put(tier, 0)
        inside = files(tmp_path / "a")[0].read_bytes()[: 8 * PAGE]
        assert tier.put(key(50), inside).result(WAIT_S)
        put(tier, 1)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    at = PAGE + record_bytes(5000)
    flip(files(tmp_path / "b")[0], at + 13)
    with SsdTier(config(tmp_path / "b", bucket_bytes=4 * BUCKET)) as tier:
        assert sorted(tier.keys()) == sorted([key(0), key(1)])
        assert tier.report.damaged_pages == 1 + 4  # the header, and what is not zero of its payload
        assert get(tier, 0) and get(tier, 1)


def test_a_damaged_block_found_by_a_reader_is_gone_for_good(crashed: Crashed, tmp_path: Path) -> None:
    path = crashed.copy(tmp_path / "x", closed=True)
    flip(files(path)[0], crashed.offsets[1] + PAGE)
    with SsdTier(config(path)) as tier:
        assert tier.contains(key(1))  # its footer says so, its bytes were not read yet
        assert not get(tier, 1, LENGTHS[1]) and not tier.contains(key(1))
        assert tier.stats().counts.corrupt == 1
        assert not get(tier, 1, LENGTHS[1])
        settle(tier)
    flip(files(path)[0], crashed.offsets[1] + PAGE)  # even if the disk finds the right bytes again
    with SsdTier(config(path)) as tier:
        assert not tier.contains(key(1))
        assert put(tier, 1, LENGTHS[1]) and get(tier, 1, LENGTHS[1])
    with SsdTier(config(path)) as tier:
        assert get(tier, 1, LENGTHS[1])


def test_removals_hold_whether_their_bucket_was_closed_or_not(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path / "a")) as tier:
        for n in range(30):
            put(tier, n)
        assert tier.remove([key(0), key(25), key(29)]).result(WAIT_S)
        put(tier, 29)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    for path in (tmp_path / "a", tmp_path / "b"):
        for _ in range(2):
            with SsdTier(config(path)) as tier:
                assert [n for n in range(30) if get(tier, n)] == [*range(1, 25), *range(26, 30)]


def test_an_interrupted_re_insertion_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Killed after each write and each removal of a file, while hot blocks are appended again."""

    class Copying(FaultyDisk):
        def write(self, fd: int, data, offset: int) -> int:  # type: ignore[no-untyped-def]
            self.copy()
            return super().write(fd, data, offset)

        def unlink(self, path: Path) -> None:
            self.copy()
            super().unlink(path)

        def copy(self) -> None:
            if copying:
                shutil.copytree(tmp_path / "a", tmp_path / f"killed-{len(copies)}")
                copies.append(len(copies))

    copying, copies = False, list[int]()
    with SsdTier(config(tmp_path / "a", capacity_bytes=4 * BUCKET), disk=Copying()) as tier:
        for n in range(39):
            put(tier, n)
        assert all(get(tier, n) for n in range(4))  # of the oldest bucket
        hot = [n for n in range(4) if tier.contains(key(n))]
        copying = True
        for n in range(39, 70):
            put(tier, n)
        settle(tier)
        copying = False
        assert tier.stats().reinserted >= 4
        assert all(tier.contains(key(n)) for n in hot)
    assert len(copies) >= 5
    for copy in copies:
        with SsdTier(config(tmp_path / f"killed-{copy}", capacity_bytes=4 * BUCKET)) as tier:
            assert all(get(tier, n) for n in hot), copy
            assert all(get(tier, n) for n in range(70) if tier.contains(key(n)))
            tier.check_integrity()


@pytest.mark.slow
def test_a_hundred_thousand_records_are_found_by_their_footers(tmp_path: Path) -> None:
    """Counted, not timed: what is read does not grow with the payloads."""
    total, bucket = 100_000, 32 << 20
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and shutil.disk_usage(shm).free > 4 << 30
    path = (shm if roomy else tmp_path) / f"kvmesh-{os.getpid()}"
    made = config(path, capacity_bytes=2 << 30, bucket_bytes=bucket, queue_ops=2048, direct="off")
    try:
        with SsdTier(made) as tier:
            keys = [key(n) for n in range(total)]
            for first in range(0, total, 2000):
                part = [(k, k) for k in keys[first : first + 2000]]
                assert all(future.result(WAIT_S) for future in tier.put_many(part))
            assert tier.stats().blocks == total
        size = sum(file.stat().st_size for file in files(path))
        buckets = len(files(path))
        disk = FaultyDisk()
        with SsdTier(made, disk=disk) as tier:
            report = tier.report
            assert (report.blocks, report.records, report.footers) == (total, total, buckets)
            assert (report.walked, report.verified, report.bytes_read) == (0, 0, disk.bytes["read"])
            assert report.bytes_read <= 32 * total + 3 * PAGE * buckets < size // 200
            assert set(tier.keys()) == set(keys)
            k = keys[total // 3]
            into = memoryview(bytearray(16))
            assert tier.get_into(k, into).result(WAIT_S) and bytes(into) == k
        # The last bucket loses its footer, as if it had been written when the process was killed: it alone is walked.
        last = files(path)[-1]
        os.truncate(last, last.stat().st_size - PAGE)
        records = last.stat().st_size // record_bytes(16)
        with SsdTier(made) as tier:
            assert tier.report.blocks == total and tier.report.walked == 1
            assert abs(tier.report.verified - records) <= 1 + records // 100
            extra = tier.report.bytes_read - report.bytes_read
            assert 0 < extra <= last.stat().st_size
    finally:
        shutil.rmtree(path, ignore_errors=True)


def flip(path: Path, at: int, bit: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
