"""One order holds all instances of a model, by leases that its conductor renews until the order has ended. Several
conductors may order at once: the instances let one of them, and the first instance by name is asked before the others,
so that of two orders that begin together one goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvmesh.errors import DeadlinePassed, KvmeshError, Overloaded, Unavailable
from kvmesh.rpc import channels, status
from kvmesh.rpc.authorisation import ServerRole
from kvmesh.rpc.pb import instance_pb2, instance_pb2_grpc
from kvmesh.services.conductor.fleet.instance import Instance

log = logging.getLogger(__name__)

LEASE_S = 12.0  # for so long the instances of a conductor that dies in the middle of an order stay paused
CALL_S = 3.0  # four renewals a lease, the last of which may still come too late
AGAIN_S = 0.25  # between two looks at an order that another conductor carries out
END_S = 10.0
MAX_RESULT = 60_000  # bytes, less than an instance keeps

Call = Callable[[Any, Instance], Awaitable[Any]]  # of an Instance stub


class OrderLease:
    """Holds `instances` for the order `ref`. `begin`, then the order's calls with `ref` in them, then `end` or
    `release`, whatever has happened."""

    def __init__(self, instances: Sequence[Instance], ref: instance_pb2.OrderRef, lease_s: float = LEASE_S) -> None:
        self._instances = sorted(instances, key=lambda instance: instance.ref.instance_id)
        self.ref = ref
        self._hold = instance_pb2.HoldOrderRequest(order=ref, lease_ms=int(lease_s * 1000))
        self._renew_s = lease_s / 4
        self._renewing: asyncio.Task[None] | None = None
        self.seen = False  # whether another conductor had begun this order

    async def begin(self, until: float) -> bytes:
        """Returns b"" when all instances are held, and from now on renewed; else the result of this order, which was
        carried out before. While another conductor carries out this very order it waits for that one's end, up to
        `until` on the monotonic clock. Raises Overloaded, naming it, while another order runs, DeadlinePassed, or an
        instance's error; then nothing is held."""
        try:
            result = await self._held(self._instances[:1], until) or await self._held(self._instances[1:], until)
        except KvmeshError:
            await self.release()
            raise
        if result:
            await self.end(result)
        else:
            self._renewing = asyncio.create_task(self._renew(), name=f"order {self.ref.id}")
        return result

    async def _held(self, instances: Sequence[Instance], until: float) -> bytes:
        while True:
            held = good(await call_all(instances, self._hold_at))
            self.seen |= any(answer.seen for answer in held)
            results = [answer.result for answer in held if answer.result]
            others = [answer for answer in held if answer.HasField("held_by")]
            if results or not others:
                return results[0] if results else b""
            other = others[0].held_by
            if other.id != self.ref.id:
                text = f"{others[0].instance.instance_id}: order {other.id} of {other.conductor} is being carried out"
                raise Overloaded(text, retry_after_ms=1000)
            if time.monotonic() >= until:
                raise DeadlinePassed(f"order {other.id} of {other.conductor} has not ended in time", field="order_id")
            await asyncio.sleep(min(AGAIN_S, others[0].wait_ms / 1000))

    async def _renew(self) -> None:
        """Goes on until it is cancelled. An instance that does not answer refuses the order's next step there."""
        while True:
            await asyncio.sleep(self._renew_s)
            for instance, answer in zip(self._instances, await call_all(self._instances, self._hold_at), strict=True):
                if isinstance(answer, KvmeshError) or answer.HasField("held_by"):
                    log.warning("order %s is not renewed at %s", self.ref.id, instance.ref.instance_id)

    async def end(
        self,
        result: bytes = b"",
        needs_epoch: int = 0,
        behind: Sequence[Instance] = (),
        **more: Any,
    ) -> list[Any]:
        """Ends the order at all instances. Those `behind` get no work before they have weights of `needs_epoch`. `more`
        is of ResumeRequest. Returns each instance's answer, or the KvmeshError that it was."""
        if self._renewing is not None:
            self._renewing.cancel()
        result = result if len(result) <= MAX_RESULT else b""

        def one(stub: Any, instance: Instance) -> Awaitable[Any]:
            needs = needs_epoch if instance in behind else 0
            request = instance_pb2.ResumeRequest(order=self.ref, result=result, needs_epoch=needs, **more)
            return stub.Resume(request, timeout=END_S)  # type: ignore[no-any-return]

        return await call_all(self._instances, one)

    async def release(self) -> None:
        """Ends the order where it was begun: what it has paused goes on where its weights are whole."""
        for answer in await self.end():
            if isinstance(answer, KvmeshError):
                log.info("order %s: %s", self.ref.id, answer.message)

    def _hold_at(self, stub: Any, _: Instance) -> Awaitable[Any]:
        return stub.HoldOrder(self._hold, timeout=CALL_S)  # type: ignore[no-any-return]


async def call_all(instances: Sequence[Instance], call: Call) -> list[Any]:
    """Returns each instance's answer, or the KvmeshError that it was."""

    async def one(instance: Instance) -> Any:
        try:
            async with channels.connect(instance.ref.address, ServerRole.INSTANCE) as channel:
                return await status.called(call(instance_pb2_grpc.InstanceStub(channel), instance))
        except KvmeshError as error:
            return Unavailable(f"{instance.ref.instance_id}: {error.message}") if not error.field else error

    return list(await asyncio.gather(*(one(instance) for instance in instances)))


def good(answers: Sequence[Any]) -> list[Any]:
    """Raises the first that is an error."""
    for answer in answers:
        if isinstance(answer, KvmeshError):
            raise answer
    return list(answers)
