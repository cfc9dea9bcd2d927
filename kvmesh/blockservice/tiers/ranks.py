"""An operation on a tier is asked once of all ranks of a node, and answered by every rank or ended by the rank's
end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from kvmesh.blockservice.peer_segments import SegmentRank
from kvmesh.ranks import protocol as m

Ask = Callable[[int, int], m.ToRank]  # (rank, ticket) → the message for that rank


class TierRanks:
    """Asks the ranks of a node for operations on tiers. It belongs to the event loop. `lost` says why nothing is
    answered any more."""

    def __init__(self, ranks: Sequence[SegmentRank]) -> None:
        self.lost = ""
        self._ranks = ranks
        self._tickets = itertools.count(1)
        self._asked: dict[tuple[int, int], asyncio.Future[m.TierDone | None]] = {}  # (rank, ticket)

    def __len__(self) -> int:
        return len(self._ranks)

    def send(self, rank: int, message: m.ToRank) -> None:
        """Sends a message that has no answer of its own."""
        self._ranks[rank].send(message)

    def ask(self, ask: Ask) -> asyncio.Future[list[m.TierDone | None]]:
        """Sends a message to all ranks in this very turn of the loop, so that they get it before later ones. Returns
        every rank's answer; None of one that is gone. Memory named in the message is the ranks' until then."""
        ticket, answers = next(self._tickets), []
        for rank, client in enumerate(self._ranks):
            done: asyncio.Future[m.TierDone | None] = asyncio.get_running_loop().create_future()
            answers.append(done)
            if self.lost:
                done.set_result(None)
                continue
            self._asked[rank, ticket] = done
            client.send(ask(rank, ticket))
        return asyncio.gather(*answers)

    def said(self, rank: int, message: m.TierDone) -> None:
        """Takes a rank's answer."""
        waiting = self._asked.pop((rank, message.ticket), None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def lose(self, cause: str) -> None:
        """Ends all operations, because no rank will answer any more."""
        self.lost = self.lost or cause
        asked, self._asked = self._asked, {}
        for waiting in asked.values():
            if not waiting.done():
                waiting.set_result(None)


def everywhere(answers: Sequence[m.TierDone | None]) -> dict[int, int]:
    """Returns position → bytes of what every rank has done."""
    whole: dict[int, int] | None = None
    for said in answers:
        done = dict(zip(said.done, said.sizes, strict=True)) if said is not None else {}
        whole = done if whole is None else {at: size for at, size in whole.items() if at in done}
    return whole or {}
