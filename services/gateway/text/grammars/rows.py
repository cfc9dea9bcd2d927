"""How many things may begin at one place of an answer: the parser of a grammar keeps all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.grammars.bounds import MAX_ROW
from kvmesh.services.gateway.text.grammars.finite import children

_PER_PROPERTY = 4
_PER_OBJECT = 7
"""Items of llguidance's parser, counted at its limit."""


def check_rows(schema: dict[str, Any], place: Callable[[dict[str, Any]], str]) -> None:
    """Refuses a rewritten schema (with finite values) of which one part may begin in more ways than the parser keeps
    at one place: llguidance would compile it and give up in mid-answer."""
    weights: dict[int, tuple[int, int]] = {}
    pending: list[Any] = [schema, *schema.get("$defs", {}).values()]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if _weight(node, schema, weights, 0)[1] > MAX_ROW:
                raise InvalidRequest.of(
                    place(node), "...", "has too many optional properties and branches at one place"
                )
            pending.extend(children(node))


def _weight(node: Any, root: dict[str, Any], known: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """The alternatives that `node` offers and their items together. Joined parts multiply their alternatives."""
    if not isinstance(node, dict):
        return 1, 0
    if id(node) in known:
        return known[id(node)]
    if depth > 200:
        return 1, MAX_ROW + 1
    known[id(node)] = (1, 0)  # a part that meets itself here is refused as endless
    count, items = 1, _own(node)
    joined = list(node.get("allOf", ()))
    if "$ref" in node:
        joined.append(root["$defs"][node["$ref"].removeprefix("#/$defs/")])
    parts = [_weight(one, root, known, depth + 1) for one in joined]
    if "anyOf" in node:
        branches = [_weight(one, root, known, depth + 1) for one in node["anyOf"]]
        parts.append((sum(one for one, _ in branches), sum(one for _, one in branches)))
    for more, weight in parts:
        count, items = min(count * more, MAX_ROW + 1), min(items * more + weight * count, MAX_ROW + 1)
    known[id(node)] = count, items
    return count, items


def _own(node: dict[str, Any]) -> int:
    if "const" in node or "enum" in node or not {"properties", "required", "additionalProperties"} & node.keys():
        return 0 if "const" in node or "enum" in node or _is_scalar(node) else _PER_OBJECT
    if _is_scalar(node):
        return 0
    optional = node.get("properties", {}).keys() - set(node.get("required", ()))
    return _PER_OBJECT + _PER_PROPERTY * len(optional)


def _is_scalar(node: dict[str, Any]) -> bool:
    kinds = node.get("type")
    if kinds is None:
        return not {"properties", "items", "patternProperties", "prefixItems"} & node.keys()
    return not {"object", "array"} & ({kinds} if isinstance(kinds, str) else set(kinds))
