"""JSON Schema (draft 2020-12): checked keyword by keyword, and rewritten so that llguidance enforces all of it.

What comes out holds only keywords that llguidance enforces; whatever constrains and would not be enforced is refused
with the place of the keyword. A rewritten schema may be narrower than the client's (it leaves out some valid
instances), never wider.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn
from urllib.parse import unquote

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.grammars.bounds import (
    MAX_BRANCHES_OF_ONE,
    MAX_COUNT,
    MAX_ENUM_VALUES,
    MAX_LITERAL_BYTES,
    MAX_MULTIPLE,
    MAX_MULTIPLES_OF_SCHEMA,
    MAX_NODES,
    MAX_PATTERN_PROPERTIES,
    MAX_PROPERTIES,
    MAX_REGEX_COST_OF_SCHEMA,
    json_bytes,
)
from kvmesh.services.gateway.text.grammars.finite import check_finite
from kvmesh.services.gateway.text.grammars.formats import ENFORCED, PATTERNS
from kvmesh.services.gateway.text.grammars.patterns import translated
from kvmesh.services.gateway.text.grammars.rows import check_rows

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANNOTATIONS = frozenset({
    "title", "description", "default", "example", "examples", "$comment", "deprecated", "readOnly", "writeOnly",
    "contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml",
})  # fmt: skip
"""Keywords that by their specification reject no instance."""
DIALECTS = frozenset({
    "https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema", "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/schema", "https://json-schema.org/schema",
})  # fmt: skip
EXACT = 2**53
"""llguidance keeps numbers as binary64; beyond this bound two integers may be one."""

Schema = dict[str, Any] | bool


def place(field: str, pointer: str) -> str:
    """How an error names the keyword at `pointer` (a JSON pointer) of the schema in `field`."""
    return f"{field}#{pointer}"


def below(pointer: str, *names: str | int) -> str:
    return pointer + "".join("/" + str(name).replace("~", "~0").replace("/", "~1") for name in names)


@dataclass(frozen=True, slots=True)
class NarrowedSchema:
    """The schema that llguidance gets, and where the client's schema has what each of its parts was made of."""

    schema: dict[str, Any]
    parts: int
    pointers: dict[int, tuple[str, dict[str, Any]]]

    def pointer_of(self, part: dict[str, Any]) -> str | None:
        """The JSON pointer of `part` (a dict inside of `schema`), None for what no keyword of the client wrote."""
        known = self.pointers.get(id(part))
        return None if known is None else known[0]


def narrowed(schema: Any, field: str) -> NarrowedSchema:
    """The schema that llguidance gets. Raises InvalidRequest, whose field is `field#` and the JSON pointer of the
    keyword that is not supported, not well-formed, out of bounds, or cannot be met."""
    json_bytes(schema, field)
    out = _Rewriter(schema, field).run()
    where = lambda part: place(field, out.pointer_of(part) or "")  # noqa: E731
    check_finite(out.schema, where)
    check_rows(out.schema, where)
    return out


