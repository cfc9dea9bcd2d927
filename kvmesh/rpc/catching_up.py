"""Up to when everything that has arrived at this process has been heard.

A heartbeat that waits in a socket is no silence. Whoever judges silence therefore goes by the last time of which it is
known that nothing of before it waits: a turn of the event loop has read every socket since, and no call came over gRPC
meanwhile (gRPC hands calls over one after another, so while some come others may wait).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PAUSE_S = 0.005  # some turns of the loop; time for gRPC's own threads


async def caught_up(calls: Callable[[], int], clock: Callable[[], float]) -> float:
    """The time, of `clock`. `calls`: how many have been taken over gRPC so far."""
    while True:
        began, before = clock(), calls()
        await asyncio.sleep(PAUSE_S)
        if calls() == before:
            return began
