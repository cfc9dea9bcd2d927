"""StoreMaster over gRPC: where blocks are. Decides nothing."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any

from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.keys import KEY_BYTES
from kvmesh.kvcache.tiers import Tier, split_name
from kvmesh.rpc.pb import store_pb2 as pb
from services.store import mapping
from services.store.domain import Tick
from services.store.servicer_base import Base
from services.store.state import MasterState

MAX_FIND_KEYS = 4096
MAX_FOUND_HOLDERS = 1024
MAX_LISTED = 65_536
DEFAULT_LISTED = 4096


class FindServicer(Base):
    """Find and ListKeys."""

    async def Find(self, request: pb.FindRequest, context: Any) -> pb.FindResponse:  # noqa: N802
        """Raises InvalidRequest, NotLeader."""
        keys = mapping.packed_keys("keys", request.keys, MAX_FIND_KEYS)
        self._step(Tick())
        self._state.policy.asked(keys, self._clock())
        answer = found(self._state, keys, request.grouped, self._clock())
        answer.term = self.term
        return answer

    async def ListKeys(self, request: pb.ListKeysRequest, context: Any) -> pb.ListKeysResponse:  # noqa: N802
        """At most MAX_LISTED keys, ascending. Raises InvalidRequest, NotLeader."""
        if len(request.prefix) > KEY_BYTES:
            raise InvalidRequest.of("prefix", request.prefix, f"has more than {KEY_BYTES} bytes")
        if len(request.after) not in (0, KEY_BYTES):
            raise InvalidRequest.of("after", request.after, f"must be empty or a key of {KEY_BYTES} bytes")
        if request.limit > MAX_LISTED:
            raise InvalidRequest.of("limit", request.limit, f"must be at most {MAX_LISTED}")
        self._step(Tick())
        limit = request.limit or DEFAULT_LISTED
        lowest: list[bytes] = []
        for store_id in self._state.blocks.map.stores():
            part = self._state.blocks.map.page(store_id, request.prefix, request.after, limit)
            lowest = sorted({*lowest, *part})[:limit]
            await asyncio.sleep(0)  # a store may be big
        return pb.ListKeysResponse(keys=b"".join(lowest), next=lowest[-1] if len(lowest) == limit else b"")


def found(state: MasterState, keys: Sequence[bytes], grouped: bool = False, now: float = 0.0) -> pb.FindResponse:
    """Where each of `keys` is. Keys of the same holders, as those of one chain, cost one look at these. A key that
    nobody has announced is where a client has put it a moment ago."""
    known, answer = state.blocks.map, pb.FindResponse()
    index: dict[str, int | None] = {}
    masks: list[int | str] = list(known.masks(keys))
    fresh = _fresh(state, keys, masks, now) if len(state.policy.unannounced) else {}
    number: dict[int | str, int] = {}
    groups: list[pb.Replicas] = []
    for mask, key in dict(zip(masks, keys, strict=True)).items():
        holders, tiers = _holders(state, fresh.get(mask) or known.holders(key), index, answer)
        number[mask] = len(groups)
        groups.append(pb.Replicas(holder=holders, tier=tiers))
    if grouped:
        answer.groups.extend(groups)
        answer.group = struct.pack(f"<{len(masks)}H", *[number[mask] for mask in masks])
    else:
        answer.replicas.extend([groups[number[mask]] for mask in masks])  # a quarter of what as many `add` cost
    return answer


def _fresh(state: MasterState, keys: Sequence[bytes], masks: list[int | str], now: float) -> dict[int | str, list[str]]:
    """Who has those of `keys` that nobody has announced, by the group in which they are put in `masks`."""
    found: dict[int | str, list[str]] = {}
    for at, mask in enumerate(masks):
        holder = state.policy.unannounced.holder(keys[at], now) if not mask else None
        if holder is not None and state.lives(*holder):
            masks[at] = holder[0]
            found[holder[0]] = [holder[0]]
    return found


def _holders(
    state: MasterState, names: Sequence[str], index: dict[str, int | None], answer: pb.FindResponse
) -> tuple[list[int], bytes]:
    """Indices and tiers; who is new is added to `answer`, as long as there is room."""
    holders: list[int] = []
    tiers: list[Tier] = []
    for name in names:
        store_id, tier = split_name(name)
        if store_id not in index:
            index[store_id] = _holder(state, store_id, answer)
        at = index[store_id]
        if at is not None:
            holders.append(at)
            tiers.append(tier)
    return holders, bytes(tiers)


def _holder(state: MasterState, store_id: str, answer: pb.FindResponse) -> int | None:
    known = state.known(store_id)
    if known is None or len(answer.holders) >= MAX_FOUND_HOLDERS:
        return None
    member, usage = known
    told = answer.holders.add(member=mapping.member_out(member))
    if usage is not None:
        told.sending_bytes_per_s, told.leases = usage.sending_bytes_per_s, usage.leases
    return len(answer.holders) - 1
