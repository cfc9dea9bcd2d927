"""A pause of one instance: no new request is taken, those in flight are dealt with, and nothing is left in it."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import time
from collections.abc import Sequence
from typing import Protocol

from kvmesh.errors import DeadlinePassed, KvmeshError, Paused, RequestAborted
from kvmesh.instance.order_holds import OrderHolds, OrderIdentity

log = logging.getLogger(__name__)

POLL_S = 0.005


class PauseMode(enum.Enum):
    """What becomes of requests in flight (`PauseMode` in common.proto)."""

    KEEP = "keep"
    ABORT = "abort"
    FINISH = "finish"


class PausableHalf(Protocol):
    """Is what one role of an instance does about a pause."""

    def refuse(self, error: KvmeshError | None) -> None:
        """Refuses new requests with this error from now on; None takes them again."""

    def end_all(self, error: KvmeshError) -> int:
        """Ends all requests in flight with this error. Returns how many there were."""

    @property
    def empty(self) -> bool:
        """Whether no request is left, and nobody touches memory for one."""

    @property
    def copies(self) -> bool:
        """Whether blocks are still being copied out of device pages, for nobody's request."""

    async def leave_pages(self) -> None:
        """Forgets what lies in device pages, and has those peers that know where they are forget it."""

    def pages_moved(self) -> None:
        """Takes note of where the ranks' pages are now."""


class InstancePause:
    """Pauses and resumes. `halves` are in the order in which they are emptied, decode before prefill: what decode has
    taken needs its prompt computed. `reason` is "" unless it is paused; `holds` say what keeps it so."""

    def __init__(self, instance_id: str, halves: Sequence[PausableHalf]) -> None:
        self._id = instance_id
        self._halves = halves
        self._resumes = 0
        self.holds = OrderHolds()
        self.sleeps = ""  # why a sleep holds it, whatever else does; "": none does
        self.reason = ""

    @property
    def empty(self) -> bool:
        """Whether it is paused and no request is left."""
        return bool(self.reason) and all(half.empty for half in self._halves)

    async def pause(
        self,
        mode: PauseMode,
        reason: str,
        deadline_s: float,
        order: OrderIdentity | None = None,
        for_s: float = math.inf,
    ) -> int:
        """Pauses, for an order or by hand; returns how many requests were ended, once none is left. Raises
        DeadlinePassed if some are: the instance stays paused, and no new ones come. Raises as `OrderHolds.check`
        does."""
        self.holds.pause(order, reason or "by an operator", time.monotonic(), for_s)
        return await self.empty_out(mode, reason or "by an operator", deadline_s)

    async def empty_out(self, mode: PauseMode, reason: str, deadline_s: float) -> int:
        """Takes no new requests and deals with those in flight, as `pause` does; the caller has said what holds it."""
        self.reason = reason
        error = Paused(f"{Paused.PREFIX}{self.reason}", retry_after_ms=100)
        loop, resumes, ended = asyncio.get_running_loop(), self._resumes, 0
        until = loop.time() + deadline_s
        for half in self._halves:
            half.refuse(error)
            if mode is not PauseMode.FINISH:
                aborted = RequestAborted(f"ended by a pause: {self.reason}")
                ended += half.end_all(aborted if mode is PauseMode.ABORT else error)
            while not half.empty:
                if loop.time() >= until:
                    text = f"{self._id}: requests are left after {deadline_s:g} s; it takes no new ones"
                    raise DeadlinePassed(text, field="deadline_ms")
                await asyncio.sleep(POLL_S)
                if self._resumes != resumes:
                    raise Paused(f"{self._id} was resumed before the pause was complete")
        log.info("paused (%s): %d requests ended", self.reason, ended)
        return ended

    async def leave_pages(self, until: float) -> None:
        """Has all halves forget what device pages hold, once nothing is copied out of them; it is paused, and empty.
        Raises DeadlinePassed."""
        loop = asyncio.get_running_loop()
        while any(half.copies for half in self._halves):
            if loop.time() >= until:
                raise DeadlinePassed(f"{self._id}: blocks are still being copied out of pages", field="deadline_ms")
            await asyncio.sleep(POLL_S)
        for half in self._halves:
            await half.leave_pages()

    def pages_moved(self) -> None:
        """Has all halves take note of where pages are now."""
        for half in self._halves:
            half.pages_moved()

    def follow_holds(self, epoch: int) -> bool:
        """Takes requests again where nothing holds the instance any more, and refuses new ones where something does;
        its weights are whole, and of this epoch. Returns whether it does the other now."""
        why, was = self.sleeps or self.holds.why_paused(epoch, time.monotonic()), self.reason
        self.reason = why
        if bool(why) == bool(was):
            return False
        self._resumes += not why
        error = Paused(f"{Paused.PREFIX}{why}", retry_after_ms=100) if why else None
        for half in self._halves:
            half.refuse(error)
        log.info("takes no requests: %s", why) if why else log.info("resumed")
        return True
