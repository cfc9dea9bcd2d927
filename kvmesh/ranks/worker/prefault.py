"""First writes to a rank's host region fault for each 4 KiB: paid before it says Ready, or ahead of need, not by a
request."""

from __future__ import annotations

import ctypes
import logging
import threading

from kvmesh.transfer import Region
from kvmesh.transfer.memory import PAGE, populate

log = logging.getLogger("kvmesh.rank")

# About a quarter of a second a GiB. Beyond it memory comes as it is used: an instance that never fills a large segment
# should not hold all of it from its first second.
MAX_TOUCH_BYTES = 1 << 30
AHEAD_BYTES = 256 << 20
SLICE_BYTES = 4 << 20  # of one call of the kernel


def touch(region: Region) -> None:
    """Write zeros over the region's first MAX_TOUCH_BYTES; nothing may lie in it yet, but what an earlier life left."""
    if not region.kept:
        ctypes.memset(region.address, 0, min(region.length, MAX_TOUCH_BYTES))


class PrefaultAhead:
    """Has the pages of a large region come before they are used: those up to `ahead_bytes` behind the highest place
    that was, by a thread of its own. For memory that is taken from the lower end on. (The thread has no lower priority
    than others: it would keep the GIL, once taken, for as long as it waits for a core.)"""

    def __init__(self, region: Region, touched: int = MAX_TOUCH_BYTES, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._region = region
        self._ahead_bytes = ahead_bytes
        self._wanted = self._touched = min(touched, region.length)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def touched(self) -> int:
        """Bytes from the region's begin on that are there."""
        return self._touched

    def used(self, end: int) -> None:
        """What lies before `end`, counted from the region's begin, is in use. Returns at once."""
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
        """Returns when the memory is touched no more."""
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
