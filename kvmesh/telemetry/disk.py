"""Files that do not fill a disk: a floor of free space, and what is left out below it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

LOOK_S = 1.0  # between two looks at the file system
RESUME = 1.25  # times the floor: writing goes on from here
SHARE = 10  # the floor is at most so many-th a part of the file system

Statvfs = Callable[[str], os.statvfs_result]


class FreeSpace:
    """Whether the file system of `folder` has less than `min_free_mb` MiB free, or than a tenth of its size where
    that is less; with 0 it never has."""

    def __init__(self, folder: Path, min_free_mb: int, statvfs: Statvfs = os.statvfs) -> None:
        self._folder = str(folder)
        self._floor = min_free_mb << 20
        self._statvfs = statvfs
        self._look_at = 0.0
        self.low = False
        self.free = 0

    def look(self, now: float) -> bool:
        """Look again if the last look is a second old (`now`: monotonic seconds). True: `low` has changed."""
        if not self._floor or now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        try:
            found = self._statvfs(self._folder)
        except OSError:
            return False  # the folder is gone: writing tells
        self.free = found.f_bavail * found.f_frsize
        floor = min(self._floor, found.f_blocks * found.f_frsize // SHARE)
        before, self.low = self.low, self.free < (floor * RESUME if self.low else floor)
        return self.low != before
