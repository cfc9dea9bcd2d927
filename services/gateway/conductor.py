"""The gateway's side of the conductors: placements, and what is known of the models and their instances."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from opentelemetry.context import Context

from kvmesh.errors import (
    DeadlinePassed,
    KvmeshError,
    ModelNotFound,
    Overloaded,
    Paused,
    RequestCancelled,
    TlsFailed,
    Unavailable,
    UnknownInstance,
)
from kvmesh.rpc.addresses import split
from kvmesh.rpc.leader_client import ServiceClient
from kvmesh.rpc.pb import common_pb2, conductor_pb2
from kvmesh.rpc.status import Unreachable
from kvmesh.services.gateway.concurrency import PlacementRoom
from kvmesh.services.gateway.hold_gate import HoldGate
from kvmesh.services.gateway.models import Model, Models, ServedModelFacts, is_absent, kv_usage
from kvmesh.telemetry import names
from kvmesh.telemetry.spans import traceparent

SERVICE = conductor_pb2.DESCRIPTOR.services_by_name["Conductor"]
FAST = ("Schedule", "Release")

log = logging.getLogger(__name__)

ORDER_GRACE_S = 5.0
_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 0.5
_REFRESH_TIMEOUT_S = 2.0
UNREADY_REFRESH_S = 1.0
READY_REFRESH_S = 5.0
PLACED_S = 2.0  # after a placement the conductor counts as reached for so long

_UNREACHABLE = (Unreachable, TlsFailed)
_UNSAID = (*_UNREACHABLE, DeadlinePassed, RequestCancelled)  # what no conductor says of its instances
_PREFILL = (common_pb2.ROLE_PREFILL, common_pb2.ROLE_BOTH)
_DECODE = (common_pb2.ROLE_DECODE, common_pb2.ROLE_BOTH)


class ConductorSilent(Unavailable):
    """No conductor says anything: whether there are instances is not known."""


class Conductor:
    """Calls with deadlines and named errors, at whichever conductor answers. It stays with the one that answered last:
    one that sees all requests places them better than two that each see half. Owns its connections."""

    def __init__(
        self, addresses: str, *, timeout_s: float, retry_s: float, max_waiting: int, max_placing: int = 64
    ) -> None:
        """`addresses`: "a:1,b:2". `max_waiting`: requests of the batch lane that wait here for something idle,
        together; `max_placing`: placements under way. Raises ConfigError naming `conductor`."""
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._max_waiting = max_waiting
        self._waiting = 0
        self._room = PlacementRoom(max_placing, timeout_s)
        self.placed_at = -math.inf  # loop time of the last placement: then there were instances
        self._conductors: list[ServiceClient] = []
        for address in split(addresses, "conductor"):
            self._conductors.append(one := ServiceClient(SERVICE, FAST))
            one.connect(address)
        self._first = 0  # the one that answered last

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(one.close() for one in self._conductors))

    @property
    def address(self) -> str:
        """The conductor that answered last."""
        return self._conductors[self._first].address

    @property
    def _order(self) -> list[ServiceClient]:
        """Whom to ask, one after another until one answers."""
        return self._conductors[self._first :] + self._conductors[: self._first]

    async def schedule(
        self, request: conductor_pb2.ScheduleRequest, deadline: float, parent: Context
    ) -> conductor_pb2.Placement:
        """A placement. An unreachable conductor (or one without instances) is asked again for a short while; for the
        batch lane one that refuses is asked again when it says, up to the deadline.

        `deadline` is loop time. Overloaded: the SLO cannot be met; Unavailable; DeadlinePassed."""
        if request.lane != conductor_pb2.LANE_BATCH:
            return await self._placed(request, deadline, parent)
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await self._placed(request, deadline, parent)
            except Overloaded as err:
                # Late by up to a tenth: those who were refused together do not come together.
                wait_s = max(_BACKOFF_S, err.retry_after_ms / 1000) * random.uniform(1.0, 1.1)
                if self._waiting >= self._max_waiting or loop.time() + wait_s >= deadline:
                    raise
            self._waiting += 1
            names.GATEWAY_BATCH_WAITING.set(self._waiting)
            try:
                await asyncio.sleep(wait_s)
            finally:
                self._waiting -= 1
                names.GATEWAY_BATCH_WAITING.set(self._waiting)

    async def _placed(
        self, request: conductor_pb2.ScheduleRequest, deadline: float, parent: Context
    ) -> conductor_pb2.Placement:
        request.traceparent = traceparent(parent)
        loop = asyncio.get_running_loop()
        give_up, backoff = loop.time() + self._retry_s, _BACKOFF_S
        failure: Unavailable | None = None
        said: Unavailable | None = None  # by a conductor, of the instances: that tells more than that one is silent
        while True:
            for one in self._order:
                # One that hangs must not eat the time of all.
                left = min(self._timeout_s / len(self._conductors), deadline - loop.time())
                if left <= 0:
                    raise DeadlinePassed("the request's deadline passed before it was placed")
                try:
                    async with self._room:
                        answer: conductor_pb2.ScheduleResponse = await one.call("Schedule", request, left)
                except KvmeshError as err:
                    named = self._named(err, one)
                    if not isinstance(named, Unavailable) or isinstance(named, Paused):
                        raise named from None  # a pause lasts longer than what is waited for here
                    failure = named
                    said = said if isinstance(err, _UNSAID) else named
                else:
                    self._first = self._conductors.index(one)
                    self.placed_at = loop.time()
                    return answer.placement
            assert failure is not None, "there is a conductor"
            if loop.time() + backoff > min(give_up, deadline):
                raise said or failure
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    async def release(self, requests: Iterable[conductor_pb2.ReleasedRequest], timeout_s: float) -> None:
        """Tells the conductor that placed last of requests that are over. Raises named errors: it may have been told,
        and tells of one request twice do no harm."""
        one = self._conductors[self._first]
        await one.call("Release", conductor_pb2.ReleaseRequest(requests=requests), timeout_s)

    async def order(self, method: str, request: Any, timeout_s: float) -> Any:
        """Gives an operator's or a trainer's order to the first conductor that can be reached; its answer may come a
        moment after `timeout_s`, which is the order's own deadline. One whose answer is lost is repeated at the next
        conductor with the same id: it is carried out once. Raises named errors."""
        failure: KvmeshError | None = None
        if not getattr(request, "order_id", "told"):
            request.order_id = secrets.token_hex(16)
        for one in self._order:
            try:
                return await one.call(method, request, timeout_s + ORDER_GRACE_S)
            except KvmeshError as err:
                if not isinstance(err, (*_UNREACHABLE, RequestCancelled)):
                    raise
                failure = failure or self._named(err, one)
        assert failure is not None, "there is a conductor"
        raise failure

    async def look(
        self, held: Mapping[str, int] | None = None
    ) -> tuple[dict[str, common_pb2.ModelCard], list[conductor_pb2.InstanceStatus]]:
        """The cards of all registered models by name, and all instances, as one conductor knows them that knows any.
        Every conductor is told how many requests of which models are `held` here. Raises named errors."""
        asks = conductor_pb2.ListModelsRequest(
            held=[conductor_pb2.HeldRequests(model=model, requests=count) for model, count in (held or {}).items()]
        )
        order = self._order
        found: tuple[dict[str, common_pb2.ModelCard], list[conductor_pb2.InstanceStatus]] | None = None
        failure: KvmeshError | None = None
        for one in order:
            one.seek_fastpath()  # before a request has to do without
        for number, one in enumerate(order):
            try:
                cards, known = await asyncio.gather(
                    one.call("ListModels", asks, _REFRESH_TIMEOUT_S),
                    one.call("GetStatus", conductor_pb2.GetConductorStatusRequest(), _REFRESH_TIMEOUT_S),
                )
            except KvmeshError as err:
                failure = failure or self._named(err, one)
                continue
            found = {card.name: card for card in cards.models}, list(known.instances)
            if found[1]:
                self._first = self._conductors.index(one)
                if asks.held:  # of one model; there are instances of another
                    others = (other.call("ListModels", asks, _REFRESH_TIMEOUT_S) for other in order[number + 1 :])
                    await asyncio.gather(*others, return_exceptions=True)
                return found
        if found is None:
            assert failure is not None, "there is a conductor"
            raise failure
        return found

    def _named(self, err: KvmeshError, one: ServiceClient) -> KvmeshError:
        if isinstance(err, DeadlinePassed):
            return ConductorSilent(f"the conductor at {one.address} does not answer in time")
        if isinstance(err, RequestCancelled):  # not by us, whose cancellation is no such error
            return ConductorSilent(f"the conductor at {one.address} ended the call: it stops", retry_after_ms=1000)
        if isinstance(err, ModelNotFound | UnknownInstance):
            return Unavailable(err.message, retry_after_ms=1000)  # its instances have not registered yet
        if isinstance(err, _UNREACHABLE):
            why = err.why if isinstance(err, Unreachable) else err.message
            told = f": {why}" if why else ""
            return ConductorSilent(f"the conductor at {one.address} cannot be reached{told}", retry_after_ms=1000)
        return err


class Catalog:
    """Facts and readiness of all models, looked up in the background: every second until all is well, then slowly,
    and at once when somebody has met trouble."""

    def __init__(
        self,
        conductor: Conductor,
        models: Models,
        *,
        on_ready: Callable[[bool], None],
        on_instances: Callable[[Collection[tuple[str, int]]], None],
        holds: HoldGate,
    ) -> None:
        """`holds` hears of each model whether it has instances; what it holds, conductors are told."""
        self.models = models
        self._conductor = conductor
        self._holds = holds
        self._on_ready = on_ready
        self._on_instances = on_instances
        self._poked = asyncio.Event()

    def poke(self) -> None:
        """Something failed: look again soon."""
        self._poked.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._refresh()
            except KvmeshError as err:
                # A look that came too late behind others is no reason while requests are placed.
                if asyncio.get_running_loop().time() > self._conductor.placed_at + PLACED_S:
                    for model in self.models:
                        model.held = False
                        self._set(model, err.message)
            self._on_ready(self.models.ready)
            await self._pause(READY_REFRESH_S if all(model.ready for model in self.models) else UNREADY_REFRESH_S)

    def _set(self, model: Model, reason: str) -> None:
        """`reason`: why `model` is not ready, "" when it is. Changes are logged."""
        if reason != model.not_ready_reason:
            log.info("model %s: %s", model.name, f"not ready: {reason}" if reason else "ready")
        model.not_ready_reason = reason
        names.GATEWAY_MODEL_READY.labels(model=model.name).set(model.ready)

    async def _pause(self, seconds: float) -> None:
        self._poked.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._poked.wait()
                await asyncio.sleep(0.1)  # many requests meet the same trouble
        except TimeoutError:
            pass

    async def _refresh(self) -> None:
        cards, instances = await self._conductor.look(self._holds.counts())
        self._on_instances({(i.instance.instance_id, i.instance.incarnation) for i in instances})
        for model in self.models:
            card = cards.get(model.name)
            if card is not None:
                model.facts = ServedModelFacts.of(card)
            model.kv = kv_usage(model.name, instances)
            self._set(model, why_not_ready(model.name, card is not None, instances))
            absent = not model.ready and is_absent(model.name, instances)
            model.held = absent and self._holds.holds
            self._holds.set_absent(model.name, absent)


def why_not_ready(model: str, registered: bool, instances: Collection[conductor_pb2.InstanceStatus]) -> str:
    """ "" when a request could be placed, else one line for people."""
    if not registered:
        return f"no instance has registered model {model!r}"
    mine = [instance for instance in instances if instance.model == model]
    for what, roles in (("prefill", _PREFILL), ("decode", _DECODE)):
        such = [instance for instance in mine if instance.role in roles]
        if not such:
            return f"no {what} instance of model {model!r}"
        if not any(instance.ready for instance in such):
            reasons = [f"{i.instance.instance_id}: {i.not_ready_reason or 'starting'}" for i in such[:3]]
            return f"no {what} instance is ready ({'; '.join(reasons)})"
    return ""
