"""Requests of models that are paused: one of them looks whether its model is resumed, and the others wait for it. Each
that is placed then lets two more go: a pause's end is no burst, and where the next pause has begun few have asked."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

PROBE_S = 0.05  # between two looks
SILENT_S = 1.0  # a look that did not come by then has ended with its request: the next one looks
LET_GO = 2  # by each that is placed: all are on their way after as many rounds as their number has binary digits


@dataclass(slots=True)
class _Waiting:
    """What waits for one model. `who` looks, and did so `at`; None: nobody does."""

    who: object = None
    at: float = 0.0
    others: dict[asyncio.Future[None], None] = field(default_factory=dict)  # who came first is first


class PauseGate:
    """Holds requests back while their model is paused. All methods belong to the event loop."""

    def __init__(self) -> None:
        self._models: dict[str, _Waiting] = {}

    async def wait(self, model: str, who: object) -> None:
        """Returns when `who`, whose attempt met the pause, is to try again."""
        waiting = self._models.setdefault(model, _Waiting())
        if waiting.who is not None and waiting.who is not who:
            turn = asyncio.get_running_loop().create_future()
            waiting.others[turn] = None
            try:
                while waiting.who is not None and time.monotonic() - waiting.at <= SILENT_S:
                    await asyncio.wait({turn}, timeout=SILENT_S)
                    if turn.done():
                        return
            finally:
                waiting.others.pop(turn, None)
        waiting.who, waiting.at = who, time.monotonic()
        await asyncio.sleep(PROBE_S)

    def passed(self, model: str) -> None:
        """A request of the model was placed: it is not paused, or not any more."""
        if not self._models or (waiting := self._models.get(model)) is None:
            return
        waiting.who = None
        for turn in list(itertools.islice(waiting.others, LET_GO)):
            del waiting.others[turn]
            turn.set_result(None)
        if not waiting.others:
            del self._models[model]
