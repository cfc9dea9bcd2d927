"""The store master as a client sees it: who holds what, numbers, names, orders. The master that leads is asked."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvmesh.clock import lease_clock
from kvmesh.errors import InvalidRequest, NotLeader, TransferError
from kvmesh.kvcache.keys import KEY_BYTES, split, tenant_tag
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc.leader_client import LeaderClient, LeaderTracker
from kvmesh.rpc.pb import common_pb2
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.storeclient.arguments import instance, whole
from kvmesh.storeclient.calls import turn
from kvmesh.storeclient.placement import PoolCandidate
from kvmesh.storeclient.replicas import Holder, Replica
from kvmesh.telemetry.spans import ambient

T = TypeVar("T")

SERVICE = pb.DESCRIPTOR.services_by_name["StoreMaster"]
FAST = ("Find", "Resolve")  # the calls that every read of a block begins with go by the fast path
MAX_KEYS = 4096  # keys in one Find, Bind or Resolve
FLEET_S = 1.0  # how long figures of pool nodes are used: nodes report about as often
YOUNG_S = 0.05  # between two calls to a master that does not know all nodes yet
NOTHING = bytes(KEY_BYTES)
REMOVED_S = 300.0  # a removal that was over for longer is told no node: each is dead or has heard of it
MAX_QUOTA = (1 << 63) - 1
QUOTA_NAME_BYTES = 256  # the longest name that a master takes; the name is for people


@dataclass(frozen=True, slots=True)
class Removed:
    """Tells what a removal did. `acknowledged` are the stores that have removed the blocks; `pending` are those that
    could not be asked, and will be told before they announce again; `blocks` is how many copies they counted: a
    store that heard of the removal with its heartbeat, before it was asked, counts none."""

    acknowledged: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class Quota:
    """Tells how many `blocks` a namespace may have in memory over all nodes, copies counted, and `used_blocks`, how
    many it has now. `namespace` is the name that whoever set it gave; the `tag` is what counts."""

    namespace: str
    tag: bytes
    blocks: int
    used_blocks: int


@dataclass(slots=True)
class _Fleet:
    """Has the pool nodes. `complete` says that the master knew every node that may live."""

    nodes: list[PoolCandidate] = field(default_factory=list)
    asked: float = 0.0
    complete: bool = True


class Directory:
    """Asks the store master for a client. It belongs to the event loop; its owner must `close` it. Every method raises
    KvmeshError, at the latest after `timeout_s`."""

    def __init__(self, store: str) -> None:
        """Raises ConfigError when the list of addresses is empty."""
        self._master = LeaderClient(SERVICE, LeaderTracker(store), FAST)
        self._fleet = _Fleet()
        self._asking = asyncio.Lock()
        self._removed = (0, 0.0)  # the last removal of this client that is over, and since when

    @property
    def removed(self) -> tuple[int, int]:
        """The number of the last removal that this client has seen end, and how many milliseconds ago; 0, 0 if none has
        in the last REMOVED_S."""
        seq, over = self._removed
        ago_s = lease_clock() - over
        return (seq, int(ago_s * 1000)) if seq and ago_s < REMOVED_S else (0, 0)

    @property
    def term(self) -> int:
        """The highest term that any answer had."""
        return self._master.leaders.terms.highest

    async def call(self, method: str, request: Message, timeout_s: float) -> Any:
        """Returns the answer of the master that leads."""
        return await self._master.call(method, request, timeout_s)

    async def find(self, keys: Sequence[bytes], timeout_s: float) -> tuple[list[list[Replica]], bool]:
        """Returns the replicas of each key, in no particular order, and whether the master knows all nodes: if not, a
        key without replicas may be held all the same."""
        found: list[list[Replica]] = []
        complete = True
        deadline = time.monotonic() + timeout_s
        for some in _portions(keys):
            request = pb.FindRequest(keys=b"".join(some), grouped=True, traceparent=ambient())
            answer = await self.call("Find", request, _left(deadline))
            found += _replicas(answer, len(some))
            complete &= not answer.rebuilding
        return found, complete

    async def pools(
        self, timeout_s: float, enough: Callable[[list[PoolCandidate]], bool] | None = None
    ) -> list[PoolCandidate]:
        """Returns the nodes that take puts, as they were at most FLEET_S ago. While they are not `enough` and the
        master does not know all nodes that may live, the master is asked again, within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        age_s = FLEET_S
        while True:
            async with turn(self._asking, deadline):
                if time.monotonic() - self._fleet.asked > age_s:
                    told = await self.status(_left(deadline))
                    nodes = [_candidate(one) for one in told.stores if one.member.role == common_pb2.ROLE_POOL]
                    self._fleet = _Fleet(nodes, time.monotonic(), _complete(told))
            fleet = self._fleet
            late = time.monotonic() + YOUNG_S >= deadline
            if enough is None or enough(fleet.nodes) or fleet.complete or late:
                return fleet.nodes
            age_s = YOUNG_S
            await asyncio.sleep(YOUNG_S)

    def forget_pools(self) -> None:
        """Forgets the list of nodes, one of which has failed: the master is asked again next time."""
        self._fleet.asked = 0.0

    async def status(self, timeout_s: float) -> pb.GetStoreStatusResponse:
        """Returns the status of the master that leads. (The others answer as well, but know no nodes.)"""
        answer: pb.GetStoreStatusResponse = await self._master.call(
            "GetStatus", pb.GetStoreStatusRequest(), timeout_s, _check_leading
        )
        return answer

    async def members(self, name: str, timeout_s: float) -> dict[str, pb.Member]:
        """Returns the members by store id. The master is asked again, as in `pools`, while `name` is not among them."""
        deadline = time.monotonic() + timeout_s
        while True:
            told = await self.status(_left(deadline))
            found = {one.member.store_id or one.member.instance.instance_id: one.member for one in told.stores}
            if name in found or _complete(told) or time.monotonic() + YOUNG_S >= deadline:
                return found
            await asyncio.sleep(YOUNG_S)

    async def grant(self, count: int, timeout_s: float) -> tuple[int, int]:
        """Returns term and first number of a range of `count` numbers that nobody else gets."""
        request = pb.GrantRequest(count=count)
        answer = await self.call("Grant", request, timeout_s)
        return answer.term, answer.first

    async def bind(
        self,
        namespace: str,
        names: Mapping[str, bytes],
        timeout_s: float,
        *,
        replace: bool = False,
        holders: Mapping[bytes, str] | None = None,
    ) -> dict[str, bytes]:
        """Binds names. Returns what each stands for now: the given key, or the one that was bound first. With `replace`
        it is always the given key, and at every moment the name stands for that or the one before. `holders` are nodes
        that have just sealed a key."""
        bound: dict[str, bytes] = {}
        deadline = time.monotonic() + timeout_s
        for some in _portions(list(names.items())):
            named = [pb.NamedKey(name=n, key=k, holder=holders.get(k, "") if holders else "") for n, k in some]
            request = pb.BindRequest(namespace=namespace, names=named, replace=replace, traceparent=ambient())
            answer = await self.call("Bind", request, _left(deadline))
            bound |= zip((name for name, _ in some), split(answer.keys), strict=True)
        return bound

    async def resolve(self, namespace: str, names: Sequence[str], timeout_s: float) -> list[bytes | None]:
        """Returns the key of each name; None for an unknown name."""
        found: list[bytes | None] = []
        deadline = time.monotonic() + timeout_s
        for some in _portions(names):
            found += await self._resolve(pb.ResolveRequest(namespace=namespace, names=some), deadline)
        return found

    async def unbind(
        self, namespace: str, names: Mapping[str, bytes | None] | Sequence[str], timeout_s: float
    ) -> list[bytes | None]:
        """Returns what `resolve` does, and forgets the names: of a mapping only those that stand for the given key then
        (None: whose block has been removed), so that a name that somebody else has bound meanwhile stays."""
        found: list[bytes | None] = []
        deadline = time.monotonic() + timeout_s
        for some in _portions(list(names)):
            request = pb.ResolveRequest(namespace=namespace, names=some, unbind=True)
            if isinstance(names, Mapping):
                request.keys = b"".join(names[name] or NOTHING for name in some)
            found += await self._resolve(request, deadline)
        return found

    async def _resolve(self, request: pb.ResolveRequest, deadline: float) -> list[bytes | None]:
        request.traceparent = ambient()
        answer = await self.call("Resolve", request, _left(deadline))
        keys = split(answer.keys)
        if len(keys) != len(request.names):
            raise TransferError(f"a Resolve that speaks of {len(keys)} names, not of {len(request.names)}")
        return [None if key == NOTHING else key for key in keys]

    async def remove(self, timeout_s: float, *, keys: Sequence[bytes] = (), prefix: bytes = b"") -> Removed:
        """Removes these keys everywhere, or all that begin with `prefix`."""
        acknowledged: set[str] = set()
        pending: set[str] = set()
        blocks = 0
        deadline = time.monotonic() + timeout_s
        for some in _portions(keys) if keys else ((),):
            request = pb.RemoveRequest(keys=b"".join(some), prefix=prefix)
            answer = await self.call("Remove", request, _left(deadline))
            self._removed = max(self._removed, (answer.seq, lease_clock()))
            acknowledged |= set(answer.acknowledged)
            pending |= set(answer.pending)
            blocks += answer.removed
        return Removed(tuple(sorted(acknowledged - pending)), tuple(sorted(pending)), blocks)

    async def change_replica(self, keys: Sequence[bytes], replicas: int, hard: bool, timeout_s: float) -> list[int]:
        """Sets how many replicas each key is to have. Returns the live replicas of each key now; more or fewer will
        follow."""
        live: list[int] = []
        deadline = time.monotonic() + timeout_s
        for some in _portions(keys):
            request = pb.ChangeReplicaRequest(keys=b"".join(some), replicas=replicas, hard=hard)
            answer = await self.call("ChangeReplica", request, _left(deadline))
            live += answer.replicas
        return live

    async def quotas(self, timeout_s: float) -> list[Quota]:
        """Returns all quotas that are set."""
        answer = await self.call("ListQuotas", pb.ListQuotasRequest(), timeout_s)
        return [Quota(one.quota.name, one.quota.tag, one.quota.blocks, one.used_blocks) for one in answer.quotas]

    async def set_quota(self, namespace: str, blocks: int, timeout_s: float) -> None:
        """Sets a namespace's quota; 0 blocks end it. Raises InvalidRequest for an invalid number or name, Overloaded
        when there are too many quotas."""
        blocks = whole("blocks", blocks, 0, MAX_QUOTA)
        instance("namespace", namespace, str)
        try:
            name = namespace.encode()[:QUOTA_NAME_BYTES].decode(errors="ignore")
        except UnicodeEncodeError:
            raise InvalidRequest.of("namespace", namespace, "is not UTF-8") from None
        quota = pb.Quota(tag=tenant_tag(namespace), blocks=blocks, name=name)
        await self.call("SetQuota", pb.SetQuotaRequest(quota=quota), timeout_s)

    async def list_keys(self, prefix: bytes, after: bytes, limit: int, timeout_s: float) -> tuple[list[bytes], bytes]:
        """Returns some keys that begin with `prefix`, and the key to go on after; empty if those were all."""
        request = pb.ListKeysRequest(prefix=prefix, after=after, limit=limit)
        answer = await self.call("ListKeys", request, timeout_s)
        return split(answer.keys), answer.next

    async def close(self) -> None:
        await self._master.close()


