"""Measures what a block costs at this instance: to fetch from elsewhere, or to compute. Pure."""

from __future__ import annotations

from dataclasses import dataclass

NEWEST = 0.2  # the weight of the newest value in the moving average


@dataclass(slots=True)
class Rates:
    """Has moving averages in nanoseconds for each block; 0 where not known yet."""

    pulled_ns: float = 0.0
    computed_ns: float = 0.0

    def pulled(self, blocks: int, took_ns: int) -> None:
        """Records a pull that has brought `blocks` blocks."""
        if blocks and took_ns > 0:
            each = took_ns / blocks
            self.pulled_ns += (each - self.pulled_ns) * (NEWEST if self.pulled_ns else 1.0)

    @property
    def pull_pays(self) -> bool:
        """Whether fetching is faster than computing. Where one of the two is not known, the conductor, which asked for
        the pull, is believed."""
        return not (self.pulled_ns and self.computed_ns) or self.pulled_ns < self.computed_ns
