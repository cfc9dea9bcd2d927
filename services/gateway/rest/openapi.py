"""What /openapi.json says of the REST API: the body of every request, and every answer of every endpoint with its
body. `tests/gateway/rest/test_openapi.py` and schemathesis hold it against the running gateway."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from kvmesh.services.gateway.rest.chat import ChatRequest
from kvmesh.services.gateway.rest.completions import CompletionRequest
from kvmesh.services.gateway.rest.generate import GenerateTokensRequest
from kvmesh.services.gateway.rest.interfaces import INTERFACES, QUERIES
from kvmesh.services.gateway.rest.messages import CountTokensRequest, MessagesRequest
from kvmesh.services.gateway.rest.responses import ResponseRequest
from kvmesh.services.gateway.rest.tokenize import DetokenizeBody, TokenizeBody

TITLE = "kvmesh"
Json = dict[str, Any]

_TEXT = "Large language models over a mesh of prefill and decode instances. OpenAI-compatible."
_REF = "#/components/schemas/{model}"
_EXAMPLES: dict[Any, Json] = {
    ChatRequest: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32},
    CompletionRequest: {"prompt": "Hello", "max_tokens": 32, "temperature": 0},
    MessagesRequest: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32},
    CountTokensRequest: {"messages": [{"role": "user", "content": "Hello"}]},
    TokenizeBody: {"prompt": "Hello"},
    DetokenizeBody: {"tokens": [1, 2, 3]},
    GenerateTokensRequest: {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 32}},
    ResponseRequest: {"input": "Hello", "max_output_tokens": 32, "store": False},
}

# Refusals by the connection itself, before the request has reached an endpoint: a line of text, not an error object.
_BY_CONNECTION = {
    "400": "What was sent is no HTTP",
    "408": "The request's head did not arrive in time",
    "414": "The URL is too long",
    "431": "The head is too large",
}
_EVERYWHERE = {
    "403": "Host or Origin names another site, where the gateway checks them (allowed_hosts)",
    "500": "The gateway failed; a defect",
}
_WITH_KEYS = {"401": "No valid API key, where the gateway asks for one"}
_GENERATING = _WITH_KEYS | {
    "400": "A field is unknown, not supported or out of range; the prompt is too long",
    "404": "Unknown model",
    "412": "A service of the mesh speaks another version of the protocol",
    "413": "The body is too long",
    "429": "The mesh cannot meet its latency targets now; Retry-After tells when to come again",
    "503": "No instance can serve now; Retry-After tells when to come again",
    "504": "The request's deadline passed, or its body came too slowly",
}
# As Anthropic's clients know it: 529 where the others answer 503.
_MESSAGES = {("529" if status == "503" else status): text for status, text in _GENERATING.items()}

_STORED = _WITH_KEYS | {
    "400": "A parameter is out of range; the response has ended, and cannot be cancelled",
    "404": "No such response is stored, or it is another tenant's",
    "503": "The store of responses does not answer; Retry-After tells when to come again",
}


def _object(required: Json, optional: Json | None = None, *, more: bool = False) -> Json:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": more}


def _list(of: Json) -> Json:
    return {"type": "array", "items": of}


def _one_of(*values: str) -> Json:
    return {"type": "string", "enum": [*values]}


def _ref(name: str) -> Json:
    return {"$ref": _REF.format(model=name)}


_STRING, _INTEGER, _NUMBER, _ANYTHING = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "object"}
_TEXT_OR_NULL = {"type": "string", "nullable": True}
_OBJECT_OR_NULL = {"type": "object", "nullable": True}
_STATE = {"not_ready_reason": _STRING}
_FACTS = {"max_context_tokens": _INTEGER, "vocab_size": _INTEGER, "block_tokens": _INTEGER}
_MODELS = {"models": {"type": "object", "additionalProperties": _object({"ready": {"type": "boolean"}}, _STATE)}}


_IDS = {"type": "array", "items": _INTEGER}
_TIMINGS = {"kvmesh": {**_ANYTHING, "description": "Where the time went, with the header x-kvmesh-timings: 1"}}


def _answer(kind: str, text: Json, more_of_choices: Json, more: Json) -> Json:
    """A whole answer; `text`: where a choice has its text; what follows it is there when it was asked for."""
    choice = {"index": _INTEGER, **text, "logprobs": _OBJECT_OR_NULL, "finish_reason": _STRING}
    return _object(
        {
            "id": _STRING,
            "object": _one_of(kind),
            "created": _INTEGER,
            "model": _STRING,
            "choices": _list(_object(choice, {"token_ids": _IDS, **more_of_choices})),
            "usage": _ref("Usage"),
        },
        {**_TIMINGS, **more},
    )


_PROMPT_LOGPROBS = {
    **_list(
        {
            "type": "object",
            "nullable": True,
            "additionalProperties": _object({"logprob": _NUMBER, "rank": _INTEGER, "decoded_token": _STRING}),
        }
    ),
    "description": "One entry for each token of the prompt, by token id: its own first, then the likeliest; the first "
    "token's is null",
}
_TOOL_CALL = _object(
    {"id": _STRING, "type": _one_of("function"), "function": _object({"name": _STRING, "arguments": _STRING})}
)

_LOGPROB = {"token": _STRING, "logprob": _NUMBER, "bytes": _list(_INTEGER)}
_OUTPUT_TEXT = _object(
    {
        "type": _one_of("output_text"),
        "text": _STRING,
        "annotations": _list(_ANYTHING),
        "logprobs": _list(_object({**_LOGPROB, "top_logprobs": _list(_object(_LOGPROB))})),
    }
)
_RESPONSE_ITEM = {
    **_object({"type": _STRING, "id": _STRING, "status": _STRING}, more=True),
    "description": "A message, reasoning, a call, or a call's output",
}
_RESPONSE = _object(
    {
        "id": _STRING,
        "object": _one_of("response"),
        "created_at": _INTEGER,
        "completed_at": {"type": "integer", "nullable": True},
        "status": _one_of("completed", "incomplete", "failed", "cancelled", "in_progress"),
        "error": _OBJECT_OR_NULL,
        "incomplete_details": _OBJECT_OR_NULL,
        "model": _STRING,
        "previous_response_id": _TEXT_OR_NULL,
        "instructions": _TEXT_OR_NULL,
        "output": _list(_ref("ResponseItem")),
        "tools": _list(_ANYTHING),
        "tool_choice": {"description": "As in the request: a word, or an object that names a tool"},
        "parallel_tool_calls": {"type": "boolean"},
        "max_output_tokens": {"type": "integer", "nullable": True},
        "max_tool_calls": {"type": "integer", "nullable": True},
        "temperature": _NUMBER,
        "top_p": _NUMBER,
        "presence_penalty": _NUMBER,
        "frequency_penalty": _NUMBER,
        "top_logprobs": _INTEGER,
        "reasoning": _object({"effort": _TEXT_OR_NULL, "summary": _TEXT_OR_NULL}),
        "text": _ANYTHING,
        "truncation": _one_of("disabled"),
        "background": {"type": "boolean"},
        "store": {"type": "boolean"},
        "service_tier": _one_of("default", "flex"),
        "metadata": {"type": "object", "additionalProperties": _STRING},
        "user": _TEXT_OR_NULL,
        "safety_identifier": _TEXT_OR_NULL,
        "prompt_cache_key": _TEXT_OR_NULL,
        "usage": {"description": "Null while it is in progress", "anyOf": [_ref("ResponseUsage"), _OBJECT_OR_NULL]},
    },
    {"kvmesh": {**_ANYTHING, "description": "Where the time went, with the header x-kvmesh-timings: 1"}},
)

SCHEMAS: dict[str, Json] = {
    "Error": _object(
        {"error": _object({"message": _STRING, "type": _STRING, "param": _TEXT_OR_NULL, "code": _STRING})},
    ),
    "Model": _object(
        {
            "id": _STRING,
            "object": _one_of("model"),
            "created": _INTEGER,
            "owned_by": _STRING,
            "ready": {"type": "boolean"},
        },
        _FACTS | _STATE,
    ),
    "Models": _object({"object": _one_of("list"), "data": _list(_ref("Model"))}),
    "Health": _object({"status": _one_of("ok"), **_MODELS}),
    "Ready": _object({"status": _one_of("ready"), **_MODELS}),
    "NotReady": _object({"status": _one_of("not ready"), "reason": _STRING, **_MODELS}),
    "Usage": _object(
        {
            "prompt_tokens": _INTEGER,
            "completion_tokens": _INTEGER,
            "total_tokens": _INTEGER,
            "prompt_tokens_details": _object({"cached_tokens": _INTEGER}),
            "completion_tokens_details": _object({"reasoning_tokens": _INTEGER}),
        }
    ),
    "ChatCompletion": _answer(
        "chat.completion",
        {
            "message": _object(
                {"role": _one_of("assistant"), "content": _TEXT_OR_NULL, "refusal": _TEXT_OR_NULL},
                {"reasoning_content": _STRING, "tool_calls": _list(_TOOL_CALL)},
            )
        },
        {},
        {"prompt_token_ids": _IDS, "prompt_logprobs": _PROMPT_LOGPROBS},
    ),
    "Completion": _answer(
        "text_completion",
        {"text": _STRING},
        {"prompt_token_ids": _IDS, "prompt_logprobs": _PROMPT_LOGPROBS},
        {},
    ),
    "Tokenized": _object(
        {"count": _INTEGER, "max_model_len": _INTEGER, "tokens": _IDS}, {"token_strs": _list(_STRING)}
    ),
    "Detokenized": _object({"prompt": _STRING}),
    "GeneratedTokens": _object(
        {
            "request_id": _STRING,
            "model": _STRING,
            "created": _INTEGER,
            "choices": _list(
                _object(
                    {
                        "index": _INTEGER,
                        "logprobs": _OBJECT_OR_NULL,
                        "finish_reason": _STRING,
                        "token_ids": _IDS,
                        "weights_epochs": _list(_list(_INTEGER)),
                    }
                )
            ),
            "usage": _ref("Usage"),
            "prompt_logprobs": {**_PROMPT_LOGPROBS, "nullable": True},
            "kv_transfer_params": _OBJECT_OR_NULL,
        },
        _TIMINGS,
    ),
    "AnthropicError": _object(
        {
            "type": _one_of("error"),
            "error": _object({"type": _STRING, "message": _STRING}),
            "request_id": _TEXT_OR_NULL,
        }
    ),
    "Message": _object(
        {
            "id": _STRING,
            "type": _one_of("message"),
            "role": _one_of("assistant"),
            "model": _STRING,
            "content": _list(
                _object(
                    {"type": _one_of("text", "thinking", "tool_use")},
                    {
                        "text": _STRING,
                        "thinking": _STRING,
                        "signature": _STRING,
                        "id": _STRING,
                        "name": _STRING,
                        "input": _ANYTHING,
                    },
                )
            ),
            "stop_reason": _one_of(
                "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
            ),
            "stop_sequence": _TEXT_OR_NULL,
            "usage": _object(
                {
                    "input_tokens": {"type": "integer", "description": "Without those that were cached"},
                    "cache_creation_input_tokens": _INTEGER,
                    "cache_read_input_tokens": _INTEGER,
                    "output_tokens": _INTEGER,
                    "output_tokens_details": _object({"thinking_tokens": _INTEGER}),
                }
            ),
        },
        {"kvmesh": {**_ANYTHING, "description": "Where the time went, with the header x-kvmesh-timings: 1"}},
    ),
    "InputTokens": _object({"input_tokens": _INTEGER}),
    "Response": _RESPONSE,
    "ResponseItem": _RESPONSE_ITEM,
    "ResponseOutputText": _OUTPUT_TEXT,
    "ResponseUsage": _object(
        {
            "input_tokens": _INTEGER,
            "input_tokens_details": _object({"cached_tokens": _INTEGER, "cache_write_tokens": _INTEGER}),
            "output_tokens": _INTEGER,
            "output_tokens_details": _object({"reasoning_tokens": _INTEGER}),
            "total_tokens": _INTEGER,
        }
    ),
    "DeletedResponse": _object({"id": _STRING, "object": _one_of("response"), "deleted": {"type": "boolean"}}),
    "ResponseItems": _object(
        {
            "object": _one_of("list"),
            "data": _list(_ref("ResponseItem")),
            "first_id": _STRING,
            "last_id": _STRING,
            "has_more": {"type": "boolean"},
        }
    ),
}


def _said(description: str, content: Json, headers: Json | None = None) -> Json:
    return {"description": description, "content": content, **({"headers": headers} if headers else {})}


def _json(name: str) -> Json:
    return {"application/json": {"schema": _ref(name)}}


def _header(description: str, kind: Json) -> Json:
    return {"description": description, "schema": kind}


_LATER = {
    "Retry-After": _header("Seconds", _INTEGER),
    "Retry-After-Ms": _header("The same in milliseconds", _INTEGER),
}
_HEADERS = {"401": {"WWW-Authenticate": _header("Bearer", _STRING)}, "429": _LATER, "503": _LATER, "529": _LATER}


def _failures(texts: dict[str, str], error: str = "Error") -> dict[str, Json]:
    """By status: an error object of an endpoint (`error` is its name; that of a foreign host is always OpenAI's), a
    line of text of the connection, or (400) either."""
    found: dict[str, Json] = {}
    for status in sorted({*texts, *_EVERYWHERE, *_BY_CONNECTION}):
        why, content = [], {}
        if own := texts.get(status) or _EVERYWHERE.get(status):
            why, content = [own], _json("Error" if status == "403" else error)
        if early := _BY_CONNECTION.get(status):
            why, content = [*why, early], {**content, "text/plain": {"schema": _STRING}}
        found[status] = _said("; ".join(why), content, _HEADERS.get(status))
    return found


_EVENT = {
    "description": "A server-sent event; its data is one chunk as JSON, of the last event [DONE]",
    **_object({"data": _STRING}, more=True),
}


_NAMED_EVENT = {
    "description": "A server-sent event; its data is JSON of the type that its name says",
    **_object({"event": _STRING, "data": _STRING}, more=True),
}


def _streamed(name: str, event: Json) -> Json:
    return {**_json(name), "text/event-stream": {"schema": event}}


def _generated(name: str) -> dict[str, Json]:
    return {"200": _said("OpenAI's answer; with stream=true, server-sent events", _streamed(name, _EVENT))}


RESPONSES: dict[str, dict[str, Json]] = {
    "/v1/chat/completions": _failures(_GENERATING) | _generated("ChatCompletion"),
    "/v1/completions": _failures(_GENERATING) | _generated("Completion"),
    "/v1/messages": _failures(_MESSAGES, "AnthropicError")
    | {"200": _said("Anthropic's answer; with stream=true, server-sent events", _streamed("Message", _NAMED_EVENT))},
    "/v1/messages/count_tokens": _failures(_MESSAGES, "AnthropicError")
    | {"200": _said("The prompt's tokens, cached ones included", _json("InputTokens"))},
    "/inference/v1/generate": _failures(_GENERATING)
    | {"200": _said("Token ids; with stream=true, server-sent events", _streamed("GeneratedTokens", _EVENT))},
    "/tokenize": _failures(_GENERATING) | {"200": _said("Its tokens", _json("Tokenized"))},
    "/detokenize": _failures(_GENERATING) | {"200": _said("Their text", _json("Detokenized"))},
    "/v1/responses": _failures(_GENERATING | {"499": "Cancelled, before the stream had begun"})
    | {"200": _said("OpenAI's answer; with stream=true, server-sent events", _streamed("Response", _NAMED_EVENT))},
    "/v1/responses/{response_id}": _failures(_STORED)
    | {
        "200": _said(
            "The response; to DELETE, that it is forgotten",
            {"application/json": {"schema": {"anyOf": [_ref("Response"), _ref("DeletedResponse")]}}},
        )
    },
    "/v1/responses/{response_id}/cancel": _failures(_STORED)
    | {"200": _said("The response, with what had come of it", _json("Response"))},
    "/v1/responses/{response_id}/input_items": _failures(_STORED)
    | {"200": _said("What the response was given, and all before that", _json("ResponseItems"))},
    "/v1/models": _failures(_WITH_KEYS) | {"200": _said("The models that the caller may use", _json("Models"))},
    "/v1/models/{model}": _failures(_WITH_KEYS | {"404": "Unknown model"})
    | {"200": _said("That model", _json("Model"))},
    "/health": _failures({}) | {"200": _said("It is", _json("Health"))},
    "/ready": _failures({}) | {"200": _said("Yes", _json("Ready")), "503": _said("No, of no model", _json("NotReady"))},
    "/metrics": _failures({}) | {"200": _said("Metrics", {"text/plain": {"schema": _STRING}})},
}


def body(kind: type[Any], model: str) -> Json:
    """A request's body, for a route's `openapi_extra`; its example is what "Try it out" sends, and works."""
    example = {"model": model, **_EXAMPLES[kind]}
    content = {"application/json": {"schema": _ref(kind.__name__), "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def schema(app: FastAPI, *, keys: bool) -> Json:
    """The whole document. `keys`: whether this gateway asks for API keys."""
    # Swagger UI 4 reads OpenAPI 3.0.
    found = get_openapi(title=TITLE, version="1", openapi_version="3.0.3", description=_TEXT, routes=app.routes)
    kinds = [*INTERFACES.values(), *(query.body_model for query in QUERIES.values())]
    bodies = [(kind, "validation") for kind in kinds]
    _, definitions = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]
    for path, operations in found["paths"].items():
        for operation in operations.values():
            operation["responses"] = dict(sorted(RESPONSES[path].items()))
            if keys and not {"OpenAI", "Generation"}.isdisjoint(operation.get("tags", ())):
                operation["security"] = [{"key": []}]
    found["components"] = {"schemas": {**definitions["$defs"], **SCHEMAS}}
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return found
