"""OpenAI's answers as bytes: JSON bodies and server-sent events.

A stream writes one frame a step and choice, so frames are put together from prepared parts; only the text is
encoded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kvmesh.errors import KvmeshError, Unauthorized
from kvmesh.services.gateway.text.completion import TokenLogprob

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity

Piece = Callable[[int], tuple[str, list[int]]]
"""Text and bytes of one token."""


@dataclass(frozen=True, slots=True)
class CompletionUsage:
    """Tokens of a whole request; prompts count once however many answers they got."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def error_json(err: KvmeshError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": err.message, "type": err.openai_type, "param": err.field, "code": err.code}}


def error_event(err: KvmeshError) -> bytes:
    """The last event of a stream that failed after its first byte."""
    return b"data: " + orjson.dumps(error_json(err)) + b"\n\n"


def error_headers(err: KvmeshError) -> list[tuple[bytes, bytes]]:
    """Headers that tell a client what would help: a key, or to come again and when."""
    if isinstance(err, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    if not err.retryable:
        return []
    wait_ms = err.retry_after_ms or 1000
    return [(b"retry-after", b"%d" % -(-wait_ms // 1000)), (b"retry-after-ms", b"%d" % wait_ms)]


def _number(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


class Frames:
    """The bytes of one response. `chat` or completion, `id` as the client sees it."""

    def __init__(
        self, *, chat: bool, request_id: str, created: int, model: str, include_usage: bool, piece: Piece
    ) -> None:
        self.chat = chat
        self.include_usage = include_usage
        self._piece = piece
        self._object = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + request_id,
            "object": self._object + (".chunk" if chat else ""),
            "created": created,
            "model": model,
        }
        head = orjson.dumps(self._head)[:-1]
        self._usage_null = b',"usage":null' if include_usage else b""
        self._open = b"data: " + head + b',"choices":[{"index":'
        self._text_key = b',"delta":{"content":' if chat else b',"text":'
        closing = b"}" if chat else b""
        self._plain_end = closing + b',"logprobs":null,"finish_reason":null}]' + self._usage_null + b"}\n\n"
        self._prefixes: dict[int, bytes] = {}

    def text(self, index: int, text: str) -> bytes:
        """The usual frame: more text of choice `index`."""
        prefix = self._prefixes.get(index)
        if prefix is None:
            prefix = self._prefixes[index] = self._open + b"%d" % index + self._text_key
        return prefix + orjson.dumps(text) + self._plain_end

    def role(self, index: int) -> bytes:
        """First frame of a chat's choice."""
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self._open + b"%d" % index + delta + self._usage_null + b"}\n\n"

    def rich(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, finish: str, tail: dict[str, Any]
    ) -> bytes:
        """Any frame: text with logprobs, the finish, and `tail` fields of the whole chunk."""
        choice: dict[str, Any] = {"index": index}
        if self.chat:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["text"] = text
        choice["logprobs"] = None if logprobs is None else self.logprobs(logprobs)
        choice["finish_reason"] = finish or None
        body = {**self._head, "choices": [choice]}
        if self._usage_null:
            body["usage"] = None
        return b"data: " + orjson.dumps(body | tail) + b"\n\n"

    def usage(self, usage: CompletionUsage, tail: dict[str, Any]) -> bytes:
        """The chunk without choices that `include_usage` asks for."""
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": usage.as_json(), **tail}) + b"\n\n"

    def whole(
        self,
        choices: Sequence[tuple[str, Sequence[TokenLogprob] | None, str]],
        usage: CompletionUsage,
        tail: dict[str, Any],
    ) -> bytes:
        """The body of an answer that is not streamed; one (text, logprobs, finish) a choice."""
        listed = []
        for index, (text, logprobs, finish) in enumerate(choices):
            choice: dict[str, Any] = {"index": index}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choice["logprobs"] = None if logprobs is None else self.logprobs(logprobs)
            choice["finish_reason"] = finish
            listed.append(choice)
        head = self._head | {"object": self._object}
        return orjson.dumps({**head, "choices": listed, "usage": usage.as_json(), **tail})

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """OpenAI's logprobs object, of chats or of completions."""
        return self._chat_logprobs(entries) if self.chat else self._completion_logprobs(entries)

    def _chat_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        def one(token_id: int, logprob: float) -> dict[str, Any]:
            token, raw = self._piece(token_id)
            return {"token": token, "logprob": _number(logprob), "bytes": raw}

        content = [
            one(e.token_id, e.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in e.top]}
            for e in entries
        ]
        return {"content": content, "refusal": None}

    def _completion_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        def top(e: TokenLogprob) -> dict[str, float]:
            best: dict[str, float] = {}
            for token, logprob in (*e.top, (e.token_id, e.logprob)):
                best.setdefault(self._piece(token)[0], _number(logprob))
            return best

        return {
            "tokens": [self._piece(e.token_id)[0] for e in entries],
            "token_logprobs": [_number(e.logprob) for e in entries],
            "top_logprobs": [top(e) for e in entries],
            "text_offset": [e.start for e in entries],
        }
