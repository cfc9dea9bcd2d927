"""Imports of a process that lives long."""

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
