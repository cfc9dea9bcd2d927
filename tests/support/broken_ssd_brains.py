"""Brains of the SSD tier that are wrong, each in one point: what the model must find."""

from __future__ import annotations

from kvmesh.tiers.ssd.brain import Brain, Demote, Drop
from kvmesh.tiers.ssd.format import PAGE, record_bytes


class ForgetsWhatItRemoved(Brain):
    def removed_in(self, number: int) -> list[bytes]:
        return []


class DropsEmptyOnesWithRemovals(Brain):
    def _next_empty(self) -> int | None:
        return next((b.number for b in self._buckets.values() if b.closed and not b.live), None)


class TakesTheYoungest(Brain):
    def force(self) -> Drop | None:
        youngest = [bucket.number for bucket in self._buckets.values() if bucket.closed]
        return self.discard(youngest[-1]) if youngest else None


class NoRoomForFooters(Brain):
    def fits(self, length: int, *, removed: int = 0) -> bool:
        return self._open is not None and self._open.tail + record_bytes(length) <= self._open.size


class IgnoresRemovalWhileWriting(Brain):
    def claimed(self, key: bytes, ticket: int) -> bool:
        return True


class LeaksSpace(Brain):
    def closed(self, number: int, size: int) -> None:
        super().closed(number, size)
        self._used += PAGE


class OffersNothing(Brain):
    def _leave(self, number: int) -> Demote | Drop:
        return self._evict(number)


BROKEN: list[type[Brain]] = [
    DropsEmptyOnesWithRemovals, TakesTheYoungest, NoRoomForFooters,
    IgnoresRemovalWhileWriting, LeaksSpace, OffersNothing,
]  # fmt: skip
