"""POST /tokenize and POST /detokenize, as vLLM has them: the tokens of a text or a chat, and the text of tokens."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

import orjson
from pydantic import ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.config import GatewayLimits
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.generation import refused
from kvmesh.services.gateway.models import Model
from kvmesh.services.gateway.request_memory import prompts_bytes, tokenize_cost
from kvmesh.services.gateway.rest.bounded_call import Caller, QueryCall
from kvmesh.services.gateway.rest.chat import ChatMessage, TemplateVariables, Tools, check_tools, look_at_messages
from kvmesh.services.gateway.rest.openai import Strict, check_ids, drop_unsupported, first_error, refuse_unknown, wrong
from kvmesh.services.gateway.text.chat import Chat

# Field → values that ask for nothing; null always does.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (), "mm_processor_kwargs": (), "continue_final_message": (False,),
}  # fmt: skip
_TOKEN_BYTES = 256  # of a token that is made text, or text that is told as tokens

Body = TypeVar("Body", bound=Strict)


def _read(kind: type[Body], body: Any, limits: GatewayLimits) -> Body:
    """Validates a parsed JSON body. Raises InvalidRequest naming the first wrong field."""
    if not isinstance(body, dict):
        raise InvalidRequest("body: must be a JSON object", field="body")
    drop_unsupported(body, UNSUPPORTED)
    look_at_messages(body, limits)
    refuse_unknown(body, kind)
    try:
        return kind.model_validate(body, context={"limits": limits})
    except ValidationError as err:
        raise first_error(err) from None


def _model(core: GatewayCore, name: str | None, caller: Caller) -> Model:
    return core.models.only(caller.tenant) if name is None else core.models.find(name, caller.tenant)


class TokenizeBody(Strict):
    """Body of POST /tokenize: a `prompt` or the `messages` of a chat."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]})

    model: Annotated[str | None, Field(description="Default: the only one that the caller may use")] = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: Tools = ()
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    add_generation_prompt: Annotated[
        bool | None, Field(description="Of a chat: open for the assistant's answer. Default true")
    ] = None
    add_special_tokens: Annotated[
        bool | None, Field(description="Of a prompt: with those that the tokenizer adds. Default true")
    ] = None
    return_token_strs: bool | None = None

    @classmethod
    def read(cls, body: Any, limits: GatewayLimits) -> Self:
        """Validates a parsed JSON body, which it may change. Raises InvalidRequest naming the first wrong field."""
        found = _read(cls, body, limits)
        if (found.prompt is None) == (found.messages is None):
            raise InvalidRequest("prompt: give either prompt or messages", field="prompt")
        of_chats: dict[str, Any] = {"tools": found.tools, "chat_template_kwargs": found.chat_template_kwargs}
        of_chats["add_generation_prompt"] = found.add_generation_prompt
        for name, value in of_chats.items():
            if found.messages is None and value not in ((), {}, None):
                raise refused(name, value, "only messages have it")
        if found.messages is not None and found.add_special_tokens:
            raise refused("add_special_tokens", True, "the template of a chat writes its special tokens itself")
        check_tools("tools", found.tools, "")
        return found

    def to_tokenize(self) -> str | Chat:
        """Returns the text or the chat. Raises InvalidRequest for messages that do not go together."""
        if self.prompt is not None:
            return self.prompt
        if not self.messages:
            raise refused("messages", [], "must not be empty")
        variables = dict(self.chat_template_kwargs)
        if self.add_generation_prompt is False:
            variables["add_generation_prompt"] = False
        turns = tuple(message.turn(f"messages.{index}") for index, message in enumerate(self.messages))
        return Chat(turns, self.tools, template_args=variables)


class TokenizeCall(QueryCall[tuple[TokenizeBody, str | Chat]]):
    """POST /tokenize."""

    route = "tokenize"
    body_model = TokenizeBody

    async def read(self, body: Any, caller: Caller) -> tuple[TokenizeBody, str | Chat]:
        """See BoundedCall."""
        asked = TokenizeBody.read(body, self.core.config.limits)
        return asked, asked.to_tokenize()

    def kept_bytes(self, read: tuple[TokenizeBody, str | Chat]) -> int:
        """See BoundedCall."""
        return prompts_bytes((read[1],))

    async def compute(self, read: tuple[TokenizeBody, str | Chat], caller: Caller) -> bytes:
        """See QueryCall."""
        asked, prompt = read
        model = _model(self.core, asked.model, caller)
        longest = model.require().max_context_tokens
        special = asked.add_special_tokens is not False

        def work() -> bytes:
            ids = model.preparer.tokens(prompt, datetime.datetime.now, add_special_tokens=special)
            found: dict[str, Any] = {"count": len(ids), "max_model_len": longest, "tokens": ids}
            if asked.return_token_strs:
                found["token_strs"] = model.preparer.tokenizer.names(ids)
            return orjson.dumps(found)

        return await self.core.in_thread(tokenize_cost((prompt,)), work)


def _check_tokens(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise wrong("must be a list of token ids")
    check_ids("tokens", value)
    return value


class DetokenizeBody(Strict):
    """Body of POST /detokenize."""

    model: Annotated[str | None, Field(description="Default: the only one that the caller may use")] = None
    tokens: Annotated[
        list[int],
        PlainValidator(_check_tokens),
        WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}}),
    ]


class DetokenizeCall(QueryCall[DetokenizeBody]):
    """POST /detokenize."""

    route = "detokenize"
    body_model = DetokenizeBody

    async def read(self, body: Any, caller: Caller) -> DetokenizeBody:
        """See BoundedCall."""
        return _read(DetokenizeBody, body, self.core.config.limits)

    def kept_bytes(self, read: DetokenizeBody) -> int:
        """See BoundedCall."""
        return prompts_bytes((read.tokens,))

    async def compute(self, read: DetokenizeBody, caller: Caller) -> bytes:
        """See QueryCall."""
        model = _model(self.core, read.model, caller)
        vocabulary = model.require().vocab_size
        if (highest := max(read.tokens, default=0)) >= vocabulary:
            raise refused("tokens", highest, f"token id outside the vocabulary of {vocabulary}")
        decode = functools.partial(model.preparer.tokenizer.decode_all, read.tokens)
        return orjson.dumps({"prompt": await self.core.in_thread(_TOKEN_BYTES * len(read.tokens), decode)})
