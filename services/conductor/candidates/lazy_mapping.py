"""A mapping whose values are found when they are asked for: of thousands a decision asks for a few. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LazyMapping(dict[K, V]):
    """Remembers what it was asked by `[]`."""

    def __init__(self, find: Callable[[K], V]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: K) -> V:
        value = self[key] = self._find(key)
        return value
