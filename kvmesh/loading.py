"""The garbage collector in a process that lives long: what lasts is not looked over again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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


class LastingHeap:
    """For a process whose state is large and changes little by little: what has outlived a full collection is not
    looked over again, so that full collections (a pause of a third of a second with an index of some hundred thousand
    blocks) stay as short as what came since. Freed objects are freed all the same; garbage *cycles* of old objects are
    found only by `close`."""

    def __init__(self) -> None:
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            gc.freeze()

    def close(self) -> None:
        """Everything is looked over again."""
        gc.callbacks.remove(self._collected)
        gc.unfreeze()
