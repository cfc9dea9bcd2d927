"""Values that a model wrote without types, as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.services.gateway.text.answers.tools import ToolSpec, property_schema, value_json, value_types

ROOT = {"$defs": {"size": {"type": ["integer", "null"]}, "loop": {"$ref": "#/$defs/loop"}, "a/b": {"type": "boolean"}}}
ALL = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, None, 2.5, True, [], {}]}, ALL),
        ({"const": "x"}, {"string"}),
        ({"$ref": "#/$defs/size"}, {"integer", "null"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/$defs/loop"}, ALL),
        ({"$ref": "#/nowhere"}, ALL),
        ({"$ref": "http://elsewhere"}, ALL),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/size"}]}, {"string", "integer", "null"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"type": "date"}, ALL),
        ({"type": 5}, ALL),
        ({}, ALL),
        (True, ALL),
        (None, ALL),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str]) -> None:
    assert value_types(schema, ROOT) == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("3", "integer", 3),
        (" 3\n", "integer", 3),
        ("3.0", "integer", 3),
        ("3.5", "integer", "3.5"),
        ("-1e3", "number", -1000.0),
        ("007", "integer number", "007"),
        ("1" * 5000, "integer", None),
        ("NaN", "number", "NaN"),
        ("TRUE", "boolean", True),
        ("False", "boolean string", False),
        ("true", "string integer", "true"),
        ("None", "null string", None),
        ("null", "object", "null"),
        ('{"a": [1, "}"]}', "object", {"a": [1, "}"]}),
        ("{'a': True, 'b': None}", "object", {"a": True, "b": None}),
        ("[1, 2", "array string", "[1, 2"),
        ("{1, 2}", "object", "{1, 2}"),
        ("{'a': __import__('os')}", "object", "{'a': __import__('os')}"),
        ('{"a": 1}', "array string", '{"a": 1}'),
        ("[" * 100_000, "array", "[" * 100_000),
        ('"x"', "string integer", "x"),
        ('"x"', "string", '"x"'),
        ("", "integer", ""),
        (" a ", "integer", " a "),
    ],
)
def test_a_value(text: str, types: str, value: Any) -> None:
    written = value_json(text, frozenset(types.split()))
    if text == "1" * 5000:
        assert written == text
        return
    assert json.loads(written) == value


@given(st.text(), st.sets(st.sampled_from(sorted(ALL)), min_size=1))
def test_any_value_is_json(text: str, types: set[str]) -> None:
    json.loads(value_json(text, frozenset(types)), parse_int=len)


def test_a_property_without_a_schema_may_be_anything() -> None:
    tool = ToolSpec("f", {"properties": {"a": {"type": "string"}}})
    assert property_schema(tool, "a") == {"type": "string"}
    assert property_schema(tool, "b") is True
    assert property_schema(None, "a") is True
    assert property_schema(ToolSpec("f", {"properties": [1]}), "a") is True
