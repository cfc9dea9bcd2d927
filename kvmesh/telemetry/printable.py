"""Makes foreign text safe for a log, where a line is an event, and for a terminal, which obeys some characters."""

from __future__ import annotations

import re

# Control characters but tab and line feed; what separates lines or turns their direction; halves of surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Returns `text` with control characters as Python writes them (`\x1b`). Tabs and line feeds stay."""
    return _UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)
