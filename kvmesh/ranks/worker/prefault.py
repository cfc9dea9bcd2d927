"""Faults in the pages of a rank's host region before a request needs them: the first write to each 4 KiB costs a page
fault."""

from __future__ import annotations

import ctypes
import logging
import threading

from kvmesh.transfer import Region
from kvmesh.transfer.memory import PAGE, populate

log = logging.getLogger("kvmesh.rank")

# Touching takes about a quarter of a second a GiB. Beyond MAX_TOUCH_BYTES memory comes as it is used: an instance that
# never fills a large segment should not hold all of it from its first second.
MAX_TOUCH_BYTES = 1 << 30
AHEAD_BYTES = 256 << 20
SLICE_BYTES = 4 << 20  # bytes in one system call


def touch(region: Region) -> None:
    """Writes zeros over the region's first MAX_TOUCH_BYTES, in which nothing may lie yet, unless an earlier incarnation
    left it."""
    if not region.kept:
        ctypes.memset(region.address, 0, min(region.length, MAX_TOUCH_BYTES))


class PrefaultAhead:
    """Faults in the pages of a large region before they are used, in a thread of its own: those up to `ahead_bytes`
    behind the highest place in use. It is for memory that is taken from the lower end on. (The thread has no lower
    priority than others: it would keep the GIL, once taken, for as long as it waits for a core.)"""

    def __init__(self, region: Region, touched: int = MAX_TOUCH_BYTES, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._region = region
        self._ahead_bytes = ahead_bytes
        self._wanted = self._touched = min(touched, region.length)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def touched(self) -> int:
        """How many bytes from the region's begin on are in memory."""
        return self._touched

    def used(self, end: int) -> None:
        """Notes that what lies before `end`, counted from the region's begin, is in use. It returns at once."""
        wanted = min(-(-(end + self._ahead_bytes) // PAGE) * PAGE, self._region.length)
        if wanted <= self._wanted or self._closed:
            return
        with self._changed:
            self._wanted = wanted
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pages ahead", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread, and returns when the memory is not touched any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._touched < self._wanted)
            if self._closed:
                return
            length = min(SLICE_BYTES, self._wanted - self._touched)
            if not populate(self._region.address + self._touched, length):
                log.warning("the kernel gives no pages of the host region ahead of their use")
                self._closed = True
                return
            self._touched += length
