"""Grammars in llguidance's serialised form (the wire form of a request's `grammar`), each checked before it leaves."""

from __future__ import annotations

import json
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.grammars.asked import AskedForm
from kvmesh.services.gateway.text.grammars.bounds import (
    MAX_ENUM_VALUES,
    MAX_LARK_BYTES,
    MAX_LITERAL_BYTES,
    MAX_SOURCE_BYTES,
)
from kvmesh.services.gateway.text.grammars.compiler import why_refused
from kvmesh.services.gateway.text.grammars.finite import children, target
from kvmesh.services.gateway.text.grammars.lark import checked_lark
from kvmesh.services.gateway.text.grammars.patterns import translated
from kvmesh.services.gateway.text.grammars.schemas import NarrowedSchema, narrowed, place

JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}
"""At most one space after a comma and a colon and no other whitespace, so that lengths are bounded by the schema
alone; no \\uXXXX escapes, so that each name is spelt in one way (`"\\u0061"` would pass as another name than "a")."""

MAX_LOCATED_PARTS = 200
MAX_LOCATED_COMPILES = 30
"""An error's place is searched in schemas of at most so many subschemas, by at most so many compilations."""


def form_grammar(form: AskedForm) -> str:
    """The grammar of the form that a body asked for."""
    if form.kind == "json_object":
        return json_object_grammar()
    if form.kind == "json_schema":
        return json_schema_grammar(form.source, strict=form.strict, field=form.field)
    if form.kind == "regex":
        return regex_grammar(form.source, form.field)
    if form.kind == "choice":
        return choice_grammar(form.source, form.field)
    return lark_grammar(form.source, form.field)


def json_object_grammar() -> str:
    """Any JSON object."""
    return _of_schema({"type": "object"})


def json_schema_grammar(schema: Any, *, strict: bool, field: str) -> str:
    """JSON that is valid under `schema`; `strict` changes nothing, since every accepted schema is enforced in full.

    Raises InvalidRequest that names the place of what is not supported, out of bounds, or cannot be met.
    """
    del strict
    ours = narrowed(schema, field)
    grammar = _of_schema(ours.schema)
    why = why_refused(grammar)
    if why:
        pointer, why = _innermost_error(ours, why)
        raise InvalidRequest.of(place(field, pointer), "...", why)
    return grammar


def regex_grammar(text: Any, field: str) -> str:
    """Text that the expression matches as a whole."""
    grammar = _of_lark("start: /" + translated(text, field, anchored=True)[0] + "/")
    return _checked(grammar, field, text)


def lark_grammar(text: Any, field: str) -> str:
    """Text of a context-free grammar in llguidance's Lark or in GBNF ("root ::= ...")."""
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequest.of(field, text, "is the text of a grammar")
    if len(text.encode("utf-8", "replace")) > MAX_LARK_BYTES:
        raise InvalidRequest.of(field, text, f"is longer than {MAX_LARK_BYTES} bytes")
    try:
        lark = any_to_lark(text)
    except Exception as err:  # the converter raises what it likes
        raise InvalidRequest.of(field, text, f"is no GBNF grammar ({err})") from None
    if lark != text:
        lark = lark.removeprefix("%llguidance {}\n")  # the converter's own line
    return _checked(_of_lark(checked_lark(lark, field)), field, text)


def choice_grammar(choices: Any, field: str) -> str:
    """One of the texts in `choices`."""
    if not isinstance(choices, list) or not choices:
        raise InvalidRequest.of(field, choices, "is a list of at least one text")
    if len(choices) > MAX_ENUM_VALUES:
        raise InvalidRequest.of(field, "...", f"holds {len(choices)} choices, at most {MAX_ENUM_VALUES} are allowed")
    total = 0
    for index, one in enumerate(choices):
        if not isinstance(one, str) or not one:
            raise InvalidRequest.of(f"{field}[{index}]", one, "is a text that is not empty")
        size = len(one.encode("utf-8", "replace"))
        if size > MAX_LITERAL_BYTES:
            raise InvalidRequest.of(f"{field}[{index}]", one, f"is longer than {MAX_LITERAL_BYTES} bytes")
        total += size
        if total > MAX_SOURCE_BYTES:
            raise InvalidRequest.of(field, "...", f"all choices together are longer than {MAX_SOURCE_BYTES} bytes")
    literals = " | ".join(json.dumps(one, ensure_ascii=False) for one in dict.fromkeys(choices))
    return _checked(_of_lark(f"start: CHOICE\nCHOICE: {literals}"), field, choices)


def combined(form: str, *, reasoning_end: str | None, end_token: int | None = None) -> str:
    """`form` alone, or, for models that reason first, free text up to and including the first `reasoning_end`, at most
    two newlines, and then `form`. `end_token` is the marker's id where the tokenizer calls it special: special tokens
    have no text for a grammar. No end of the answer is allowed before the form is complete."""
    if reasoning_end is None:
        return form
    if end_token is None:
        head = f"head[lazy]: /(?s:.*)/ {json.dumps(reasoning_end, ensure_ascii=False)}"
    else:
        head = f"head: THOUGHTS <[{end_token}]>\nTHOUGHTS: /(?s:.*)/"
    return _before(f"start: head GAP @form\n{head}\nGAP: /\\n{{0,2}}/", form)


def or_text(form: str, *, start: str) -> str:
    """Free text, which nothing forces; once it holds `start`, `form` follows and ends the answer."""
    marker = json.dumps(start, ensure_ascii=False)
    return _before(f"start: TEXT | head @form\nhead[lazy]: TEXT {marker}\nTEXT: /(?s:.*)/", form)


def _innermost_error(ours: NarrowedSchema, why: str) -> tuple[str, str]:
    """The JSON pointer of the innermost part that does not compile by itself, and why it does not."""
    found = ""
    if ours.parts > MAX_LOCATED_PARTS or "too large" in why:  # what is too large takes long each time
        return found, why
    node, seen, left = ours.schema, {id(ours.schema)}, MAX_LOCATED_COMPILES
    while True:
        for part in (*target(node, ours.schema), *children(node)):
            if not isinstance(part, dict) or id(part) in seen or left <= 0:
                continue
            seen.add(id(part))
            left -= 1
            reason = why_refused(_of_schema({**part, "$defs": ours.schema.get("$defs", {})}))
            if reason:
                node, why = part, reason
                known = ours.pointer_of(part)
                found = found if known is None else known
                break
        else:
            return found, why


def _before(lark: str, form: str) -> str:
    """A grammar whose `@form` is the serialised grammar `form`."""
    first, *others = json.loads(form)["grammars"]
    named = {**first, "name": "form"}
    return json.dumps({"grammars": [{"lark_grammar": lark}, named, *others]}, separators=(",", ":"))


def _of_schema(schema: dict[str, Any]) -> str:
    return json.dumps(
        {"grammars": [{"json_schema": {**schema, "x-guidance": JSON_OPTIONS}}]},
        separators=(",", ":"),
        ensure_ascii=False,
    )


def _of_lark(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]}, separators=(",", ":"), ensure_ascii=False)


def _checked(grammar: str, field: str, source: Any) -> str:
    why = why_refused(grammar)
    if why:
        raise InvalidRequest.of(field, source, why)
    return grammar
