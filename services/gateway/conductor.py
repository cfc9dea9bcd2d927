"""The gateway's side of the conductor: placements, and what is known of the model and its instances."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

import grpc
import grpc.aio
from opentelemetry.context import Context

from kvmesh.kvcache.keys import Namespace
from kvmesh.rpc import channels, status
from kvmesh.rpc.errors import DeadlinePassed, KvmeshError, ModelNotFound, Unavailable, UnknownInstance
from kvmesh.rpc.metadata import metadata
from kvmesh.rpc.pb import common_pb2, conductor_pb2, conductor_pb2_grpc

log = logging.getLogger(__name__)

_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 0.5
_REFRESH_TIMEOUT_S = 2.0
UNREADY_REFRESH_S = 1.0
READY_REFRESH_S = 5.0

_PREFILL = (common_pb2.ROLE_PREFILL, common_pb2.ROLE_BOTH)
_DECODE = (common_pb2.ROLE_DECODE, common_pb2.ROLE_BOTH)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the mesh says about the served model."""

    fingerprint: str
    block_tokens: int
    kv_dtype: str
    max_context_tokens: int
    vocab_size: int
    eos_ids: frozenset[int]
    weights_epoch: int

    @classmethod
    def of(cls, card: common_pb2.ModelCard) -> Facts:
        return cls(
            card.fingerprint,
            card.block_tokens,
            card.kv_dtype,
            card.max_context_tokens,
            card.vocab_size,
            frozenset(card.eos_token_ids),
            card.weights_epoch,
        )

    def namespace(self, salt: str) -> Namespace:
        """Where the block keys of this model, for tenants with this salt, are rooted."""
        return Namespace(
            fingerprint=self.fingerprint,
            kv_dtype=self.kv_dtype,
            tenant_salt=salt,
            weights_epoch=self.weights_epoch,
        )


class Conductor:
    """Calls with deadlines and named errors."""

    def __init__(self, address: str, *, timeout_s: float, retry_s: float) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._channel = channels.connect(address)
        self._stub: conductor_pb2_grpc.ConductorAsyncStub = conductor_pb2_grpc.ConductorStub(self._channel)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(grace=None)

    async def schedule(
        self, request: conductor_pb2.ScheduleRequest, deadline: float, parent: Context
    ) -> conductor_pb2.Placement:
        """A placement. An unreachable conductor (or one without instances) is asked again for a short while.

        `deadline` is loop time. Overloaded: the SLO cannot be met; Unavailable; DeadlinePassed."""
        loop = asyncio.get_running_loop()
        give_up, backoff = loop.time() + self._retry_s, _BACKOFF_S
        while True:
            left = min(self._timeout_s, deadline - loop.time())
            if left <= 0:
                raise DeadlinePassed("the request's deadline passed before it was placed")
            try:
                answer = await self._stub.Schedule(request, timeout=left, metadata=metadata(parent) or None)
            except grpc.RpcError as err:
                named = self._named(err)
            else:
                return answer.placement
            if not isinstance(named, Unavailable) or loop.time() + backoff > min(give_up, deadline):
                raise named
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    async def look(self, model: str) -> tuple[common_pb2.ModelCard | None, list[conductor_pb2.InstanceStatus]]:
        """The card of `model` (None: nobody registered it) and all instances. Raises named errors."""
        try:
            cards, known = await asyncio.gather(
                self._stub.ListModels(conductor_pb2.ListModelsRequest(), timeout=_REFRESH_TIMEOUT_S),
                self._stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=_REFRESH_TIMEOUT_S),
            )
        except grpc.RpcError as err:
            raise self._named(err) from None
        return next((card for card in cards.models if card.name == model), None), list(known.instances)

    def _named(self, err: grpc.RpcError) -> KvmeshError:
        named = status.from_rpc_error(err)
        if isinstance(named, DeadlinePassed):
            return Unavailable(f"the conductor at {self.address} does not answer in time")
        if isinstance(named, ModelNotFound | UnknownInstance):
            return Unavailable(named.message, retry_after_ms=1000)  # its instances have not registered yet
        if isinstance(named, Unavailable) and not _spoken(err):
            return Unavailable(f"the conductor at {self.address} cannot be reached", retry_after_ms=1000)
        return named


def _spoken(err: grpc.RpcError) -> bool:
    """Whether a kvmesh service said this, not gRPC itself."""
    trailing = err.trailing_metadata() if isinstance(err, grpc.aio.AioRpcError) else ()
    return any(key == status.DETAIL_KEY for key, _ in trailing or ())


class Catalog:
    """Model facts and readiness, looked up in the background: every second until all is well, then slowly,
    and at once when somebody has met trouble."""

    def __init__(
        self,
        conductor: Conductor,
        model: str,
        *,
        on_ready: Callable[[bool], None],
        on_instances: Callable[[Collection[tuple[str, int]]], None],
    ) -> None:
        self.model = model
        self.facts: Facts | None = None
        self.not_ready_reason = "the conductor has not answered yet"
        self._conductor = conductor
        self._on_ready = on_ready
        self._on_instances = on_instances
        self._poked = asyncio.Event()

    @property
    def ready(self) -> bool:
        return not self.not_ready_reason

    def require(self) -> Facts:
        """The facts. Unavailable, saying why, while nobody has registered the model."""
        if self.facts is None:
            raise Unavailable(
                f"model {self.model!r} cannot be served yet: {self.not_ready_reason}", retry_after_ms=1000
            )
        return self.facts

    def poke(self) -> None:
        """Something failed: look again soon."""
        self._poked.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            was = self.not_ready_reason
            try:
                await self._refresh()
            except KvmeshError as err:
                self.not_ready_reason = err.message
            if self.not_ready_reason != was:
                log.info("ready" if self.ready else "not ready: %s", *([] if self.ready else [self.not_ready_reason]))
            self._on_ready(self.ready)
            await self._pause(READY_REFRESH_S if self.ready else UNREADY_REFRESH_S)

    async def _pause(self, seconds: float) -> None:
        self._poked.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._poked.wait()
                await asyncio.sleep(0.1)  # many requests meet the same trouble
        except TimeoutError:
            pass

    async def _refresh(self) -> None:
        card, instances = await self._conductor.look(self.model)
        self._on_instances({(i.instance.instance_id, i.instance.incarnation) for i in instances})
        if card is not None:
            self.facts = Facts.of(card)
        self.not_ready_reason = why_not_ready(self.model, card is not None, instances)


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
