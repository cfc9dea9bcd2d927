"""Forms of answer that are made to cost much: each is compiled or refused within the gateway's bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def _nested(levels: int, key: str) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {key: [schema]} if key in ("allOf", "anyOf") else {"type": "array", "items": schema}
    return schema


def _chain(length: int) -> dict[str, Any]:
    """Definitions that each join all those behind them."""
    defs: dict[str, Any] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"minLength": i}]} for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {"type": "string"}}}


def _doubling(levels: int) -> dict[str, Any]:
    """Two references a level: 2 ** levels objects when written out."""
    defs: dict[str, Any] = {}
    for level in range(levels):
        below = {"$ref": f"#/$defs/d{level + 1}"}
        defs[f"d{level}"] = {"type": "object", "properties": {"a": below, "b": below}, "required": ["a", "b"]}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{levels}": {"type": "null"}}}


def _doubling_joined(levels: int) -> dict[str, Any]:
    defs: dict[str, Any] = {}
    for level in range(levels):
        below = {"$ref": f"#/$defs/d{level + 1}"}
        defs[f"d{level}"] = {"allOf": [{"properties": {"a": below}}, {"properties": {"a": below, "b": below}}]}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{levels}": {"type": "null"}}}


def _products(factors: int, branches: int) -> dict[str, Any]:
    return {
        "allOf": [
            {
                "anyOf": [
                    {"properties": {f"p{i}.{j}": {"type": "integer"}}, "required": [f"p{i}.{j}"]}
                    for j in range(branches)
                ]
            }
            for i in range(factors)
        ]
    }


def _wide(count: int, inner: Callable[[int], Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": inner(i) for i in range(count)}}


SCHEMAS: dict[str, Callable[[], Any]] = {
    "array in array, 2,000 levels": lambda: _nested(2000, "items"),
    "allOf in allOf, 2,000 levels": lambda: _nested(2000, "allOf"),
    "array in array, 45 levels": lambda: _nested(45, "items"),
    "anyOf in anyOf, 30 levels": lambda: _nested(30, "anyOf"),
    "a chain of 150 joined references": lambda: _chain(150),
    "a chain of 1,500 joined references": lambda: _chain(1500),
    "2 ** 40 objects by references": lambda: _doubling(40),
    "2 ** 40 joined objects by references": lambda: _doubling_joined(40),
    "2 ** 12 joined objects by references": lambda: _doubling_joined(12),
    "4 ** 7 joined branches": lambda: _products(7, 4),
    "30 ** 3 joined branches": lambda: _products(3, 30),
    "2 ** 30 joined branches": lambda: _products(30, 2),
    "1,000 properties": lambda: _wide(1000, lambda i: {"type": "integer"}),
    "1,000 patterns": lambda: _wide(
        1000, lambda i: {"type": "string", "pattern": f"^[a-z]{{1,{i % 19 + 1}}}[0-9]{i}$"}
    ),
    "1,000 numeric ranges": lambda: _wide(
        1000, lambda i: {"type": "number", "minimum": i / 7, "maximum": 1e12 + i / 3}
    ),
    "1,000 multiples": lambda: _wide(1000, lambda i: {"type": "integer", "multipleOf": 999_983 + i}),
    "3,999 properties in four objects": lambda: {
        "type": "array", "prefixItems": [_wide(999, lambda i: {}) for _ in range(4)],
    },
    "1,000 required names": lambda: {"type": "object", "required": [f"n{i}" for i in range(1000)]},
    "5,000 enum values": lambda: {"enum": [f"value {i}" for i in range(5000)]},
    "5,001 enum values": lambda: {"enum": [f"value {i}" for i in range(5001)]},
    "20 enums of 250 values of 20 bytes": lambda: _wide(20, lambda k: {"enum": [f"{k}-{i:018}" for i in range(250)]}),
    "one constant of 120,000 bytes": lambda: {"const": "x" * 120_000},
    "one constant of 200,000 bytes": lambda: {"const": "x" * 200_000},
    "one constant of 12,000 arrays": lambda: {"const": [[] for _ in range(12_000)]},
    "a string of 100,000 characters": lambda: {"type": "string", "minLength": 99_999, "maxLength": 100_000},
    "200 strings of 99,000 characters and more": lambda: _wide(
        200, lambda i: {"type": "string", "minLength": 99_000 + i, "maxLength": 99_500 + i}
    ),
    "an array of 100,000 items": lambda: {"type": "array", "items": {"type": "null"}, "minItems": 99_999},
    "arrays of 100,000 items, five levels": lambda: json.loads(
        '{"type":"array","minItems":99999,"maxItems":100000,"items":' * 5 + "true" + "}" * 5
    ),
    "additional names beside 1,000": lambda: {
        **_wide(1000, lambda i: {"type": "integer"}), "additionalProperties": {"type": "string"},
    },
    "200 disjoint key patterns": lambda: {"patternProperties": {f"^{i:03}[a-z]{{1,50}}$": {} for i in range(200)}},
    "1,000 key patterns": lambda: {"patternProperties": {f"^{i:03}": {} for i in range(1000)}},
    "60 overlapping key patterns": lambda: {"patternProperties": {f"(a|b)*a(a|b){{{i}}}$": {} for i in range(60)}},
    "a oneOf of 300 tagged objects": lambda: {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": f"k{i}"}}, "required": ["kind"]} for i in range(300)
        ]
    },
    "a oneOf of 3,000 constants": lambda: {"oneOf": [{"const": f"k{i}"} for i in range(3000)]},
    "4,001 subschemas": lambda: {"anyOf": [{} for _ in range(4001)]},
    "3,000 branches of objects": lambda: {"anyOf": [{"properties": {"p": {"const": i}}} for i in range(1300)]},
}  # fmt: skip
"""Schemas by what they do."""

REGEXES: dict[str, str] = {
    "one count of 100,000": "a{1,100000}",
    "counts of counts": "((a{1,100}){1,100}){1,100}",
    "a count of 20,000 letters": "[a-z]{20000}",
    "letters of all scripts, 20,000": r"\p{L}{1,20000}",
    "2 ** 200 states": "(a|b)*a(a|b){200}",
    "2 ** 4,000 states": "(a|b)*a(a|b){4000}",
    "stars of stars": "(x+x+)+(y+y+)+z",
    "overlapping counts": "(.{0,50}a){100}",
    "1,000 alternatives": "|".join(f"a{{1,{i % 17 + 1}}}b{i}" for i in range(1, 900)),
    "65 groups deep": "(" * 65 + "a" + ")" * 65,
    "9,000 bytes": "a" * 9000,
    "empty repeated": "(a*)*" * 500,
    "optional 4,000 times": "a?" * 2000 + "a{2000}",
}
"""Regular expressions by what they do."""

GRAMMARS: dict[str, str] = {
    "a billion laughs": "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)), 'r40: "x"']),
    "terminals that double": "\n".join(["start: R0", *(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)), 'R40: "x"']),
    "counts of counts in rules": 'start: a{100000}\na: b{100000}\nb: c{100000}\nc: "x"',
    "counts of counts in terminals": 'start: A\nA: B{1000}\nB: C{1000}\nC: "x"{1000}',
    "ambiguous without end": 'start: s\ns: s s | "a" |',
    "left and right recursion": 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/',
    "8,000 rules": "\n".join(["start: r0", *(f'r{i}: "{i}" | r{i + 1}' for i in range(8000))]),
    "complements of complements": 'start: A\nA: ~(/(?s:.*)a(?s:.*)/ & ~/(?s:.*)b(?s:.{50})/) & /(?s:.{100,200})/',
    "200,000 bytes": "start: " + '"a" ' * 50_000,
    "deep parentheses": "start: " + "(" * 5000 + '"a"' + ")" * 5000,
    "deep parentheses in gbnf": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000,
    "a long gbnf class": "root ::= [" + "a" * 60_000,
    "open quotes in gbnf": 'root ::= ' + '"\\' * 20_000,
}  # fmt: skip
"""Lark and GBNF grammars by what they do."""
