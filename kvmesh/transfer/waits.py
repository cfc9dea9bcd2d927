"""Waiting for a batch: by callback, on an event loop, or with a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from kvmesh.transfer.api import BatchId
from kvmesh.transfer.core import Core

HELP_S = 0.02  # a caller that waits longer sleeps: what took so long need not be sooner


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
    """False when `timeout_s` passed first. While a frame of the batch is on its way the calling thread takes part in
    reading its answer, which is sooner than being woken by the thread that reads it."""
    deadline = time.monotonic() + timeout_s
    gate = threading.Lock()  # much cheaper than an Event
    gate.acquire()
    with core.lock:
        batch = core.batch(batch_id)
        if not batch.open:
            return True
        batch.callbacks.append(gate.release)
    until = time.monotonic() + min(timeout_s, HELP_S)
    while batch.open and (left := until - time.monotonic()) > 0:
        with core.lock:
            frame = batch.frame()
        if frame is None:
            break
        frame.transport.assist(frame, left)
        if not frame.answered:
            break
    if gate.acquire(timeout=max(0.0, deadline - time.monotonic())):
        return True
    with core.lock:
        if gate.release in batch.callbacks:
            batch.callbacks.remove(gate.release)
            return False
    return True
