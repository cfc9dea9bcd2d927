"""A removal as the store master writes it down and as nodes apply it."""

from __future__ import annotations

from dataclasses import dataclass

RECORD_KEYS = 8  # what a tombstone itself counts for where keys are bounded, so that small ones are bounded too


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Removes either `keys` or all that begin with `prefix`, of 1 to 16 bytes; neither: everything. `seq` grows over
    all terms of masters. `at`: seconds on the clock of the master that keeps it; nodes do not hear of it."""

    seq: int
    keys: tuple[bytes, ...] = ()
    prefix: bytes = b""
    at: float = 0.0

    def covers(self, key: bytes) -> bool:
        """Whether it removes `key`. O(keys)."""
        return key in self.keys if self.keys else key.startswith(self.prefix)
