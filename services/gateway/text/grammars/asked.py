"""Which form of answer a chat body asks for, under the names that OpenAI, vLLM and SGLang gave the field."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.grammars.bounds import MAX_SOURCE_BYTES, check_depth

FormKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class AskedForm:
    """The one form that a body asks for. `field` is the dotted name under which the client wrote `source`."""

    kind: FormKind
    source: Any
    field: str
    strict: bool = False


_PLAIN: dict[str, FormKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
}
"""vLLM's legacy names and SGLang's names, at the top of the body."""

_STRUCTURED: dict[str, FormKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
"""The keys of vLLM's `structured_outputs`."""


def asked_form(body: MutableMapping[str, Any]) -> AskedForm | None:
    """Removes every field that asks for a form from `body` and returns the form, or None where text is asked for.

    Raises InvalidRequest when a field is misshapen or when two fields ask for a form.
    """
    found = [
        form
        for form in (
            _response_format(body.pop("response_format", None)),
            *_structured_outputs(body.pop("structured_outputs", None)),
            *(_plain(name, kind, body.pop(name, None)) for name, kind in _PLAIN.items()),
        )
        if form is not None
    ]
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise InvalidRequest(f"{first} and {second}: one request asks for one form of answer", field=second)
    return found[0] if found else None


def _response_format(value: Any) -> AskedForm | None:
    if value is None:
        return None
    field = "response_format"
    if not isinstance(value, dict):
        raise InvalidRequest.of(field, value, "is an object with a type")
    kind = value.get("type")
    if kind == "text":
        _only(value, {"type"}, field)
        return None
    if kind == "json_object":
        _only(value, {"type", "schema"}, field)
        if value.get("schema") is None:
            return AskedForm("json_object", None, field)
        return AskedForm("json_schema", _schema(value["schema"], f"{field}.schema"), f"{field}.schema")
    if kind == "json_schema":
        _only(value, {"type", "json_schema"}, field)
        return _named_schema(value.get("json_schema"), f"{field}.json_schema")
    raise InvalidRequest.of(f"{field}.type", kind, "is not one of text, json_object, json_schema")


def _named_schema(value: Any, field: str) -> AskedForm:
    if not isinstance(value, dict):
        raise InvalidRequest.of(field, value, "is an object with name and schema")
    _only(value, {"name", "description", "schema", "strict"}, field)
    for name in ("name", "description"):
        if value.get(name) is not None and not isinstance(value[name], str):
            raise InvalidRequest.of(f"{field}.{name}", value[name], "is a string")
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest.of(f"{field}.strict", strict, "is true or false")
    if value.get("schema") is None:
        raise InvalidRequest.of(f"{field}.schema", None, "is missing")
    return AskedForm("json_schema", _schema(value["schema"], f"{field}.schema"), f"{field}.schema", bool(strict))


def _structured_outputs(value: Any) -> list[AskedForm | None]:
    if value is None:
        return []
    field = "structured_outputs"
    if not isinstance(value, dict):
        raise InvalidRequest.of(field, value, f"is an object with one of {', '.join(_STRUCTURED)}")
    set_keys = {key: one for key, one in value.items() if one is not None}
    _only(set_keys, set(_STRUCTURED), field)
    if not set_keys:
        raise InvalidRequest.of(field, value, f"holds one of {', '.join(_STRUCTURED)}")
    found: list[AskedForm | None] = []
    for key, one in set_keys.items():
        name = f"{field}.{key}"
        if key != "json_object":
            found.append(_plain(name, _STRUCTURED[key], one))
        elif one is True:
            found.append(AskedForm("json_object", None, name))
        elif one is not False:
            raise InvalidRequest.of(name, one, "is true or false")
    return found


def _plain(field: str, kind: FormKind, value: Any) -> AskedForm | None:
    if value is None:
        return None
    return AskedForm(kind, _schema(value, field) if kind == "json_schema" else value, field)


def _schema(value: Any, field: str) -> Any:
    """The schema itself, where clients may send it as an object or as JSON text."""
    if not isinstance(value, str):
        return value
    if len(value.encode("utf-8", "replace")) > MAX_SOURCE_BYTES:
        raise InvalidRequest.of(field, value, f"is longer than {MAX_SOURCE_BYTES} bytes")
    check_depth(value, field)
    try:
        return json.loads(value)
    except ValueError as err:
        raise InvalidRequest.of(field, value, f"is not JSON ({err})") from None


def _only(value: dict[str, Any], known: set[str], field: str) -> None:
    for key, one in value.items():
        if key not in known and one is not None:
            raise InvalidRequest.of(f"{field}.{key}", one, f"is not supported; known are {', '.join(sorted(known))}")
