"""What headers may tell of a request besides what it asks for: what it is held to, how urgent it is, what it belongs
to. Each has a field of the same name in the body (`x-kvmesh-ttft-slo-ms`: `ttft_slo_ms`); told in both, they must
agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvmesh.services.gateway.generation import LANES, Generation, brief, refused

PREFIX = "x-kvmesh-"
_WHOLE = re.compile(r"-?[0-9]{1,12}")


def _whole(header: str, text: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise refused(header, text, "must be a whole number")
    return int(text)


def _lane(header: str, text: str) -> str:
    if text not in LANES:
        raise refused(header, text, f"must be one of {', '.join(LANES)}")
    return text


def _name(header: str, text: str) -> str:
    if not text:
        raise refused(header, text, "must not be empty")
    return text


_READERS: Mapping[str, Callable[[str, str], Any]] = {
    "ttft_slo_ms": _whole,
    "tbt_slo_ms": _whole,
    "expected_tokens": _whole,
    "priority": _whole,
    "lane": _lane,
    "session": _name,
    "origin": _name,
}
_FIELDS = {f"{PREFIX}{name.replace('_', '-')}".encode(): name for name in _READERS}
HEADERS = frozenset(_FIELDS)


def read(headers: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Fields of a Generation by name. InvalidRequest names the header and its value."""
    found = {}
    for header, name in _FIELDS.items():
        if header in headers:
            found[name] = _READERS[name](header.decode(), headers[header].decode("latin-1").strip())
    return found


def joined(wanted: Generation, told: Mapping[str, Any]) -> Generation:
    """With what headers tell, checked. InvalidRequest: the body says otherwise, or a value is out of range."""
    if not told:
        return wanted
    for name, value in told.items():
        said = getattr(wanted, name)
        if said is not None and said != value:
            header = PREFIX + name.replace("_", "-")
            raise refused(header, value, f"differs from {name}={brief(repr(said))} in the body")
    wanted = replace(wanted, **told)
    wanted.check_wishes()
    return wanted
