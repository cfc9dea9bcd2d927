"""What of a node hears the answers of the store master."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvmesh.rpc.pb import store_pb2 as pb_store


class StoreOrders(Protocol):
    """What of a node hears the store master's answers."""

    @property
    def removed_seq(self) -> int:
        """The last tombstone applied."""

    async def bury(self, tombstones: Sequence[pb_store.Tombstone]) -> None:
        """Apply them in every tier, before anything is announced. Unavailable: that could not be written down."""

    def beat_answered(self, answer: pb_store.BeatResponse) -> None:
        """New tombstones, whether to drain, what is allowed. Must not block."""
