"""Bucket files that are open: made, found again, dropped. Thread-safe.

At most `max_open` stay open beside those in use: a tier of a terabyte has more buckets than a process may have
descriptors. A file that is dropped while somebody reads it loses its name at once and its space with the last reader.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvmesh.tiers.ssd.disk import Disk, Scratch, read_whole, write_whole
from kvmesh.tiers.ssd.folder import TierFolder
from kvmesh.tiers.ssd.format import NONCE_BYTES, PAGE, pack_bucket

log = logging.getLogger(__name__)


class BucketFile:
    """One open file. With `direct`, every piece, its place in memory and its offset must be whole pages."""

    def __init__(self, disk: Disk, number: int, fd: int, *, direct: bool) -> None:
        self.number = number
        self.direct = direct
        self.users = 0
        self.dropped = False
        self._disk = disk
        self._fd = fd

    def read(self, into: Sequence[memoryview], offset: int) -> None:
        """Fills all of `into`. Raises OSError, also when the file is too short."""
        read_whole(self._disk, self._fd, into, offset)

    def write(self, data: Sequence[memoryview], offset: int) -> None:
        """Writes all of `data`, which are whole pages. Raises OSError."""
        write_whole(self._disk, self._fd, data, offset)

    def sync(self) -> None:
        """Makes what was written survive a power loss. Raises OSError."""
        self._disk.sync(self._fd)

    def truncate(self, size: int) -> None:
        """Ends the file at `size` bytes. Raises OSError."""
        self._disk.truncate(self._fd, size)

    def reserve(self, size: int) -> None:
        """Reserves space as `Disk.reserve` does."""
        self._disk.reserve(self._fd, size)

    def size(self) -> int:
        """Returns the file's size in bytes."""
        return self._disk.size(self._fd)

    def close(self) -> None:
        self._disk.close(self._fd)


class BucketFiles:
    """The open bucket files. `on_gone(number)` is called when the space of a dropped file is free, on the thread that
    released it last."""

    def __init__(
        self, folder: TierFolder, disk: Disk, on_gone: Callable[[int], None], *, direct: bool, max_open: int
    ) -> None:
        self.direct = direct
        self._folder = folder
        self._disk = disk
        self._on_gone = on_gone
        self._max_open = max_open
        self._lock = threading.Lock()
        self._files: OrderedDict[int, BucketFile] = OrderedDict()  # least recently used first
        self._leaving: set[BucketFile] = set()  # dropped, and in use

    def create(self, number: int, size: int) -> tuple[BucketFile, bytes]:
        """Makes a bucket with room for `size` bytes and its header written. Returns its file, in use by the caller, and
        its nonce. Raises OSError."""
        nonce = os.urandom(NONCE_BYTES)
        page = Scratch().take(PAGE)
        page[:] = pack_bucket(number, self._folder.identity, nonce)
        file = self._open(number, os.O_CREAT | os.O_EXCL)
        try:
            file.reserve(size)
            file.write([page], 0)
            self._disk.sync_folder(self._folder.path)
        except BaseException:
            file.close()
            self._unlink(number)
            raise
        with self._lock:
            file.users = 1
            self._files[number] = file
        return file, nonce

    def acquire(self, number: int) -> BucketFile:
        """Returns a bucket's file, to be used until `release`. Raises OSError (FileNotFoundError when it was
        dropped)."""
        with self._lock:
            file = self._files.get(number)
            if file is None:
                file = self._files[number] = self._open(number, 0)
            self._files.move_to_end(number)
            file.users += 1
            self._close_idle()
            return file

    def release(self, file: BucketFile) -> None:
        """Ends the caller's use of a file."""
        with self._lock:
            file.users -= 1
            last = file.dropped and not file.users
            if last:
                self._leaving.discard(file)
            self._close_idle()
        if last:
            file.close()
            self._on_gone(file.number)

    def drop(self, number: int) -> bool:
        """Deletes a bucket's name now; its space is freed once nobody uses it. Returns False when it could not be
        deleted."""
        if not self._unlink(number):
            return False
        with self._lock:
            file = self._files.pop(number, None)
            if file is not None:
                file.dropped = True
                if file.users:
                    self._leaving.add(file)
                    return True
        if file is not None:
            file.close()
        self._on_gone(number)
        return True

    def close(self) -> None:
        """Closes all files, which nobody may use any more."""
        with self._lock:
            for file in (*self._files.values(), *self._leaving):
                file.close()
            self._files.clear()
            self._leaving.clear()

    @property
    def open_files(self) -> int:
        """The number of open descriptors."""
        with self._lock:
            return len(self._files) + len(self._leaving)

    def _open(self, number: int, flags: int) -> BucketFile:
        fd = self._disk.open(self._folder.bucket(number), flags | os.O_RDWR | (os.O_DIRECT if self.direct else 0))
        return BucketFile(self._disk, number, fd, direct=self.direct)

    def _close_idle(self) -> None:
        excess = len(self._files) - self._max_open
        if excess > 0:
            for number in [n for n, file in self._files.items() if not file.users][:excess]:
                self._files.pop(number).close()

    def _unlink(self, number: int) -> bool:
        try:
            self._disk.unlink(self._folder.bucket(number))
            self._disk.sync_folder(self._folder.path)
        except OSError as error:
            log.warning("%s: could not be removed: %s", self._folder.bucket(number), error.strerror)
            return False
        return True
