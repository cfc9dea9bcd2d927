"""What every operation of a client needs: its time, its end, its memory as spans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvmesh.kvcache.client.memory import Buffer, Data, Span
from kvmesh.rpc.errors import DeadlinePassed, InvalidRequest

T = TypeVar("T")

Target = Buffer | Span
Source = Data | Buffer | Span


def left(deadline: float) -> float:
    """Seconds until `deadline` (monotonic). DeadlinePassed: none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise DeadlinePassed("the operation's time is over")
    return seconds


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """Its result. When this is cancelled so is the work, which has ended before this raises: others own its memory."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        await ended(task)
        raise


async def ended(task: asyncio.Future[Any]) -> None:
    """Returns when it has ended, however often the caller is cancelled meanwhile; raises nothing."""
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            pass


def source_of(one: Source) -> Data | Span:
    """What a put reads. InvalidRequest: empty, or no contiguous memory."""
    if isinstance(one, Buffer):
        return one.span()
    if isinstance(one, Span):
        return one
    try:
        view = memoryview(one)
    except TypeError:
        raise InvalidRequest.of("data", type(one).__name__, "must be bytes or memory") from None
    if not view.c_contiguous:
        raise InvalidRequest.of("data", view.shape, "memory that is not contiguous")
    if not view.nbytes:
        raise InvalidRequest("data: a block has at least one byte", field="data")
    return view.cast("B")


def memory_of(one: Data | Span) -> Data:
    return one.memory if isinstance(one, Span) else one
