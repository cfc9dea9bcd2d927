"""POST /v1/rollout/...: what a trainer orders for a model whose weights it changes: pause, resume,
update_weights, gather.

Only where the gateway is configured with `rollout`; with API keys, only for keys with `trainer = true`.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, Field, ValidationError

from kvmesh.errors import InvalidRequest, PermissionDenied
from kvmesh.kvcache.keys import MAX_WEIGHTS_EPOCH
from kvmesh.rpc.pb import common_pb2, conductor_pb2
from kvmesh.rpc.status import from_detail
from kvmesh.services.gateway.api_keys import Tenant
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.generation import refused
from kvmesh.services.gateway.rest.bounded_call import Caller, QueryCall
from kvmesh.services.gateway.rest.openai import Strict, first_error, refuse_unknown

# As vLLM calls them, too.
MODES = {
    "keep": common_pb2.PAUSE_MODE_KEEP,
    "abort": common_pb2.PAUSE_MODE_ABORT,
    "finish": common_pb2.PAUSE_MODE_FINISH,
    "wait": common_pb2.PAUSE_MODE_FINISH,
}
MOST_S = 3600.0
MOST_PAUSE_S = 7 * 86_400.0
Mode = Annotated[
    str | None,
    Field(
        description="Of requests in flight: `keep` (they go on with the new weights; the default), `abort`, or "
        "`finish` (they end first)"
    ),
]
Seconds = Annotated[float | None, Field(description="For all of it", gt=0, le=MOST_S)]
Body = TypeVar("Body", bound=Strict)


class PauseBody(Strict):
    """Body of POST /v1/rollout/pause."""

    model: str | None = None
    mode: Mode = None
    timeout_s: Seconds = None
    for_s: Annotated[
        float | None,
        Field(description="The model goes on by itself then. Default: when it is resumed", gt=0, le=MOST_PAUSE_S),
    ] = None


class ResumeBody(Strict):
    """Body of POST /v1/rollout/resume."""

    model: str | None = None


class TensorBody(BaseModel):
    """Where a trainer has one tensor."""

    name: str
    dtype: str
    shape: list[int]
    offset: int


class UpdateWeightsBody(Strict):
    """Body of POST /v1/rollout/update_weights: a `path` that the ranks' hosts see, or a trainer's segment."""

    model: str | None = None
    path: str | None = None
    segment: Annotated[str | None, Field(description="The trainer's segment descriptor, base64")] = None
    tensors: list[TensorBody] = Field(default_factory=list)
    epoch: Annotated[
        int | None,
        Field(description="Names the weights for ever. Default: made of the time", ge=1, le=MAX_WEIGHTS_EPOCH),
    ] = None
    mode: Mode = None
    timeout_s: Seconds = None
    stay_paused: bool | None = None


class GatherBody(Strict):
    """Body of POST /v1/rollout/gather."""

    model: str | None = None
    slower: Annotated[
        float | None,
        Field(description="Share by which a step may be longer than one of a single row: 0.25", ge=0.01, le=10),
    ] = None
    timeout_s: Seconds = None


class SleepBody(Strict):
    """Body of POST /v1/rollout/sleep."""

    model: str | None = None
    level: Annotated[
        int | None,
        Field(description="1 (the default): weights are kept in host memory. 2: they are dropped", ge=1, le=2),
    ] = None
    mode: Mode = None
    timeout_s: Seconds = None


class WakeBody(Strict):
    """Body of POST /v1/rollout/wake."""

    model: str | None = None
    timeout_s: Seconds = None


class RolloutCall(QueryCall[Body]):
    """One order. `check` says who may give it."""

    body_model: ClassVar[type[Strict]]
    route = "rollout"

    async def read(self, body: Any, caller: Caller) -> Body:
        """See BoundedCall. Raises PermissionDenied first."""
        check_trainer(self.core, caller.tenant)
        if not isinstance(body, dict):
            raise InvalidRequest("body: must be a JSON object", field="body")
        refuse_unknown(body, self.body_model)
        try:
            return self.body_model.model_validate(body)  # type: ignore[return-value]
        except ValidationError as err:
            raise first_error(err) from None

    def kept_bytes(self, read: Body) -> int:
        """See BoundedCall."""
        return len(read.model_dump_json())

    def _model(self, name: str | None, caller: Caller) -> str:
        models = self.core.models
        return (models.only(caller.tenant) if name is None else models.find(name, caller.tenant)).name


class PauseCall(RolloutCall[PauseBody]):
    """POST /v1/rollout/pause."""

    body_model = PauseBody

    async def compute(self, read: PauseBody, caller: Caller) -> bytes:
        """See QueryCall."""
        timeout_s = read.timeout_s or 60.0
        request = conductor_pb2.PauseModelRequest(
            model=self._model(read.model, caller),
            mode=_mode(read.mode),
            deadline_ms=round(timeout_s * 1000),
            for_ms=math.ceil((read.for_s or 0) * 1000),
        )
        answer = await self.core.conductor.order("PauseModel", request, timeout_s)
        return orjson.dumps({"model": answer.model, "ended": answer.ended, "instances": answer.instances})


class ResumeCall(RolloutCall[ResumeBody]):
    """POST /v1/rollout/resume."""

    body_model = ResumeBody

    async def compute(self, read: ResumeBody, caller: Caller) -> bytes:
        """See QueryCall."""
        request = conductor_pb2.ResumeModelRequest(model=self._model(read.model, caller))
        answer = await self.core.conductor.order("ResumeModel", request, 30.0)
        told = {"model": answer.model, "weights_epoch": answer.weights_epoch, "instances": answer.instances}
        return orjson.dumps(told)


class GatherCall(RolloutCall[GatherBody]):
    """POST /v1/rollout/gather."""

    body_model = GatherBody

    async def compute(self, read: GatherBody, caller: Caller) -> bytes:
        """See QueryCall."""
        timeout_s = read.timeout_s or 60.0
        request = conductor_pb2.GatherModelRequest(
            model=self._model(read.model, caller),
            slower_percent=round(100 * (read.slower or 0)),
            deadline_ms=round(timeout_s * 1000),
        )
        told = await self.core.conductor.order("GatherModel", request, timeout_s)
        return orjson.dumps(
            {
                "model": told.model,
                "kept": list(told.kept),
                "freed": list(told.freed),
                "moved": told.moved,
                "why": told.why,
            }
        )


class UpdateWeightsCall(RolloutCall[UpdateWeightsBody]):
    """POST /v1/rollout/update_weights."""

    body_model = UpdateWeightsBody

    async def compute(self, read: UpdateWeightsBody, caller: Caller) -> bytes:
        """See QueryCall."""
        timeout_s = read.timeout_s or 600.0
        try:
            segment = base64.b64decode(read.segment or "", validate=True)
        except binascii.Error:
            raise InvalidRequest("segment: is not base64", field="segment") from None
        for number, one in enumerate(read.tensors):
            if not 0 <= one.offset < 2**64 or not all(0 < size < 2**63 for size in one.shape):
                raise refused(f"tensors.{number}", one.name, "its shape and offset are positive")
        request = conductor_pb2.UpdateModelWeightsRequest(
            model=self._model(read.model, caller),
            weights_epoch=read.epoch or 0,
            source=common_pb2.WeightsSource(
                path=read.path or "",
                segment_descriptor=segment,
                tensors=[
                    common_pb2.TrainerTensor(name=one.name, dtype=one.dtype, shape=one.shape, offset=one.offset)
                    for one in read.tensors
                ],
            ),
            mode=_mode(read.mode),
            deadline_ms=round(timeout_s * 1000),
            stay_paused=bool(read.stay_paused),
        )
        answer = await self.core.conductor.order("UpdateModelWeights", request, timeout_s)
        told = {
            "model": answer.model,
            "weights_epoch": answer.weights_epoch,
            "paused_s": answer.paused_seconds,
            "ended": answer.ended,
            "instances": [_taken(one) for one in answer.taken],
        }
        return orjson.dumps(told)


class SleepCall(RolloutCall[SleepBody]):
    """POST /v1/rollout/sleep."""

    body_model = SleepBody

    async def compute(self, read: SleepBody, caller: Caller) -> bytes:
        """See QueryCall."""
        timeout_s = read.timeout_s or 60.0
        request = conductor_pb2.SleepModelRequest(
            model=self._model(read.model, caller),
            level=read.level or 1,
            mode=_mode(read.mode),
            deadline_ms=round(timeout_s * 1000),
        )
        answer = await self.core.conductor.order("SleepModel", request, timeout_s)
        instances = [
            {
                "instance": one.instance.instance_id,
                "level": one.level,
                "page_bytes": one.page_bytes,
                "weight_bytes": one.weight_bytes,
            }
            for one in answer.released
        ]
        return orjson.dumps({"model": answer.model, "ended": answer.ended, "instances": instances})


class WakeCall(RolloutCall[WakeBody]):
    """POST /v1/rollout/wake."""

    body_model = WakeBody

    async def compute(self, read: WakeBody, caller: Caller) -> bytes:
        """See QueryCall."""
        timeout_s = read.timeout_s or 600.0
        request = conductor_pb2.WakeModelRequest(
            model=self._model(read.model, caller), deadline_ms=round(timeout_s * 1000)
        )
        answer = await self.core.conductor.order("WakeModel", request, timeout_s)
        told = {
            "model": answer.model,
            "weights_epoch": answer.weights_epoch,
            "instances": answer.instances,
        }
        return orjson.dumps(told)


CALLS: Mapping[str, type[QueryCall[Any]]] = {
    "/v1/rollout/pause": PauseCall,
    "/v1/rollout/resume": ResumeCall,
    "/v1/rollout/gather": GatherCall,
    "/v1/rollout/update_weights": UpdateWeightsCall,
    "/v1/rollout/sleep": SleepCall,
    "/v1/rollout/wake": WakeCall,
}
"""Served, and documented in docs/howto/rollouts.md, where a gateway's setting `rollout` is on."""


def check_trainer(core: GatewayCore, tenant: Tenant) -> None:
    """Raises PermissionDenied for one who may not change what a gateway's models say."""
    if core.keys.required and not tenant.trainer:
        raise PermissionDenied(f"the API key of {tenant.name!r} is not a trainer's (`trainer = true` in its entry)")


def _mode(name: str | None) -> Any:
    if name is not None and name not in MODES:
        raise refused("mode", name, f"must be one of {', '.join(MODES)}")
    return MODES[name or "keep"]


def _taken(one: common_pb2.WeightsTaken) -> dict[str, Any]:
    told: dict[str, Any] = {"instance": one.instance.instance_id, "weights_epoch": one.weights_epoch}
    if one.HasField("error"):
        return told | {"error": from_detail(one.error).message}
    return told | {"bytes": one.bytes, "seconds": one.seconds, "apply_s": one.apply_seconds}
