"""Whether this process's event loop runs, and whether it takes work: what orchestrators ask at `/live` and `/ready`.

Beside `/metrics`, from the metrics server's thread: it answers when the event loop hangs, and says so.
"""

from __future__ import annotations

import asyncio
import time

BEAT_S = 0.5
# Long enough for a full garbage collection, a model's page faults, a laptop's lid; short enough to restart a hung one.
SILENT_S = 15.0


class Readiness:
    """The readiness of one process. Its event loop writes it and other threads read it, so only single attributes
    change.

    `why_not` is "" while the service takes work, else one line for people.
    """

    def __init__(self) -> None:
        self.why_not = "starting"
        self._beat_at: float | None = None  # monotonic seconds; None: nobody beats here

    def beat(self, now: float) -> None:
        """Notes that the event loop turns at `now` (monotonic seconds)."""
        self._beat_at = now

    def hung_s(self, now: float) -> float:
        """Returns for how many seconds the event loop has been silent, once that is too long; else 0."""
        silent = 0.0 if self._beat_at is None else now - self._beat_at
        return silent if silent > SILENT_S else 0.0

    def answer(self, path: str, now: float) -> tuple[int, str] | None:
        """Returns (HTTP status, one line) for a probe's path, None for another path."""
        if path not in ("/live", "/ready"):
            return None
        if hung := self.hung_s(now):
            return 503, f"the event loop has not turned for {hung:.0f} s"
        if path == "/ready" and self.why_not:
            return 503, self.why_not
        return 200, "live" if path == "/live" else "ready"


PROCESS = Readiness()


async def beats() -> None:
    """Notes in PROCESS that the loop turns, until cancelled."""
    while True:
        PROCESS.beat(time.monotonic())
        await asyncio.sleep(BEAT_S)
