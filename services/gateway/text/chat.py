"""Chat templates of checkpoints, rendered as Hugging Face defines them and in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvmesh.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class TemplateMessage:
    """One turn of a chat."""

    role: str
    content: str
    name: str = ""

    def as_template_sees_it(self) -> dict[str, str]:
        seen = {"role": self.role, "content": self.content}
        return seen | {"name": self.name} if self.name else seen


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
        self._named_tokens = dict(named_tokens)
        self._compiled: jinja2.Template | None = None
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception

    def render(self, messages: Sequence[TemplateMessage], now: Callable[[], datetime.datetime]) -> str:
        """The prompt of a chat, open for the assistant's answer; `now` is local time for `strftime_now`.
        InvalidRequest: the model has no template, the template is broken or refuses these messages."""
        if self._source is None:
            raise InvalidRequest("messages: this model has no chat template; use /v1/completions", field="messages")
        try:
            if self._compiled is None:
                self._compiled = self._environment.from_string(self._source)
            return self._compiled.render(
                messages=[message.as_template_sees_it() for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                strftime_now=lambda pattern: now().strftime(pattern),
                **self._named_tokens,
            )
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
