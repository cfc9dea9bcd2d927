"""Memory in a named file of a memory file system, which the next incarnation of its process finds again.

    owner: open ─▶ flock ─▶ reserve ─▶ mmap(read, write) ─▶ mode 0400 ─▶ reopen O_RDONLY
    peer:  fd over SCM_RIGHTS ─▶ check: of this user, read-only ─▶ mmap(read)

Such a file cannot be sealed as a memfd is (`memory`). That nobody maps it writable rests on the descriptor, which is
read-only, as is its file for all who would open it by name, except root and its owner's next life
(docs/adr/0014-warm-segments-without-seals.md).

The lock is on a description of its own: peers' maps hold the other one for as long as they live. It is held until the
owner's own map is gone; of a process that was killed, the kernel closes it once no thread of it runs any more.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import stat
import time

from kvmesh.errors import ConfigError
from kvmesh.transfer import memory
from kvmesh.transfer.memory import PAGE, Mapping

log = logging.getLogger(__name__)

PATIENCE_S = 5.0  # a killed life of a large process may take as long to end
_LOOK_S = 0.02
_TMPFS = 0x01021994
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


def lock(path: str) -> int:
    """Opens or makes the file at `path`, locks it, and returns a read-only descriptor that holds the lock. Raises
    ConfigError when the file is another user's, no plain file, not in a tmpfs, or still locked by a living process
    after PATIENCE_S."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as err:
            raise _bad(path, err.strerror or str(err)) from None
        try:
            _check(fd, path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise _bad(path, "another process that lives has it: give each a path of its own") from None
            else:
                if _is_at(fd, path):
                    fd, mine = -1, fd
                    return mine
                continue  # replaced by its owner meanwhile: there is a new file
        finally:
            if fd >= 0:
                os.close(fd)
        time.sleep(_LOOK_S)


def replace(path: str, locked: int) -> int:
    """Puts a new, empty, locked file in the place of the one behind `locked`, closes `locked`, and returns the new
    descriptor. Processes that have the old file mapped keep the old bytes."""
    fresh = f"{path}.new"
    try:
        os.unlink(fresh)
    except FileNotFoundError:
        pass
    try:
        fd = os.open(fresh, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as err:
        raise _bad(path, err.strerror or str(err)) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(fresh, path)
    except BaseException:
        os.close(fd)
        raise
    finally:
        os.close(locked)
    return fd


def allocate(path: str, nbytes: int, *, keep: bool, huge_pages: str, prefault: bool) -> tuple[Mapping, int]:
    """Allocates memory as `memory.allocate` does, in the file at `path`. With `keep`, a file of the same length keeps
    its bytes, and `Mapping.kept` is true; else they are zero. Raises ConfigError as `lock` does, and when the file
    system has no room."""
    length = -(-nbytes // PAGE) * PAGE
    locked = lock(path)
    try:
        had = os.fstat(locked).st_size
        kept = keep and had == length
        if had and keep and not kept:
            log.warning("%s has %d bytes, not %d: this life starts without its blocks", path, had, length)
        if had and not kept:
            locked = replace(path, locked)
        writable = open_writable(path, locked, length)
    except BaseException:
        os.close(locked)
        raise
    fd = -1
    try:
        fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        mapping = Mapping(writable, length, writable=True, lock=locked, kept=kept)
    except BaseException:
        for one in (locked, fd):
            if one >= 0:
                os.close(one)
        raise
    finally:
        os.close(writable)
    memory.advise(mapping, huge_pages, prefault and not kept)
    return mapping, fd


def open_writable(path: str, locked: int, length: int) -> int:
    """Opens the file behind `locked` for writing and reserves `length` bytes; what was not there reads as zero. The
    file's mode is 0400 afterwards."""
    os.fchmod(locked, 0o600)
    fd = os.open(f"/proc/self/fd/{locked}", os.O_RDWR | os.O_CLOEXEC)
    fresh = os.fstat(fd).st_size == 0
    try:
        os.ftruncate(fd, length)
        # A page that is missing when it is written would be SIGBUS.
        os.posix_fallocate(fd, 0, length)
        os.fchmod(fd, 0o400)
    except OSError as err:
        if fresh:
            os.ftruncate(fd, 0)
        os.close(fd)
        if err.errno == errno.ENOSPC:
            raise _bad(path, f"no room for {length} bytes: make that file system larger, or ask for less") from None
        raise _bad(path, err.strerror or str(err)) from None
    return fd


def _check(fd: int, path: str) -> None:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise _bad(path, "no plain file")
    if found.st_uid != os.geteuid():
        raise _bad(path, "belongs to another user")
    if not _in_memory(fd):
        raise _bad(path, "not in a memory file system (tmpfs, as /dev/shm is)")


def check_folder(path: str) -> None:
    """Raises ConfigError or OSError unless segment files can lie in the folder `path`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _in_memory(fd):
            raise _bad(path, "not in a memory file system (tmpfs, as /dev/shm is)")
        if not os.access(path, os.W_OK | os.X_OK):
            raise _bad(path, os.strerror(errno.EACCES))
    finally:
        os.close(fd)


def _is_at(fd: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _in_memory(fd: int) -> bool:
    answer = ctypes.create_string_buffer(256)  # struct statfs begins with the type, one word long
    if _libc.fstatfs(fd, answer) != 0:
        return False
    return ctypes.c_long.from_buffer(answer).value == _TMPFS


def _bad(path: str, why: str) -> ConfigError:
    return ConfigError(f"path={path!r}: {why}", field="path")
