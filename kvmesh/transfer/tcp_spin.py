"""When a thread that waits for the other end looks again and again instead of going to sleep.

Waking a thread takes longer than moving some KiB: 20 to 100 us in a VM. So whoever is about to get something small,
soon, looks for it for `SPIN_S` before it sleeps; "soon" is what the last one was. Looking in vain is paid for from an
`Allowance`, a share of one core for the whole process, so that it never costs more than that.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass

SPIN_S = 150e-6
_SOON_S = 400e-6  # with sleeping and waking at both ends; without, it would have taken less than SPIN_S
SMALL_BYTES = 256 << 10  # what is larger keeps the copying busy longer than waking takes
_CORES = len(os.sched_getaffinity(0))  # on one core the other end runs only while this one sleeps


@dataclass
class Allowance:
    """Seconds that may be spent in vain: grows by `share` of the time, up to `most`. Races may lose some."""

    share: float = 0.05
    most: float = 5e-3
    left: float = 5e-3
    at: float = 0.0

    def grows(self, now: float) -> float:
        self.left = min(self.left + (now - self.at) * self.share, self.most)
        self.at = now
        return self.left


ALLOWANCE = Allowance()  # of this process


class Patience:
    """Of one waiting thread."""

    __slots__ = ("_since", "eager")

    def __init__(self) -> None:
        self.eager = False
        self._since = 0.0

    def begin(self) -> float:
        """It waits from now on; until when it looks before it sleeps."""
        self._since = now = time.monotonic()
        return now + SPIN_S if self.eager and ALLOWANCE.grows(now) > 0 else now

    def met(self, nbytes: int) -> None:
        """It came, after all."""
        took = time.monotonic() - self._since
        if self.eager and took > SPIN_S:
            ALLOWANCE.left -= SPIN_S
        self.eager = took < _SOON_S and nbytes <= SMALL_BYTES and _CORES > 1

    def await_first(self, sock: socket.socket, view: memoryview) -> int:
        """Looks for the first bytes; 0: go to sleep for them."""
        until = self.begin()
        while self.eager:
            try:
                return sock.recv_into(view, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.monotonic() >= until:
                    break
        return 0
