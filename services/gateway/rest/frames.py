"""OpenAI's answers as bytes: JSON bodies and server-sent events.

A stream writes one frame a step and choice, so frames are put together from prepared parts; only the text is
encoded anew.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from kvmesh.errors import KvmeshError, Unauthorized
from kvmesh.kvcache.keys import unpack_tokens
from kvmesh.services.gateway.text.completion import Delta, TokenLogprob
from kvmesh.services.gateway.text.prompt_logprobs import vllm_form

if TYPE_CHECKING:
    from kvmesh.services.gateway.attempts import AnswerAttempts
    from kvmesh.services.gateway.requests import Request

DONE = b"data: [DONE]\n\n"

Piece = Callable[[int], tuple[str, list[int]]]
"""Text and bytes of one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameOptions:
    """What a client wants to be told besides the answer. `continuous_usage`: each chunk tells the usage of its choice
    so far; `token_ids`: of the answers and their prompts; `tokens_as_ids`: logprobs name tokens "token_id:7";
    `prompt_logprobs`: those of the prompt's tokens, and of so many others beside each (-1: none); `timings`: where the
    time went."""

    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs: int = -1
    timings: bool = False


@dataclass(frozen=True, slots=True)
class CompletionUsage:
    """Tokens of a whole request; prompts count once however many answers they got."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


def usage_of(choice: AnswerAttempts) -> CompletionUsage:
    """Returns the tokens of one answer so far, and of its prompt."""
    answer = choice.answer
    return CompletionUsage(choice.prompt.tokens, answer.count, choice.cached_tokens, answer.reasoning_tokens)


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


def told_epochs(epochs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Returns the field that names by which weights tokens were made: pairs of a token's index in the answer and the
    weights epoch from it on; nothing while these are the checkpoint's own."""
    return {"weights_epochs": [list(pair) for pair in epochs]} if epochs else {}


def prompt_logprobs(request: Request, index: int, top: int) -> dict[str, Any]:
    """Returns the field `prompt_logprobs` of choice `index`, with `top` others beside each token; {} for -1."""
    scored = request.choices[index].scored_prompt
    if top < 0 or scored is None:
        return {}
    return {"prompt_logprobs": vllm_form(scored, top, lambda token: request.piece(token)[0])}


