"""One question at a time to all ranks of an instance, each of which answers with the question's ticket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from kvmesh.errors import DeadlinePassed, Unavailable
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankClient

Answer = TypeVar("Answer")


class AskedRanks(Generic[Answer]):
    """Asks, and collects the answers. All methods belong to the event loop."""

    answers: ClassVar[tuple[type[Any], ...]]  # the messages that answer its questions
    late: ClassVar[str]  # begins the error of who has not answered in time

    def __init__(self, ranks: Sequence[RankClient]) -> None:
        self._ranks = ranks
        self._tickets = 0
        self._asked = 0
        self._waiting: asyncio.Future[None] | None = None
        self._answers: dict[int, Answer] = {}

    @property
    def asking(self) -> bool:
        """Whether a question is not answered yet."""
        return self._waiting is not None

    def _next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    async def _ask(self, message: m.ToRank, ticket: int, until: float) -> list[Answer]:
        """Returns all ranks' answers to a message with this ticket. Raises DeadlinePassed, Unavailable."""
        self._asked, self._answers = ticket, {}
        self._waiting = asyncio.get_running_loop().create_future()
        for rank in self._ranks:
            rank.send(message)
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._waiting
        except TimeoutError:
            silent = ", ".join(str(rank.rank) for rank in self._ranks if rank.rank not in self._answers)
            raise DeadlinePassed(f"{self.late} (rank {silent})", field="deadline_ms") from None
        finally:
            self._waiting = None
        return [self._answers[rank.rank] for rank in self._ranks]

    def rank_said(self, rank: int, message: m.ToFront) -> bool:
        """Takes a rank's answer; False: the message is for somebody else."""
        if not isinstance(message, self.answers):
            return False
        if self._waiting is not None and message.ticket == self._asked:
            self._answers[rank] = message
            if len(self._answers) == len(self._ranks) and not self._waiting.done():
                self._waiting.set_result(None)
        return True

    def ranks_lost(self, cause: str) -> None:
        """A rank has ended: nobody can answer any more."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Unavailable(cause))
