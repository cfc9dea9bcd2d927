"""The SSD tier's folder: who may use it, what it must hold, settings; and its ends, which leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import ConfigError
from kvmesh.tiers.ssd import SsdConfig, SsdTier
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

# ── folders ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_has_one_user(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path)) as tier:
        put(tier, 1)
        with pytest.raises(ConfigError, match=f"path='{tmp_path}': in use by process {os.getpid()}"):
            SsdTier(config(tmp_path))
        code = (
            "import sys; from pathlib import Path; from tests.support.ssd_blocks import config\n"
            "from kvmesh.tiers.ssd import SsdTier\n"
            "SsdTier(config(Path(sys.argv[1])))"
        )
        other = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
        assert other.returncode == 1 and f"in use by process {os.getpid()}" in other.stderr
        assert get(tier, 1)
    with SsdTier(config(tmp_path)) as tier:
        assert get(tier, 1)


def test_blocks_of_another_identity_are_refused_or_set_aside(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path)) as tier:
        put(tier, 1)
    before = files(tmp_path)[0].read_bytes()
    with pytest.raises(ConfigError, match="its blocks are of identity 'layout-a', not 'layout-b'"):
        SsdTier(config(tmp_path, identity="layout-b"))
    assert files(tmp_path)[0].read_bytes() == before
    with SsdTier(config(tmp_path, identity="layout-b", on_mismatch="set_aside")) as tier:
        assert tier.keys() == [] and put(tier, 2)
    with SsdTier(config(tmp_path, identity="layout-c", on_mismatch="set_aside")) as tier:
        assert tier.keys() == []
    assert (tmp_path / "aside-1" / files(tmp_path / "aside-1")[0].name).read_bytes() == before
    assert files(tmp_path / "aside-2")
    with SsdTier(config(tmp_path / "aside-1")) as tier:
        assert get(tier, 1)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path)) as tier:
        put(tier, 1)
    said = tmp_path / "tier.json"
    said.write_text(said.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigError, match="its blocks are of format 2, not 1"):
        SsdTier(config(tmp_path))
    for text in ("{", "[]"):
        said.write_text(text)
        with pytest.raises(ConfigError, match="format None, not 1"):
            SsdTier(config(tmp_path))
    said.unlink()
    with pytest.raises(ConfigError, match="holds buckets, and no tier"):
        SsdTier(config(tmp_path))


def test_a_bucket_carried_here_from_another_tier_is_not_used(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path / "a")) as tier:
        put(tier, 1)
    with SsdTier(config(tmp_path / "b", identity="layout-b")) as tier:
        put(tier, 2)
    files(tmp_path / "b")[0].rename(tmp_path / "a" / "bucket-000000000002.kv")
    with SsdTier(config(tmp_path / "a")) as tier:
        assert tier.keys() == [key(1)] and tier.report.unusable == 1


def test_a_folder_that_holds_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"holds 'thesis.tex', not a file of the SSD tier"):
        SsdTier(config(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"path='.*/file': File exists"):
        SsdTier(config(tmp_path / "file"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"threads": 0}, "threads=0: must be 1..64"),
        ({"admit_uses": 16}, "admit_uses=16: must be 0..15"),
        ({"direct": "maybe"}, "direct='maybe': must be auto, on or off"),
        ({"verify": "none"}, "verify='none'"),
        ({"on_mismatch": "delete"}, "on_mismatch='delete'"),
        ({"capacity_bytes": BUCKET}, f"capacity_bytes={BUCKET}"),
        ({"queue_ops": 0}, "queue_ops=0"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        config(tmp_path, **changed)
    assert caught.value.field == next(iter(changed))


def test_without_o_direct_it_works_and_says_so(tmp_path: Path) -> None:
    class NoDirect(FaultyDisk):
        def open(self, path: Path, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
            return super().open(path, flags)

    with SsdTier(config(tmp_path), disk=NoDirect()) as tier:
        assert "O_DIRECT does not work" in tier.stats().why_not_direct
        assert put(tier, 1) and get(tier, 1)
    with pytest.raises(ConfigError, match="direct='on': O_DIRECT does not work"):
        SsdTier(config(tmp_path, direct="on"), disk=NoDirect())
    with SsdTier(config(tmp_path)) as tier:  # what was written without is read with
        assert get(tier, 1)
    assert not (tmp_path / "probe").exists()


def test_a_tier_made_smaller_drops_its_oldest(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path)) as tier:
        for n in range(200):
            put(tier, n)
    with SsdTier(config(tmp_path, capacity_bytes=4 * BUCKET)) as tier:
        settle(tier)
        assert 0 < len(tier.keys()) <= tier.report.blocks < 100
        assert not get(tier, 0) and get(tier, 199)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 4 * BUCKET
        assert put(tier, 300) and get(tier, 300)


def test_few_files_are_open_however_many_there_are(tmp_path: Path) -> None:
    with SsdTier(config(tmp_path, max_open_files=3)) as tier:
        for n in range(150):
            put(tier, n)
        assert len(files(tmp_path)) > 6
        for n in range(150):
            assert get(tier, n)
            assert tier.stats().open_files <= 4  # one may have been opened for another user


def test_the_lowest_layer_takes_a_relative_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with SsdTier(SsdConfig(path=Path("a/b"), capacity_bytes=1 << 30, identity="x")) as tier:
        assert put(tier, 1)
    assert files(tmp_path / "a" / "b")


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────


def test_close_leaves_nothing_behind_and_answers_everybody(tmp_path: Path) -> None:
    before = open_descriptors()
    disk = FaultyDisk()
    tier = SsdTier(config(tmp_path, threads=1), disk=disk)
    for n in range(40):
        put(tier, n)
    disk.gate["write"] = disk.gate["read"] = gate = threading.Event()
    running = [tier.put(key(50), payload(50)), tier.get_into(key(0), memory(5000))]
    assert disk.waiting.acquire(timeout=WAIT_S) and disk.waiting.acquire(timeout=WAIT_S)
    waiting = [tier.put(key(51), payload(51)), tier.get_into(key(1), memory(5000))]
    removed = tier.remove([key(2)])
    closer = threading.Thread(target=tier.close)
    closer.start()
    assert wait(waiting, WAIT_S).not_done == set()
    gate.set()
    closer.join(WAIT_S)
    assert [future.result(0) for future in (*running, *waiting, removed)] == [True, True, False, False, True]
    assert tier_threads() == [] and open_descriptors() == before
    tier.close()
    # Whoever comes late is answered too.
    assert not put(tier, 60) and not tier.get_into(key(3), memory(5000)).result(0)
    assert not tier.remove([key(3)]).result(0) and not tier.flush().result(0)
    with SsdTier(config(tmp_path)) as tier:
        assert tier.report.walked == 0 and tier.report.buckets == tier.report.footers
        assert sorted(tier.keys()) == sorted(key(n) for n in (*range(2), *range(3, 40), 50))
    assert tier_threads() == [] and open_descriptors() == before


def test_a_failed_start_leaves_the_folder_free(tmp_path: Path) -> None:
    before = open_descriptors()
    disk = FaultyDisk()
    disk.fail["open"] = lambda: 24  # EMFILE: not this folder's fault
    with pytest.raises(ConfigError):
        SsdTier(config(tmp_path, direct="on"), disk=disk)
    assert open_descriptors() == before and tier_threads() == []
    with SsdTier(config(tmp_path)) as tier:
        assert put(tier, 1)


def test_a_hanging_disk_is_named_and_the_folder_stays_locked(tmp_path: Path) -> None:
    disk = FaultyDisk()
    tier = SsdTier(config(tmp_path), disk=disk)
    put(tier, 1)
    disk.gate["write"] = gate = threading.Event()
    future = tier.put(key(2), payload(2))
    assert disk.waiting.acquire(timeout=WAIT_S)
    began = time.monotonic()
    with pytest.raises(Exception, match=r"has not answered for 0\.01 s"):
        tier.close(0.01)
    assert time.monotonic() - began < WAIT_S and not future.done()
    with pytest.raises(ConfigError, match="in use"):
        SsdTier(config(tmp_path))
    gate.set()
    tier.close()
    assert future.result(0)


def test_many_threads_put_get_and_remove_at_once(tmp_path: Path) -> None:
    """Whatever the interleaving: never a wrong byte, and the accounts agree."""
    with SsdTier(config(tmp_path, capacity_bytes=6 * BUCKET, threads=4)) as tier:

        def work(first: int) -> None:
            try:
                for step in range(300):
                    n = (first * 7 + step * 5) % 60
                    if step % 11 == 0:
                        tier.remove([key(n)])
                    put(tier, n)
                    get(tier, (n + first) % 60)
            except BaseException as error:
                failures.append(error)

        failures: list[BaseException] = []
        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        settle(tier)
        assert tier.stats().counts.corrupt == tier.stats().counts.io_errors == 0
        held = set(tier.keys())
    with SsdTier(config(tmp_path, capacity_bytes=6 * BUCKET)) as tier:
        assert set(tier.keys()) == held
        assert all(get(tier, n) for n in range(60) if key(n) in held)


def test_blocks_of_other_weights_are_removed_in_the_background(tmp_path: Path) -> None:
    shape = "bfloat16 2x2x2x16x8 L0 H0 rank 0/1"
    old, new, epoch = (f"4096 {weights} {shape}" for weights in ("a" * 16, "b" * 16, "b" * 16 + "+7"))
    with SsdTier(config(tmp_path, identity=old, on_mismatch="other_weights")) as tier:
        assert put(tier, 1)
    for identity in (new, epoch):
        with SsdTier(config(tmp_path, identity=identity, on_mismatch="other_weights")) as tier:
            assert tier.keys() == []
            assert tier.purge is not None and tier.purge.wait(10) and tier.purge.removed_bytes > 0
            assert put(tier, 2)
        assert not list(tmp_path.glob("aside-*"))
    with pytest.raises(ConfigError, match="name another folder"):
        SsdTier(config(tmp_path, identity=f"4096 {'b' * 16} float32 other", on_mismatch="other_weights"))


def test_a_purge_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    shape = "float32 2x2x2x16x8 L0 H0 rank 0/1"
    one, two = (f"4096 {weights} {shape}" for weights in ("a" * 16, "b" * 16))
    with SsdTier(config(tmp_path, identity=one, on_mismatch="other_weights")) as tier:
        assert put(tier, 1)
    SsdTier(config(tmp_path, identity=two, on_mismatch="other_weights", purge_bytes_s=1)).close()
    assert list(tmp_path.glob("aside-1"))
    with SsdTier(config(tmp_path, identity=two, on_mismatch="other_weights")) as tier:
        assert tier.purge is not None and tier.purge.wait(10)
    assert not list(tmp_path.glob("aside-*"))
