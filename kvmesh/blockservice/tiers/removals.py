"""Removals in the tiers below DRAM, also in parts that this node has not opened yet.

A pool node opens a layout's part in an object store with the first block of it: what is removed before that is
remembered, and is removed there before the part is in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvmesh.blockservice.removals import Watch
from kvmesh.blockservice.tiers.level import TierLevel
from kvmesh.blockservice.tiers.parts import TierPart
from kvmesh.blockservice.tiers.ranks import TierRanks, everywhere
from kvmesh.errors import Unavailable
from kvmesh.ranks import protocol as m

REMOVE_TRIES = 3
REMOVE_S = 10.0
SLICE = 4096  # keys in one message

Answers = asyncio.Future[list[m.TierDone | None]]


class TierRemovals:
    """Removes blocks from one node's tiers. `unseen` has what was removed since the node came up; None if nothing can
    come back with a part that is opened."""

    def __init__(self, ranks: TierRanks, levels: Sequence[TierLevel]) -> None:
        self._ranks = ranks
        self._levels = levels
        self._undone: dict[
            TierPart, dict[bytes, None]
        ] = {}  # removals that could not be written: the medium has the block
        self.unseen: Watch | None = None

    async def forget(self, keys: Sequence[bytes]) -> set[bytes]:
        """See `Tiering.forget`."""
        here: set[bytes] = set()
        told: list[tuple[TierLevel, TierPart, list[bytes], Answers]] = []
        above: dict[str, set[bytes]] = {}  # by layout: keys told to a faster tier, which may just be handing them on
        # All parts are told in the turn of the loop in which DRAM has dropped the blocks, so that none is read back
        # from a tier. The faster tier is told first, so that it hands none on to the next.
        for level in self._levels:
            for layout, part in level.parts.items():
                undone, handed = self._undone.get(part, {}), above.setdefault(layout, set())
                known = {key for key in keys if part.contents.known(key) or key in part.writing or key in undone}
                here |= known
                handed |= known
                there = [key for key in keys if key in handed]
                if there:
                    told.append((level, part, there, self._tell(part, b"".join(there))))
        done = await asyncio.gather(*(self._forgotten(part, there, answers) for _, part, there, answers in told))
        failed = {level.settings.said for (level, *_), good in zip(told, done, strict=True) if not good}
        if failed:
            raise Unavailable(f"removals of {len(here)} blocks could not all be written to {' and '.join(failed)}")
        return here

    async def _forgotten(self, part: TierPart, keys: Sequence[bytes], answers: Answers) -> bool:
        """Returns whether these keys are removed for good; if not, the rest is done when somebody asks again."""
        good = await self._done(part, b"".join(keys), answers)
        undone = self._undone.setdefault(part, {})
        for key in keys:
            if good:
                undone.pop(key, None)
            else:
                undone[key] = None
        if not undone:
            del self._undone[part]
        return good

    def lingering(self, part: TierPart) -> list[bytes]:
        """Returns keys that a part that has just been opened holds, although they were removed here. Its cost is
        O(blocks)."""
        unseen = self.unseen
        return [] if unseen is None else [key for key in part.contents.keys() if unseen.gone(key)]  # noqa: SIM118

    async def purge(self, part: TierPart, keys: Sequence[bytes]) -> str:
        """Removes these keys before anybody may read there; returns why they could not be, or ""."""
        for start in range(0, len(keys), SLICE):
            packed = b"".join(keys[start : start + SLICE])
            if not await self._done(part, packed, self._tell(part, packed)):
                return f"{len(keys)} blocks that were removed are still there"
        return ""

    def _tell(self, part: TierPart, packed: bytes) -> Answers:
        return self._ranks.ask(lambda _, ticket: m.TierRemove(ticket, part.tier, part.number, packed))

    async def _done(self, part: TierPart, packed: bytes, answers: Answers) -> bool:
        """Whether every rank has written the removal, within REMOVE_TRIES."""
        for last in (False,) * (REMOVE_TRIES - 1) + (True,):
            try:
                if len(everywhere(await asyncio.wait_for(answers, REMOVE_S))) == len(packed) // 16:
                    return True
            except TimeoutError:
                pass
            if not last:
                answers = self._tell(part, packed)
        return False