class _Rewriter:
    def __init__(self, root: Any, field: str) -> None:
        self._root = root
        self._field = field
        self._nodes = 0
        self._values = 0
        self._regex_cost = 0
        self._multiples: list[Decimal] = []
        self._targets: dict[str, str] = {}  # pointer of a `$ref`'s target -> its name in `$defs`
        self._queue: list[str] = []
        self._defs: dict[str, Schema] = {}
        self._pointers: dict[int, tuple[str, dict[str, Any]]] = {}  # by identity of what was written

    def run(self) -> NarrowedSchema:
        out = self._schema(self._root, "")
        if out is False:
            self._refuse("", False, "no value is valid")
        while self._queue:
            pointer = self._queue.pop()
            self._defs[self._targets[pointer]] = self._schema(self._at(pointer, pointer), pointer)
        whole = dict(out) if isinstance(out, dict) else {}
        self._pointers[id(whole)] = ("", whole)
        if self._defs:
            whole["$defs"] = self._defs
        return NarrowedSchema(whole, self._nodes, self._pointers)

    def _refuse(self, pointer: str, value: Any, why: str) -> NoReturn:
        raise InvalidRequest.of(place(self._field, pointer), value, why)

    def _schema(self, schema: Any, pointer: str) -> Schema:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._refuse(pointer, schema, "is no schema (an object, true or false)")
        self._nodes += 1
        if self._nodes > MAX_NODES:
            self._refuse(pointer, "...", f"the schema holds more than {MAX_NODES} subschemas")
        out: dict[str, Any] = {}
        self._pointers[id(out)] = (pointer, out)
        kinds = self._types(schema, pointer)
        if kinds is not None:
            out["type"] = kinds
        for key, value in schema.items():
            if key in ANNOTATIONS or key in ("type", "$defs", "definitions") or key.startswith("x-"):
                if key == "x-guidance":
                    self._refuse(below(pointer, key), value, "is not for clients to set")
                continue
            handler = getattr(self, "_on_" + key.replace("$", "dollar_"), None) if key in _KEYWORDS else None
            if handler is None:
                self._refuse(below(pointer, key), value, f"the keyword {key[:40]} is not supported")
            handler(out, schema, value, below(pointer, key))
        if out.get("minProperties") and out["minProperties"] <= len(out.get("required", ())):
            del out["minProperties"]  # the required names are distinct: they are enough
        elif out.get("minProperties", 0) > 1:  # names beyond the listed ones may be written twice, and count once
            self._refuse(below(pointer, "minProperties"), schema["minProperties"], "more than 1 is not supported")
        return out

    def _types(self, schema: dict[str, Any], pointer: str) -> Any:
        if "type" not in schema:
            return None
        value = schema["type"]
        kinds = [value] if isinstance(value, str) else value
        if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
            self._refuse(below(pointer, "type"), value, "is a type or a list of types")
        for kind in kinds:
            if kind not in TYPES:
                self._refuse(below(pointer, "type"), value, f"is not of {', '.join(TYPES)}")
        return value if isinstance(value, str) else list(dict.fromkeys(kinds))

    # identity and references

    def _on_dollar_schema(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:
        if not isinstance(value, str) or value.rstrip("#") not in DIALECTS:
            self._refuse(pointer, value, "is no known dialect (draft 2020-12, 2019-09, 7 or 6)")

    def _on_dollar_id(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:
        if pointer != "/$id":
            self._refuse(pointer, value, "is supported at the schema's root alone")

    def _on_dollar_ref(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:
        if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
            self._refuse(pointer, value, "refers to something else than this schema's # or #/pointer")
        target = unquote(value[1:])
        if target not in self._targets:
            self._at(target, pointer)
            self._targets[target] = f"d{len(self._targets)}"
            self._queue.append(target)
        out["$ref"] = f"#/$defs/{self._targets[target]}"

    def _at(self, target: str, pointer: str) -> Any:
        one = self._root
        for name in target.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(one, dict) and name in one:
                one = one[name]
            elif isinstance(one, list) and name.isdecimal() and name.isascii() and int(name[:9]) < len(one):
                one = one[int(name[:9])]
            else:
                self._refuse(pointer, "#" + target, "refers to nothing")
            if isinstance(one, dict) and isinstance(one.get("$id"), str) and one is not self._root:
                self._refuse(pointer, "#" + target, "leads through an $id")
        return one

    # values

    def _on_enum(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:
        if not isinstance(value, list) or not value:
            self._refuse(pointer, value, "is a list of at least one value")
        for index, one in enumerate(value):
            self._literal(one, below(pointer, index))
        out["enum"] = value

    def _on_const(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:
        self._literal(value, pointer)
        out["const"] = value

    def _literal(self, value: Any, pointer: str) -> None:
        for one in _parts(value):
            self._values += 1
            if self._values > MAX_ENUM_VALUES:
                self._refuse(pointer, "...", f"all enums together hold more than {MAX_ENUM_VALUES} values")
            if isinstance(one, str):
                self._writable(one, pointer)
            elif isinstance(one, (int, float)) and not isinstance(one, bool) and abs(one) > EXACT:
                self._refuse(pointer, one, "numbers beyond 2**53 are not exact")

    def _writable(self, text: str, pointer: str) -> None:
        """Answers never escape as \\uXXXX: a name that is spelt in two ways would be two names to the grammar."""
        if any((char < " " and char not in "\b\t\n\f\r") or char == "\x7f" for char in text):
            self._refuse(pointer, text, "holds a control character")
        if len(text.encode()) > MAX_LITERAL_BYTES:
            self._refuse(pointer, text, f"is longer than {MAX_LITERAL_BYTES} bytes")

    # applicators

    def _on_allOf(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:  # noqa: N802
        out["allOf"] = self._schemas(value, pointer) + out.get("allOf", [])

    def _on_anyOf(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:  # noqa: N802
        out["anyOf"] = self._schemas(value, pointer)

    def _on_oneOf(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:  # noqa: N802
        """`oneOf` is `anyOf` where no value can be valid under two branches; other uses are refused."""
        branches = self._schemas(value, pointer)
        if len(branches) > MAX_BRANCHES_OF_ONE:
            self._refuse(pointer, "...", f"holds {len(branches)} branches, at most {MAX_BRANCHES_OF_ONE} are allowed")
        known = [_Disjointness(self._root, one) for one in value]
        for index, one in enumerate(known):
            for other_index in range(index):
                if not one.apart_from(known[other_index]):
                    why = f"branches {other_index} and {index} are not known to exclude each other (anyOf takes them)"
                    self._refuse(pointer, value, why)
        out["allOf"] = [*out.get("allOf", []), {"anyOf": branches}]

    def _schemas(self, value: Any, pointer: str) -> list[Schema]:
        if not isinstance(value, list) or not value:
            self._refuse(pointer, value, "is a list of at least one schema")
        return [self._schema(one, below(pointer, index)) for index, one in enumerate(value)]

    def _schemas_by_name(self, value: Any, pointer: str) -> Iterator[tuple[str, Schema]]:
        if not isinstance(value, dict):
            self._refuse(pointer, value, "is an object of schemas")
        if len(value) > MAX_PROPERTIES:
            self._refuse(pointer, "...", f"names {len(value)} properties, at most {MAX_PROPERTIES} are allowed")
        for name, one in value.items():
            yield name, self._schema(one, below(pointer, name))

    # objects

    def _on_properties(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:
        out["properties"] = dict(self._schemas_by_name(value, pointer))
        for name in out["properties"]:
            self._writable(name, below(pointer, name))

    def _on_patternProperties(  # noqa: N802
        self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str
    ) -> None:
        out["patternProperties"] = {
            self._translated(name, below(pointer, name)): one for name, one in self._schemas_by_name(value, pointer)
        }
        if len(value) > MAX_PATTERN_PROPERTIES:
            self._refuse(pointer, "...", f"holds {len(value)} patterns, at most {MAX_PATTERN_PROPERTIES} are allowed")
        if len(out["patternProperties"]) < len(value):
            self._refuse(pointer, value, "two patterns are one")

    def _on_additionalProperties(  # noqa: N802
        self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str
    ) -> None:
        out["additionalProperties"] = self._schema(value, pointer)

    def _on_required(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._refuse(pointer, value, "is a list of names")
        if len(value) > MAX_PROPERTIES:
            self._refuse(pointer, "...", f"names {len(value)} properties, at most {MAX_PROPERTIES} are allowed")
        for index, name in enumerate(value):
            self._writable(name, below(pointer, index))
        out["required"] = list(dict.fromkeys(value))

    def _on_minProperties(  # noqa: N802
        self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str
    ) -> None:
        self._count("minProperties", out, value, pointer)

    def _on_maxProperties(  # noqa: N802
        self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str
    ) -> None:
        self._count("maxProperties", out, value, pointer)

    # arrays

    def _on_items(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:
        if isinstance(value, list):
            self._refuse(pointer, value, "is one schema; a list of schemas is called prefixItems")
        out["items"] = self._schema(value, pointer)

    def _on_prefixItems(  # noqa: N802
        self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str
    ) -> None:
        out["prefixItems"] = self._schemas(value, pointer)

    def _on_minItems(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:  # noqa: N802
        self._count("minItems", out, value, pointer)

    def _on_maxItems(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:  # noqa: N802
        self._count("maxItems", out, value, pointer)

    # strings

    def _on_minLength(  # noqa: N802
        self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str
    ) -> None:
        self._count("minLength", out, value, pointer)

    def _on_maxLength(  # noqa: N802
        self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str
    ) -> None:
        self._count("maxLength", out, value, pointer)

    def _on_pattern(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:
        out["pattern"] = self._translated(value, pointer)

    def _translated(self, pattern: Any, pointer: str) -> str:
        written, cost = translated(pattern, place(self._field, pointer), anchored=False)
        self._regex_cost += cost
        if self._regex_cost > MAX_REGEX_COST_OF_SCHEMA:
            self._refuse(pointer, pattern, "all patterns together repeat too much")
        return written

    def _on_format(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:
        if not isinstance(value, str):
            self._refuse(pointer, value, "is the name of a format")
        if value in PATTERNS:
            of_strings = {"type": "string"} if out.get("type") == "string" else {}
            out["allOf"] = [*out.get("allOf", []), {**of_strings, "pattern": PATTERNS[value]}]
        elif value in ENFORCED:
            out["format"] = value
        else:
            known = ", ".join(sorted([*PATTERNS, *ENFORCED]))
            self._refuse(pointer, value, f"is no format that is enforced ({known} are)")

    # numbers

    def _on_minimum(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:
        self._lower("minimum", out, value, pointer)

    def _on_exclusiveMinimum(  # noqa: N802
        self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str
    ) -> None:
        self._lower("exclusiveMinimum", out, value, pointer)

    def _on_maximum(self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str) -> None:
        self._upper("maximum", out, value, pointer)

    def _on_exclusiveMaximum(  # noqa: N802
        self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str
    ) -> None:
        self._upper("exclusiveMaximum", out, value, pointer)

    def _on_multipleOf(  # noqa: N802
        self, out: dict[str, Any], schema: dict[str, Any], value: Any, pointer: str
    ) -> None:
        number = self._number(value, pointer)
        if not 1e-9 <= number <= 1e9:
            self._refuse(pointer, value, "is not from 1e-9 to 1e9")
        self._multiples.append(Decimal(repr(value)).normalize())
        unit = min(int(one.as_tuple().exponent) for one in self._multiples)
        scaled = [int(one.scaleb(-unit)) for one in self._multiples]
        if math.lcm(*scaled) > MAX_MULTIPLE or sum(scaled) > MAX_MULTIPLES_OF_SCHEMA:
            self._refuse(pointer, value, f"all multipleOf together have a common multiple above {MAX_MULTIPLE} units")
        out["multipleOf"] = value

    def _lower(self, key: str, out: dict[str, Any], value: Any, pointer: str) -> None:
        number = self._number(value, pointer)
        if number > EXACT:
            self._refuse(pointer, value, "is beyond 2**53: numbers there are not exact")
        out[key] = -EXACT if number < -EXACT else value

    def _upper(self, key: str, out: dict[str, Any], value: Any, pointer: str) -> None:
        number = self._number(value, pointer)
        if number < -EXACT:
            self._refuse(pointer, value, "is beyond -2**53: numbers there are not exact")
        out[key] = EXACT if number > EXACT else value

    def _number(self, value: Any, pointer: str) -> int | float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._refuse(pointer, value, "is a number")
        return value

    def _count(self, key: str, out: dict[str, Any], value: Any, pointer: str) -> None:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < 0:
            self._refuse(pointer, value, "is a whole number of at least 0")
        if value > MAX_COUNT:
            self._refuse(pointer, value, f"is more than {MAX_COUNT}")
        out[key] = int(value)


_KEYWORDS = frozenset(
    name.removeprefix("_on_").replace("dollar_", "$") for name in vars(_Rewriter) if name.startswith("_on_")
)
"""The keywords that constrain and are enforced."""


def _parts(value: Any) -> Iterator[Any]:
    """A JSON value, the values inside of it, and the names inside of it."""
    stack = [value]
    while stack:
        one = stack.pop()
        yield one
        if isinstance(one, dict):
            yield from one
            stack.extend(one.values())
        elif isinstance(one, list):
            stack.extend(one)


class _Disjointness:
    """What one branch of a `oneOf` allows, as far as a type, a constant or a required constant property shows it."""

    def __init__(self, root: Any, branch: Any) -> None:
        branch = _resolved(root, branch)
        self.kinds = _kinds(branch)
        self.values = _values(branch)
        self.tags: dict[str, set[tuple[str, Any]]] = {}
        if isinstance(branch, dict) and self.kinds == {"object"}:
            required = branch.get("required", ())
            properties = branch.get("properties", {})
            if isinstance(required, list) and isinstance(properties, dict):
                for name in required:
                    values = _values(_resolved(root, properties.get(name))) if isinstance(name, str) else None
                    if values is not None:
                        self.tags[name] = values

    def apart_from(self, other: _Disjointness) -> bool:
        if not self.kinds & other.kinds:
            return True
        if self.values is not None and other.values is not None and not self.values & other.values:
            return True
        return any(name in other.tags and not self.tags[name] & other.tags[name] for name in self.tags)


def _resolved(root: Any, schema: Any) -> Any:
    """The schema behind a plain `$ref` (up to eight of them), or `schema` itself where it cannot be followed."""
    for _ in range(8):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str) or "%" in schema["$ref"]:
            return schema
        one = root
        for name in schema["$ref"].split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(one, dict) or name not in one:
                return schema
            one = one[name]
        schema = one
    return schema


def _kinds(schema: Any) -> set[str]:
    """The JSON types that a schema may allow ("integer" counts as "number")."""
    everything = {"null", "boolean", "number", "string", "array", "object"}
    if not isinstance(schema, dict):
        return set() if schema is False else everything
    value = schema.get("type")
    named = [value] if isinstance(value, str) else value if isinstance(value, list) else everything
    kinds = {"number" if kind == "integer" else kind for kind in named if isinstance(kind, str)}
    if "const" in schema:
        kinds &= {_kind(schema["const"])}
    if isinstance(schema.get("enum"), list):
        kinds &= {_kind(one) for one in schema["enum"]}
    return kinds


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _values(schema: Any) -> set[tuple[str, Any]] | None:
    """The values that a schema of constant scalars allows, with their types, or None for any other schema."""
    if not isinstance(schema, dict):
        return None
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list) or any(isinstance(one, (dict, list)) for one in listed):
        return None
    return {(_kind(one), one) for one in listed}
