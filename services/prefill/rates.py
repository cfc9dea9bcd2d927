"""What a block costs at this instance, as seen lately: to fetch from elsewhere, or to compute. Pure."""

from __future__ import annotations

from dataclasses import dataclass

NEWEST = 0.2  # its weight among what was seen


@dataclass(slots=True)
class Rates:
    """Nanoseconds a block; 0: not known yet."""

    pulled_ns: float = 0.0
    computed_ns: float = 0.0

    def pulled(self, blocks: int, took_ns: int) -> None:
        """A pull has brought so many."""
        if blocks and took_ns > 0:
            each = took_ns / blocks
            self.pulled_ns += (each - self.pulled_ns) * (NEWEST if self.pulled_ns else 1.0)

    @property
    def pull_pays(self) -> bool:
        """Whether fetching is faster than computing. Where that is not known, whoever asked for the pull knew."""
        return not (self.pulled_ns and self.computed_ns) or self.pulled_ns < self.computed_ns
