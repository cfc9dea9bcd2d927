"""What a client's own Lark grammar may hold: plain rules and terminals of bounded cost, and nothing that reaches past
its text."""

from __future__ import annotations

import math
import re

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.grammars.bounds import MAX_LARK_COST, QUANTIFIER_COST

_STRING = r'"(?:[^"\\\n]|\\.)*"i?'
_EXPRESSION = r"/(?![/*\s])(?:[^/\\\n]|\\.)+/[a-z]*"
_QUIET = re.compile(rf"{_STRING}|{_EXPRESSION}|//[^\n]*|#[^\n]*")
"""Strings, expressions and comments: what stands in them is text."""
_COMMENT = re.compile(rf"({_STRING}|{_EXPRESSION})|//[^\n]*|#[^\n]*")
_REFUSED = (
    (re.compile(r"%(?!import\b|ignore\b)\w*"), "only %import and %ignore are supported; for a schema use json"),
    (re.compile(r"<[^>\s][^>]*>"), "tokens (<...>) cannot be named"),
    (re.compile(r"@\w+"), "other grammars (@name) cannot be named"),
    (re.compile(r"\b(?:max_tokens|temperature|stop|stop_capture)\b"), "is not supported"),
    (re.compile(r"::"), "parametric rules are not supported"),
    (re.compile(r"[~&](?!\s*\d)"), "the operators ~ and & are not supported"),
)
_DEFINITION = re.compile(r"^[ \t]*[?!]?([A-Za-z_][\w-]*)(?:\[[^\]\n]*\])?(?:\.-?\d+)?[ \t]*:", re.MULTILINE)
_COUNT = re.compile(r"\{(\d*),?(\d*)\}|~\s*(\d+)(?:\s*\.\.\s*(\d+))?")
_TERMINAL = re.compile(r"\b[A-Z_][A-Z0-9_]*\b")


def checked_lark(text: str, field: str) -> str:
    """`text` as it is. Raises InvalidRequest when it names tokens, other grammars, embedded schemas, options of the
    compiler, or options that need the answer to be taken back, and when a terminal is too large when written out."""
    quiet = _QUIET.sub(" ", text)
    for pattern, why in _REFUSED:
        found = pattern.search(quiet)
        if found is not None:
            raise InvalidRequest.of(field, found[0], why)
    bodies = _bodies(_COMMENT.sub(lambda found: found[1] or " ", text))
    costs: dict[str, int] = {}
    for name, body in bodies.items():
        if name.isupper():
            cost = _cost(name, bodies, costs, ())
        else:  # the terminals that stand in a rule by themselves
            cost = max((_own_cost(one[0]) for one in re.finditer(_EXPRESSION, body)), default=0)
        if cost > MAX_LARK_COST:
            raise InvalidRequest.of(field, name, f"costs {cost} when written out, at most {MAX_LARK_COST} are allowed")
    return text


def _bodies(text: str) -> dict[str, str]:
    found = list(_DEFINITION.finditer(text))
    ends = [one.start() for one in found[1:]] + [len(text)]
    return {one[1]: text[one.end() : end] for one, end in zip(found, ends, strict=True)}


def _cost(name: str, bodies: dict[str, str], costs: dict[str, int], inside: tuple[str, ...]) -> int:
    """The cost of a terminal with those in it written out; too deep or endless ones cost too much."""
    if name in costs:
        return costs[name]
    if name in inside or len(inside) > 50:
        return MAX_LARK_COST + 1
    body = bodies.get(name, "")
    inner = sum(_cost(one, bodies, costs, (*inside, name)) for one in _TERMINAL.findall(_QUIET.sub(" ", body)))
    costs[name] = min(_own_cost(body) + inner * _counts(body), MAX_LARK_COST + 1)
    return costs[name]


def _own_cost(body: str) -> int:
    quantifiers = sum(body.count(char) for char in "?*+{")
    return _counts(body) * len(body) + QUANTIFIER_COST * quantifiers


def _counts(body: str) -> int:
    """All counted repetitions of `body`, multiplied, as if they stood in each other."""
    return math.prod(max(1, *(int(one[:6]) for one in found if one)) for found in _found_counts(body))


def _found_counts(body: str) -> list[tuple[str, ...]]:
    return [tuple(one for one in found.groups() if one) or ("1",) for found in _COUNT.finditer(body)]
