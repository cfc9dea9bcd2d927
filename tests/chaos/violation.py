"""What a checker finds."""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.history import Op


@dataclass(frozen=True)
class Violation:
    rule: str
    key: str
    text: str
    ops: tuple[Op, ...] = ()

    def __str__(self) -> str:
        return f"[{self.rule}] {self.key[:16] or '-'}: {self.text}"
