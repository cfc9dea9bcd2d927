"""Prompts of requests as the conductor counts them: how many tokens, and the keys of their blocks. Runs in threads.

A body is read as far as a placement needs it. The endpoint judges it: what it would refuse (a field that it does not
know, a prompt that is too long) is an error of its own, so here such a body has no tokens and goes by load alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvmesh.errors import ContextTooLong, InvalidRequest
from kvmesh.kvcache.keys import Namespace, pack_tokens
from kvmesh.services.gateway.config import GatewayLimits
from kvmesh.services.gateway.generation import Generation, Prompt
from kvmesh.services.gateway.rest import serving_headers
from kvmesh.services.gateway.rest.interfaces import INTERFACES
from kvmesh.services.gateway.text.chat import Chat, ChatEncoder, ChatTemplates, Rendered
from kvmesh.services.gateway.text.prepare import ModelBounds
from kvmesh.services.gateway.text.tokenizer import Tokenizer
from kvmesh.services.picker.known_prompts import KnownPrompts, Piece, PromptStep, in_pieces

# What is read of a body: the prompt, what a template is given, and how the request is to be served.
_PROMPT_FIELDS = frozenset(
    (
        "model", "prompt", "messages", "input", "instructions", "previous_response_id", "system", "token_ids", "tools",
        "tool_choice", "chat_template_kwargs",
    )
)  # fmt: skip
_SERVING_FIELDS = frozenset(
    (
        "max_tokens", "max_completion_tokens", "max_output_tokens", "sampling_params", "cache_salt", "priority",
        "ttft_slo_ms", "tbt_slo_ms", "lane", "session", "origin", "prompt_cache_key", "expected_tokens",
        "reasoning_effort", "reasoning", "thinking", "output_config",
    )
)  # fmt: skip
_READ = _PROMPT_FIELDS | _SERVING_FIELDS
_PARAMS = "sampling_params"  # of which the same fields are read


@dataclass(frozen=True, slots=True)
class KeyedPrompt:
    """What a placement goes by. Of several prompts the keys are the first one's, and the tokens all of theirs."""

    tokens: int
    keys: bytes


def read_generation(
    path: str, body: dict[str, Any], headers: Mapping[bytes, bytes], limits: GatewayLimits
) -> Generation | None:
    """Returns what a body asks for, as far as it is read; None for a path whose bodies have no prompt, for a body that
    names no model or has not all of its prompt, and for one that the gateway would refuse."""
    interface = INTERFACES.get(path)
    if interface is None or body.get("model") is None:
        return None
    fields = interface.model_fields  # type: ignore[attr-defined]  # pydantic's: each is a model, too
    told = {name: value for name, value in body.items() if name in _READ and name in fields}
    if isinstance(params := told.get(_PARAMS), dict):
        told[_PARAMS] = {name: value for name, value in params.items() if name in _READ}
    try:
        asked = interface.read(told, limits)
        if asked.refers_to_stored:
            return None
        return serving_headers.joined(asked.generation(limits), serving_headers.read(headers))
    except InvalidRequest:
        return None


@dataclass(frozen=True, slots=True)
class PromptInPieces:
    """Is a prompt as pieces of its text or of its packed ids, and what is known of the first ones. `chat` is the chat
    that it is of. A text that may not be taken apart is `whole`, and has no pieces yet."""

    pieces: list[Piece]
    chat: Rendered | None = None
    whole: str = ""
    known: Sequence[PromptStep] = ()

    @property
    def new_chars(self) -> int:
        """How many characters are not known there."""
        return len(self.whole) + sum(len(one) for one in self.pieces[len(self.known) :] if isinstance(one, str))


class PromptReader:
    """Tokenizer, chat template and known prompts of one model, which take up to `cache_bytes`."""

    def __init__(self, tokenizer: Tokenizer, *, special_prompts: bool, cache_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._special_prompts = special_prompts
        self._chats = ChatEncoder(tokenizer, ChatTemplates(tokenizer.templates, tokenizer.named_tokens))
        self.texts = tokenizer.words
        self._prompts = KnownPrompts(self.texts, cache_bytes)
        self._before, self._behind = map(pack_tokens, tokenizer.around)

    def begin(
        self,
        generation: Generation,
        namespace: Namespace,
        bounds: ModelBounds,
        now: Callable[[], datetime.datetime],
    ) -> list[PromptInPieces] | None:
        """Returns the prompts, with what is known of them; None for what the model cannot take."""
        try:
            found = [self._in_pieces(prompt, bounds, now) for prompt in generation.prompts]
        except InvalidRequest:
            return None
        size = bounds.block_tokens
        return [replace(one, known=self._prompts.begin(namespace, size, one.pieces)) for one in found]

    def finish(self, begun: Sequence[PromptInPieces], namespace: Namespace, bounds: ModelBounds) -> KeyedPrompt | None:
        """Returns tokens and keys; None for what the model cannot take."""
        steps = [self._steps(one, namespace, bounds.block_tokens) for one in begun]
        tokens = [some[-1].tokens if some else 0 for some in steps]
        if not all(tokens) or max(tokens) >= bounds.max_context_tokens:
            return None
        return KeyedPrompt(sum(tokens), b"".join(step.keys for step in steps[0]))

    def _in_pieces(self, prompt: Prompt, bounds: ModelBounds, now: Callable[[], datetime.datetime]) -> PromptInPieces:
        if isinstance(prompt, list):
            if max(prompt) >= bounds.vocab_size:
                raise InvalidRequest.of("prompt", max(prompt), "token id outside the vocabulary")
            return PromptInPieces(in_pieces(pack_tokens(prompt)))
        chat = self._chats.render(prompt, now) if isinstance(prompt, Chat) else None
        text = str(prompt) if chat is None else chat.text
        if len(text) > bounds.max_context_tokens * self._tokenizer.longest:  # it would not fit: it is not tokenized
            raise ContextTooLong(f"{len(text)} characters", field="prompt")
        if not (self._special_prompts if chat is None else chat.plain):
            return PromptInPieces([], chat, whole=text)
        pieces: list[Piece] = [*self.texts.cut(text)]
        return PromptInPieces(pieces, chat) if chat else PromptInPieces([self._before, *pieces, self._behind])

    def _steps(self, begun: PromptInPieces, namespace: Namespace, block_tokens: int) -> list[PromptStep]:
        steps = self._prompts.finish(namespace, block_tokens, begun.pieces, begun.known)
        if not begun.whole and (begun.chat is None or self._chats.is_plain(begun.chat, steps[-1].special)):
            return steps
        if begun.chat is not None:
            ids = self._chats.encode(begun.chat)
        else:
            ids = self._tokenizer.encode_as_text(begun.whole, add_special_tokens=True)
        pieces = in_pieces(pack_tokens(ids))
        known = self._prompts.begin(namespace, block_tokens, pieces)
        return self._prompts.finish(namespace, block_tokens, pieces, known)
