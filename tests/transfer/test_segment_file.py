"""Segments in named files: kept from one life to the next, never shared by two, never writable to others."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.errors import ConfigError
from kvmesh.transfer import EngineConfig, TransferEngine, TransferRequest, TransferState, segment_file
from kvmesh.transfer.api import Opcode
from tests.support.transfer.raw import RawShm
from tests.transfer.conftest import Nest, over

MIB = 1 << 20

pytestmark = over("shm")


@pytest.fixture
def path() -> Iterator[str]:
    name = f"/dev/shm/kvmesh-test-{uuid.uuid4().hex}"
    yield name
    for each in (name, f"{name}.new"):
        Path(each).unlink(missing_ok=True)


def engine(name: str) -> TransferEngine:
    return TransferEngine(name, EngineConfig(transports=("shm",)))


def test_the_next_life_finds_the_bytes_and_another_size_starts_anew(path: str) -> None:
    content = os.urandom(3 * MIB)
    with engine("a#1") as first:
        region = first.allocate(len(content), path=path)
        assert not region.kept and region.memory is not None
        assert bytes(region.memory) == bytes(len(content))
        region.memory[:] = content
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o400
        del region
    with engine("a#2") as second:
        region = second.allocate(len(content), path=path)
        assert region.kept and region.memory is not None
        assert bytes(region.memory) == content
        del region
    for keep, nbytes in ((False, 3 * MIB), (True, 2 * MIB)):
        with engine("a#3") as third:
            region = third.allocate(nbytes, path=path, keep=keep)
            assert not region.kept and region.memory is not None
            assert bytes(region.memory) == bytes(nbytes)
            region.memory[:4] = b"dirt"
            del region


OWNER = """
import sys
from kvmesh.transfer import EngineConfig, TransferEngine
engine = TransferEngine("owner#1", EngineConfig(transports=("shm",)))
region = engine.allocate(1 << 20, path=sys.argv[1])
region.memory[:5] = b"alive"
print("ready", flush=True)
sys.stdin.read()
"""


def test_two_lives_never_share_it_and_kill_9_frees_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None and owner.stdout is not None
    try:
        assert owner.stdout.readline() == "ready\n"
        with engine("a#2") as second:
            with monkeypatch.context() as patch:
                patch.setattr(segment_file, "PATIENCE_S", 0.0)
                with pytest.raises(ConfigError, match="another process that lives has it") as refused:
                    second.allocate(MIB, path=path)
            assert refused.value.field == "path"
            os.kill(owner.pid, signal.SIGKILL)
            region = second.allocate(MIB, path=path)  # waits for the kernel, not for the parent's wait()
            assert region.kept and region.memory is not None
            assert bytes(region.memory[:5]) == b"alive"
            del region
    finally:
        owner.kill()
        owner.wait()
        owner.stdin.close()
        owner.stdout.close()


def test_peers_read_it_and_cannot_write_it(nest: Nest, path: str) -> None:
    content = os.urandom(MIB)
    with engine("owner#1") as owner, engine("reader#1") as reader:
        region = owner.allocate(MIB, path=path)
        assert region.memory is not None
        region.memory[:] = content
        target = reader.allocate(MIB)
        segment = reader.open_segment(owner.local_descriptor())
        batch = reader.allocate_batch(1)
        reader.submit(batch, [TransferRequest(Opcode.READ, target.address, segment, region.base_offset, MIB)])
        assert reader.wait_sync(batch, 10)
        assert reader.status(batch, 0).state is TransferState.COMPLETED
        assert reader.carried(batch).rails[0][0].startswith("shm")
        assert target.memory is not None and bytes(target.memory) == content
        raw = RawShm(owner.local_descriptor(), "thief#1")
        length, fd = raw.want(region.base_offset)
        assert length == MIB and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(PermissionError):
            mmap.mmap(fd, length, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError):
            os.ftruncate(fd, 0)
        if os.geteuid() != 0:
            for name in (path, f"/proc/self/fd/{fd}"):
                with pytest.raises(PermissionError):
                    os.open(name, os.O_RDWR)
        os.close(fd)
        raw.close()
        del region, target


def test_a_writable_descriptor_is_taken_from_nobody(nest: Nest, path: str) -> None:
    """Its file could be truncated under the copier."""
    from kvmesh.transfer.memory import peers_file

    with open(path, "w+b") as file:
        assert not peers_file(file.fileno())
        with open(path, "rb") as readable:
            assert peers_file(readable.fileno())


def test_old_readers_keep_the_old_bytes_when_it_is_made_anew(path: str) -> None:
    content = os.urandom(MIB)
    with engine("a#1") as first:
        region = first.allocate(MIB, path=path)
        assert region.memory is not None
        region.memory[:] = content
        del region
    with open(path, "rb") as file:
        old = mmap.mmap(file.fileno(), MIB, prot=mmap.PROT_READ)
    with old, engine("a#2") as second:
        region = second.allocate(MIB, path=path, keep=False)
        assert region.memory is not None
        region.memory[:] = os.urandom(MIB)
        assert old[:] == content
        del region


def test_what_cannot_be_a_segment_is_refused_by_name(tmp_path: Path, path: str) -> None:
    os.mkfifo(path)
    link = f"{path}-link"
    os.symlink(path, link)
    room = os.statvfs("/dev/shm")
    try:
        with engine("a#1") as one:
            for bad, why in ((path, "no plain file"), (link, "symbolic link"), (str(tmp_path), "directory")):
                with pytest.raises(ConfigError, match=why) as refused:
                    one.allocate(MIB, path=bad)
                assert refused.value.field == "path" and bad in refused.value.message
            with pytest.raises(ConfigError, match="No such file"):
                one.allocate(MIB, path=f"{path}-none/segment")
            os.unlink(path)
            with pytest.raises(ConfigError, match="no room for"):
                one.allocate(room.f_frsize * (room.f_blocks + 1), path=path)
            assert os.stat(path).st_size == 0
            assert not one.allocate(MIB, path=path).kept
    finally:
        os.unlink(link)
