"""First writes to a rank's host region fault for each 4 KiB: paid before it says Ready, not by a request."""

from __future__ import annotations

import ctypes

from kvmesh.transfer import Region

# About a quarter of a second a GiB. Beyond it memory comes as it is used: an instance that never fills a large segment
# should not hold all of it from its first second.
MAX_TOUCH_BYTES = 1 << 30


def touch(region: Region) -> None:
    """Write zeros over the region's first MAX_TOUCH_BYTES; nothing may lie in it yet, but what an earlier life left."""
    if not region.kept:
        ctypes.memset(region.address, 0, min(region.length, MAX_TOUCH_BYTES))
