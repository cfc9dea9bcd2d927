"""The gRPC service StoreMaster converts protos for the brain and back. It decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvmesh.clock import CaughtUp, Tick
from kvmesh.errors import InvalidRequest, KvmeshError, NotLeader, UnknownInstance
from kvmesh.kvcache.keys import KEY_BYTES, TAG_BYTES, split
from kvmesh.kvcache.tiers import Tier, split_name
from kvmesh.rpc import protocol
from kvmesh.rpc.call_queue import caught_up
from kvmesh.rpc.fastpath.server import FastContext
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.rpc.pb import store_pb2_grpc as pb_grpc
from kvmesh.services.store import mapping
from kvmesh.services.store.domain import (
    MAX_TEXT,
    Announce,
    Beat,
    Event,
    Heard,
    NodeJoined,
    NodeLeft,
    Publish,
    RefuseCall,
    Relay,
)
from kvmesh.services.store.durable import Durable
from kvmesh.services.store.orders import StoreOrderQueue
from kvmesh.services.store.policy.quotas import TagQuota
from kvmesh.services.store.policy.records import Write
from kvmesh.services.store.policy.store_policy import MAX_GRANT
from kvmesh.services.store.rank_hosts import INTERVAL_S, RankHosts
from kvmesh.services.store.state import MasterState
from kvmesh.services.store.watchers import Watchers
from kvmesh.telemetry import names
from kvmesh.telemetry.served import served

log = logging.getLogger(__name__)
MAX_LOOKUP_KEYS = 4096
MAX_HOLDERS = 64
COMPLAIN_S = 60.0  # between two lines in the log on what is left out of the map
SWEEP_KEYS = 8192  # keys of a store that is gone, swept in one turn of the loop: some milliseconds
SWEEP_TARGETS = 2048
MAX_FIND_KEYS = 4096
MAX_FOUND_HOLDERS = 1024
MAX_LISTED = 65_536
DEFAULT_LISTED = 4096
MAX_NAMES = 4096
MAX_NAME_BYTES = 1024
MAX_NAMESPACE_BYTES = 256
UNKNOWN = bytes(KEY_BYTES)
MAX_REMOVED_KEYS = 65_536
MAX_CHANGED_KEYS = 4096
MAX_REPLICAS = 64
MAX_QUOTA_NAME_BYTES = 256


class StoreMasterServicer(pb_grpc.StoreMasterServicer):
    """Serves the calls of one session, whose number is `incarnation`. `clock` gives monotonic seconds; `leads` says
    whether the session goes on at this moment."""

    _owing = False  # whether what the policy owes is being written

    def __init__(
        self,
        state: MasterState,
        watchers: Watchers,
        *,
        incarnation: int,
        clock: Callable[[], float],
        leads: Callable[[], bool],
        durable: Durable,
        orders: StoreOrderQueue,
    ) -> None:
        self._state = state
        self._watchers = watchers
        self._incarnation = incarnation
        self._clock = clock
        self._leads = leads
        self._durable = durable
        self._orders = orders
        self._rank_hosts = RankHosts()
        self._books = asyncio.Lock()
        self._complain_at = clock()
        self._sweeping: asyncio.Task[None] | None = None
        self._catching_up: asyncio.Task[None] | None = None
        self._grpc_calls = 0  # Join, Beat and Announce so far
        self._ending_late = False

    async def close(self) -> None:
        """Ends every stream, order and task: the server is about to stop."""
        self._watchers.close()
        await self._orders.close()
        for task in (self._sweeping, self._catching_up):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def tick(self) -> None:
        """Lets time pass: leases run out, nodes get orders, what is gone is cleared away."""
        self._step(Tick())
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.create_task(self._catch_up(), name="catch up")
        orders, writes = self._state.policy.tick(self._clock())
        for order in orders:
            self._orders.start(self._orders.carry_out(self._state, order, self._clock))
        if writes or (self._state.policy.owes and not self._owing):
            self._orders.start(self._keep_meanwhile(writes))
        idle = self._sweeping is None or self._sweeping.done()
        if idle and self._swept():
            self._sweeping = asyncio.create_task(self._sweep(), name="sweep")

    async def _catch_up(self) -> None:
        until = await caught_up(lambda: self._grpc_calls, self._clock)
        with contextlib.suppress(NotLeader):
            self._step(CaughtUp(until))

    async def _sweep(self) -> None:
        more = True
        while more:
            await asyncio.sleep(0)
            more = self._swept()

    def _swept(self) -> bool:
        """Clears away a slice of what is gone. Returns whether there is more."""
        more = self._state.blocks.sweep(SWEEP_KEYS)
        return self._state.policy.replicas.sweep(SWEEP_TARGETS) or more

    def _step(self, event: Event) -> Heard | None:
        """Hands an event to the brain and carries out its actions. Raises the brain's refusal."""
        if not self._leads():
            raise NotLeader("this store master leads no more")
        refused, heard = None, None
        for action in self._state.step(event, self._clock()):
            match action:
                case Publish():
                    names.STORE_CHANGES.labels(change=action.change.value).inc()
                    self._watchers.publish(action)
                case Relay():
                    self._watchers.publish(action)
                case Heard():
                    heard = action
                case RefuseCall(error):
                    refused = error
        if self._state.overdue and not self._ending_late:
            self._ending_late = True
            self._orders.start(self._end_late())
        if refused is not None:
            raise refused
        return heard

    async def _end_late(self) -> None:
        """Ends the rest of many members that died at once, in turns of the loop between which other calls are
        answered."""
        try:
            while self._state.overdue and self._leads():
                await asyncio.sleep(0)
                self._step(Tick())
        except NotLeader:
            pass
        finally:
            self._ending_late = False

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:  # noqa: N802
        """Adds a member. Raises ProtocolMismatch, InvalidRequest or Overloaded."""
        self._grpc_calls += 1
        member = request.member
        who = member.instance.instance_id or "a nameless instance"
        protocol.check(request.protocol_version, f"{who} at {member.instance.address}")
        lasting = request.lasting_seq if request.HasField("lasting_seq") else None
        self._step(NodeJoined(mapping.member_in(member), request.removed_seq, lasting))
        pulse = self._state.pulse
        return pb.JoinResponse(
            heartbeat_interval_ms=pulse.interval_ms,
            lease_ms=pulse.lease_ms,
            pace=pulse.number,
            master_incarnation=self._incarnation,
            term=self.term,
            tombstones=self._tombstones(member.instance.instance_id),
        )

    async def Beat(self, request: pb.BeatRequest, context: Any) -> pb.BeatResponse:  # noqa: N802
        """Takes a heartbeat. Raises UnknownInstance."""
        ref = request.instance
        usage = mapping.usage_in(request.usage) if request.HasField("usage") else None
        by_door = isinstance(context, FastContext)
        if by_door:
            names.STORE_HEARTBEAT_WAIT.observe(time.monotonic() - context.arrived)
        else:
            self._grpc_calls += 1
        self._step(Beat(ref.instance_id, ref.incarnation, usage, request.removed_seq, request.pace, by_door))
        names.STORE_BEATS.inc()
        pulse = self._state.pulse
        pools = [
            pb.PoolNode(instance=mapping.ref_out(member), free_bytes=free_bytes)
            for member, free_bytes in self._state.pools(ref.instance_id)
        ]
        return pb.BeatResponse(
            heartbeat_interval_ms=pulse.interval_ms,
            lease_ms=pulse.lease_ms,
            pace=pulse.number,
            master_incarnation=self._incarnation,
            pools=pools,
            term=self.term,
            tombstones=self._tombstones(ref.instance_id),
            draining=ref.instance_id in self._state.policy.drains,
            quotas=[
                pb.Quota(tag=tag, blocks=blocks)
                for tag, blocks in self._state.policy.allowances(ref.instance_id, self._clock()).items()
            ],
        )

    def _tombstones(self, instance_id: str) -> list[pb.Tombstone]:
        """Returns the tombstones that the member has yet to apply, in order."""
        newer = self._state.policy.tombstones.newer(instance_id)
        return [pb.Tombstone(seq=each.seq, keys=b"".join(each.keys), prefix=each.prefix) for each in newer]

    async def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveResponse:  # noqa: N802
        """Ends a membership. It also succeeds for a node that is no member."""
        self._step(NodeLeft(request.instance.instance_id, request.instance.incarnation))
        return pb.LeaveResponse()

    async def ListMembers(self, request: pb.ListMembersRequest, context: Any) -> pb.ListMembersResponse:  # noqa: N802
        self._step(Tick())
        members = map(mapping.member_out, self._state.members)
        return pb.ListMembersResponse(master_incarnation=self._incarnation, members=members)

    async def Announce(self, request: pb.AnnounceRequest, context: Any) -> pb.AnnounceResponse:  # noqa: N802
        """Takes an announcement. Raises UnknownInstance or InvalidRequest."""
        self._grpc_calls += not isinstance(context, FastContext)
        said = mapping.announcement_in(request.announcement)
        heard = self._step(Announce(said))
        assert heard is not None, "an announcement is refused or heard"
        names.STORE_ANNOUNCEMENTS.labels(verdict=heard.verdict.value).inc()
        names.STORE_KEYS.labels(change="sealed").inc(len(said.sealed))
        names.STORE_KEYS.labels(change="removed").inc(len(said.removed))
        names.STORE_KEYS.labels(change="over_limit").inc(heard.cut)
        if heard.shed:
            self._tell_shed(heard.shed)
        if heard.want_snapshot:
            names.STORE_SNAPSHOTS.inc()
        announcing = self._state.announcement_pacing
        return pb.AnnounceResponse(
            master_incarnation=self._incarnation,
            want_snapshot=heard.want_snapshot,
            seq=heard.seq,
            idle_ms=announcing.idle_ms,
            gap_ms=announcing.gap_ms,
        )

    def _tell_shed(self, replicas: int) -> None:
        names.STORE_KEYS.labels(change="shed").inc(replicas)
        now = self._clock()
        if now >= self._complain_at:
            self._complain_at = now + COMPLAIN_S
            memory = self._state.policy.memory
            log.warning("max_map_mb=%d: %d replicas are left out", memory.limit_bytes >> 20, memory.missing)

    # It is a coroutine that writes, where the stubs expect a generator, because only so can a write have a deadline.
    async def Watch(self, request: pb.WatchRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Sends a snapshot, then changes. Raises Unavailable once this watcher has fallen behind, Overloaded when there
        are too many watchers."""
        self._step(Tick())
        await self._watchers.follow(self._state.read(), context)

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:  # noqa: N802
        """Returns at most MAX_HOLDERS of each key. Raises InvalidRequest."""
        keys = mapping.packed_keys("keys", request.keys, MAX_LOOKUP_KEYS)
        self._step(Tick())
        if not request.uncounted:
            self._state.policy.asked(keys, self._clock())
        blocks = self._state.blocks
        return pb.LookupResponse(
            holders=[
                pb.Holders(store_ids=(ids := blocks.store_ids(key)[:MAX_HOLDERS]), groups=blocks.groups(key, ids))
                for key in keys
            ]
        )

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStoreStatusRequest, context: Any
    ) -> pb.GetStoreStatusResponse:
        self._step(Tick())
        known, policy = self._state.blocks.map, self._state.policy
        pulse, announcing = self._state.pulse, self._state.announcement_pacing
        return pb.GetStoreStatusResponse(
            master_incarnation=self._incarnation,
            blocks=len(known),
            replicas=known.replicas,
            map_bytes=known.memory_bytes(),
            shed=policy.memory.missing,
            map_limit_bytes=policy.memory.limit_bytes,
            names=len(policy.names),
            tombstones=len(policy.tombstones),
            heartbeat_interval_ms=pulse.interval_ms,
            lease_ms=pulse.lease_ms,
            idle_ms=announcing.idle_ms,
            gap_ms=announcing.gap_ms,
            stores=self._state.statuses(),
        )

    async def LendRanks(self, request: pb.LendRanksRequest, context: Any) -> pb.LendRanksResponse:  # noqa: N802
        """Takes what a rank host says of itself. Raises ProtocolMismatch, InvalidRequest or Overloaded."""
        host = mapping.rank_host_in(request.host)
        protocol.check(request.protocol_version, f"the rank host at {host.address}")
        if request.leaves:
            self._rank_hosts.leave(host.name, host.incarnation)
        else:
            self._rank_hosts.lend(host, self._clock())
        return pb.LendRanksResponse(interval_ms=int(INTERVAL_S * 1000))

    async def PlaceRanks(self, request: pb.PlaceRanksRequest, context: Any) -> pb.PlaceRanksResponse:  # noqa: N802
        """Chooses rank hosts for an instance. Raises InvalidRequest."""
        addresses, why_not = self._rank_hosts.place(mapping.rank_places_in(request), self._clock())
        return pb.PlaceRanksResponse(addresses=addresses, why_not=why_not)

    async def ListRankHosts(  # noqa: N802
        self, request: pb.ListRankHostsRequest, context: Any
    ) -> pb.ListRankHostsResponse:
        hosts = self._rank_hosts.living(self._clock())
        return pb.ListRankHostsResponse(hosts=map(mapping.rank_host_out, hosts))

    # ── what is kept for the next leader ────────────────────────────────────────────────────────────

    @property
    def term(self) -> int:
        """The term under which this master leads, or led last."""
        return self._state.policy.term

    async def _keep(self, writes: Sequence[Write]) -> None:
        """Writes records, so that the next leader knows them before anybody is answered. Raises StaleTerm or
        Unavailable."""
        for write in writes:
            if write.puts:
                await self._durable.put(write.kind, write.puts, self.term)
            if write.drops:
                await self._durable.delete(write.kind, write.drops, self.term)

    async def _keep_meanwhile(self, writes: Sequence[Write]) -> None:
        """Writes records that nobody waits for, and what the policy owes. What is kept too long does no harm, or is
        tried again."""
        self._owing, every = True, list(writes)
        try:
            async with self._books:
                every += self._state.policy.owed()
                await self._keep(every)
        except KvmeshError as error:
            log.warning("what was forgotten is still kept: %s", error)
            self._state.policy.not_kept(every)
        finally:
            self._owing = False

    # ── Find and ListKeys ───────────────────────────────────────────────────────────────────────────

    @served(names.SPAN_LOCATE, lambda request: len(request.keys) // KEY_BYTES)
    async def Find(self, request: pb.FindRequest, context: Any) -> pb.FindResponse:  # noqa: N802
        """Returns where each block is. Raises InvalidRequest or NotLeader."""
        keys = mapping.packed_keys("keys", request.keys, MAX_FIND_KEYS)
        self._step(Tick())
        self._state.policy.asked(keys, self._clock())
        answer = found(self._state, keys, request.grouped, self._clock())
        answer.term = self.term
        return answer

    async def ListKeys(self, request: pb.ListKeysRequest, context: Any) -> pb.ListKeysResponse:  # noqa: N802
        """Returns at most MAX_LISTED keys, ascending. Raises InvalidRequest or NotLeader."""
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

    # ── keys that are granted, names that are bound ─────────────────────────────────────────────────

    async def Grant(self, request: pb.GrantRequest, context: Any) -> pb.GrantResponse:  # noqa: N802
        """Returns numbers that nobody else gets. Raises InvalidRequest or NotLeader."""
        if not 0 < request.count <= MAX_GRANT:
            raise InvalidRequest.of("count", request.count, f"must be in 1..{MAX_GRANT}")
        self._step(Tick())
        return pb.GrantResponse(term=self.term, first=self._state.policy.grants.take(request.count))

    @served(names.SPAN_BIND, lambda request: len(request.names))
    async def Bind(self, request: pb.BindRequest, context: Any) -> pb.BindResponse:  # noqa: N802
        """Binds names to keys. Raises InvalidRequest, Overloaded (too many names), NotLeader or Unavailable."""
        namespace = text("namespace", request.namespace, MAX_NAMESPACE_BYTES)
        _few("names", request.names)
        names = []
        sealed: dict[str, list[bytes]] = {}
        for each in request.names:
            if len(each.key) != KEY_BYTES or each.key == UNKNOWN:
                raise InvalidRequest.of("names.key", each.key, f"must have {KEY_BYTES} bytes, not all of them 0")
            names.append((text("names.name", each.name, MAX_NAME_BYTES, empty=False), each.key))
            if each.holder:
                sealed.setdefault(text("names.holder", each.holder, MAX_TEXT), []).append(each.key)
        async with self._books:
            self._step(Tick())
            policy = self._state.policy
            keys, writes, bound = policy.bind(namespace, names, self._clock(), replace=request.replace)
            await self._keep(writes)
            self._sealed(sealed)
            bound()  # only now: when writing fails, nothing has changed and nobody has been told
        return pb.BindResponse(keys=b"".join(keys))

    def _sealed(self, keys: Mapping[str, Sequence[bytes]]) -> None:
        """Tells the policy what each store that is a member is about to announce."""
        for store_id, some in keys.items():
            known = self._state.known(store_id)
            if known is not None:
                self._state.policy.sealed(some, store_id, known[0].incarnation, self._clock())

    @served(names.SPAN_RESOLVE, lambda request: len(request.names))
    async def Resolve(self, request: pb.ResolveRequest, context: Any) -> pb.ResolveResponse:  # noqa: N802
        """Returns what names stand for, and forgets them with `unbind`. Raises InvalidRequest, NotLeader or
        Unavailable."""
        namespace = text("namespace", request.namespace, MAX_NAMESPACE_BYTES)
        _few("names", request.names)
        names = [text("names", name, MAX_NAME_BYTES, empty=False) for name in request.names]
        policy = self._state.policy
        wanted = _wanted(request, len(names))
        if not request.unbind:
            self._step(Tick())
            return _resolved(policy.names.resolve(namespace, names))
        await asyncio.sleep(0)  # the fast path gives a call a task at its first wait, and what is kept needs one
        async with self._books:
            self._step(Tick())
            keys = policy.names.resolve(namespace, names)
            writes, unbound = policy.unbind(namespace, names, wanted)
            await self._keep(writes)
            unbound()
        return _resolved(keys)

    # ── removals, replicas, quotas, drains ──────────────────────────────────────────────────────────

    async def Remove(self, request: pb.RemoveRequest, context: Any) -> pb.RemoveResponse:  # noqa: N802
        """Removes blocks everywhere. Raises InvalidRequest, NotLeader or Unavailable (part of the removal may have been
        written)."""
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
        """Sets how many nodes should hold blocks. Raises InvalidRequest, Overloaded (too many blocks have a target),
        NotLeader or Unavailable."""
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
        """Begins a drain, or tells how far it is. Raises UnknownInstance, Overloaded, NotLeader or Unavailable."""
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
        """Returns the incarnation that asks for its own drain; 0 if an operator asks. Raises UnknownInstance if that
        incarnation is no member."""
        name, life = request.instance_id, request.incarnation
        if life and not request.cancel and not self._state.lives(name, life):
            raise UnknownInstance(f"incarnation={life:x}: no life of {name[:MAX_TEXT]!r}", field="incarnation")
        return request.incarnation

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Any) -> pb.SetQuotaResponse:  # noqa: N802
        """Sets or ends a quota. Raises InvalidRequest, Overloaded (too many), NotLeader or Unavailable."""
        quota = request.quota
        if len(quota.tag) != TAG_BYTES:
            raise InvalidRequest.of("quota.tag", quota.tag, f"must have {TAG_BYTES} bytes")
        name = text("quota.name", quota.name, MAX_QUOTA_NAME_BYTES)
        async with self._books:
            self._step(Tick())
            await self._keep(self._state.policy.set_quota(TagQuota(quota.tag, quota.blocks, name)))
        return pb.SetQuotaResponse()

    async def ListQuotas(self, request: pb.ListQuotasRequest, context: Any) -> pb.ListQuotasResponse:  # noqa: N802
        """Returns all quotas that are set. Raises NotLeader."""
        self._step(Tick())
        return pb.ListQuotasResponse(
            quotas=[
                pb.QuotaUse(quota=pb.Quota(tag=quota.tag, blocks=quota.blocks, name=quota.name), used_blocks=used)
                for quota, used in self._state.policy.quotas.all()
            ]
        )


def text(field: str, value: str, most: int, *, empty: bool = True) -> str:
    """Returns `value` if the master may keep it. Raises InvalidRequest naming `field` when it is empty, too long in
    bytes, or contains a NUL."""
    if not value and not empty:
        raise InvalidRequest.of(field, value, "must not be empty")
    if len(value.encode()) > most:
        raise InvalidRequest.of(field, value, f"has more than {most} bytes")
    if "\0" in value:
        raise InvalidRequest.of(field, value, "holds a NUL")
    return value


def found(state: MasterState, keys: Sequence[bytes], grouped: bool = False, now: float = 0.0) -> pb.FindResponse:
    """Returns where each of `keys` is. Keys of the same holders, such as those of one chain, cost one look-up of these
    holders. A key that nobody has announced is where a client says that it has just put it."""
    known, answer = state.blocks.map, pb.FindResponse()
    index: dict[str, int | None] = {}
    masks: list[int | str] = list(known.masks(keys))
    fresh = _unannounced_holders(state, keys, masks, now) if len(state.policy.unannounced) else {}
    number: dict[int | str, int] = {}
    groups: list[pb.Replicas] = []
    for mask, key in dict(zip(masks, keys, strict=True)).items():
        holders, tiers, told = _holders(state, key, fresh.get(mask) or known.holders(key), index, answer)
        number[mask] = len(groups)
        groups.append(pb.Replicas(holder=holders, tier=tiers, groups=told))
    if grouped:
        answer.groups.extend(groups)
        answer.group = struct.pack(f"<{len(masks)}H", *[number[mask] for mask in masks])
    else:
        answer.replicas.extend([groups[number[mask]] for mask in masks])  # a quarter of what as many `add` cost
    return answer


def _unannounced_holders(
    state: MasterState, keys: Sequence[bytes], masks: list[int | str], now: float
) -> dict[int | str, list[str]]:
    """Returns the holders of those keys that nobody has announced, by the group that they get in `masks`."""
    found: dict[int | str, list[str]] = {}
    for at, mask in enumerate(masks):
        holder = state.policy.unannounced.holder(keys[at], now) if not mask else None
        if holder is not None and state.lives(*holder):
            masks[at] = holder[0]
            found[holder[0]] = [holder[0]]
    return found


def _holders(
    state: MasterState, key: bytes, names: Sequence[str], index: dict[str, int | None], answer: pb.FindResponse
) -> tuple[list[int], bytes, bytes]:
    """Returns the indices of the holders in `answer`, their tiers, and the cache groups of `key` that they have (empty
    where nobody has any but group 0). A new holder is added to `answer` while there is room."""
    holders: list[int] = []
    tiers: list[Tier] = []
    stores: list[str] = []
    for name in names:
        store_id, tier = split_name(name)
        if store_id not in index:
            index[store_id] = _holder(state, store_id, answer)
        at = index[store_id]
        if at is not None:
            holders.append(at)
            tiers.append(tier)
            stores.append(name)
    return holders, bytes(tiers), state.blocks.groups_at(key, stores)


def _holder(state: MasterState, store_id: str, answer: pb.FindResponse) -> int | None:
    known = state.known(store_id)
    if known is None or len(answer.holders) >= MAX_FOUND_HOLDERS:
        return None
    member, usage = known
    told = answer.holders.add(member=mapping.member_out(member))
    if usage is not None:
        told.sending_bytes_per_s, told.leases = usage.sending_bytes_per_s, usage.leases
    return len(answer.holders) - 1


def _resolved(keys: Sequence[bytes | None]) -> pb.ResolveResponse:
    return pb.ResolveResponse(keys=b"".join(key or UNKNOWN for key in keys))


def _wanted(request: pb.ResolveRequest, names: int) -> list[bytes | None] | None:
    """Returns what each name must stand for to be forgotten (None: for nothing), or None if any key will do."""
    if not request.keys:
        return None
    if not request.unbind or len(request.keys) != names * KEY_BYTES:
        why = f"has {len(request.keys)} bytes; with unbind {KEY_BYTES} for each of {names} names, else none"
        raise InvalidRequest.of("keys", request.keys[:24], why)
    return [None if key == UNKNOWN else key for key in split(request.keys)]


def _few(field: str, names: Sequence[object]) -> None:
    if len(names) > MAX_NAMES:
        raise InvalidRequest.of(field, f"{len(names)} names", f"one message holds at most {MAX_NAMES}")
