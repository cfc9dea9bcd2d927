"""Grammars accept what was asked for and nothing else; what cannot be enforced is refused where it stands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.grammars.build import (
    choice_grammar,
    combined,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    or_text,
    regex_grammar,
)
from scripts.json_schema_suite import accepts


def schema_grammar(schema: Any) -> str:
    return json_schema_grammar(schema, strict=False, field="f")


@pytest.mark.parametrize(("schema", "pointer"), [
    ({"properties": {"a": {"unevaluatedProperties": False}}}, "/properties/a/unevaluatedProperties"),
    ({"properties": {"a/b~": {"uniqueItems": True}}}, "/properties/a~1b~0/uniqueItems"),
    ({"items": {"not": {}}}, "/items/not"),
    ({"maxlength": 3}, "/maxlength"),
    ({"x-guidance": {"lenient": True}}, "/x-guidance"),
    ({"$ref": "https://example.com/a"}, "/$ref"),
    ({"$ref": "#/$defs/none"}, "/$ref"),
    ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"if": {}}}}, "/$defs/a/if"),
    ({"format": "int32", "type": "integer"}, "/format"),
    ({"type": "string", "pattern": "(?=a)"}, "/pattern"),
    ({"type": "array", "items": [{}]}, "/items"),
    ({"type": "object", "minProperties": 2}, "/minProperties"),
    ({"oneOf": [{"type": "string"}, {"maxLength": 1}]}, "/oneOf"),
    ({"minimum": 2**53 + 2}, "/minimum"),
    ({"const": "\x01"}, "/const"),
    ({"type": "float"}, "/type"),
    ({"properties": {"a": 3}}, "/properties/a"),
    (False, ""),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, ""),
    ({"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["a"], "type": "object"},
     "/properties/a"),
    ({"type": "object", "properties": {"k": {"allOf": [{"type": "string"}, {"type": "null"}]}}, "required": ["k"]},
     "/properties/k"),
    ({"$ref": "#"}, ""),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ""),
    ({"properties": {"n": {"$ref": "#/$defs/n"}},
      "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}}}, "/$defs/n"),
])  # fmt: skip
def test_a_refusal_names_the_place(schema: Any, pointer: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        schema_grammar(schema)
    assert refused.value.field == "f#" + pointer


@pytest.mark.parametrize(("schema", "yes", "no"), [
    ({"type": "object", "properties": {"a": {"type": "integer"}}},
     ['{"a":1}', '{"a": 1, "b": "x"}', "{}"],
     ['{"a":"x"}', '{"\\u0061":"x"}', '{"a":1,"a":"x"}', '{"a":  1}', '{ "a":1}', '{"b":1,"a":"x"}']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-02-30"', '"1900-02-29"']),
    ({"type": "string", "format": "time"}, ['"23:59:59.5Z"'], ['"23:59:60Z"', '"24:00:00Z"']),
    ({"type": "string", "pattern": "^a.c$"}, ['"abc"'], ['"a\\nc"', '"a\\rc"', '"a\u2028c"']),
    ({"type": "string", "pattern": r"^\S\d$"}, ['"x1"'], ['"\ufeff1"', '"x\u0661"']),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ['"a"', "1"], ["1.5", "null"]),
    ({"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}],
      "$defs": {k: {"type": "object", "properties": {"t": {"const": k}}, "required": ["t"]} for k in "cd"}},
     ['{"t":"c"}', '{"t":"d"}'], ['{"t":"e"}', "{}"]),
    ({"type": "integer", "maximum": 2**63 - 1}, ["9007199254740992"], ["9223372036854775808"]),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}, ["[[],[[]]]"], ["[1]"]),
    ({"title": "t", "description": "d", "default": 1, "x-order": 1, "$schema": "http://json-schema.org/draft-07/schema#",
      "enum": [1, "a", {"b": [1]}]}, ["1", '"a"', '{"b": [1]}'], ["2"]),
    (True, ["1", '{"a": []}'], ["x"]),
])  # fmt: skip
def test_a_schema_accepts_its_instances_alone(schema: Any, yes: list[str], no: list[str]) -> None:
    grammar = schema_grammar(schema)
    assert [text for text in yes if not accepts(grammar, text)] == []
    assert [text for text in no if accepts(grammar, text)] == []


def test_strict_changes_nothing() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert json_schema_grammar(schema, strict=True, field="f") == json_schema_grammar(schema, strict=False, field="f")


def test_other_forms() -> None:
    assert accepts(json_object_grammar(), '{"a": [1, {"b": null}]}')
    assert not accepts(json_object_grammar(), "[]")
    regex = regex_grammar(r"^(a|b)/\d{2}$", "regex")
    assert accepts(regex, "b/12")
    assert not accepts(regex, "b/123")
    choice = choice_grammar(["yes", 'n"o', "a\nb"], "choice")
    assert all(accepts(choice, one) for one in ("yes", 'n"o', "a\nb"))
    assert not accepts(choice, "ye")
    for text in ('start: "a" B+\nB: /[bc]/', 'root ::= "a" [bc]+'):
        grammar = lark_grammar(text, "grammar")
        assert accepts(grammar, "abcb")
        assert not accepts(grammar, "a")


@pytest.mark.parametrize("text", [
    "", 'start: %json {"type": "object"}', "start: <|im_end|>", "start: <[3]>", "start: @other", "start: nothing",
    'start: a\na[max_tokens=3]: "x"', "root ::= (", '%llguidance {"no_forcing": true}\nstart: "a"', 3,
])  # fmt: skip
def test_grammars_that_reach_too_far_are_refused(text: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        lark_grammar(text, "grammar")
    assert refused.value.field == "grammar"


@pytest.mark.parametrize("choices", [[], "a", [""], [1], ["x" * 5000]])
def test_choices_are_texts(choices: Any) -> None:
    with pytest.raises(InvalidRequest, match="choice"):
        choice_grammar(choices, "choice")


def test_the_form_applies_after_the_reasoning() -> None:
    grammar = combined(schema_grammar({"type": "object", "additionalProperties": False}), reasoning_end="</think>")
    assert accepts(grammar, 'I think {"of": x}.\n</think>\n\n{}')
    assert accepts(grammar, "</think>{}")
    assert not accepts(grammar, "{}")
    assert not accepts(grammar, "thinking without end")
    assert not accepts(grammar, "a</think>b</think>{}")
    assert combined("form", reasoning_end=None) == "form"


def test_text_may_go_over_to_the_form() -> None:
    grammar = or_text(schema_grammar({"const": {"a": 1}}), start="<call>")
    assert accepts(grammar, "plain text {")
    assert accepts(grammar, 'text <call>{"a":1}')
    assert not accepts(grammar, "text <call>{}")


def test_grammars_are_the_wire_form() -> None:
    assert json.loads(schema_grammar({"type": "null"}))["grammars"][0]["json_schema"]["type"] == "null"
