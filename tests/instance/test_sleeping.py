"""Two ranks of one instance sleep and wake together: all of them or none."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvmesh.errors import DeadlinePassed, InvalidRequest, Unavailable
from kvmesh.instance.sleeping import InstanceSleep, SleepLevel
from kvmesh.ranks import protocol as m
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import prompt
from tests.support.rank_driver import BLOCK, GREEDY, AllRanks, ranks

PROMPT = prompt(3, 40, 250)
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Sleeper:
    """Two ranks and what puts them to sleep."""

    def __init__(self, both: AllRanks) -> None:
        self.both = both
        self.sleep = InstanceSleep([driver.client for driver in both.drivers])
        for at, driver in enumerate(both.drivers):
            driver.on_message = lambda message, at=at: self.sleep.rank_said(at, message)  # type: ignore[misc]
        self.moves = 0
        self._handles = iter(range(1, 100))

    def moved(self) -> None:
        self.moves += 1

    @property
    def places(self) -> list[int]:
        return [driver.client.ready.page_base_offset for driver in self.both.drivers]

    async def fall_asleep(self, level: SleepLevel) -> tuple[int, int]:
        return await self.sleep.fall_asleep(level, time.monotonic() + 60, self.moved)

    async def wake(self) -> None:
        await self.sleep.wake(time.monotonic() + 60)

    async def answer(self, count: int = 6) -> list[int]:
        handle, pages = next(self._handles), tuple(range(-(-(len(PROMPT) + count) // BLOCK)))
        item = m.PrefillItem(handle, tuple(PROMPT), 0, pages, GREEDY, push=False)
        self.both.send(m.PrefillStep(handle, (item,)))
        first = (await self.both.take(m.PrefillStepDone)).sampled[0].token_id
        self.both.send(m.Join(handle, pages, len(PROMPT), first, 0, count, 0, (), GREEDY))
        said = [first]
        while len(said) < count:
            said += [token.token_id for token in (await self.both.take(m.DecodeStepDone)).tokens]
        return said


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sleeper(forked_ranks: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Sleeper]:
    folder = tmp_path_factory.mktemp("ranks")
    async with ranks("w", make_checkpoint(folder / "model", num_hidden_layers=2), 2, folder) as both:
        yield Sleeper(both)


async def test_both_ranks_answer_as_before(sleeper: Sleeper) -> None:
    before = await sleeper.answer()
    for level in (SleepLevel.KEEP_WEIGHTS, SleepLevel.DROP_WEIGHTS):
        old = sleeper.places
        pages, weights = await sleeper.fall_asleep(level)
        assert pages == sum(ready.num_pages * ready.shard_bytes for ready in sleeper.both.readies)
        assert (weights > 0) == (level is SleepLevel.DROP_WEIGHTS)
        with pytest.raises(InvalidRequest, match="wake it first"):
            sleeper.sleep.check_awake("w")
        await sleeper.wake()
        sleeper.sleep.check_awake("w")
        assert all(new != was for new, was in zip(sleeper.places, old, strict=True))
        assert await sleeper.answer() == before


async def test_where_one_cannot_none_sleeps(sleeper: Sleeper) -> None:
    """A window is open at the second rank: a peer may still write there."""
    before, old, second = await sleeper.answer(), sleeper.places, sleeper.both.drivers[1]
    second.client.send(m.OpenWindow("p", 3, (second.page_offset(0),)))
    await second.take(m.WindowOpened)
    with pytest.raises(Unavailable, match=r"rank 1 cannot sleep: .* has an open window"):
        await sleeper.fall_asleep(SleepLevel.DROP_WEIGHTS)
    assert (sleeper.sleep.level, sleeper.moves) == (SleepLevel.AWAKE, 1)
    assert sleeper.places[0] != old[0] and sleeper.places[1] == old[1]
    assert await sleeper.answer() == before
    second.client.send(m.Fence("p", 3))
    await second.take(m.Fenced)
    await sleeper.fall_asleep(SleepLevel.KEEP_WEIGHTS)
    await sleeper.wake()
    assert await sleeper.answer() == before


async def test_a_rank_that_ends_or_says_nothing_ends_the_order() -> None:
    sleep = InstanceSleep([])
    with pytest.raises(InvalidRequest, match="level=3: 1"):
        SleepLevel.told(3)
    async with sleep.in_turn(time.monotonic() + 5):
        with pytest.raises(DeadlinePassed, match="another sleep or wake"):
            async with sleep.in_turn(time.monotonic()):
                pass
