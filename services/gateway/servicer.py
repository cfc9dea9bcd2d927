"""The gRPC front door: kvmesh.v1.Gateway. The same path as REST, without the HTTP."""

from __future__ import annotations

import re
import time
import uuid
from typing import Any

from kvmesh.errors import BodyTooLarge, DeadlinePassed, InvalidRequest
from kvmesh.kvcache.keys import TOKEN_BYTES, unpack_tokens
from kvmesh.rpc.pb import common_pb2, conductor_pb2, gateway_pb2, gateway_pb2_grpc
from kvmesh.rpc.protocol import MAX_TOP_LOGPROBS
from kvmesh.rpc.public_calls import HeldMemory, Metadata, few_fields
from kvmesh.services.gateway.api_keys import Tenant
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.generation import BATCH, Generation, Prompt, between, refused
from kvmesh.services.gateway.key_file import KeyFile
from kvmesh.services.gateway.request_memory import REQUEST_BYTES, RequestMemory
from kvmesh.services.gateway.requests import Request
from kvmesh.services.gateway.text.chat import Chat, TemplateMessage
from kvmesh.services.gateway.text.completion import Delta
from kvmesh.telemetry.spans import context_from_metadata

ROLES = ("system", "developer", "user", "assistant")
SERVICE = "kvmesh.v1.Gateway"
AUTHORIZATION = "authorization"
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


STATUS = f"/{SERVICE}/GetGatewayStatus"
# Of a request: 300 biases, 16 stops, every other field once; and of a chat's messages.
_MOST_FIELDS = 16_384
_CHAT = gateway_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["chat"].number


class GatewayPolicy:
    """What a call of the gateway's gRPC needs before its message is received, and before it is parsed."""

    def __init__(self, keys: KeyFile, memory: RequestMemory) -> None:
        self._keys = keys
        self._memory = memory
        self.keys_required = keys.required

    def authorize(self, method: str, metadata: Metadata) -> str:
        """See CallPolicy."""
        return self._keys.tenant(_authorization(metadata), "grpc").name

    def hold(self, method: str, message: bytes) -> HeldMemory:
        """See CallPolicy."""
        reservation = self._memory.reserve(REQUEST_BYTES + 2 * len(message))  # as a message, and as what it asks for
        if not few_fields(message, _MOST_FIELDS, nested=(_CHAT,)):
            reservation.release()
            raise InvalidRequest(f"message: has more than {_MOST_FIELDS} fields", field="message")
        return reservation


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """`core` is what REST uses, too."""

    def __init__(self, core: GatewayCore) -> None:
        self._core = core

    # A coroutine that writes, where the stubs expect a generator: only so can a write have a deadline.
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: gateway_pb2.GenerateRequest, context: Any
    ) -> None:
        """Tokens as they come; usage and timings with the last. Cancelling the call cancels the request."""
        received_ns = time.monotonic_ns()
        metadata = context.invocation_metadata()
        tenant = self._core.keys.tenant(_authorization(metadata), "grpc")
        request_id = engine_id(request.request_id)
        wanted = to_generation(request, self._core, tenant)
        running = Request(
            self._core,
            wanted,
            request_id=request_id,
            given_id=request.request_id,
            route="grpc",
            stream=True,
            parent=context_from_metadata(metadata),
            received_ns=received_ns,
            token_ids=True,
            tenant=tenant,
        )
        scored = None  # what has been told of the prompt
        try:
            async with running.guard(), running:
                async for step in running:
                    for _, delta in step:
                        response = self._response(running, delta)
                        if scored is None and (scored := running.choices[0].scored_prompt) is not None:
                            response.prompt_logprobs.CopyFrom(scored.message)
                        await context.write(response)
                        running.account.wrote()
        except TimeoutError:
            raise DeadlinePassed("the deadline passed while the client took nothing") from None

    def _response(self, running: Request, delta: Delta) -> gateway_pb2.GenerateResponse:
        response = gateway_pb2.GenerateResponse(
            request_id=running.request_id,
            text=delta.text,
            token_ids=delta.token_ids,
            first_token_index=delta.first,
            finish_reason=delta.finish,
            logprobs=[
                common_pb2.TokenLogprobs(
                    logprob=one.logprob,
                    top=[common_pb2.TopLogprob(token_id=token, logprob=logprob) for token, logprob in one.top],
                )
                for one in delta.logprobs
            ],
            epochs=[
                gateway_pb2.TokenEpoch(first_token_index=first, weights_epoch=epoch)
                for first, epoch in running.choices[0].epochs_of(delta.first, len(delta.token_ids))
            ],
        )
        if delta.finish:
            usage = running.account.usage(running.choices)
            response.usage.prompt_tokens = usage.prompt_tokens
            response.usage.completion_tokens = usage.completion_tokens
            response.usage.cached_tokens = usage.cached_tokens
            response.timings.CopyFrom(running.choices[0].timings)
        return response

    async def GetGatewayStatus(  # noqa: N802
        self, request: gateway_pb2.GetGatewayStatusRequest, context: Any
    ) -> gateway_pb2.GetGatewayStatusResponse:
        """Live counts."""
        core = self._core
        return gateway_pb2.GetGatewayStatusResponse(
            requests=len(core.running),
            streams=len(core.sessions),
            models=core.models.names,
            ready=not core.not_ready_reason,
            not_ready_reason=core.not_ready_reason,
            model_status=[
                gateway_pb2.GatewayModel(name=model.name, ready=model.ready, not_ready_reason=model.not_ready_reason)
                for model in core.models
            ],
        )


