"""What every operation of a client needs: its time, its turn, and an end after which nothing of it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from kvmesh.errors import DeadlinePassed

T = TypeVar("T")


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


async def every(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, beside one another; when one raises, or this is cancelled, the others have ended as well: they
    use the same memory."""
    works = list(works)
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            await ended(task)


@asynccontextmanager
async def turn(of: asyncio.Lock | asyncio.Semaphore, deadline: float) -> AsyncIterator[None]:
    """One's turn, waited for no longer than until `deadline`. DeadlinePassed: it has not come."""
    seconds = left(deadline)
    try:
        if of.locked():
            async with asyncio.timeout(seconds):
                await of.acquire()
        else:
            await of.acquire()  # at once
    except TimeoutError:
        raise DeadlinePassed("other operations of this client have taken all of its time") from None
    try:
        yield
    finally:
        of.release()


async def in_thread(work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
    """Its result. A thread cannot be cancelled: when this is, it ends first; `undo` takes what nobody waits for."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await ended(running)
        if undo is not None and not running.cancelled() and running.exception() is None:
            undo(running.result())
        raise


async def ended(task: asyncio.Future[Any]) -> None:
    """Returns when it has ended, however often the caller is cancelled meanwhile; raises nothing."""
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            pass
