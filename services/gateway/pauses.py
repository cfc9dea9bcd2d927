"""Requests of models that are paused: one of them looks whether its model is resumed, and the others wait for it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

PROBE_S = 0.05  # between two looks
SILENT_S = 1.0  # a look that did not come by then has ended with its request: the next one looks


@dataclass(slots=True)
class _Probe:
    who: object
    at: float
    resumed: asyncio.Future[None]


class PauseGate:
    """Holds requests back while their model is paused. All methods belong to the event loop."""

    def __init__(self) -> None:
        self._probes: dict[str, _Probe] = {}

    async def wait(self, model: str, who: object) -> None:
        """Returns when `who`, whose attempt met the pause, is to try again."""
        probe, now = self._probes.get(model), time.monotonic()
        if probe is None:
            probe = self._probes[model] = _Probe(who, now, asyncio.get_running_loop().create_future())
        elif probe.who is not who and now - probe.at > SILENT_S:
            probe.who = who
        if probe.who is who:
            probe.at = now
            await asyncio.sleep(PROBE_S)
        else:
            await asyncio.wait({probe.resumed}, timeout=SILENT_S)

    def passed(self, model: str) -> None:
        """A request of the model was placed: it is not paused, or not any more."""
        if self._probes and (probe := self._probes.pop(model, None)) is not None:
            probe.resumed.set_result(None)
