"""Peers' segments that this node's ranks have open, counted by users, so that a pull and a handoff can share one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvmesh.ranks import protocol as m
from kvmesh.transfer import SegmentDescriptor


class SegmentRank(Protocol):
    """The part of kvmesh.ranks.client.RankClient that is needed here."""

    def send(self, message: m.ToRank, /) -> None: ...


class PeerSegments:
    """Keeps account of all segments that the ranks of one front have open. It belongs to the event loop and never
    blocks."""

    def __init__(self, ranks: Sequence[SegmentRank]) -> None:
        self._ranks = ranks
        self._users: dict[str, int] = {}
        self._descriptors: dict[str, bytes] = {}

    def open(self, descriptor: bytes) -> str:
        """Adds a user of this segment, and opens it for the first one; returns its name. Raises TransferError when
        `descriptor` is malformed."""
        name = SegmentDescriptor.decode(descriptor).name
        self._users[name] = self._users.get(name, 0) + 1
        if self._descriptors.get(name) != descriptor:
            # A newer descriptor of the same incarnation names regions that were registered since.
            self._descriptors[name] = descriptor
            self._tell(m.OpenSegment(descriptor))
        return name

    def share(self, name: str) -> None:
        """Adds a user of a segment that is open."""
        assert name in self._users, f"segment {name} is not open"
        self._users[name] += 1

    def release(self, name: str) -> None:
        """Takes a user away; after the last one the segment's connections and maps are closed. Unknown names are
        ignored."""
        users = self._users.get(name, 0) - 1
        if users > 0:
            self._users[name] = users
        elif users == 0:
            del self._users[name], self._descriptors[name]
            self._tell(m.CloseSegment(name))

    def users(self, name: str) -> int:
        """Returns how many users hold the segment open."""
        return self._users.get(name, 0)

    def __len__(self) -> int:
        return len(self._users)

    def _tell(self, message: m.ToRank) -> None:
        for rank in self._ranks:
            rank.send(message)
