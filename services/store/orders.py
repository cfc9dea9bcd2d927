"""Carries out what the master decides at node stores: the calls, their deadlines, how many run at once. It decides
nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio

from kvmesh.errors import KvmeshError
from kvmesh.kvcache.tombstones import Tombstone
from kvmesh.rpc import channels, status
from kvmesh.rpc.authorisation import ServerRole
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.services.store import mapping
from kvmesh.services.store.domain import RegisteredNode
from kvmesh.services.store.policy.copies import DiscardOrder, Order, PinOrder, PullOrder, TrimOrder
from kvmesh.services.store.state import MasterState
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

T = TypeVar("T")

REMOVE_S = 1.0
ASK_S = 1.0
PULL_MS = 10_000
MAX_CALLS = 64  # at once; and as many pulls beside them, as those take long
WAIT_S = 1.0  # the longest wait for a call's turn; pulls wait as long as it takes
MAX_CHANNELS = 256  # channels that are kept open


@dataclass
class RemovalOutcome:
    """Tells what a removal did: the ids of the stores that acknowledged it and of those that could not be asked, and
    how many blocks were removed."""

    acknowledged: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    blocks: int = 0


@dataclass
class _NodeQueue:
    """Orders the removals at one node, which are carried out one after the other."""

    lock: asyncio.Lock
    users: int = 0


class StoreOrderQueue:
    """Owns the channels to nodes. `leads()` is asked right before each call: a master that does not lead any more
    orders nothing. A node that refuses an order because it knows a later term has only failed the order: if that is so,
    the node also reports the term when it beats."""

    def __init__(self, leads: Callable[[], bool]) -> None:
        self._leads = leads
        self._calls = asyncio.Semaphore(MAX_CALLS)
        self._pulls = asyncio.Semaphore(MAX_CALLS)
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._users: dict[str, int] = {}
        self._queues: dict[str, _NodeQueue] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task that goes on until `close`, even when whoever waits for it is cancelled."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancels all tasks and closes the channels."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        found, self._channels = self._channels, OrderedDict()
        for channel in found.values():
            with contextlib.suppress(Exception):
                await channel.close(None)

    async def remove(self, state: MasterState, tombstone: Tombstone) -> RemovalOutcome:
        """Asks every member to apply the tombstone; members that are away are pending in the outcome. Never raises."""
        members, away = state.members, state.policy.tombstones.away(tombstone.at)
        answers = await asyncio.gather(*(self._remove_at(state, member, tombstone) for member in members))
        outcome = RemovalOutcome(pending=away)
        for member, count in zip(members, answers, strict=True):
            if count is None:
                outcome.pending.append(member.store_id)
            else:
                outcome.acknowledged.append(member.store_id)
                outcome.blocks += count
        return outcome

    async def _remove_at(self, state: MasterState, member: RegisteredNode, tombstone: Tombstone) -> int | None:
        """Returns how many blocks the node removed; None if it could not be asked."""
        kept = state.policy.tombstones
        async with self._in_turn(member.instance_id):
            if kept.has_applied(member.instance_id, tombstone.seq):
                return 0  # the node was told with a heartbeat, while earlier removals were under way
            if not kept.is_next(member.instance_id, tombstone.seq):
                return None  # tombstones go in order or not at all: the node is told of all of them when it beats
            request = pb.RemoveBlocksRequest(
                keys=b"".join(tombstone.keys), prefix=tombstone.prefix, term=state.policy.term, seq=tombstone.seq
            )
            kept.asking(member.instance_id, tombstone.seq)
            try:
                answer = await self.call(member, "Remove", request, REMOVE_S)
            finally:
                kept.asking(member.instance_id, 0)
            if answer is None:
                return None
            now = state.known(member.instance_id)
            if now is not None and now[0] == member:
                kept.applied(member.instance_id, tombstone.seq)
            return int(answer.removed)

    async def carry_out(self, state: MasterState, order: Order, clock: Callable[[], float]) -> None:
        """Carries out an order, and tells the brain what came of it. Raises nothing but CancelledError."""
        match order.work:
            case PullOrder() as pull:
                done = await self._pull(state, pull)
            case TrimOrder() as trim:
                done = await self._trim(state, trim)
            case PinOrder() as pin:
                done = await self._pin(state, pin)
            case DiscardOrder(holder, keys):
                done = await self._drop(state, holder, keys)
        order.then(done or frozenset(), done is not None, clock())

    async def _pull(self, state: MasterState, pull: PullOrder) -> frozenset[bytes] | None:
        request = pb.PullBlocksRequest(
            keys=b"".join(pull.keys),
            holders=map(mapping.ref_out, pull.holders),
            timeout_ms=PULL_MS,
            term=state.policy.term,
            background=True,
            pins=pull.pins,
        )
        answer = await self.call(pull.receiver, "Pull", request, PULL_MS / 1000 + 1)
        return None if answer is None else _said(pull.keys, answer.held)

    async def _trim(self, state: MasterState, trim: TrimOrder) -> frozenset[bytes] | None:
        """Removes blocks of which there are too many copies. Only keys that each of the others has confirmed just now
        are removed, and none that somebody moves or reads."""
        keys = trim.keys
        for keeper in trim.keepers:
            answer = await self.call(keeper, "Exists", pb.ExistsRequest(keys=b"".join(keys)), ASK_S) if keys else None
            keys = tuple(key for key in keys if answer is not None and key in _said(keys, answer.tiers))
        return await self._drop(state, trim.holder, keys, leased=True, pinned=trim.spare) if keys else frozenset()

    async def _drop(
        self,
        state: MasterState,
        holder: RegisteredNode,
        keys: tuple[bytes, ...],
        *,
        leased: bool = False,
        pinned: bool = False,
    ) -> frozenset[bytes] | None:
        """Removes keys at a holder, but for those that are `leased` or `pinned`, where these are set."""
        request = pb.RemoveBlocksRequest(
            keys=b"".join(keys), term=state.policy.term, spare_leased=leased, spare_pinned=pinned
        )
        answer = await self.call(holder, "Remove", request, REMOVE_S)
        return None if answer is None else frozenset(keys) - _said(keys, answer.spared)

    async def _pin(self, state: MasterState, pin: PinOrder) -> frozenset[bytes] | None:
        kind = pb.PIN_KIND_HARD if pin.hard else pb.PIN_KIND_NONE
        request = pb.PinBlocksRequest(keys=b"".join(pin.keys), kind=kind, term=state.policy.term)
        answer = await self.call(pin.holder, "Pin", request, ASK_S)
        return None if answer is None else _said(pin.keys, answer.done)

    async def call(self, member: RegisteredNode, method: str, request: Any, timeout_s: float) -> Any | None:
        """Calls one method of a node. Returns None if the call failed, its turn did not come, or this master does not
        lead. Raises nothing but CancelledError."""
        turns = self._pulls if method == "Pull" else self._calls
        try:
            async with asyncio.timeout(None if method == "Pull" else WAIT_S):
                await turns.acquire()
        except TimeoutError:
            names.STORE_ORDERS.labels(order=method.lower(), outcome="failed").inc()
            return None
        try:
            return await self._called(member, method, request, timeout_s)
        finally:
            turns.release()

    async def _called(self, member: RegisteredNode, method: str, request: Any, timeout_s: float) -> Any | None:
        async with self._channel(member.address) as channel:
            if not self._leads():
                return None
            stub = pb_grpc.NodeStoreStub(channel)
            try:
                answer = await getattr(stub, method)(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                cause: KvmeshError = status.from_rpc_error(error)
                names.STORE_ORDERS.labels(order=method.lower(), outcome="failed").inc()
                log.info("%s at %s: %s", method, member.instance_id, cause)
                return None
        names.STORE_ORDERS.labels(order=method.lower(), outcome="answered").inc()
        return answer

    @asynccontextmanager
    async def _in_turn(self, instance_id: str) -> AsyncIterator[None]:
        queue = self._queues.setdefault(instance_id, _NodeQueue(asyncio.Lock()))
        queue.users += 1
        try:
            async with queue.lock:
                yield
        finally:
            queue.users -= 1
            if not queue.users:
                del self._queues[instance_id]

    @asynccontextmanager
    async def _channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Yields the channel to an address. It is kept open for the next call, unless too many are."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = channels.connect(address, ServerRole.NODE)
        self._channels.move_to_end(address)
        self._users[address] = self._users.get(address, 0) + 1
        try:
            yield channel
        finally:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
            await self._shut_some()

    async def _shut_some(self) -> None:
        idle = [address for address in self._channels if address not in self._users]
        for address in idle[: max(0, len(self._channels) - MAX_CHANNELS)]:
            with contextlib.suppress(Exception):
                await self._channels.pop(address).close(None)


def _said(keys: Sequence[bytes], answers: bytes) -> frozenset[bytes]:
    """Returns those of `keys` to which a node answered yes; `answers` has one byte for each."""
    return frozenset(key for key, yes in zip(keys, answers, strict=False) if yes)
