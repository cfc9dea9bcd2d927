"""Which form a chat body asks for."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.grammars.asked import asked_form

SCHEMA = {"type": "object"}


@pytest.mark.parametrize(("body", "kind", "source", "field"), [
    ({"response_format": {"type": "json_object"}}, "json_object", None, "response_format"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema", SCHEMA, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
     "json_schema", SCHEMA, "response_format.json_schema.schema"),
    ({"structured_outputs": {"json": '{"type": "object"}'}}, "json_schema", SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"], "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "g"}}, "grammar", "g", "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": True}}, "json_object", None, "structured_outputs.json_object"),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA, "guided_json"),
    ({"guided_regex": "a"}, "regex", "a", "guided_regex"),
    ({"guided_choice": ["a"]}, "choice", ["a"], "guided_choice"),
    ({"guided_grammar": "g"}, "grammar", "g", "guided_grammar"),
    ({"regex": "a"}, "regex", "a", "regex"),
    ({"ebnf": "g"}, "grammar", "g", "ebnf"),
    ({"json_schema": '{"type": "object"}'}, "json_schema", SCHEMA, "json_schema"),
])  # fmt: skip
def test_every_name_of_the_field_is_read_and_removed(body: dict[str, Any], kind: str, source: Any, field: str) -> None:
    body["model"] = "m"
    form = asked_form(body)
    assert form is not None
    assert (form.kind, form.source, form.field) == (kind, source, field)
    assert body == {"model": "m"}


@pytest.mark.parametrize("body", [{}, {"response_format": None}, {"response_format": {"type": "text"}}])
def test_text_is_no_form(body: dict[str, Any]) -> None:
    assert asked_form(body) is None
    assert not body


@pytest.mark.parametrize(("body", "field"), [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "text", "more": 1}}, "response_format.more"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"whitespace_pattern": "x", "json": {}}}, "structured_outputs.whitespace_pattern"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[" * 200_000}, "guided_json"),
    ({"guided_json": "[" * 1000}, "guided_json"),
])  # fmt: skip
def test_what_is_misshapen_is_refused_by_its_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked_form(body)
    assert refused.value.field == field


def test_two_forms_are_refused_by_both_names() -> None:
    with pytest.raises(InvalidRequest, match="response_format and guided_regex"):
        asked_form({"response_format": {"type": "json_object"}, "guided_regex": "a"})
