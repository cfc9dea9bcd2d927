"""Clocks that a test can set back, in every Python process that is started with this folder on its path.

The file that `TEST_CLOCKS` names holds two numbers: nanoseconds by which CLOCK_MONOTONIC and CLOCK_BOOTTIME lag
behind what the kernel says. They may change at any moment.
"""

from __future__ import annotations

import mmap
import os
import struct
import time


def _set_back(path: str) -> None:
    with open(path, "rb") as file:
        lag = mmap.mmap(file.fileno(), 16, access=mmap.ACCESS_READ)
    gettime_ns = time.clock_gettime_ns

    def clock_gettime_ns(clock: int) -> int:
        found = gettime_ns(clock)
        if clock == time.CLOCK_MONOTONIC:
            return found - struct.unpack_from("<q", lag, 0)[0]
        if clock == time.CLOCK_BOOTTIME:
            return found - struct.unpack_from("<q", lag, 8)[0]
        return found

    time.clock_gettime_ns = clock_gettime_ns
    time.clock_gettime = lambda clock: clock_gettime_ns(clock) * 1e-9
    time.monotonic_ns = lambda: clock_gettime_ns(time.CLOCK_MONOTONIC)
    time.monotonic = lambda: clock_gettime_ns(time.CLOCK_MONOTONIC) * 1e-9


if "TEST_CLOCKS" in os.environ:
    _set_back(os.environ["TEST_CLOCKS"])
