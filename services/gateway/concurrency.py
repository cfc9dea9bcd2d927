"""How many answers are in flight at once, and how many of them ask the conductor; the rest is told when to come again.

A gateway that takes whatever comes makes thousands of requests wait for each other, and the conductor with them. Here a
bounded number is taken; whoever finds no room is refused at once, before anything is done for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from kvmesh.errors import Overloaded
from kvmesh.rpc.call_queue import ReturnTimes
from kvmesh.telemetry import names


class AnswerRoom:
    """Room for `most` answers (a request may want several)."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._refused = False  # somebody, since the last answer ended
        self._returning = ReturnTimes()
        self.answers = 0

    def enter(self, answers: int) -> None:
        """Raises Overloaded when there is no room for so many."""
        if self.answers + answers <= self._most or not self.answers:
            self.answers += answers
            return
        self._refused = True
        names.GATEWAY_REFUSED.labels(what="requests").inc()
        wait_s = self._returning.wait_s(self._clock(), ahead=answers - 1)
        text = f"{self.answers} answers are in flight here: max_answers={self._most}"
        raise Overloaded(text, retry_after_ms=max(1, round(wait_s * 1000)))

    def leave(self, answers: int) -> None:
        """Makes room: so many answers have ended."""
        self.answers -= answers
        self._returning.ended(self._clock(), full=self._refused)
        self._refused = False


class PlacementRoom:
    """Room for `most` placements under way; others wait, the first of them first, `wait_s` at most."""

    def __init__(self, most: int, wait_s: float) -> None:
        self._free = most
        self._wait_s = wait_s
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        """Raises Overloaded when there was no room for too long."""
        if self._free and not self._waiting:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # its turn came while it was given up
                self._leave()
            elif turn in self._waiting:  # else `_leave` has passed it over, between its cancelling and this
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                names.GATEWAY_REFUSED.labels(what="placements").inc()
                text = f"{len(self._waiting)} requests wait to be placed, for {self._wait_s:g} s by now"
                raise Overloaded(text, retry_after_ms=round(self._wait_s * 1000)) from None
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
