"""What the tests of the SSD tier share: blocks that are known by number, small tiers, a disk that fails on demand."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvmesh.tiers.ssd import SsdConfig, SsdTier
from kvmesh.tiers.ssd.disk import Disk
from kvmesh.tiers.ssd.format import PAGE

BUCKET = 64 * PAGE
WAIT_S = 60.0


def key(n: int) -> bytes:
    return hashlib.sha256(n.to_bytes(8, "little")).digest()[:16]


def payload(n: int, length: int = 5000) -> bytes:
    """Bytes that no other block has, page by page."""
    return hashlib.shake_128(b"payload" + n.to_bytes(8, "little")).digest(length)


def memory(length: int, *, aligned: bool = True) -> memoryview:
    """Writable; `aligned`: on a page, as a host segment's extents are."""
    view = memoryview(mmap.mmap(-1, length + PAGE))
    return view[:length] if aligned else view[8 : 8 + length]


def config(path: Path, **changed: Any) -> SsdConfig:
    values: dict[str, Any] = {
        "path": path,
        "capacity_bytes": 16 * BUCKET,
        "identity": "layout-a",
        "bucket_bytes": BUCKET,
        "threads": 2,
        "sketch_keys": 256,
    }
    return SsdConfig(**values | changed)


def put(tier: SsdTier, n: int, length: int = 5000) -> bool:
    return tier.put(key(n), payload(n, length)).result(WAIT_S)


def get(tier: SsdTier, n: int, length: int = 5000) -> bool:
    """Whether it is here. Other bytes than those that were put are an error, not an answer."""
    into = memory(length)
    if not tier.get_into(key(n), into).result(WAIT_S):
        return False
    assert bytes(into) == payload(n, length), f"block {n} has wrong bytes"
    return True


def settle(tier: SsdTier) -> None:
    assert tier.flush().result(WAIT_S)
    tier.check_integrity()


def files(path: Path) -> list[Path]:
    return sorted(path.glob("bucket-*.kv"))


def open_descriptors() -> set[str]:
    """What this process has open, by name."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return found


def tier_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ssd-")]


class FaultyDisk(Disk):
    """`fail[call]`: asked before each such call (read, write, reserve, sync, open, truncate, unlink); the errno that it
    answers is raised, 0: the call goes on. `gate`, when set, is waited for before each read and write."""

    def __init__(self) -> None:
        self.fail: dict[str, Callable[[], int]] = {}
        self.gate: dict[str, threading.Event] = {}
        self.waiting = threading.Semaphore(0)  # released by each call that has come to its gate
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {"read": 0, "write": 0}

    def _asked(self, call: str) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        if (gate := self.gate.get(call)) is not None:
            self.waiting.release()
            assert gate.wait(WAIT_S)
        if (fail := self.fail.get(call)) is not None and (number := fail()):
            raise OSError(number, errno.errorcode[number])

    def open(self, path: Path, flags: int) -> int:
        self._asked("open")
        return super().open(path, flags)

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        self._asked("read")
        got = super().read(fd, into, offset)
        self.bytes["read"] += got
        return got

    def write(self, fd: int, data: Sequence[memoryview], offset: int) -> int:
        self._asked("write")
        wrote = super().write(fd, data, offset)
        self.bytes["write"] += wrote
        return wrote

    def reserve(self, fd: int, size: int) -> None:
        self._asked("reserve")
        super().reserve(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        self._asked("truncate")
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._asked("sync")
        super().sync(fd)

    def unlink(self, path: Path) -> None:
        self._asked("unlink")
        super().unlink(path)
