"""Carries out the orders of a leading conductor's brain: copies of blocks, roles of instances. Nothing is decided here.

The receiver pulls a copy (`NodeStore.Pull`, in the background class, after everything that somebody waits for). The
instance itself takes a role (`Instance.SetRole`). Every order ends within its deadline, and the brain gets its outcome.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from kvmesh.errors import DeadlinePassed, KvmeshError
from kvmesh.rpc import channels, status
from kvmesh.rpc.authorisation import ServerRole
from kvmesh.rpc.pb import blocks_pb2, blocks_pb2_grpc, instance_pb2, instance_pb2_grpc
from kvmesh.services.conductor.balance.hot import DEADLINE_S
from kvmesh.services.conductor.domain import Action, OrderEnded, Replicate, SwitchRole
from kvmesh.services.conductor.mapping import ROLES_OUT, ref_out
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

PULL_BLOCKS = 512  # of one call
COPY_S = DEADLINE_S - 5  # before the brain gives the order up
ROLE_S = 5.0
MAX_ORDERS = 64  # at once; the brain gives fewer

Order = SwitchRole | Replicate


class BalanceOrders:
    """Carries orders out in tasks of its own. `leads()` is checked right before each call, because a conductor that
    does not lead must order nothing. `ended` gets the outcome of each order."""

    def __init__(self, leads: Callable[[], bool], ended: Callable[[OrderEnded], None]) -> None:
        self._leads = leads
        self._ended = ended
        self._tasks: set[asyncio.Task[None]] = set()

    def carry_out(self, orders: Sequence[Action]) -> None:
        """Begins these orders, on the event loop."""
        for order in orders:
            assert isinstance(order, SwitchRole | Replicate), "nothing else is to be carried out"
            if len(self._tasks) >= MAX_ORDERS:
                self._end(order, 0, f"{MAX_ORDERS} orders are under way", "failed")
                continue
            task = asyncio.create_task(self._one(order), name=f"order {order.number}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancels all orders, without reporting their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one(self, order: Order) -> None:
        try:
            held = await (self._copy(order) if isinstance(order, Replicate) else self._switch(order))
        except KvmeshError as error:
            self._end(order, 0, error.message, "failed")
        except Exception as error:
            log.exception("order %d failed", order.number)
            self._end(order, 0, repr(error), "failed")
        else:
            if held is None:
                self._end(order, 0, "this conductor leads no more", "dropped")
            else:
                self._end(order, held, "", "done")

    def _end(self, order: Order, held: int, error: str, outcome: str) -> None:
        if isinstance(order, Replicate):
            kind, told = "replicate", f"{len(order.keys)} blocks from {order.source.instance_id} to"
            target = f"{order.target.instance_id}, {held} are there"
        else:
            kind, told, target = "switch_role", order.role.value, order.ref.instance_id
        names.CONDUCTOR_ORDERS.labels(order=kind, outcome=outcome).inc()
        log.info("order %d %s: %s %s %s (%s)%s", order.number, outcome, kind, told, target, order.why,
                 f": {error}" if error else "")  # fmt: skip
        self._ended(OrderEnded(order.number, held, error))

    async def _switch(self, order: SwitchRole) -> int | None:
        """Returns None when this conductor does not lead any more. Raises KvmeshError."""
        if not self._leads():
            return None
        request = instance_pb2.SetRoleRequest(role=ROLES_OUT[order.role], incarnation=order.ref.incarnation)
        async with channels.connect(order.ref.address, ServerRole.INSTANCE) as channel:
            await status.called(instance_pb2_grpc.InstanceStub(channel).SetRole(request, timeout=ROLE_S))
        return 0

    async def _copy(self, order: Replicate) -> int | None:
        """Returns how many of the blocks the target has; None when this conductor does not lead any more. Raises
        KvmeshError when the target has none of those requested last."""
        until, held = time.monotonic() + COPY_S, 0
        async with channels.connect(order.target.address, ServerRole.NODE) as channel:
            stub = blocks_pb2_grpc.NodeStoreStub(channel)
            for at in range(0, len(order.keys), PULL_BLOCKS):
                if not self._leads():
                    return None
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise DeadlinePassed(f"{held} of {len(order.keys)} blocks were copied in {COPY_S:.0f} s")
                request = blocks_pb2.PullBlocksRequest(
                    keys=b"".join(order.keys[at : at + PULL_BLOCKS]),
                    holders=[ref_out(order.source)],
                    timeout_ms=max(1, int(left_s * 1000)),
                    background=True,
                    groups=order.groups[at : at + PULL_BLOCKS],
                )
                answer = await status.called(stub.Pull(request, timeout=left_s + 1))
                held += sum(map(bool, answer.held))
                if not all(answer.held):
                    break  # what follows a gap helps nobody
        return held
