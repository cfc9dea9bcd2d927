"""A node that starts on a disk that is read-only or full serves without that tier, and says so; what is removed
meanwhile is told again once the tier is back."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.pool import pool
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import store_pb2 as pb_store
from kvmesh.telemetry import names
from tests.blockservice.tiers.test_tiers import fill_below, settings
from tests.support.nodes import Node, bench, keys_of, node, stub
from tests.support.putting import config
from tests.support.services import running

KIB = 1 << 10


class Mounted:
    """A tmpfs of its own at `path`, which can be made read-only or full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self._mount("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path))

    def turn(self, how: str) -> None:
        """Mounts it anew: "ro" or "rw"."""
        self._mount("mount", "-o", f"remount,{how},size=4m", str(self.path))

    def fill(self) -> None:
        with (self.path / "others").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (4 << 20) - 8 * KIB)
        for number in range(8):
            try:
                (self.path / f"rest-{number}").write_bytes(bytes(4 * KIB))
            except OSError:
                return

    def close(self) -> None:
        self._mount("umount", "--lazy", str(self.path))

    def _mount(self, *argv: str) -> None:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            raise OSError(done.stderr.strip())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Mounted]:
    if os.geteuid():
        pytest.skip("mounts a tmpfs: run as root")
    try:
        made = Mounted(tmp_path / "disk")
    except OSError as error:
        pytest.skip(f"nothing can be mounted here: {error}")
    try:
        yield made
    finally:
        made.close()


def missing() -> float:
    return float(names.NODE_TIER_FAULTS.labels(tier="ssd", fault="missing")._value.get())


def why_not(n: Node) -> str:
    assert n.blocks is not None
    return n.blocks.counters.tiers[0].why_not


async def test_read_only_at_the_start_and_mended_at_the_next(disk: Mounted) -> None:
    old, new, folder = keys_of(*range(4)), keys_of("new"), disk.path / "ssd"
    async with bench() as desk:
        async with node("a", tiers=settings(folder)) as a:
            await fill_below(a, desk, old)
            assert a.blocks is not None and a.blocks.lasting_seq is None and not why_not(a)
        disk.turn("ro")
        before = missing()
        async with node("a", tiers=settings(folder)) as a:
            assert a.blocks is not None
            assert why_not(a).startswith("left out until a restart") and "Read-only file system" in why_not(a)
            assert missing() == before + 1
            await a.fill(desk, new)
            assert a.store.holds(new[0]) and not a.blocks.lower_keys()
            await a.blocks.bury([pb_store.Tombstone(seq=7, keys=old[0])], 0)
            assert (a.blocks.removed_seq, a.blocks.lasting_seq) == (7, 0)
        disk.turn("rw")
        async with node("a", tiers=settings(folder)) as a:
            assert a.blocks is not None and set(old) == set(a.blocks.lower_keys())
            assert a.blocks.removed_seq == 0, "it asks for the removal that it has missed"
            await a.blocks.bury([pb_store.Tombstone(seq=7, keys=old[0])], 0)
            assert set(old[1:]) == set(a.blocks.lower_keys())


async def test_full_at_the_start(disk: Mounted) -> None:
    disk.fill()
    async with node("a", tiers=settings(disk.path / "ssd")) as a:
        assert "No space left on device" in why_not(a)


async def test_a_pool_node_on_a_read_only_disk(disk: Mounted) -> None:
    disk.turn("ro")
    settings = config(ssd_path=str(disk.path / "ssd"))
    async with running(pool.run, settings) as service, stub(service.address) as rpc:
        (told,) = (await rpc.GetStore(pb.GetNodeStoreRequest())).tiers
        assert "Read-only file system" in told.why_not
