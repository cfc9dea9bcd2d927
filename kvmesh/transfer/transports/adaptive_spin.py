"""When a thread that waits for its peer polls instead of going to sleep.

Waking a thread takes longer than moving some KiB: 20 to 100 us in a VM. So whoever is about to get something small,
soon, looks for it for `SPIN_S` before it sleeps; "soon" is what the last one was. Looking in vain is paid for from an
`Allowance` of the whole process, so that it costs a small share of a core and of what looking saves, no more.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

from kvmesh.transfer.transports.tls import ByteStream

SPIN_S = 150e-6
_SOON_S = 300e-6  # with sleeping and waking at both ends; without, it would have taken less than SPIN_S
SMALL_BYTES = 256 << 10  # what is larger keeps the copying busy longer than waking takes
_CORES = len(os.sched_getaffinity(0))  # on one core the other end runs only while this one sleeps


@dataclass
class Allowance:
    """The process-wide seconds that polling may waste. They grow by `share` of the time that passes, and by `reward`
    for each poll that paid, up to `most`; so threads hardly poll where others want the cores. Updates that race may be
    lost."""

    share: float = 0.03
    reward: float = SPIN_S / 4
    most: float = 10 * SPIN_S
    left: float = 10 * SPIN_S
    at: float = 0.0

    def grows(self, now: float) -> float:
        self.left = min(self.left + (now - self.at) * self.share, self.most)
        self.at = now
        return self.left

    def looked(self, took_s: float) -> None:
        self.left += self.reward if took_s < SPIN_S else -SPIN_S


ALLOWANCE = Allowance()  # of this process


class AdaptiveSpin:
    """Decides when one waiting thread polls before it sleeps."""

    __slots__ = ("_looked", "_since", "eager")

    def __init__(self) -> None:
        self.eager = False
        self._since = 0.0
        self._looked = False

    def begin(self) -> float:
        """Starts a wait, and returns the monotonic time until which the thread polls before it sleeps."""
        self._since = now = time.monotonic()
        self._looked = self.eager and ALLOWANCE.grows(now) > 0
        return now + SPIN_S if self._looked else now

    def met(self, nbytes: int) -> None:
        """Notes that what was waited for came, with `nbytes` bytes."""
        took = time.monotonic() - self._since
        if self._looked:
            ALLOWANCE.looked(took)
        self.eager = took < _SOON_S and nbytes <= SMALL_BYTES and _CORES > 1

    def await_first(self, sock: ByteStream, view: memoryview) -> int:
        """Polls for the first bytes, and returns how many came; 0 means that the caller should sleep."""
        until = self.begin()
        while self._looked:
            try:
                return sock.recv_into(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.monotonic() >= until:
                    break
        return 0
