"""Long calls in slices of the event loop, and the times that the refused are told."""

from __future__ import annotations

import asyncio

import pytest

from kvmesh.errors import Overloaded
from kvmesh.rpc.call_queue import MOST_S, CallQueue, ReturnTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_calls_are_carried_out_in_order_a_slice_in_each_turn() -> None:
    clock, done = Clock(), []
    queue = CallQueue(100, "most", clock=clock)

    def work(number: int) -> None:
        clock.now += 0.001
        done.append(number)

    for number in range(10):
        queue.submit(lambda number=number: work(number))  # type: ignore[misc]
    turns = []
    while len(queue):
        turns.append(len(done))
        await asyncio.sleep(0)
    assert done == list(range(10))
    assert turns == [2, 4, 6, 8], "two milliseconds in each turn"


async def test_too_many_are_refused_with_times_of_their_own() -> None:
    clock = Clock()
    queue = CallQueue(5, "max_schedules", clock=clock)

    def work() -> None:
        clock.now += 1.0

    for _ in range(6):
        queue.submit(work)
    waits = []
    for _ in range(50):
        with pytest.raises(Overloaded, match="max_schedules=5") as caught:
            queue.submit(work)
        waits.append(caught.value.retry_after_ms)
    assert len(set(waits)) == 50 and min(waits) >= 1


async def test_a_dropped_call_is_not_carried_out() -> None:
    clock, done = Clock(), []
    queue = CallQueue(5, "most", clock=clock)

    def work() -> None:
        clock.now += 1.0
        done.append(1)

    queue.submit(work)
    queued = queue.submit(work)
    assert queued is not None
    queued.drop()
    waiting = asyncio.ensure_future(queue.call(work))
    await waiting
    assert len(done) == 2


async def test_what_a_call_raises_is_raised_to_who_waits() -> None:
    queue = CallQueue(5, "most")

    def fail() -> None:
        raise Overloaded("no")

    with pytest.raises(Overloaded, match="no"):
        await queue.call(fail)


def test_times_follow_the_rate_at_which_calls_end() -> None:
    times = ReturnTimes()
    for number in range(100):
        times.ended(10 + number * 0.5, full=True)
    told = [times.wait_s(60.0) for _ in range(40)]
    assert told == sorted(told) and told[0] == pytest.approx(0.5, rel=0.01)
    assert told[39] == pytest.approx(20.0, rel=0.01)
    assert max(times.wait_s(60.0) for _ in range(1000)) <= MOST_S + 1


def test_a_pause_without_refusals_is_not_taken_for_slowness() -> None:
    times = ReturnTimes()
    for number in range(50):
        times.ended(number * 0.01, full=True)
    times.ended(1000.0, full=False)
    assert times.interval_s == pytest.approx(0.01, rel=0.01)
