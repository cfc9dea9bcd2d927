"""Chats as token ids: the chat templates of checkpoints, rendered as Hugging Face defines them and in a sandbox, and
their tokens. The template's special tokens are special, the same characters in a message are only text.

Somebody who writes `<|im_end|>` into a message must not end it. A template may trim, split and join contents in any
way, so where a special token comes from is found by rendering a second time, with the first characters of special
tokens in contents replaced by characters of a private plane (marks): what is special in both renderings comes from the
template. Contents without control text are encoded as ever, token by token.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an earlier answer made. `arguments` is a JSON object as text, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TemplateMessage:
    """One turn of a chat. `reasoning` and `tool_calls` are an assistant's, `tool_call_id` is that of the call whose
    result a message of the role "tool" tells."""

    role: str
    content: str
    name: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    def as_template_sees_it(self) -> dict[str, Any]:
        """As Hugging Face's templates expect it: arguments are an object, what is not told is not there."""
        seen: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name:
            seen["name"] = self.name
        if self.reasoning:
            seen["reasoning_content"] = self.reasoning
        if self.tool_calls:
            seen["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments or "{}")},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            seen["tool_call_id"] = self.tool_call_id
        return seen

    @property
    def characters(self) -> int:
        """How many characters the client gave."""
        calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.content) + len(self.name) + len(self.reasoning) + len(self.tool_call_id) + calls


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON Schema; `strict`: its calls must satisfy it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    strict: bool = False

    def as_template_sees_it(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt of turns. `tool_choice` is AUTO, NONE, REQUIRED, or with `named` one tool must be called; `parallel`:
    an answer may call several. `template_args` are given to the template beside what it has anyway."""

    messages: tuple[TemplateMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = AUTO
    named: str = ""
    parallel: bool = True
    template_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools whose calls are looked for in the answer."""
        return () if self.tool_choice == NONE else self.tools

    @property
    def characters(self) -> int:
        """How many characters the client gave, but for values of `template_args`."""
        tools = sum(len(tool.name) + len(tool.description) + len(json.dumps(tool.parameters)) for tool in self.tools)
        return sum(message.characters for message in self.messages) + tools

    def with_developers_as_system(self) -> Chat:
        """Returns the chat for templates that know no role "developer", which is what newer clients call the system."""
        if all(message.role != "developer" for message in self.messages):
            return self
        change = dataclasses.replace
        messages = (change(one, role="system") if one.role == "developer" else one for one in self.messages)
        return change(self, messages=tuple(messages))

    def as_template_sees_it(self) -> dict[str, Any]:
        """The template's variables: messages, tools and the client's own."""
        return {
            **self.template_args,
            "messages": [message.as_template_sees_it() for message in self.messages],
            "tools": [tool.as_template_sees_it() for tool in self.callable_tools] or None,
        }


def fold_late_system(chat: Chat) -> Chat:
    """Returns `chat` with the system messages after its first message told by the user: at the end of the user's turn
    before them, else in a turn of their own. They stay where they are, so prefixes stay the same. Returns `chat`
    itself when there are none."""
    folded: list[TemplateMessage] = []
    for message in chat.messages:
        if not folded or message.role not in ("system", "developer"):
            folded.append(message)
        elif folded[-1].role == "user":
            before = folded[-1]
            folded[-1] = dataclasses.replace(before, content=f"{before.content}\n\n{message.content}")
        else:
            folded.append(TemplateMessage("user", message.content))
    if all(told is message for told, message in zip(folded, chat.messages, strict=False)):
        return chat
    return dataclasses.replace(chat, messages=tuple(folded))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models have not seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplates:
    """The templates of one checkpoint, compiled when first used."""

    def __init__(self, templates: Mapping[str, str], named_tokens: Mapping[str, str]) -> None:
        self._source = templates.get("default")
        # What has no place in a template is left out by it without a word.
        self.knows_developers = "developer" in (self._source or "")
        self._named_tokens = dict(named_tokens)
        self._compiled: jinja2.Template | None = None
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception

    def render(self, variables: Mapping[str, Any], now: Callable[[], datetime.datetime]) -> str:
        """The prompt of a chat (`Chat.as_template_sees_it`), open for the assistant's answer; `now` is local time for
        `strftime_now`. InvalidRequest: the model has no template, the template is broken or refuses these messages."""
        if self._source is None:
            raise InvalidRequest("messages: this model has no chat template; use /v1/completions", field="messages")
        try:
            if self._compiled is None:
                self._compiled = self._environment.from_string(self._source)
            own: dict[str, Any] = {"documents": None, "add_generation_prompt": True, **self._named_tokens}
            own["strftime_now"] = lambda pattern: now().strftime(pattern)
            return self._compiled.render({**own, **variables})
        except jinja2.TemplateSyntaxError as err:
            why = f"messages: the model's chat template is broken at line {err.lineno}: {_short(err)}"
        except jinja2.TemplateError as err:
            why = f"messages: the model's chat template refuses them: {_short(err)}"
        except Exception as err:  # a template may do anything that Python can: TypeError, overflow, ...
            why = f"messages: the model's chat template fails on them: {type(err).__name__}: {_short(err)}"
        raise InvalidRequest(why, field="messages")


def _short(err: Exception) -> str:
    text = " ".join(str(err).split())
    return text if len(text) <= 300 else text[:297] + "..."


_PLANE = range(0xF0000, 0xFFFF0, 256)  # private use: no tokenizer, template or language gives these a meaning


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as text. `plain`: every special token in it comes from the template; else those of messages are marked."""

    text: str
    plain: bool
    unmark: dict[int, int] = dataclasses.field(default_factory=dict)


class ChatEncoder:
    """Messages to token ids, for one model. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        texts = sorted(tokenizer.special_texts, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._firsts = sorted({text[0] for text in texts})

    def render(self, chat: Chat, now: Callable[[], datetime.datetime]) -> Rendered:
        """Renders `chat`; a template that takes no system message after the first one gets it as a user's. Raises
        InvalidRequest as `ChatTemplates.render` does."""
        try:
            return self._render(chat, now)
        except InvalidRequest:
            folded = fold_late_system(chat)
            if folded is chat:
                raise
            return self._render(folded, now)

    def _render(self, chat: Chat, now: Callable[[], datetime.datetime]) -> Rendered:
        moment = now()
        if not self._templates.knows_developers:
            chat = chat.with_developers_as_system()
        variables = chat.as_template_sees_it()
        text = self._templates.render(variables, lambda: moment)
        given = list(_texts(variables))
        if self._special is None or not any(first in part for first in self._firsts for part in given):
            return Rendered(text, plain=True)
        marks = self._marks(given)
        told = self._templates.render(_mapped(variables, lambda part: part.translate(marks)), lambda: moment)
        own = self._special.findall(told)
        if self._special.findall(text) == own:
            return Rendered(text, plain=True)
        unmark = {ord(mark): first for first, mark in marks.items()}
        # Marks in whole control tokens alone leave what templates look for in contents (`</think>`) as it is. They do
        # not suffice where the template joins two halves.
        special = self._special
        whole = _mapped(variables, lambda part: special.sub(lambda found: marks[ord(found[0][0])] + found[0][1:], part))
        gentle = self._templates.render(whole, lambda: moment)
        return Rendered(gentle if special.findall(gentle) == own else told, plain=False, unmark=unmark)

    def encode(self, rendered: Rendered) -> list[int]:
        """Token ids of what `render` gave."""
        tokenizer = self._tokenizer
        if rendered.plain:
            ids = tokenizer.encode(rendered.text, add_special_tokens=False)
            if self.is_plain(rendered, tokenizer.count_special(ids)):
                return ids
            # A special token that the tokenizer finds only after it has normalized the text: of a message, that is.
        ids = []
        at = 0
        text = rendered.text
        for found in self._special.finditer(text) if self._special else ():
            ids += self._text(text[at : found.start()], rendered)
            ids.append(tokenizer.special_texts[found[0]])
            at = found.end()
        return ids + self._text(text[at:], rendered)

    def is_plain(self, rendered: Rendered, special: int) -> bool:
        """Whether a chat's text may be tokenized as it is: it has then `special` special tokens, and they are all the
        template's."""
        return rendered.plain and special <= len(self._special.findall(rendered.text) if self._special else [])

    def _text(self, text: str, rendered: Rendered) -> list[int]:
        text = text.translate(rendered.unmark)
        return self._tokenizer.encode_as_text(text, add_special_tokens=False) if text else []

    def _marks(self, given: Sequence[str]) -> dict[int, str]:
        """A mark for each first character, none of which stands in `given`."""
        for start in _PLANE:
            marks = {ord(first): chr(start + number) for number, first in enumerate(self._firsts)}
            if not any(mark in part for mark in marks.values() for part in given):
                return marks
        raise AssertionError("a text holds characters of every block of the private plane")


# Keys that templates look for, and no client chooses.
_STRUCTURE = frozenset(
    (
        "messages", "tools", "role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id", "id", "type",
        "function", "arguments", "description", "parameters", "properties", "required", "items", "enum", "anyOf",
    )
)  # fmt: skip


def _texts(value: Any, key: str = "") -> Iterator[str]:
    """Every text that a client may have chosen, keys of objects too; roles are not: they are the interface's."""
    if isinstance(value, str):
        if key != "role":
            yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if name not in _STRUCTURE:
                yield str(name)
            yield from _texts(part, str(name))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _mapped(value: Any, change: Callable[[str], str], key: str = "", *, keys: bool = False) -> Any:
    """`value` with each of `_texts` changed; names of the template's variables (`keys` False) stay."""
    if isinstance(value, str):
        return value if key == "role" else change(value)
    if isinstance(value, Mapping):
        return {
            change(str(name)) if keys and name not in _STRUCTURE else name: _mapped(part, change, str(name), keys=True)
            for name, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mapped(part, change, keys=True) for part in value]
    return value
