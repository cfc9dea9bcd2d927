"""What one more token adds to a step, as a share of the step: learned from the times of steps. Pure.

    time = a + b·tokens            share of R rows = b / (a + b·R)

a and b are those of a line through the steps of late, of which each counts a little less than the one after it. Before
steps of different sizes were seen, b is believed to be small: the first drafts show it.
"""

from __future__ import annotations

FORGETS = 0.99
FAR_OFF = 3.0  # times what was predicted: a step that waited for the machine
BELIEVED = 0.05  # share of one token, in the weight of one step
PER_MILLION = 1_000_000


class StepShare:
    """Fits the line. Steps that computed prompts are not given to it."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, tokens, tokens², ns, tokens·ns, decayed

    def add(self, tokens: int, took_ns: int) -> None:
        """Notes a step."""
        expected = self._time(tokens)
        if expected:
            took_ns = min(took_ns, int(FAR_OFF * expected))
        new = (1.0, tokens, tokens * tokens, took_ns, tokens * took_ns)
        self._sums = [FORGETS * old + one for old, one in zip(self._sums, new, strict=True)]

    def _line(self) -> tuple[float, float]:
        n, x, xx, y, xy = self._sums
        if not n:
            return 0.0, 0.0
        mean_x, mean_y = x / n, y / n
        spread, together = xx - x * mean_x, xy - x * mean_y
        # One step's worth of belief that a token adds BELIEVED of a mean step.
        slope = (together + BELIEVED * mean_y) / (spread + 1.0)
        slope = min(max(slope, 0.0), mean_y / mean_x if mean_x else 0.0)
        return mean_y - slope * mean_x, slope

    def _time(self, tokens: int) -> float:
        base, slope = self._line()
        return base + slope * tokens

    def ppm(self, rows: int) -> int:
        """Returns the share of a step of so many rows that one token adds, in millionths: a number that a group's
        leader can tell the others."""
        base, slope = self._line()
        whole = base + slope * rows
        return int(PER_MILLION * (slope / whole if whole else BELIEVED))