class Frames(ABC):
    """Writes the answers of one request as OpenAI's chats and completions have them (AnswerWriter)."""

    prefix: ClassVar[str]  # of the id
    kind: ClassVar[str]  # `object` of a whole answer, and of a chunk
    chunk_kind: ClassVar[str]
    text_key: ClassVar[bytes]  # around the text of a frame that has nothing else
    text_end: ClassVar[bytes]

    def __init__(self, request: Request, options: FrameOptions) -> None:
        self.request = request
        self.options = options
        self._head = {
            "id": self.prefix + request.request_id,
            "object": self.chunk_kind,
            "created": int(time.time()),
            "model": request.generation.model,
        }
        self._usage_null = b',"usage":null' if options.include_usage else b""
        self._rich = options.continuous_usage  # no chunk is put together from prepared parts
        self._open = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":[{"index":'
        self._plain_end = self.text_end + b',"logprobs":null,"finish_reason":null}]' + self._usage_null + b"}\n\n"
        self._prefixes: dict[int, bytes] = {}
        self._begun: set[int] = set()
        self._unfinished = request.generation.choices

    # ── what the two differ in ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """Returns what comes before the first text of a choice: the role, or the echoed prompt."""

    @abstractmethod
    def gained(self, delta: Delta) -> dict[str, Any]:
        """Returns the fields of a choice that hold what it gained."""

    @abstractmethod
    def said(self, index: int) -> dict[str, Any]:
        """Returns the fields of a choice that hold its whole answer."""

    @abstractmethod
    def logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Returns the logprobs object of what a choice gained."""

    def all_logprobs(self, index: int) -> dict[str, Any]:
        """Returns the logprobs object of a whole choice."""
        return self.logprobs(index, self.request.choices[index].whole.entries)

    def head(self) -> dict[str, Any]:
        """Returns further fields of a whole answer."""
        return {}

    def finish(self, index: int, reason: str) -> str:
        """Returns the finish reason that the client is told."""
        return reason

    # ── AnswerWriter ──────────────────────────────────────────────────────────────────────────────

    def step(self, index: int, delta: Delta) -> bytes:
        """See AnswerWriter."""
        opening = b""
        if index not in self._begun:
            self._begun.add(index)
            opening = self.opening(index)
        told_ids = self.options.token_ids and bool(delta.token_ids)
        rich = bool(delta.reasoning or delta.calls or delta.logprobs or told_ids or (self._rich and delta.text))
        if not delta.finish and not rich:
            return opening + self.text(index, delta.text)
        body = b""
        if rich or (delta.text and self._wants_logprobs):
            body = self._chunk(index, self.gained(delta), delta.logprobs, "", {}, delta.token_ids, delta.first)
        elif delta.text:
            body = self.text(index, delta.text)
        if not delta.finish:
            return opening + body
        self._unfinished -= 1
        # Timings go with the very last chunk.
        tail = self._tail() if not self._unfinished and not self.options.include_usage else {}
        end = self._chunk(index, self.gained(Delta()), None, self.finish(index, delta.finish), tail)
        return opening + body + end

    def end(self) -> bytes:
        """See AnswerWriter."""
        if not self.options.include_usage:
            return DONE
        usage = self.request.account.usage(self.request.choices)
        body = {**self._head, "choices": [], "usage": usage.as_json(), **self._tail()}
        return b"data: " + orjson.dumps(body) + b"\n\n" + DONE

    def whole(self) -> bytes:
        """See AnswerWriter."""
        request, listed = self.request, []
        for index, choice in enumerate(request.returned):
            one = {
                "index": index,
                **self.said(choice.index),
                "logprobs": self.all_logprobs(choice.index) if self._wants_logprobs else None,
                "finish_reason": self.finish(choice.index, choice.answer.finish),
            }
            if self.options.token_ids:
                one["token_ids"] = choice.answer.said.tolist()
                one |= told_epochs(choice.epochs_of(0, len(choice.answer.said)))
            listed.append(one)
        head = self._head | {"object": self.kind} | self.head()
        usage = request.account.usage(request.choices)
        return orjson.dumps({**head, "choices": listed, "usage": usage.as_json(), **self._tail()})

    # ── frames ────────────────────────────────────────────────────────────────────────────────────

    def text(self, index: int, text: str) -> bytes:
        """Returns the usual frame: more text of choice `index`."""
        if self._rich:
            return self._chunk(index, self.gained(Delta(text)), (), "", {})
        prefix = self._prefixes.get(index)
        if prefix is None:
            prefix = self._prefixes[index] = self._open + b"%d" % index + self.text_key
        return prefix + orjson.dumps(text) + self._plain_end

    def _chunk(
        self,
        index: int,
        gained: dict[str, Any],
        logprobs: Sequence[TokenLogprob] | None,
        finish: str,
        tail: dict[str, Any],
        token_ids: Sequence[int] = (),
        first: int = 0,
    ) -> bytes:
        """Returns any frame; `tail` are fields of the whole chunk, `first` is the index of `token_ids[0]`."""
        told = gained.get("logprobs")
        if logprobs is not None and self._wants_logprobs:
            told = self.logprobs(index, logprobs)
        choice = {"index": index, **gained, "logprobs": told, "finish_reason": finish or None}
        if self.options.token_ids:
            choice["token_ids"] = list(token_ids)
            choice |= told_epochs(self.request.choices[index].epochs_of(first, len(token_ids)))
        body: dict[str, Any] = {**self._head, "choices": [choice]}
        if self.options.continuous_usage:
            body["usage"] = usage_of(self.request.choices[index]).as_json()
        elif self.options.include_usage:
            body["usage"] = None
        return b"data: " + orjson.dumps(body | tail) + b"\n\n"

    def piece(self, token_id: int) -> tuple[str, list[int]]:
        """Returns the name and the bytes of a token, as logprobs tell them."""
        text, raw = self.request.piece(token_id)
        return (f"token_id:{token_id}" if self.options.tokens_as_ids else text), raw

    def prompt_logprobs(self, index: int) -> dict[str, Any]:
        """Returns the field `prompt_logprobs` of choice `index`, if the client wants it."""
        return prompt_logprobs(self.request, index, self.options.prompt_logprobs)

    def prompt_ids(self, index: int) -> list[int]:
        """Returns the prompt of choice `index`."""
        return unpack_tokens(self.request.choices[index].prompt.token_ids)

    @property
    def _wants_logprobs(self) -> bool:
        return self.request.generation.logprobs >= 0

    def _tail(self) -> dict[str, Any]:
        return {"kvmesh": self.request.account.stages(self.request.choices)} if self.options.timings else {}
