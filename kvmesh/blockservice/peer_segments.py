"""Peers' segments at our ranks, counted by users, so that a pull and a handoff can share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvmesh.ranks import protocol as m
from kvmesh.transfer import SegmentDescriptor


class SegmentRank(Protocol):
    """What is needed of kvmesh.ranks.client.RankClient."""

    def send(self, message: m.ToRank, /) -> None: ...


class PeerSegments:
    """All segments that the ranks of one front have open. On the event loop, never blocks."""

    def __init__(self, ranks: Sequence[SegmentRank]) -> None:
        self._ranks = ranks
        self._users: dict[str, int] = {}
        self._descriptors: dict[str, bytes] = {}

    def open(self, descriptor: bytes) -> str:
        """One more user of this segment; returns its name. TransferError: it is no descriptor."""
        name = SegmentDescriptor.decode(descriptor).name
        self._users[name] = self._users.get(name, 0) + 1
        if self._descriptors.get(name) != descriptor:
            # A newer one of the same life: it names regions that were registered since.
            self._descriptors[name] = descriptor
            self._tell(m.OpenSegment(descriptor))
        return name

    def share(self, name: str) -> None:
        """One more user of a segment that is open."""
        assert name in self._users, f"segment {name} is not open"
        self._users[name] += 1

    def release(self, name: str) -> None:
        """One user less; after the last one its connections and maps go. Unknown names are ignored."""
        users = self._users.get(name, 0) - 1
        if users > 0:
            self._users[name] = users
        elif users == 0:
            del self._users[name], self._descriptors[name]
            self._tell(m.CloseSegment(name))

    def users(self, name: str) -> int:
        """How many hold it open."""
        return self._users.get(name, 0)

    def __len__(self) -> int:
        return len(self._users)

    def _tell(self, message: m.ToRank) -> None:
        for rank in self._ranks:
            rank.send(message)
