"""The sleep of one instance: its ranks give the memory of pages and weights back, all of them or none, and have it
again when it is woken."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvmesh.errors import DeadlinePassed, InvalidRequest, KvmeshError, Unavailable
from kvmesh.instance.asked_ranks import AskedRanks
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankClient

log = logging.getLogger(__name__)

Answer = m.SleepPrepared | m.Asleep | m.Awake
WAKE_S = 60.0  # for ranks that have to be woken as another one could not sleep


class SleepLevel(enum.IntEnum):
    """What becomes of the weights; KV pages are given back at either level."""

    AWAKE = 0
    KEEP_WEIGHTS = 1  # in the host's memory
    DROP_WEIGHTS = 2

    @classmethod
    def told(cls, level: int) -> SleepLevel:
        """Returns the level of an order, where 0 stands for 1. Raises InvalidRequest."""
        if level not in (0, 1, 2):
            raise InvalidRequest.of("level", level, "1 (weights are kept in host memory) or 2 (they are dropped)")
        return cls(level or 1)


@dataclass(frozen=True, slots=True)
class MemoryReleased:
    """What a sleep gave back at all ranks together: bytes of pages, and of weights those that left the device. `ended`
    requests were in flight. Zeros where the instance slept already."""

    level: SleepLevel
    page_bytes: int = 0
    weight_bytes: int = 0
    ended: int = 0


class InstanceSleep(AskedRanks[Answer]):
    """Puts the ranks of one instance to sleep and wakes them, one order at a time. All methods belong to the event
    loop. Nothing may be in flight in the instance; `Front.sleep` sees to that.

    First every rank prepares, of which each can be refused; only when all have does any give memory back. A rank that
    ends in between ends the instance."""

    answers = (m.SleepPrepared, m.Asleep, m.Awake)
    late = "a sleep or wake was not done in time"

    def __init__(self, ranks: Sequence[RankClient]) -> None:
        super().__init__(ranks)
        self.level = SleepLevel.AWAKE
        self.dropped = False  # whether weights have to be read or updated before anything is computed
        self.turn = asyncio.Lock()

    async def fall_asleep(self, level: SleepLevel, until: float, moved: Callable[[], None]) -> tuple[int, int]:
        """Returns the bytes of pages and weights that were given back. Nobody knows blocks in pages any more. Raises
        Unavailable where a rank cannot; then all are awake, and `moved` is called, as pages lie elsewhere."""
        keep = level is SleepLevel.KEEP_WEIGHTS
        try:
            ticket = self._next_ticket()
            for rank, answer in enumerate(await self._ask(m.PrepareSleep(ticket, keep), ticket, until)):
                assert isinstance(answer, m.SleepPrepared)
                if answer.why_not:
                    raise Unavailable(f"rank {rank} cannot sleep: {answer.why_not}")
        except KvmeshError:
            if self.level is SleepLevel.AWAKE:
                await self._wake_ranks(time.monotonic() + WAKE_S)
                moved()
            raise
        self.level = max(self.level, level)
        self.dropped = self.dropped or not keep
        ticket = self._next_ticket()
        answers = await self._ask(m.FallAsleep(ticket, keep), ticket, until)
        given = [answer for answer in answers if isinstance(answer, m.Asleep)]
        pages, weights = sum(one.page_bytes for one in given), sum(one.weight_bytes for one in given)
        log.info("asleep at level %d: %d bytes of pages and %d of weights", self.level, pages, weights)
        return pages, weights

    async def wake(self, until: float) -> None:
        """Wakes all ranks; what says where their pages are is in their `ready` then. Raises Unavailable where one has
        no room: the instance sleeps on, and may be woken again."""
        await self._wake_ranks(until)
        self.level, self.dropped = SleepLevel.AWAKE, False

    async def _wake_ranks(self, until: float) -> None:
        ticket = self._next_ticket()
        answers = await self._ask(m.WakeUp(ticket), ticket, until)
        for rank, answer in zip(self._ranks, answers, strict=True):
            assert isinstance(answer, m.Awake)
            if answer.ready is None:
                raise Unavailable(f"rank {rank.rank} cannot wake: {answer.why_not}")
        for rank, answer in zip(self._ranks, answers, strict=True):
            assert isinstance(answer, m.Awake) and answer.ready is not None
            rank.moved(answer.ready)

    @asynccontextmanager
    async def in_turn(self, until: float) -> AsyncIterator[None]:
        """Waits until no other order is being carried out. Raises DeadlinePassed."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self.turn.acquire()
        except TimeoutError:
            raise DeadlinePassed("another sleep or wake has not ended in time", field="deadline_ms") from None
        try:
            yield
        finally:
            self.turn.release()

    def check_awake(self, instance_id: str) -> None:
        """Raises InvalidRequest while it sleeps."""
        if self.level or self.turn.locked():
            raise InvalidRequest(f"{instance_id}: it sleeps; wake it first", field="instance")

    def check_weights(self, epoch: int, first: int) -> None:
        """Raises InvalidRequest where nobody has the weights of `epoch` any more; those of epoch `first` are read from
        the checkpoint."""
        if self.dropped and epoch != first:
            text = f"the weights of epoch {epoch} were dropped in a sleep: update the weights, then wake it"
            raise InvalidRequest(text, field="weights_epoch")
