"""The garbage collector in a process that lives long: what lasts is not looked over again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

COLLECT_EVERY = 10_000  # objects made more than gone: between two collections of a service's process
EVERY_S = 0.5  # of `LastingHeap.tick`
PATIENCE_S = 5.0  # for a quiet moment


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Around imports, and nothing else: the garbage collector rests meanwhile, and leaves alone for ever what is there.

    Modules make hundreds of thousands of objects (torch) and next to no garbage. Looking them over again and again is a
    third of the time that importing torch and ending the process take, and a pause in the middle of a step later on."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def rare_collections() -> None:
    """Look for cycles seldom, in this process from now on. Almost everything goes when nobody refers to it any more;
    what a request leaves in cycles is small, and COLLECT_EVERY bounds how much of it lies about."""
    gc.set_threshold(COLLECT_EVERY)


class LastingHeap:
    """For a process whose state is large and changes little by little: what has outlived a full collection is not
    looked over again. Collections are made often, each of what came since the last one: about a millisecond, where all
    of an index of some hundred thousand blocks takes a third of a second.

    Freed objects are freed all the same; garbage *cycles* of old objects are found only by `close`. A call in progress
    is such a cycle later on, so collections wait for a moment with few of them."""

    def __init__(self, now: float = 0.0) -> None:
        """`now`: seconds on the clock of `tick`."""
        self._settled_at = now
        self._least = 1 << 30

    def due(self, now: float) -> bool:
        """Whether a `tick` might do anything."""
        return now - self._settled_at >= EVERY_S

    def tick(self, under_way: int, now: float) -> None:
        """Time passes. `under_way`: what grows and shrinks with the calls in progress, as the number of tasks does; the
        fewest there have been lately count as none."""
        if not self.due(now):
            return
        self._least = min(self._least, under_way)
        if under_way > self._least and now - self._settled_at < PATIENCE_S:
            return
        gc.collect()
        gc.freeze()
        self._settled_at, self._least = now, under_way  # it follows when there are more for good

    def close(self) -> None:
        """Everything is looked over again."""
        gc.unfreeze()
