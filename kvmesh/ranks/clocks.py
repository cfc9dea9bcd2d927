"""Clocks of two machines: the times in messages between a front and its ranks on another host.

All times in these messages are CLOCK_MONOTONIC nanoseconds (0: none), and every machine has its own. A front knows its
host's clock within half a round trip. It takes the end of that interval that errs to the safe side in both directions:
what ends at a time ends early for the rank, and what a rank reports seems to have happened late. Pure.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import TypeVar

import msgspec

M = TypeVar("M", bound=msgspec.Struct)

# Fields of messages that are moments; any other field that ends in _ns is a duration, or none of the machine's clock.
MOMENTS = frozenset(
    (
        "lease_until_ns",
        "deadline_ns",
        "first_post_ns",
        "last_ack_ns",
        "start_ns",
        "end_ns",
        "since_ns",
        "busy_from_ns",
        "busy_until_ns",
        "warm_until_ns",
    )
)
KEPT = 32  # exchanges that an offset is taken from: clocks of two machines drift by some 10 µs a second


class ClockOffset:
    """Keeps how far another host's clock is ahead of this one's at least, from messages that it sent and when they
    came."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=KEPT)

    def heard(self, there_ns: int, now_ns: int) -> None:
        """Takes a message that was sent at `there_ns` and is here at `now_ns`."""
        self._seen.append(there_ns - now_ns)

    @property
    def ns(self) -> int:
        """Nanoseconds to add to a time of this host; 0 before anything was heard."""
        return max(self._seen, default=0)


@cache
def _moments(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name in MOMENTS)


def shifted(message: M, by_ns: int) -> M:
    """Returns the message with its moments as another host's clock has them; 0 stays 0."""
    changed = {name: at + by_ns for name in _moments(type(message)) if (at := getattr(message, name))}
    return msgspec.structs.replace(message, **changed) if changed else message
