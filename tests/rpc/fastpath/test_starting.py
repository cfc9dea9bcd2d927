"""Coroutines that begin without a task: what they see, return, and hear when they are cancelled."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from kvmesh.rpc.fastpath.server import cancel_call, start_call

who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


async def test_what_does_not_wait_is_done_at_once() -> None:
    done = []

    async def work() -> None:
        done.append(await there())

    async def there() -> str:
        who.set("work")
        return who.get()

    assert start_call(work()) is None
    assert done == ["work"] and who.get() == "nobody", "its context is its own"


async def test_what_waits_goes_on_in_a_task_and_in_its_context() -> None:
    steps: list[object] = []
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        who.set("work")
        steps.append(await ready)
        await asyncio.sleep(0)
        steps.append(who.get())
        with pytest.raises(ValueError, match="told"):
            await failing
        async with asyncio.timeout(30):
            await asyncio.sleep(0)
            steps.append(asyncio.current_task() is task)

    failing: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    failing.set_exception(ValueError("told"))
    task = start_call(work())
    assert task is not None and not steps
    ready.set_result("told")
    await task
    assert steps == ["told", "work", True]


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_who_is_cancelled_hears_of_it(turns: int) -> None:
    heard = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)  # its end may wait too
            heard.append("end")

    task = start_call(work())
    assert task is not None
    for _ in range(turns):
        await asyncio.sleep(0)
    cancel_call(task)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert heard == ["end"]


async def test_what_it_raises_is_raised() -> None:
    async def early() -> None:
        raise ValueError("early")

    async def late() -> None:
        await asyncio.sleep(0)
        raise ValueError("late")

    async def cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ValueError, match="early"):
        start_call(early())
    task = start_call(late())
    assert task is not None
    with pytest.raises(ValueError, match="late"):
        await task
    assert start_call(cancelled()) is None