def _authorization(metadata: Metadata) -> bytes | None:
    """The Authorization header of a call, if it has one."""
    for key, value in metadata or ():
        if key == AUTHORIZATION:
            return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    return None


def engine_id(given: str) -> str:
    """The name of a request inside the mesh: unique, whatever a client called it."""
    fresh = uuid.uuid4().hex
    if not given:
        return fresh
    if not _ID.fullmatch(given):
        raise refused("request_id", given, "must be 1 to 128 of A-Z a-z 0-9 . _ : / + = @ -")
    return f"{given}-{fresh[:8]}"


def to_generation(request: gateway_pb2.GenerateRequest, core: GatewayCore, tenant: Tenant) -> Generation:
    """The request in the gateway's own terms. InvalidRequest names field and value; BodyTooLarge: as over REST."""
    if request.ByteSize() > core.config.max_body_bytes:
        raise BodyTooLarge(f"message: longer than {core.config.max_body_bytes} bytes", field="message")
    if request.top_logprobs and not request.logprobs:
        raise refused("top_logprobs", request.top_logprobs, "only allowed with logprobs=true")
    between("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    return Generation(
        model=request.model or core.models.only(tenant).name,
        prompts=(_prompt(request),),
        max_tokens=request.max_tokens or None,
        temperature=request.temperature if request.HasField("temperature") else 1.0,
        top_p=request.top_p if request.HasField("top_p") else 1.0,
        top_k=request.top_k,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty or 1.0,
        logit_bias=tuple((one.token_id, one.bias) for one in request.logit_bias),
        seed=request.seed if request.HasField("seed") else None,
        ignore_eos=request.ignore_eos,
        stops=tuple(request.stop),
        logprobs=request.top_logprobs if request.logprobs else -1,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else -1,
        cache_salt=request.cache_salt,
        priority=request.priority,
        ttft_slo_ms=request.ttft_slo_ms or None,
        tbt_slo_ms=request.tbt_slo_ms or None,
        lane=_lane(request),
        session=request.session or None,
        origin=request.origin or None,
        expected_tokens=request.expected_tokens or None,
        grammar=request.grammar,
        timeout_s=request.timeout_ms / 1000 if request.timeout_ms else None,
    ).check(core.config.limits)


def _lane(request: gateway_pb2.GenerateRequest) -> str | None:
    if request.lane not in conductor_pb2.Lane.values():
        raise refused("lane", request.lane, f"must be one of {', '.join(conductor_pb2.Lane.keys())}")
    return BATCH if request.lane == conductor_pb2.LANE_BATCH else None


def _prompt(request: gateway_pb2.GenerateRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        if len(request.token_ids) % TOKEN_BYTES:
            raise InvalidRequest(
                f"token_ids: {len(request.token_ids)} bytes; ids are little-endian u32, {TOKEN_BYTES} bytes each",
                field="token_ids",
            )
        return unpack_tokens(request.token_ids)
    if kind == "chat":
        for index, message in enumerate(request.chat.messages):
            if message.role not in ROLES:
                raise refused(f"chat.messages.{index}.role", message.role, f"must be one of {', '.join(ROLES)}")
        return Chat(tuple(TemplateMessage(message.role, message.content) for message in request.chat.messages))
    raise InvalidRequest("prompt: required and missing; give text, token_ids or chat", field="prompt")
