"""Prompts of requests as the conductor counts them: how many tokens, and the keys of their blocks. Runs in threads.

A body is read as far as a placement needs it. The endpoint judges it: what it would refuse (a field that it does not
know, a prompt that is too long) is an error of its own, so here such a body has no tokens and goes by load alone.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvmesh.errors import ContextTooLong, InvalidRequest
from kvmesh.kvcache.keys import TOKEN_BYTES, Namespace, pack_tokens
from kvmesh.services.gateway.config import GatewayLimits
from kvmesh.services.gateway.generation import Generation, Prompt
from kvmesh.services.gateway.rest import serving_headers
from kvmesh.services.gateway.rest.chat import ChatRequest
from kvmesh.services.gateway.rest.completions import CompletionRequest
from kvmesh.services.gateway.text.chat import Chat, ChatEncoder, ChatTemplates, Rendered
from kvmesh.services.gateway.text.encoded_texts import EncodedTexts
from kvmesh.services.gateway.text.prepare import ModelBounds
from kvmesh.services.gateway.text.tokenizer import Tokenizer
from kvmesh.services.picker.key_chains import KeyChains

# What is read of a body: the prompt, what a template is given, and how the request is to be served.
_PROMPT_FIELDS = frozenset(("model", "prompt", "messages", "tools", "tool_choice", "chat_template_kwargs"))
_SERVING_FIELDS = frozenset(
    (
        "max_tokens", "max_completion_tokens", "cache_salt", "priority", "ttft_slo_ms", "tbt_slo_ms", "lane", "session",
        "origin", "prompt_cache_key", "expected_tokens", "reasoning_effort",
    )
)  # fmt: skip
_READ = _PROMPT_FIELDS | _SERVING_FIELDS
INTERFACES: Mapping[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}


@dataclass(frozen=True, slots=True)
class KeyedPrompt:
    """What a placement goes by. Of several prompts the keys are the first one's, and the tokens all of theirs."""

    tokens: int
    keys: bytes


def read_generation(
    path: str, body: dict[str, Any], headers: Mapping[bytes, bytes], limits: GatewayLimits
) -> Generation | None:
    """Returns what a body asks for, as far as it is read; None for a path whose bodies have no prompt, and for a body
    that the gateway would refuse."""
    interface = INTERFACES.get(path)
    if interface is None:
        return None
    told = {name: value for name, value in body.items() if name in _READ and name in interface.model_fields}
    try:
        return serving_headers.joined(interface.read(told, limits).generation(limits), serving_headers.read(headers))
    except InvalidRequest:
        return None


class RenderedPrompts(NamedTuple):
    """Prompts as texts, or packed ids. `new_chars` would be tokenized now: the others are known."""

    prompts: list[Rendered | str | bytes]
    new_chars: int


class PromptReader:
    """Tokenizer, chat template and known texts of one model. `cache_bytes` is for the texts and for the keys, each."""

    def __init__(self, tokenizer: Tokenizer, *, special_prompts: bool, cache_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._special_prompts = special_prompts
        self._chats = ChatEncoder(tokenizer, ChatTemplates(tokenizer.templates, tokenizer.named_tokens))
        self.texts = EncodedTexts(tokenizer, cache_bytes)
        self._chains = KeyChains(cache_bytes)
        self._before, self._behind = self._added()

    def begin(
        self, generation: Generation, bounds: ModelBounds, now: Callable[[], datetime.datetime]
    ) -> RenderedPrompts | None:
        """Returns the prompts as texts; None for what the model cannot take."""
        try:
            found = [self._rendered(prompt, bounds, now) for prompt in generation.prompts]
        except InvalidRequest:
            return None
        return RenderedPrompts(found, sum(map(self._new_in, found)))

    def finish(self, begun: RenderedPrompts, namespace: Namespace, bounds: ModelBounds) -> KeyedPrompt | None:
        """Returns tokens and keys; None for what the model cannot take."""
        packed = [self._packed(one) for one in begun.prompts]
        tokens = [len(one) // TOKEN_BYTES for one in packed]
        if not all(tokens) or max(tokens) >= bounds.max_context_tokens:
            return None
        return KeyedPrompt(sum(tokens), self._chains.keys(namespace, packed[0], bounds.block_tokens))

    def _rendered(
        self, prompt: Prompt, bounds: ModelBounds, now: Callable[[], datetime.datetime]
    ) -> Rendered | str | bytes:
        if isinstance(prompt, list):
            if max(prompt) >= bounds.vocab_size:
                raise InvalidRequest.of("prompt", max(prompt), "token id outside the vocabulary")
            return pack_tokens(prompt)
        found = self._chats.render(prompt, now) if isinstance(prompt, Chat) else str(prompt)
        size = len(found if isinstance(found, str) else found.text)
        if size > bounds.max_context_tokens * self._tokenizer.longest:  # it would not fit, so it is not tokenized
            raise ContextTooLong(f"{size} characters", field="prompt")
        return found

    def _new_in(self, prompt: Rendered | str | bytes) -> int:
        if isinstance(prompt, bytes):
            return 0
        return self.texts.new_in(prompt if isinstance(prompt, str) else prompt.text)

    def _packed(self, prompt: Rendered | str | bytes) -> bytes:
        if isinstance(prompt, bytes):
            return prompt
        if isinstance(prompt, Rendered):
            return self._chats.encode_packed(prompt, self.texts)
        if not self._special_prompts:
            return pack_tokens(self._tokenizer.encode_as_text(prompt, add_special_tokens=True))
        return self._before + self.texts.encode(prompt).packed + self._behind

    def _added(self) -> tuple[bytes, bytes]:
        """Returns the packed special tokens that the tokenizer writes before and behind a text."""
        alone = self._tokenizer.encode("a", add_special_tokens=False)
        whole = self._tokenizer.encode("a", add_special_tokens=True)
        for at in range(len(whole) - len(alone) + 1):
            if whole[at : at + len(alone)] == alone:
                return pack_tokens(whole[:at]), pack_tokens(whole[at + len(alone) :])
        return b"", b""
