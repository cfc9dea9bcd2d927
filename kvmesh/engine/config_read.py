"""Values out of a config.json, checked: every reader raises one CheckpointError that names key and value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvmesh.errors import CheckpointError


def bad(key: str, value: Any, why: str) -> CheckpointError:
    shown = repr(value)
    return CheckpointError(f"config.json: {key}={shown[:77] + '...' if len(shown) > 80 else shown}: {why}", field=key)


def _get(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    """Returns the value, or `default` where the key is absent or null. Raises CheckpointError when that is None as
    well."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing", field=key)
    return value


def integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _get(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise bad(key, value, "must be a positive integer")
    return value


def natural(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _get(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise bad(key, value, "must be an integer of at least 0")
    return value


def positive(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = _get(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise bad(key, value, "must be a positive number")
    return float(value)


def boolean(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = _get(raw, key, default)
    if not isinstance(value, bool):
        raise bad(key, value, "must be true or false")
    return value


def positives(raw: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    """Reads a list of `count` positive numbers."""
    value = _get(raw, key, None)
    if not isinstance(value, list) or len(value) != count:
        raise bad(key, value, f"must be a list of {count} numbers")
    return tuple(positive({key: number}, key) for number in value)
