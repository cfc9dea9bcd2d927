"""The grammar that an answer must follow, of the form that a request asks for and of the calls that it must make."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.answers.families import AnswerFamily
from kvmesh.services.gateway.text.answers.tools import ToolSpec
from kvmesh.services.gateway.text.chat import REQUIRED, Chat, Tool
from kvmesh.services.gateway.text.grammars.asked import AskedForm
from kvmesh.services.gateway.text.grammars.build import form_grammar
from kvmesh.services.gateway.text.grammars.compiler import why_refused
from kvmesh.services.gateway.text.grammars.schemas import narrowed

KEPT_GRAMMARS = 256  # turns of a conversation ask for the same again
_KEPT_BYTES = 64 << 10  # longer ones are made each time


class AnswerRules:
    """Makes grammars for one model. `template` is its chat template, `special` are the texts and ids of its special
    tokens."""

    def __init__(self, family: AnswerFamily, template: str, special: Mapping[str, int]) -> None:
        self._family = family
        self._reasons = family.reasons(template)
        self._special = special
        self._remembered = functools.lru_cache(KEPT_GRAMMARS)(self._made)

    def grammar(self, form: AskedForm | None, chat: Chat | None, tail: str) -> str:
        """Returns the grammar, "" where anything may be answered. `tail` is the end of the rendered chat: reasoning
        that it opens, or that the model may open, comes before what the grammar forces.

        Raises InvalidRequest for a form or a tool that cannot be enforced, naming where."""
        tools = chat.callable_tools if chat is not None else ()
        forced = chat is not None and (chat.tool_choice == REQUIRED or any(tool.strict for tool in tools))
        if form is None and not forced:
            return ""
        if form is not None and chat is not None and chat.tool_choice == REQUIRED:
            raise InvalidRequest(f"{form.field}: tool_choice leaves room for calls only", field=form.field)
        told = [] if chat is None else [[tool.name, dict(tool.parameters)] for tool in tools]
        what = (
            None if form is None else (form.kind, _text(form.source), form.field, form.strict),
            _text(told),
            chat is not None,
            chat.tool_choice if chat is not None else "",
            chat.named if chat is not None else "",
            chat is not None and chat.parallel,
            tail if self._reasons else None,
        )
        small = sum(len(part) for part in (what[1], what[0][1] if what[0] else "")) <= _KEPT_BYTES
        return (self._remembered if small else self._made)(*what)

    def _made(
        self,
        form: tuple[str, str, str, bool] | None,
        told: str,
        chatted: bool,
        choice: str,
        named: str,
        parallel: bool,
        tail: str | None,
    ) -> str:
        tools = [Tool(name, parameters=parameters) for name, parameters in json.loads(told)]
        inner: list[dict[str, object]] = []
        if tools:
            # Beside a form the alternative to calls is the form, else it is text.
            required = choice == REQUIRED or form is not None
            calls = self._calls(tools, named, parallel, required=required, tail=None if form is not None else tail)
            if form is None:
                return _checked(_serialised(calls, []), "tools")
            inner.append({"name": "calls", "lark_grammar": calls})
        assert form is not None, "there are calls or a form"
        kind, source, field, strict = form
        made = form_grammar(AskedForm(kind, json.loads(source), field, strict))  # type: ignore[arg-type]
        if not chatted:
            return made
        inner.append({**json.loads(made)["grammars"][0], "name": "form"})
        answer = " | ".join(f"@{part['name']}" for part in inner)
        outer = self._family.grammar_after_reasoning(answer, prompt_tail=tail, special=self._special)
        return _checked(_serialised(outer, inner), field)

    def _calls(self, tools: list[Tool], named: str, parallel: bool, *, required: bool, tail: str | None) -> str:
        specs = []
        for index, tool in enumerate(tools):
            if named and tool.name != named:
                continue
            schema = narrowed(tool.parameters, f"tools.{index}.function.parameters").schema
            specs.append(ToolSpec(tool.name, schema))
        return self._family.call_grammar(
            specs, named=named or None, parallel=parallel, required=required, special=self._special, prompt_tail=tail
        )


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _serialised(outer: str, inner: list[dict[str, object]]) -> str:
    return _text({"grammars": [{"lark_grammar": outer}, *inner]})


def _checked(grammar: str, field: str) -> str:
    """Raises InvalidRequest for what does not compile. Special tokens are ids, which only the model's own tokenizer
    knows: what has them is compiled by the instance first."""
    if "<[" not in grammar and (why := why_refused(grammar)):
        raise InvalidRequest(f"{field}: {why}", field=field)
    return grammar
