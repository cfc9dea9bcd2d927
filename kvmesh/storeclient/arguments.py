"""Checks what callers pass. Each check raises one InvalidRequest that names the field and the value."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, TypeVar

from kvmesh.errors import InvalidRequest

T = TypeVar("T")

MAX_TIMEOUT_MS = 10**9
MAX_TTL_MS = (1 << 32) - 1  # what the message's field takes
MAX_REPLICAS = 64  # what the master accepts


def whole(field: str, value: object, least: int, most: int) -> int:
    """Returns `value` as an int within these bounds; numpy integers are accepted."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequest.of(field, value, f"must be a whole number, not {type(value).__name__}") from None
    if not least <= number <= most:
        raise InvalidRequest.of(field, number, f"must be in {least}..{most}")
    return number


def milliseconds(field: str, value: Any) -> float:
    """Returns the time of an operation, which must be positive and finite."""
    if not isinstance(value, Real) or not 0 < value <= MAX_TIMEOUT_MS:  # type: ignore[operator]
        raise InvalidRequest.of(field, value, f"must be a positive number of milliseconds, at most {MAX_TIMEOUT_MS}")
    return float(value)


def listed(field: str, value: Iterable[T]) -> list[T]:
    """Returns `value` as a list: the same object if it is one. A text, or bytes, is refused: it is one thing and not a
    list."""
    if type(value) is list:
        return value
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
        raise InvalidRequest.of(field, value, f"must be a list, not {type(value).__name__}")
    return list(value)


def instance(field: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidRequest.of(field, value, f"must be {names}, not {type(value).__name__}")


def flag(field: str, value: object, default: bool = False) -> bool:
    """Returns True or False; `default` for None."""
    if value is None:
        return default
    if value is not True and value is not False:
        raise InvalidRequest.of(field, value, f"must be True or False, not {type(value).__name__}")
    return value
