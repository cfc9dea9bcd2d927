"""Whether a schema's values can end: a schema that can only be met by endless nesting is a trap for a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from kvmesh.errors import InvalidRequest

MAX_JOINED = 20_000
"""Parts that hold beside each other (by `allOf` and `$ref`), summed over all subschemas."""


def check_finite(schema: dict[str, Any], place: Callable[[dict[str, Any]], str]) -> None:
    """Refuses a rewritten schema of which some reachable part has no finite value (`{"$ref": "#"}`, or an object that
    requires a property of its own kind). Contradictions of other kinds are the compiler's to find. `place` names a
    part in errors."""
    nodes = list(_nodes(schema))
    joined: dict[int, list[dict[str, Any]]] = {}
    asking: dict[int, list[dict[str, Any]]] = defaultdict(list)  # by part: those whose answer depends on it
    budget = MAX_JOINED
    for node in nodes:
        parts = joined[id(node)] = _joined(node, schema)
        budget -= len(parts)
        if budget < 0:
            raise InvalidRequest.of(place(node), "...", "allOf and $ref join too many schemas")
        for part in parts:
            for inner in (*children(part), *target(part, schema)):
                if isinstance(inner, dict):
                    asking[id(inner)].append(node)
    finite: set[int] = set()
    todo = nodes
    while todo:  # the least fixed point: a part joins when those that it needs have joined
        grown = [node for node in todo if _ends(joined[id(node)], schema, finite)]
        finite.update(map(id, grown))
        again = {id(node): node for one in grown for node in asking[id(one)] if id(node) not in finite}
        todo = list(again.values())
    for node in nodes:
        if id(node) not in finite:
            raise InvalidRequest.of(place(node), "...", "no finite value is valid here: it requires its own kind")


def _nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    stack: list[Any] = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack.extend(children(node))
            stack.extend(node.get("$defs", {}).values())


def children(node: dict[str, Any]) -> Iterator[Any]:
    """The subschemas that stand inside of a rewritten one."""
    for key in ("allOf", "anyOf", "prefixItems"):
        yield from node.get(key, ())
    for key in ("properties", "patternProperties"):
        yield from node.get(key, {}).values()
    for key in ("items", "additionalProperties"):
        if key in node:
            yield node[key]


def target(node: dict[str, Any], root: dict[str, Any]) -> Iterator[Any]:
    """The schema that `node`'s `$ref` leads to, if it has one."""
    if "$ref" in node:
        yield root["$defs"][node["$ref"].removeprefix("#/$defs/")]


def _joined(node: dict[str, Any], root: dict[str, Any]) -> list[dict[str, Any]]:
    """`node` and all that must hold beside it: its `allOf`, what its `$ref` leads to, and so on."""
    found: dict[int, dict[str, Any]] = {}
    stack: list[Any] = [node]
    while stack:
        one = stack.pop()
        if isinstance(one, dict) and id(one) not in found:
            found[id(one)] = one
            stack.extend(one.get("allOf", ()))
            stack.extend(target(one, root))
    return list(found.values())


def _ends(joined: list[dict[str, Any]], root: dict[str, Any], finite: set[int]) -> bool:
    def ends(part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in finite

    for one in joined:
        if not all(ends(part) for part in (*one.get("allOf", ()), *target(one, root))):
            return False
        if "anyOf" in one and not any(ends(branch) for branch in one["anyOf"]):
            return False
    if any("const" in one or "enum" in one for one in joined):
        return True
    kinds: set[str] | None = None
    for one in joined:
        if "type" in one:
            named = {one["type"]} if isinstance(one["type"], str) else set(one["type"])
            kinds = named if kinds is None else kinds & named
    if not kinds or kinds - {"array", "object"}:
        return True  # a scalar ends; so does a contradiction, which the compiler refuses
    return ("object" in kinds and _object_ends(joined, ends)) or ("array" in kinds and _array_ends(joined, ends))


def _object_ends(joined: list[dict[str, Any]], ends: Callable[[Any], bool]) -> bool:
    required = {name for one in joined for name in one.get("required", ())}
    return all(
        ends(one.get("properties", {}).get(name, one.get("additionalProperties", True)))
        for one in joined
        for name in required
    )


def _array_ends(joined: list[dict[str, Any]], ends: Callable[[Any], bool]) -> bool:
    least = max(one.get("minItems", 0) for one in joined)
    for one in joined:
        prefix = one.get("prefixItems", [])
        if not all(ends(inner) for inner in prefix[:least]) or (
            least > len(prefix) and not ends(one.get("items", True))
        ):
            return False
    return True
