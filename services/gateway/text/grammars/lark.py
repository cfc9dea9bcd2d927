"""What a client's own Lark grammar may hold: plain rules and terminals, and nothing that reaches past its text."""

from __future__ import annotations

import re

from kvmesh.errors import InvalidRequest

_QUIET = re.compile(r'"(?:[^"\\\n]|\\.)*"i?|/(?![/*\s])(?:[^/\\\n]|\\.)+/[a-z]*|//[^\n]*|#[^\n]*')
"""Strings, expressions and comments: what stands in them is text."""
_REFUSED = (
    (re.compile(r"%(?!import\b|ignore\b)\w*"), "only %import and %ignore are supported; for a schema use json"),
    (re.compile(r"<[^>\s][^>]*>"), "tokens (<...>) cannot be named"),
    (re.compile(r"@\w+"), "other grammars (@name) cannot be named"),
    (re.compile(r"\b(?:max_tokens|temperature|stop|stop_capture)\b"), "is not supported"),
    (re.compile(r"\w+\s*::\s*\w+|::"), "parametric rules (::) are not supported"),
)


def checked_lark(text: str, field: str) -> str:
    """`text` as it is. Raises InvalidRequest when it names tokens, other grammars, embedded schemas, options of the
    compiler, or options that need the answer to be taken back."""
    quiet = _QUIET.sub(" ", text)
    for pattern, why in _REFUSED:
        found = pattern.search(quiet)
        if found is not None:
            raise InvalidRequest.of(field, found[0], why)
    return text
