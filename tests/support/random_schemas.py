"""Random schemas whose answers are all bounded in length: a model of random weights meets them by `stop`."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

NAMES = ("id", "name", "tags", "price", "größe", "is valid", "a/b", "x~y", 'quo"te', "Ünï", "list", "k")
WORDS = ("red", "green", "blue", "", "null", "naïve", "🐲", 'a"b', "back\\slash", "line\nfeed")
PATTERNS = (("^[a-z]{1,8}$", 8), ("^(?:ab|cd){2}-[0-9]{1,3}$", 8), (r"^\d{4}-\w{0,3}$", 8), ('^[^"x]{2}$', 8))
"""Expressions and the most UTF-8 bytes of what they match."""
FORMATS = (("date", 10), ("time", 24), ("date-time", 35), ("ipv4", 15), ("uuid", 36))


@dataclass(frozen=True, slots=True)
class BoundedSchema:
    """A schema, and the most bytes of UTF-8 that an answer has: its JSON with one space after commas and colons."""

    schema: dict[str, Any]
    max_bytes: int


def bounded_schema(seed: int, *, depth: int = 3) -> BoundedSchema:
    """The schema of `seed`: equal for equal seeds on all machines. Its root is an object."""
    maker = _Maker(random.Random(f"schema-{seed}"))
    schema, most = maker.object(depth, least=2)
    if maker.defs:
        schema = {**schema, "$defs": maker.defs}
    return BoundedSchema(schema, most)


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.defs: dict[str, Any] = {}

    def any(self, depth: int) -> tuple[dict[str, Any], int]:
        makers = [self.scalar, self.scalar, self.string, self.number, self.constant]
        if depth > 0:
            inner = (self.object, self.array, self.union, self.reference, self.map, self.joined, self.tagged)
            makers += [lambda one=one: one(depth - 1) for one in inner]  # type: ignore[misc]
        return self._rng.choice(makers)()

    def scalar(self) -> tuple[dict[str, Any], int]:
        kinds, most = self._rng.choice((("boolean", 5), ("null", 4), (["boolean", "null"], 5)))
        return {"type": kinds}, most

    def number(self) -> tuple[dict[str, Any], int]:
        low = self._rng.choice((0, 1, -5, -100, self._rng.randint(-9999, 9999)))
        high = low + self._rng.choice((0, 1, 9, 1000))
        schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": high}
        if self._rng.random() < 0.3:
            schema = {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
        if self._rng.random() < 0.2 and high - low >= 9:
            schema["multipleOf"] = self._rng.choice((2, 3, 5))
        return schema, max(len(str(low)), len(str(high)), 2)

    def string(self) -> tuple[dict[str, Any], int]:
        form = self._rng.randrange(4)
        if form == 0:
            pattern, most = self._rng.choice(PATTERNS)
            return {"type": "string", "pattern": pattern}, 2 + 2 * most
        if form == 1:
            name, most = self._rng.choice(FORMATS)
            return {"type": "string", "format": name}, 2 + most
        most = self._rng.randint(0, 12)
        schema: dict[str, Any] = {"type": "string", "maxLength": most}
        if self._rng.random() < 0.5:
            schema["minLength"] = self._rng.randint(0, most)
        return schema, 2 + 4 * most

    def constant(self) -> tuple[dict[str, Any], int]:
        values: list[Any] = [*WORDS, 0, -1, 2.5, True, None, [1, "a"], {"a": 1, "b": []}, {}, []]
        chosen = self._rng.sample(values, self._rng.randint(1, 4))
        most = max(len(json.dumps(one, ensure_ascii=False).encode()) for one in chosen)
        return ({"const": chosen[0]} if len(chosen) == 1 else {"enum": chosen}), most

    def object(self, depth: int, *, least: int = 0) -> tuple[dict[str, Any], int]:
        names = self._rng.sample(NAMES, self._rng.randint(least, 4))
        properties, most = {}, 2
        for name in names:
            properties[name], inner = self.any(depth)
            most += self._quoted(name) + 2 + inner + 2
        required = [name for name in names if self._rng.random() < 0.6]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }, most

    def map(self, depth: int) -> tuple[dict[str, Any], int]:
        inner, most = self.any(depth)
        count = self._rng.randint(0, 3)
        schema = {
            "type": "object",
            "patternProperties": {"^[a-z]{1,3}$": inner},
            "additionalProperties": False,
            "maxProperties": count,
        }
        return schema, 2 + count * (5 + 2 + most + 2)

    def array(self, depth: int) -> tuple[dict[str, Any], int]:
        inner, most = self.any(depth)
        if self._rng.random() < 0.3:
            other, more = self.any(depth)
            return {"type": "array", "prefixItems": [inner, other], "items": False}, 2 + most + more + 4
        count = self._rng.randint(0, 4)
        schema: dict[str, Any] = {"type": "array", "items": inner, "maxItems": count}
        if self._rng.random() < 0.5:
            schema["minItems"] = self._rng.randint(0, count)
        return schema, 2 + count * (most + 2)

    def union(self, depth: int) -> tuple[dict[str, Any], int]:
        branches = [self.any(depth) for _ in range(self._rng.randint(1, 3))]
        return {"anyOf": [schema for schema, _ in branches]}, max(most for _, most in branches)

    def tagged(self, depth: int) -> tuple[dict[str, Any], int]:
        branches, most = [], 0
        for tag in ("cat", "dog"):
            inner, more = self.any(depth)
            branches.append({
                "type": "object",
                "properties": {"kind": {"const": tag}, "value": inner},
                "required": ["kind"],
                "additionalProperties": False,
            })  # fmt: skip
            most = max(most, 2 + 6 + 2 + 5 + 2 + 7 + 2 + more)
        return {"oneOf": branches}, most

    def joined(self, depth: int) -> tuple[dict[str, Any], int]:
        schema, most = self.object(depth)
        branch: dict[str, Any] = {"required": list(schema["properties"])[:1]}
        if self._rng.random() < 0.5:
            return {**schema, "allOf": [branch]}, most
        return {"allOf": [schema, branch]}, most

    def reference(self, depth: int) -> tuple[dict[str, Any], int]:
        schema, most = self.any(depth)
        name = f"part {len(self.defs)}/~"
        self.defs[name] = schema
        return {"$ref": "#/$defs/" + name.replace("~", "~0").replace("/", "~1").replace(" ", "%20")}, most

    def _quoted(self, name: str) -> int:
        return len(json.dumps(name, ensure_ascii=False).encode())
