"""Removals in what lies below DRAM, also in what this node has not looked into yet.

A pool node opens a layout's place in an object store with the first block of it: what is removed before that is
remembered, and is removed there before the place is in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from kvmesh.node import messages as m
from kvmesh.node.removals import Watch
from kvmesh.node.tier_parts import Part
from kvmesh.node.tier_ranks import TierRanks, everywhere
from kvmesh.rpc.errors import Unavailable

REMOVE_TRIES = 3
REMOVE_S = 10.0
SLICE = 4096  # keys in one message

Answers = asyncio.Future[list[m.TierDone | None]]


class TierRemovals:
    """Of one node's tier, its parts by layout. `said`: the tier as its user set it. `unseen`: what was removed since
    the node came up; none: nothing comes back with a part that is opened."""

    def __init__(self, ranks: TierRanks, parts: Mapping[str, Part], said: str) -> None:
        self._ranks = ranks
        self._parts = parts
        self._said = said
        self.unseen: Watch | None = None

    async def forget(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `Tiering.forget`."""
        here: set[bytes] = set()
        told: list[tuple[Part, bytes, Answers]] = []
        # All parts are told in the turn in which DRAM has let go: nothing can be read from one to come back.
        for part in self._parts.values():
            there = [key for key in keys if part.contents.known(key) or key in part.writing]
            if there:
                here.update(there)
                packed = b"".join(there)
                told.append((part, packed, self._tell(part, packed)))
        done = await asyncio.gather(*(self._done(*each) for each in told))
        if not all(done):
            raise Unavailable(f"removals of {len(here)} blocks could not all be written to {self._said}")
        return here

    def lingering(self, part: Part) -> list[bytes]:
        """What a part that has just been opened holds, though it was removed here. O(blocks)."""
        unseen = self.unseen
        return [] if unseen is None else [key for key in part.contents.keys() if unseen.gone(key)]  # noqa: SIM118

    async def purge(self, part: Part, keys: Sequence[bytes]) -> str:
        """These go, before anybody may read there; why they did not."""
        for start in range(0, len(keys), SLICE):
            packed = b"".join(keys[start : start + SLICE])
            if not await self._done(part, packed, self._tell(part, packed)):
                return f"{len(keys)} blocks that were removed are still there"
        return ""

    def _tell(self, part: Part, packed: bytes) -> Answers:
        return self._ranks.ask(lambda _, ticket: m.TierRemove(ticket, part.tier, part.number, packed))

    async def _done(self, part: Part, packed: bytes, answers: Answers) -> bool:
        """Whether every rank has written that down, at last."""
        for last in (False,) * (REMOVE_TRIES - 1) + (True,):
            try:
                if len(everywhere(await asyncio.wait_for(answers, REMOVE_S))) == len(packed) // 16:
                    return True
            except TimeoutError:
                pass
            if not last:
                answers = self._tell(part, packed)
        return False
