"""The tools of a request, and the JSON of argument values that a model writes without types."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_ANY = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))
_LITERAL_LIMIT = 65_536  # characters of a value that is read as Python's notation of a list or dict
_DEPTH_LIMIT = 8  # of schemas that refer to others
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"(-?[0-9]+)\.0+")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call. `parameters` is the JSON Schema of its arguments' object."""

    name: str
    parameters: Mapping[str, Any]


def property_schema(tool: ToolSpec | None, name: str) -> Any:
    """Returns the schema of the argument `name`; True, which allows everything, when there is none."""
    properties = tool.parameters.get("properties") if tool is not None else None
    return properties.get(name, True) if isinstance(properties, Mapping) else True


def value_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the JSON types that `schema` allows. `root` is what local references start from. A schema that does not
    tell allows all."""
    found = frozenset(_types(schema, root, _DEPTH_LIMIT))
    return found or _ANY


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        yield from _ANY
        return
    given = schema.get("type")
    if isinstance(given, str):
        yield from _ANY & {given}
    elif isinstance(given, list):
        yield from _ANY.intersection(one for one in given if isinstance(one, str))
    elif isinstance(schema.get("enum"), list):
        yield from map(_type_of, schema["enum"])
    elif "const" in schema:
        yield _type_of(schema["const"])
    elif isinstance(schema.get("$ref"), str):
        yield from _types(_resolved(schema["$ref"], root), root, depth - 1)
    else:
        for key in ("anyOf", "oneOf", "allOf"):
            options = schema.get(key)
            if isinstance(options, list):
                for option in options:
                    yield from _types(option, root, depth - 1)
                return
        if "properties" in schema:
            yield "object"
        elif "items" in schema:
            yield "array"
        else:
            yield from _ANY


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns what a reference like `#/$defs/city` names; True when it names nothing here."""
    found: Any = root
    if not reference.startswith("#"):
        return True
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or part not in found:
            return True
        found = found[part]
    return found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kinds, name in ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kinds):
            return name
    return "object"


def value_json(text: str, types: frozenset[str]) -> str:
    """Returns the JSON text of a value that a model wrote as `text`. One that is not of an allowed type stays a
    string."""
    written = text.strip()
    lowered = written.lower()
    if lowered in ("true", "false") and "boolean" in types:
        return lowered
    if lowered in ("null", "none") and "null" in types:
        return "null"
    if _NUMBER.fullmatch(written):
        if "number" in types:
            return written
        if "integer" in types:
            whole = _WHOLE.fullmatch(written)
            if whole or written.lstrip("-").isdigit():
                return whole[1] if whole else written
    kind = {"{": "object", "[": "array"}.get(written[:1], "")
    if kind in types:
        found = _container(written)
        if found:
            return found
    # A string in quotes where a schema leaves the type open (or the notation of one) is JSON already.
    if written[:1] == '"' and types != {"string"} and _is_json(written):
        return written
    return json.dumps(text, ensure_ascii=False)


def _container(written: str) -> str:
    if _is_json(written):
        return written
    if len(written) > _LITERAL_LIMIT:
        return ""
    try:
        value = ast.literal_eval(written)
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, dict | list) else ""
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ""


def _is_json(written: str) -> bool:
    try:
        # Numbers are not made: their digits may be many.
        json.loads(written, parse_int=len, parse_float=len, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> Any:
    raise ValueError(name)
