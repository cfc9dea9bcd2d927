"""StoreMaster over gRPC: removal, replicas, drains, quotas. Decides nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from kvmesh.errors import InvalidRequest, KvmeshError, NotLeader, UnknownInstance
from kvmesh.kvcache.keys import KEY_BYTES, TAG_BYTES
from kvmesh.rpc.pb import store_pb2 as pb
from services.store import mapping
from services.store.checks import MAX_TEXT
from services.store.domain import Tick
from services.store.policy.quotas import Quota
from services.store.servicer_base import Base, text

MAX_REMOVED_KEYS = 65_536
MAX_CHANGED_KEYS = 4096
MAX_REPLICAS = 64
MAX_QUOTA_NAME_BYTES = 256


class PolicyServicer(Base):
    """Remove, ChangeReplica, Drain, SetQuota and ListQuotas."""

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
        await asyncio.wait({asked})
        if asked.cancelled():
            raise NotLeader("this store master leads no more; nodes will hear of the removal from the one that does")
        outcome = asked.result()
        return pb.RemoveResponse(
            acknowledged=outcome.acknowledged, pending=outcome.pending, removed=outcome.blocks, seq=tombstone.seq
        )

    async def ChangeReplica(  # noqa: N802
        self, request: pb.ChangeReplicaRequest, context: Any
    ) -> pb.ChangeReplicaResponse:
        """Raises InvalidRequest, Overloaded (too many blocks have a target), NotLeader, Unavailable."""
        keys = mapping.packed_keys("keys", request.keys, MAX_CHANGED_KEYS)
        if request.replicas > MAX_REPLICAS:
            raise InvalidRequest.of("replicas", request.replicas, f"must be at most {MAX_REPLICAS}")
        if request.hard and not request.replicas:
            raise InvalidRequest.of("hard", request.hard, "needs replicas: how many nodes are to pin the blocks")
        async with self._books:
            self._step(Tick())
            counts, writes = self._state.policy.change_replicas(keys, request.replicas, request.hard, self._clock())
            try:
                await self._keep(writes)
            except KvmeshError:
                self._state.policy.not_kept(writes)
                raise
        return pb.ChangeReplicaResponse(replicas=counts)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:  # noqa: N802
        """Begins, or tells how far it is. Raises UnknownInstance, Overloaded, NotLeader, Unavailable."""
        name = request.instance_id
        async with self._books:
            self._step(Tick())
            policy = self._state.policy
            if name not in policy.drains and self._state.known(name) is None:
                raise UnknownInstance(f"instance_id={name[:MAX_TEXT]!r}: is no member", field="instance_id")
            await self._keep(policy.drain(name, request.cancel, self._life_of(request)))
            policy.drains.kept(name)
        drain = policy.drains.get(name)
        if drain is None:
            return pb.DrainResponse()
        return pb.DrainResponse(
            done=drain.done, sole_blocks=policy.drains.sole_blocks(name), moved=drain.moved, why_not=drain.why_not
        )

    def _life_of(self, request: pb.DrainRequest) -> int:
        """The incarnation that asks for itself. Raises UnknownInstance: it is not the one that lives."""
        name, life = request.instance_id, request.incarnation
        if life and not request.cancel and not self._state.lives(name, life):
            raise UnknownInstance(f"incarnation={life:x}: no life of {name[:MAX_TEXT]!r}", field="incarnation")
        return request.incarnation

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Any) -> pb.SetQuotaResponse:  # noqa: N802
        """Raises InvalidRequest, Overloaded (too many), NotLeader, Unavailable."""
        quota = request.quota
        if len(quota.tag) != TAG_BYTES:
            raise InvalidRequest.of("quota.tag", quota.tag, f"must have {TAG_BYTES} bytes")
        name = text("quota.name", quota.name, MAX_QUOTA_NAME_BYTES)
        async with self._books:
            self._step(Tick())
            await self._keep(self._state.policy.set_quota(Quota(quota.tag, quota.blocks, name)))
        return pb.SetQuotaResponse()

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Any) -> pb.ListQuotasResponse:  # noqa: N802
        """All that are set. Raises NotLeader."""
        self._step(Tick())
        return pb.ListQuotasResponse(
            quotas=[
                pb.QuotaUse(quota=pb.Quota(tag=quota.tag, blocks=quota.blocks, name=quota.name), used_blocks=used)
                for quota, used in self._state.policy.quotas.all()
            ]
        )
