"""What every operation of a client needs: its deadline, its turn, and an end after which nothing of it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from kvmesh.errors import DeadlinePassed

T = TypeVar("T")


def left(deadline: float) -> float:
    """Returns the seconds until `deadline` (monotonic). Raises DeadlinePassed when there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise DeadlinePassed("the operation's time is over")
    return seconds


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. When the caller is cancelled, the work is cancelled too, and has ended before this
    raises, as others own the memory that it uses."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        await ended(task)
        raise


async def every(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of all, which run side by side. When one raises, or the caller is cancelled, the others have
    ended before this raises: they use the same memory."""
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
    """Acquires a lock or semaphore, and waits no longer than until `deadline`. Raises DeadlinePassed after that."""
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
    """Returns the result of `work`, which runs in a thread. A thread cannot be cancelled: when the caller is, the work
    ends first, and `undo` takes its result."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await ended(running)
        if undo is not None and not running.cancelled() and running.exception() is None:
            undo(running.result())
        raise


async def ended(task: asyncio.Future[Any]) -> None:
    """Returns when `task` has ended, however often the caller is cancelled meanwhile; raises nothing."""
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            pass
