"""How long a node that leaves waits for its blocks to be moved."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest

from kvmesh.errors import Unavailable
from kvmesh.membership import evacuation
from kvmesh.membership.evacuation import STUCK_S, Evacuated, evacuate
from kvmesh.rpc.pb.store_pb2 import DrainResponse

Told = DrainResponse | Unavailable


class Time:
    """Goes on by a second with each question."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def asker(time: Time, told: Iterator[Told]) -> Callable[[float], Awaitable[DrainResponse]]:
    async def ask(timeout_s: float) -> DrainResponse:
        assert 0 < timeout_s <= evacuation.CALL_S
        time.now += 1.0
        answer = next(told)
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    return ask


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evacuation, "ASK_S", 0.0)


async def test_it_ends_when_all_is_moved() -> None:
    time = Time()
    told = iter([DrainResponse(sole_blocks=9), Unavailable("a leader changes"), DrainResponse(done=True, moved=9)])
    assert await evacuate(asker(time, told), 60.0, time) == Evacuated(9, 0, "")
    assert time.now == 3.0


async def test_nobody_with_room_is_not_waited_for() -> None:
    time = Time()

    def told() -> Iterator[Told]:
        yield DrainResponse(sole_blocks=9, moved=2)
        while True:
            yield DrainResponse(sole_blocks=7, moved=4, why_not="no other pool node has room or answers")

    done = await evacuate(asker(time, told()), 60.0, time)
    assert done == Evacuated(4, 7, "no other pool node has room or answers")
    assert time.now <= 3.0 + STUCK_S


async def test_the_time_is_over() -> None:
    time = Time()

    def told() -> Iterator[Told]:
        for moved in range(1000):
            yield DrainResponse(sole_blocks=1000 - moved, moved=moved)

    done = await evacuate(asker(time, told()), 5.0, time)
    assert time.now == 5.0 and done == Evacuated(4, 996, "not done within 5 s")


async def test_masters_that_do_not_answer() -> None:
    time = Time()

    def told() -> Iterator[Told]:
        while True:
            yield Unavailable("connection refused")

    done = await evacuate(asker(time, told()), 60.0, time)
    assert done == Evacuated(0, 0, "connection refused") and time.now < 10
