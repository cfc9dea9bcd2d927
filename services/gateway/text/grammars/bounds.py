"""What a grammar may cost: constant bounds that hold before anything is compiled; the
compiler has limits of its own (kvmesh/grammar_limits.py).

Each bound was chosen so that the worst request that passes it is compiled, or refused, within one second and 200 MB
(docs/reference/structured-output.md has the measured cases).
"""

from __future__ import annotations

from typing import Any

from kvmesh.errors import InvalidRequest

MAX_SOURCE_BYTES = 131_072
"""Of a schema as compact JSON, and of all choices together."""
MAX_LARK_BYTES = 16_384
MAX_LARK_COST = 20_000
"""Of one terminal with the terminals in it written out: characters, and 30 for each quantifier."""
MAX_REGEX_BYTES = 4_096
MAX_REGEX_COST = 10_000
"""Of one expression: the characters that it matches at most once its counts are written out (loops count once), and
30 for each quantifier, since `a?a?a?...` costs their square."""
MAX_REGEX_COST_OF_SCHEMA = 50_000
QUANTIFIER_COST = 30
MAX_REGEX_DEPTH = 64
MAX_COUNT = 100_000
"""Of minLength, maxLength, minItems, maxItems, minProperties and maxProperties."""
MAX_JSON_DEPTH = 96
"""Nested arrays and objects of the schema's JSON; a level of nested objects takes two."""
MAX_NODES = 4_000
"""Subschemas that the schema holds, those reached by `$ref` counted once."""
MAX_PROPERTIES = 1_000
"""Of one object."""
MAX_PATTERN_PROPERTIES = 20
"""Of one object: each pair is compared."""
MAX_BRANCHES_OF_ONE = 200
"""Of one `oneOf`: each pair is compared."""
MAX_ENUM_VALUES = 5_000
"""Of all enums and constants together (inner values count), and of a list of choices."""
MAX_LITERAL_BYTES = 4_096
"""Of one string in an enum or a constant, of one name of a property, of one choice."""
MAX_MULTIPLE = 10_000
"""Of the least common multiple of all `multipleOf`, in units of their last decimal."""
MAX_MULTIPLES_OF_SCHEMA = 20_000
MAX_ROW = 1_500
"""Optional properties and branches that may begin at one place of the answer, in the parser's items: it stops at
2,000, in mid-answer."""


def check_depth(text: str, field: str) -> None:
    """Refuses JSON text that nests too deep for a recursive parser; strings in it are skipped."""
    depth = 0
    inside = escaped = False
    for char in text:
        if inside:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                inside = False
        elif char == '"':
            inside = True
        elif char in "[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise InvalidRequest.of(field, text, f"nests deeper than {MAX_JSON_DEPTH} arrays and objects")
        elif char in "]}":
            depth -= 1


def json_bytes(value: Any, field: str) -> int:
    """Bytes of `value`, parsed JSON, when it is written compactly (at least). The walk is iterative and stops at the
    bounds; it raises InvalidRequest for what nests too deep, is too long, or is no JSON."""
    total = 0
    stack: list[tuple[Any, int]] = [(value, 1)]
    while stack:
        one, depth = stack.pop()
        if isinstance(one, str):
            total += 2 + len(_utf8(one, field))
        elif one is None or isinstance(one, bool):
            total += 4
        elif isinstance(one, int):
            total += max(1, one.bit_length() // 4)
        elif isinstance(one, float):
            if one != one or one in (float("inf"), float("-inf")):
                raise InvalidRequest.of(field, one, "holds a number that JSON cannot write")
            total += 3
        elif isinstance(one, (dict, list)):
            if depth > MAX_JSON_DEPTH:
                raise InvalidRequest.of(field, "...", f"nests deeper than {MAX_JSON_DEPTH} arrays and objects")
            total += 2 + len(one)
            if isinstance(one, dict):
                for key, inner in one.items():
                    if not isinstance(key, str):
                        raise InvalidRequest.of(field, key, "is no name of a JSON object")
                    total += 3 + len(_utf8(key, field))
                    stack.append((inner, depth + 1))
            else:
                stack.extend((inner, depth + 1) for inner in one)
        else:
            raise InvalidRequest.of(field, one, "is not JSON")
        if total > MAX_SOURCE_BYTES:
            raise InvalidRequest.of(field, "...", f"is longer than {MAX_SOURCE_BYTES} bytes")
    return total


def _utf8(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest.of(field, text, "holds half of a surrogate pair") from None