def _portions(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[at : at + MAX_KEYS] for at in range(0, len(items), MAX_KEYS))


def _check_leading(told: pb.GetStoreStatusResponse) -> None:
    if not told.leading:
        raise NotLeader("no store master leads", leader=told.leader)


def _complete(told: pb.GetStoreStatusResponse) -> bool:
    return not (told.young or told.rebuilding)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _replicas(answer: pb.FindResponse, keys: int) -> list[list[Replica]]:
    """Returns the replicas of each key; keys of one group share a list. Raises TransferError when the answer does not
    have `keys` keys."""
    holders = [_holder(one) for one in answer.holders]
    try:
        groups = [
            [
                Replica(holders[i], Tier(tier))
                for i, tier in zip(one.holder, one.tier or bytes([Tier.DRAM]) * len(one.holder), strict=True)
            ]
            for one in answer.groups
        ]
        return [groups[at] for at in struct.unpack(f"<{keys}H", answer.group)]
    except (struct.error, IndexError, ValueError) as error:
        raise TransferError(f"a Find of {keys} keys whose answer makes no sense: {error}") from None


def _holder(one: pb.HolderInfo) -> Holder:
    member = one.member
    ref = member.instance
    return Holder(
        member.store_id or ref.instance_id,
        ref.address,
        ref.incarnation,
        member.node_id,
        one.sending_bytes_per_s,
        one.leases,
    )


def _candidate(one: pb.StoreStatus) -> PoolCandidate:
    member = one.member
    return PoolCandidate(
        member.store_id or member.instance.instance_id,
        member.instance.address,
        member.node_id,
        member.instance.incarnation,
        one.usage.free_bytes,
        one.usage.capacity_bytes,
        one.draining,
    )
