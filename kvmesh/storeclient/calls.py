"""What every operation of a client needs: its time, its end, its memory as spans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np

from kvmesh.errors import DeadlinePassed, InvalidRequest
from kvmesh.storeclient.memory import Buffer, Data, Span, ended

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


def source_of(one: Source) -> Data | Span:
    """What a put reads. Raises InvalidRequest when it is empty, or no contiguous memory of plain values."""
    if isinstance(one, Buffer):
        return one.span()
    if isinstance(one, Span):
        return one
    try:
        view = memoryview(one)
    except (TypeError, ValueError, BufferError) as error:
        hint = "; of a tensor its .numpy()" if hasattr(one, "data_ptr") else ""
        why = f"must be bytes, or memory such as a numpy array's{hint} ({error})"
        raise InvalidRequest.of("data", type(one).__name__, why) from None
    if not view.c_contiguous:
        raise InvalidRequest.of("data", view.shape, "memory that is not contiguous")
    if not view.nbytes:
        raise InvalidRequest("data: a block has at least one byte, there are no empty ones", field="data")
    if "O" in view.format:
        raise InvalidRequest.of("data", type(one).__name__, "holds Python objects, not their bytes")
    try:
        return view.cast("B")
    except (TypeError, ValueError):  # of a structured type
        return np.frombuffer(view, np.uint8).data


def memory_of(one: Data | Span) -> Data:
    return one.memory if isinstance(one, Span) else one


def target_of(one: Target) -> Span:
    """Where a get lands. Raises InvalidRequest when it is no registered memory."""
    if isinstance(one, Buffer):
        return one.span()
    if isinstance(one, Span):
        return one
    raise InvalidRequest.of("target", one, "must be registered memory: allocate(), register(), or a span of one")
