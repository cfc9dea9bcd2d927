"""Waiting for a batch: by callback, on an event loop, or with a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from kvmesh.transfer.api import BatchId
from kvmesh.transfer.core import Core


def on_final(core: Core, batch_id: BatchId, callback: Callable[[], None]) -> None:
    """Calls back once every request submitted so far is final; now, when it is."""
    with core.lock:
        batch = core.batch(batch_id)
        if batch.open:
            batch.callbacks.append(callback)
            return
    callback()


async def wait(core: Core, batch_id: BatchId) -> None:
    """Until every request submitted so far is final: bounded by their time-outs."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def finished() -> None:
        if not done.done():
            done.set_result(None)

    def from_engine() -> None:
        try:
            loop.call_soon_threadsafe(finished)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    on_final(core, batch_id, from_engine)
    await done


def wait_sync(core: Core, batch_id: BatchId, timeout_s: float) -> bool:
    """False when `timeout_s` passed first."""
    done = threading.Event()
    on_final(core, batch_id, done.set)
    if done.wait(timeout_s):
        return True
    with core.lock:
        callbacks = core.batch(batch_id).callbacks
        if done.set in callbacks:
            callbacks.remove(done.set)
    return done.is_set()
