"""From what a client wrote to what the engine reads: template, tokens, block keys. Runs in the thread pool."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.errors import ContextTooLong
from kvmesh.kvcache.keys import Namespace, chain_tip, pack_tokens
from kvmesh.services.gateway.generation import Generation, Prompt, refused
from kvmesh.services.gateway.text.answer_rules import AnswerRules
from kvmesh.services.gateway.text.answers.families import PLAIN, AnswerFamily
from kvmesh.services.gateway.text.answers.parsed import AnswerParser
from kvmesh.services.gateway.text.answers.tools import ToolSpec
from kvmesh.services.gateway.text.chat import Chat, ChatEncoder, ChatTemplates, Tool
from kvmesh.services.gateway.text.detokenize import CONTEXT_TOKENS
from kvmesh.services.gateway.text.tokenizer import Tokenizer

TAIL_CHARS = 64


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """What a model can read."""

    block_tokens: int
    max_context_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """One prompt, ready to be placed. `token_ids` are packed little-endian u32, `keys` 16 bytes a full block,
    `chain_digest` the 32 bytes that the key of the next block, the answer's first, is chained from."""

    tokens: int
    token_ids: bytes
    keys: bytes
    chain_digest: bytes
    text: str  # as given; of token ids what they read as; only for `echo`
    context: tuple[int, ...]  # its last tokens, which tell how the answer's first ones read
    blank: bool  # nothing but special tokens
    grammar: str = ""  # that the answer must follow
    tail: str = ""  # of a chat: the end of the rendered prompt, where some templates open the reasoning
    tools: tuple[Tool, ...] = ()  # that the answer may call
    weights_epoch: int = 0  # of the weights whose blocks `keys` name


class Preparer:
    """Tokenizer, templates and answers of one model. `special_prompts`: special tokens in the text of a prompt (not of
    a message) are special."""

    def __init__(self, tokenizer: Tokenizer, *, special_prompts: bool = True, family: AnswerFamily = PLAIN) -> None:
        self.tokenizer = tokenizer
        self.family = family
        self._special_prompts = special_prompts
        self._chats = ChatEncoder(tokenizer, ChatTemplates(tokenizer.templates, tokenizer.named_tokens))
        self._rules = AnswerRules(family, tokenizer.templates.get("default", ""), tokenizer.special_texts)

    def prepare(
        self,
        generation: Generation,
        namespace: Namespace,
        bounds: ModelBounds,
        now: Callable[[], datetime.datetime],
    ) -> list[Prepared]:
        """One for each prompt. InvalidRequest: nothing in it, ids outside the vocabulary, a template that
        refuses; ContextTooLong."""
        for token, bias in generation.logit_bias:
            if token >= bounds.vocab_size:
                raise refused(f"logit_bias.{token}", bias, f"token id outside the vocabulary of {bounds.vocab_size}")
        return [self._one(generation, prompt, namespace, bounds, now) for prompt in generation.prompts]

    def _one(
        self,
        generation: Generation,
        prompt: Prompt,
        namespace: Namespace,
        bounds: ModelBounds,
        now: Callable[[], datetime.datetime],
    ) -> Prepared:
        field = "messages" if isinstance(prompt, Chat) else "prompt"
        rendered = None
        if isinstance(prompt, list):
            ids = prompt
            if max(ids) >= bounds.vocab_size:
                bad = next(token for token in ids if token >= bounds.vocab_size)
                raise refused(field, bad, f"token id outside the vocabulary of {bounds.vocab_size}")
        else:
            rendered = self._chats.render(prompt, now) if isinstance(prompt, Chat) else None
            text = rendered.text if rendered is not None else str(prompt)
            # Megabytes of text cost hundreds of megabytes to tokenize: what cannot fit is refused unread.
            if len(text) > bounds.max_context_tokens * self.tokenizer.longest:
                raise ContextTooLong(
                    f"{field}: {len(text)} characters leave no room for an answer in this model's context of "
                    f"{bounds.max_context_tokens} tokens",
                    field=field,
                )
            # Templates write the special tokens themselves.
            ids = self._chats.encode(rendered) if rendered is not None else self._encode(text, add_special_tokens=True)
        if not ids:
            raise refused(field, prompt, "has no tokens")
        if len(ids) >= bounds.max_context_tokens:
            raise ContextTooLong(
                f"{field}: {len(ids)} tokens leave no room for an answer in this model's context of "
                f"{bounds.max_context_tokens}",
                field=field,
            )
        chat = prompt if isinstance(prompt, Chat) else None
        tail = rendered.text[-TAIL_CHARS:] if rendered is not None else ""
        packed = pack_tokens(ids)
        keys, chain_digest = chain_tip(namespace, packed, bounds.block_tokens)
        echo = ""
        if generation.echo:
            echo = prompt if isinstance(prompt, str) else self.tokenizer.decode(ids)
        return Prepared(
            len(ids),
            packed,
            keys,
            chain_digest,
            echo,
            tuple(ids[-CONTEXT_TOKENS:]),
            all(token in self.tokenizer.special_ids for token in ids),
            generation.grammar or self._rules.grammar(generation.form, chat, tail),
            tail,
            chat.callable_tools if chat is not None else (),
            namespace.weights_epoch,
        )

    def tokens(
        self, prompt: str | Chat, now: Callable[[], datetime.datetime], *, add_special_tokens: bool
    ) -> list[int]:
        """Returns the token ids of a prompt, however many. `add_special_tokens` is for texts: chats have what their
        template writes. Raises InvalidRequest for a template that refuses."""
        if isinstance(prompt, Chat):
            return self._chats.encode(self._chats.render(prompt, now))
        return self._encode(prompt, add_special_tokens=add_special_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encode = self.tokenizer.encode if self._special_prompts else self.tokenizer.encode_as_text
        return encode(text, add_special_tokens=add_special_tokens)

    def parser(self, prompt: Prepared, request_id: str) -> AnswerParser | None:
        """Returns a parser of an answer to `prompt`; None: all of it is content. Ids of calls are made of the
        request's."""
        if self.family is PLAIN:
            return None
        return self.family.parser(
            tools=[ToolSpec(tool.name, tool.parameters) for tool in prompt.tools],
            prompt_tail=prompt.tail,
            reasoning=True,
            new_id=lambda index: f"call_{request_id}_{index}",
        )
