"""The clock of everything that lasts until a time and whose end somebody else counts too: leases, pins, heartbeats.

CLOCK_MONOTONIC stands still while a machine is suspended, CLOCK_BOOTTIME goes on: whoever wakes must see that its lease
is over. No clock helps where all of them stand still, as in a virtual machine that was paused; what must be right even
then is confirmed by whoever gave the lease (docs/adr/0032-seals-are-confirmed.md). Deadlines of calls and the times
of spans stay on CLOCK_MONOTONIC: they end within one process, and nobody else relies on them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

NEVER = 1 << 62  # nanoseconds of any clock here: a time that does not come

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def lease_clock() -> float:
    """Returns seconds of CLOCK_BOOTTIME, which goes on while the machine sleeps (CLOCK_MONOTONIC where
    there is none)."""
    return time.clock_gettime(_CLOCK)


def lease_clock_ns() -> int:
    """`lease_clock` in nanoseconds."""
    return time.clock_gettime_ns(_CLOCK)


# ── time as an event of a pure machine ────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: the machine acts on what is due."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All messages that had arrived by `until` have been handled, so silence is judged up to that time. Before the
    first such event it is judged up to the present."""

    until: float
