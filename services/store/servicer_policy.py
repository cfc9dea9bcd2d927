"""StoreMaster over gRPC: removal, replicas, drains, quotas. Decides nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from kvmesh.kvcache.keys import KEY_BYTES
from kvmesh.rpc.errors import InvalidRequest
from kvmesh.rpc.pb import store_pb2 as pb
from services.store import mapping
from services.store.domain import Tick
from services.store.servicer_base import Base

MAX_REMOVED_KEYS = 65_536


class PolicyServicer(Base):
    """Remove."""

    async def Remove(self, request: pb.RemoveRequest, context: Any) -> pb.RemoveResponse:  # noqa: N802
        """Raises InvalidRequest, NotLeader, Unavailable (not all of it may be kept)."""
        keys = tuple(dict.fromkeys(mapping.packed_keys("keys", request.keys, MAX_REMOVED_KEYS)))
        if bool(keys) == bool(request.prefix):
            raise InvalidRequest.of("prefix", request.prefix, "either keys or a prefix must be given, and not both")
        if len(request.prefix) > KEY_BYTES:
            raise InvalidRequest.of("prefix", request.prefix, f"has more than {KEY_BYTES} bytes")
        async with self._books:  # tombstones reach the orders in the order of their numbers
            self._step(Tick())
            state = self._state
            tombstone, writes = state.policy.remove(keys, request.prefix, self._clock())
            await self._keep(writes)
            asked = self._orders.start(self._orders.remove(state, tombstone))
        outcome = await asyncio.shield(asked)
        return pb.RemoveResponse(
            acknowledged=outcome.acknowledged, pending=outcome.pending, removed=outcome.blocks, seq=tombstone.seq
        )
