"""Engines that a forked child inherits, and cannot use: their threads stayed with the parent.

To the child they are closed at once, without touching what they share with the parent: closing a listener's socket for
good closes it for both.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from kvmesh.errors import TransferError

if TYPE_CHECKING:
    from kvmesh.transfer.engine import TransferEngine

_engines: weakref.WeakSet[TransferEngine] = weakref.WeakSet()
_inherited: weakref.WeakSet[TransferEngine] = weakref.WeakSet()


def watch(engine: TransferEngine) -> None:
    _engines.add(engine)


def closed(engine: TransferEngine) -> TransferError:
    """What a call of an engine that is closed raises."""
    if engine in _inherited:
        return TransferError("the transfer engine was made before this process was forked: make one here")
    return TransferError("the transfer engine is closed")


def _forked() -> None:
    """In the child. Nobody else runs here yet; locks may be held by threads that are not here."""
    for engine in list(_engines):
        _inherited.add(engine)
        engine._closed = threading.Event()
        engine._closed.set()
        engine._close_lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
