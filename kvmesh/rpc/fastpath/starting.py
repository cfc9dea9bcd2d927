"""A coroutine begun at once; a task only for one that has to wait.

Most calls of a fast path never wait, and a task with its turns of the loop costs more than they do. Up to its
first wait such a coroutine belongs to no task: `asyncio.timeout` and `asyncio.current_task` cannot be used there.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Generator
from functools import partial
from types import coroutine
from typing import Any


def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run it to its end or to its first wait, in a context of its own; the task of the rest, None: it has ended. Cancel
    the task with `cancel` alone. What else than
    CancelledError `work` raises before its first wait, this raises."""
    context = contextvars.copy_context()
    try:
        waits_for = context.run(work.send, None)
    except (StopIteration, asyncio.CancelledError):
        return None
    return asyncio.get_running_loop().create_task(_rest(work, waits_for), context=context)


def cancel(task: asyncio.Task[None]) -> None:
    """In the next turn: a task that is cancelled before its first step would never tell its coroutine."""
    asyncio.get_running_loop().call_soon(task.cancel)


async def _rest(work: Coroutine[Any, Any, None], waits_for: Any) -> None:
    await _driven(work, waits_for)


@coroutine
def _driven(work: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Hands on what `work` waits for, and what it is told. Its first step yields: it must be reached (see `cancel`)."""
    while True:
        try:
            told = yield waits_for
        except BaseException as error:
            step = partial(work.throw, error)
        else:
            step = partial(work.send, told)
        try:
            waits_for = step()
        except StopIteration:
            return
