"""The garbage collector in a process that lives long: what lasts is not looked over again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

COLLECT_EVERY = 10_000  # objects made more than gone: between two collections of a service's process
_MIDDLE, _FULL = 2, 50  # collections before one of the middle generation, and of those before one of all objects
EVERY_S = 0.5  # of `LastingHeap.tick`
PATIENCE_S = 5.0  # for a quiet moment


@contextlib.contextmanager
def lasting_imports() -> Iterator[None]:
    """Switches the garbage collector off around imports, and exempts what they made from later collections.

    Modules such as torch make hundreds of thousands of objects and next to no garbage. Collections that visit these
    objects take a third of the time of importing torch and ending the process, and later pause steps.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def rare_collections(every: int = COLLECT_EVERY) -> Iterator[None]:
    """Makes collections rare meanwhile: one after `every` objects made more than gone. Reference counts free almost
    everything; what a request leaves in cycles is small, and `every` bounds how much of it is kept. The middle
    generation is collected while it is small: it holds what calls in progress have, and a pause is as long as it."""
    before = gc.get_threshold()
    gc.set_threshold(every, _MIDDLE, _FULL)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class LastingHeap:
    """Keeps collections short in a process with a large state that changes slowly: objects that survived one full
    collection are exempt from later ones (`gc.freeze`). Collecting what is new takes about a millisecond; visiting an
    index of some hundred thousand blocks would take a third of a second.

    Exempt objects are still freed by their reference counts; only *cycles* of them are garbage until `close`. The
    objects of a call in progress would become such cycles, so collections wait for a moment with few calls.
    """

    def __init__(self, now: float = 0.0) -> None:
        """`now` is in seconds on the clock that `tick` is given."""
        self._settled_at = now
        self._least = 1 << 30

    def due(self, now: float) -> bool:
        """Says whether a `tick` at `now` might collect."""
        return now - self._settled_at >= EVERY_S

    def tick(self, under_way: int, now: float) -> None:
        """Collects and freezes when it is time and few calls are in progress. `under_way` is a number that rises and
        falls with the calls in progress, such as the number of asyncio tasks; the least value seen lately stands for
        none."""
        if not self.due(now):
            return
        self._least = min(self._least, under_way)
        if under_way > self._least and now - self._settled_at < PATIENCE_S:
            return
        gc.collect()
        gc.freeze()
        self._settled_at, self._least = now, under_way  # it follows when there are more for good

    def close(self) -> None:
        """Ends the exemption: later collections visit all objects again."""
        gc.unfreeze()
