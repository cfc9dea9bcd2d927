"""POST /inference/v1/generate: vLLM's token ids in, token ids out, as bodies and as bytes.

llm-d's sidecars and trainers speak it: they have rendered and tokenized already, and want no text back. What vLLM uses
it for besides, handing KV from one server to another (`kv_transfer_params`), is the mesh's own affair and refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import orjson
from pydantic import Field, PlainValidator, ValidationError, WithJsonSchema

from kvmesh.errors import InvalidRequest
from kvmesh.rpc.protocol import MAX_TOP_LOGPROBS
from kvmesh.services.gateway.api_keys import Tenant
from kvmesh.services.gateway.config import GatewayLimits
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.generation import MAX_TOKENS, Generation, between, brief, refused
from kvmesh.services.gateway.requests import Request
from kvmesh.services.gateway.rest.chat import chat_logprobs
from kvmesh.services.gateway.rest.frames import DONE, FrameOptions, prompt_logprobs, told_epochs, usage_of
from kvmesh.services.gateway.rest.interface import AnswerWriter, InterfaceBody
from kvmesh.services.gateway.rest.openai import (
    SamplingFields,
    ServiceFields,
    StreamOptions,
    check_ids,
    drop_unsupported,
    first_error,
    refuse_unknown,
    told,
    wrong,
)
from kvmesh.services.gateway.text.completion import Delta, TokenLogprob

MAX_ID_CHARS = 128
DEFAULT_TOKENS = 16  # of vLLM's SamplingParams, too
# Field → values that ask for nothing; null always does.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {"features": (), "kv_transfer_params": (), "ec_transfer_params": ()}
UNSUPPORTED_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "min_tokens": (0,), "stop_token_ids": ([],), "bad_words": ([],), "allowed_token_ids": ([],),
    "structured_outputs": (), "extra_args": ({},), "truncate_prompt_tokens": (), "include_stop_str_in_output": (False,),
    "logprob_token_ids": ([],), "thinking_token_budget": (),
}  # fmt: skip
# Of a rendered prompt, or of text that this interface does not answer.
IGNORED = ("assistant_tokens_mask", "token_offsets")
IGNORED_PARAMS = (
    "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind", "skip_clone",
    "flat_logprobs", "skip_reading_prefix_cache",
)  # fmt: skip


class TokenSamplingParams(SamplingFields):
    """`sampling_params`, as vLLM names them."""

    top_k: Annotated[int | None, told("Only so many of the likeliest tokens; 0 or -1: all", -1, MAX_TOKENS)] = None
    logprobs: Annotated[
        int | None, told("Log-probabilities of sampled tokens and of so many others", 0, MAX_TOP_LOGPROBS)
    ] = None

    prompt_logprobs: Annotated[
        int | None,
        told("Log-probabilities of the prompt's tokens and of so many others beside each", 0, MAX_TOP_LOGPROBS),
    ] = None

    def sampling(self) -> dict[str, Any]:
        """See SamplingFields."""
        found = super().sampling()
        return found | {"top_k": 0} if self.top_k == -1 else found


def _check_tokens(value: Any) -> list[int]:
    if not isinstance(value, list) or not value:
        raise wrong("must be a list of token ids that is not empty")
    check_ids("token_ids", value)
    return value


class GenerateTokensRequest(ServiceFields, InterfaceBody):
    """Body of POST /inference/v1/generate."""

    token_ids: Annotated[
        list[int],
        PlainValidator(_check_tokens),
        WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}),
    ]
    sampling_params: TokenSamplingParams
    request_id: Annotated[
        str | None, Field(description="Told again in the answer", json_schema_extra={"maxLength": MAX_ID_CHARS})
    ] = None
    model: Annotated[str | None, Field(description="Default: the only one that the caller may use")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None

    route: ClassVar[str] = "generate"

    @classmethod
    def read(cls, body: Any, limits: GatewayLimits) -> Self:
        """See InterfaceBody."""
        if not isinstance(body, dict):
            raise InvalidRequest("body: must be a JSON object", field="body")
        drop_unsupported(body, UNSUPPORTED)
        for name in IGNORED:
            body.pop(name, None)
        params = body.get("sampling_params")
        if isinstance(params, dict):
            drop_unsupported(params, UNSUPPORTED_PARAMS, "sampling_params.")
            for name in IGNORED_PARAMS:
                params.pop(name, None)
            refuse_unknown(params, TokenSamplingParams, "sampling_params.")
        refuse_unknown(body, cls)
        try:
            found = cls.model_validate(body, context={"limits": limits})
        except ValidationError as err:
            raise first_error(err) from None
        if found.stream_options is not None and not found.stream:
            raise refused("stream_options", body["stream_options"], "only allowed with stream=true")
        if found.request_id is not None and len(found.request_id) > MAX_ID_CHARS:
            raise refused("request_id", brief(found.request_id), f"may have at most {MAX_ID_CHARS} characters")
        return found

    @property
    def streams(self) -> bool:
        """See InterfaceBody."""
        return bool(self.stream)

    @property
    def tells_token_ids(self) -> bool:
        """See InterfaceBody."""
        return True

    async def resolve(self, core: GatewayCore, tenant: Tenant) -> None:
        """Finds the model of a request that names none."""
        if self.model is None:
            self.model = core.models.only(tenant).name

    def generation(self, limits: GatewayLimits) -> Generation:
        """See InterfaceBody."""
        params = self.sampling_params
        between("sampling_params.logprobs", params.logprobs, 0, MAX_TOP_LOGPROBS)
        between("sampling_params.prompt_logprobs", params.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        assert self.model is not None, "resolved"
        return Generation(
            model=self.model,
            prompts=(self.token_ids,),
            max_tokens=DEFAULT_TOKENS if params.max_tokens is None else params.max_tokens,
            cache_salt=self.cache_salt or "",
            logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            **params.sampling(),
            **self.service(),
        ).check(limits)

    def writer(self, request: Request, *, timings: bool) -> AnswerWriter:
        """See InterfaceBody."""
        options = self.stream_options or StreamOptions()
        told_too = FrameOptions(
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            timings=timings,
        )
        return TokensWriter(request, self.request_id or request.request_id, told_too)


class TokensWriter:
    """Writes answers as token ids (AnswerWriter). Logprobs are those of chats, with tokens named by their ids."""

    def __init__(self, request: Request, request_id: str, options: FrameOptions) -> None:
        self._request = request
        self._options = options
        self._id = {"request_id": request_id}
        self._unfinished = request.generation.choices
        self._opened = False

    def step(self, index: int, delta: Delta) -> bytes:
        """See AnswerWriter."""
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish or None,
            "token_ids": list(delta.token_ids),
            **told_epochs(self._request.choices[index].epochs_of(delta.first, len(delta.token_ids))),
        }
        body: dict[str, Any] = {**self._id, "choices": [choice]}
        if not self._opened:
            self._opened = True
            body |= self._of_prompt(index)
        if self._options.continuous_usage:
            body["usage"] = usage_of(self._request.choices[index]).as_json()
        self._unfinished -= bool(delta.finish)
        if not self._unfinished and not self._options.include_usage:
            body |= self._tail()
        return b"data: " + orjson.dumps(body) + b"\n\n"

    def end(self) -> bytes:
        """See AnswerWriter."""
        if not self._options.include_usage:
            return DONE
        usage = self._request.account.usage(self._request.choices)
        body = {**self._id, "choices": [], "usage": usage.as_json(), **self._tail()}
        return b"data: " + orjson.dumps(body) + b"\n\n" + DONE

    def whole(self) -> bytes:
        """See AnswerWriter."""
        request = self._request
        listed = [
            {
                "index": index,
                "logprobs": self._logprobs(choice.whole.entries),
                "finish_reason": choice.answer.finish,
                "token_ids": choice.answer.said.tolist(),
                **told_epochs(choice.epochs_of(0, len(choice.answer.said))),
            }
            for index, choice in enumerate(request.choices)
        ]
        return orjson.dumps(
            {
                **self._id,
                "model": request.generation.model,
                "created": int(time.time()),
                "choices": listed,
                "usage": request.account.usage(request.choices).as_json(),
                "prompt_logprobs": None,
                "kv_transfer_params": None,
                **self._of_prompt(0),
                **self._tail(),
            }
        )

    def _of_prompt(self, index: int) -> dict[str, Any]:
        return prompt_logprobs(self._request, index, self._request.generation.prompt_logprobs)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._request.generation.logprobs < 0:
            return None
        return chat_logprobs(entries, lambda token: (f"token_id:{token}", self._request.piece(token)[1]))

    def _tail(self) -> dict[str, Any]:
        return {"kvmesh": self._request.account.stages(self._request.choices)} if self._options.timings else {}
