"""The system calls of the SSD tier, in one place: whole reads and writes, and nothing else touches the disk.

`Disk` is a class so that tests can make single calls fail, or fall short.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvmesh.tiers.ssd.format import PAGE, pages

# What says that the medium or the file is at fault. Others (no descriptors, no memory) fail one operation.
MEDIUM = (errno.EIO, errno.ENOENT, errno.ENXIO, errno.ENODEV, errno.EBADMSG, errno.EUCLEAN, errno.EROFS)
FULL = (errno.ENOSPC, errno.EDQUOT)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def medium_failed(error: BaseException) -> bool:
    """Says whether a folder cannot be used since its disk is full, read-only or broken, and not since a wrong one is
    named."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno != errno.ENOENT:
            return cause.errno in MEDIUM or cause.errno in FULL
        cause = cause.__cause__
    return False


class Disk:
    """The system calls: each method is one call, and all raise OSError."""

    def open(self, path: Path, flags: int) -> int:
        """Returns a descriptor that children do not inherit; new files have mode 0600."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, into, offset)

    def write(self, fd: int, data: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, data, offset)

    def reserve(self, fd: int, size: int) -> None:
        """Reserves space for `size` bytes, so that a full disk is noticed here and not in the middle of a record. File
        systems without that call get no reservation."""
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_folder(self, path: Path) -> None:
        """Makes names added to and removed from the folder survive a power loss."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def read_whole(disk: Disk, fd: int, into: Sequence[memoryview], offset: int) -> None:
    """Fills all of `into` from `offset` on. Raises OSError (EIO) when the file ends before."""
    rest = list(into)
    while rest:
        got = disk.read(fd, rest, offset)
        if got == 0:
            raise OSError(errno.EIO, f"the file ends at or before offset {offset}")
        offset += got
        rest = _after(rest, got)


def write_whole(disk: Disk, fd: int, data: Sequence[memoryview], offset: int) -> None:
    """Writes all of `data`, which are whole pages, at `offset`. After a partial write it goes on from the last whole
    page. Raises OSError."""
    rest, stuck = list(data), 0
    while rest:
        wrote = disk.write(fd, rest, offset)
        if 0 < wrote < sum(map(len, rest)):
            wrote -= wrote % PAGE
        stuck = 0 if wrote else stuck + 1
        if stuck == 3:
            raise OSError(errno.EIO, f"nothing is written at offset {offset}")
        offset += wrote
        rest = _after(rest, wrote)


def _after(views: list[memoryview], n: int) -> list[memoryview]:
    """Returns what is left of the views behind the first `n` bytes."""
    for at, view in enumerate(views):
        if n < len(view):
            return [view[n:], *views[at + 1 :]]
        n -= len(view)
    return []


def is_aligned(view: memoryview) -> bool:
    """Says whether the view starts on a page in memory, as O_DIRECT requires."""
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data) % PAGE == 0
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % PAGE == 0


class Scratch:
    """Page-aligned memory of one thread, grown as needed and reused."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 64 * PAGE)

    def take(self, size: int) -> memoryview:
        """Returns `size` bytes; what was taken before must not be used any more."""
        if size > len(self._map):
            # The old one goes with its last view.
            self._map = mmap.mmap(-1, 1 << (size - 1).bit_length())
        return memoryview(self._map)[:size]


def why_not_direct(disk: Disk, folder: Path) -> str:
    """Tries O_DIRECT in this folder with a file of its own. Returns "" when it works, else the error."""
    probe, page = folder / "probe", Scratch().take(PAGE)
    fd = -1
    try:
        fd = disk.open(probe, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        write_whole(disk, fd, [page], 0)
        read_whole(disk, fd, [page], 0)
    except OSError as error:
        if error.errno in FULL and fd >= 0:
            return ""  # it was refused for another reason
        return f"O_DIRECT does not work in {folder}: {error.strerror}"
    finally:
        if fd >= 0:
            disk.close(fd)
        disk.unlink(probe)
    return ""


# ── which pieces of memory one pwritev or preadv carries ────────────────────────────────────────────

# No I/O. With O_DIRECT every piece must start on a page and be whole pages: whole pages of a payload go from and to the
# caller's memory, its last bytes through a page of scratch; a payload that does not start on a page goes through
# scratch as a whole. Without O_DIRECT payloads are never copied.

_ZEROS = bytes(PAGE)


class VectorRead(NamedTuple):
    """A vectored read: `pieces` are filled from the first payload's offset on, then the `copies` (to, from) are
    made."""

    pieces: list[memoryview]
    copies: list[tuple[memoryview, memoryview]]

    def finish(self) -> None:
        """Copies staged payloads, once the pieces are filled."""
        for to, source in self.copies:
            to[:] = source


def write_vector(records: Sequence[tuple[bytes, memoryview]], scratch: Scratch, *, direct: bool) -> list[memoryview]:
    """Returns the pieces that write these records (header, payload) back to back: at most three each."""
    staged = [direct and not is_aligned(payload) for _, payload in records]
    sizes = [PAGE + (pages(len(payload)) if copy else PAGE) for copy, (_, payload) in zip(staged, records, strict=True)]
    room, at = scratch.take(sum(sizes)), 0
    pieces: list[memoryview] = []
    for copy, size, (header, payload) in zip(staged, sizes, records, strict=True):
        mine = room[at : at + size]
        at += size
        mine[:PAGE] = header.ljust(PAGE, b"\0")
        whole = 0 if copy else len(payload) // PAGE * PAGE
        rest = len(payload) - whole
        mine[PAGE : PAGE + rest] = payload[whole:]
        mine[PAGE + rest : PAGE + pages(rest)] = _ZEROS[: pages(rest) - rest]
        pieces += [mine[:PAGE], payload[:whole], mine[PAGE : PAGE + pages(rest)]]
    return [piece for piece in pieces if len(piece)]


def read_vector(into: Sequence[memoryview], scratch: Scratch, *, direct: bool) -> VectorRead:
    """Returns the pieces that read the payloads of adjacent records, skipping the headers between them: at most three
    each."""
    staged = [direct and not is_aligned(view) for view in into]
    sizes = [pages(len(view)) if copy else PAGE for copy, view in zip(staged, into, strict=True)]
    room, at = scratch.take(PAGE + sum(sizes)), PAGE
    skipped = room[:PAGE]
    pieces: list[memoryview] = []
    copies: list[tuple[memoryview, memoryview]] = []
    for copy, size, view in zip(staged, sizes, into, strict=True):
        mine = room[at : at + size]
        at += size
        whole = 0 if copy else len(view) // PAGE * PAGE
        rest = len(view) - whole
        if pieces:
            pieces.append(skipped)
        pieces += [view[:whole], mine[: pages(rest)]]
        if rest:
            copies.append((view[whole:], mine[:rest]))
    return VectorRead([piece for piece in pieces if len(piece)], copies)
