"""What one more token of a draft adds to a step, as a share of the step: learned from the times of steps. Pure.

    share = (time of a step with drafts / time of one without - 1) / tokens of its drafts

What a step with drafts costs whatever they are (to find them, to sort what is kept) is thereby spread over drafts as
long as they are of late. Both times are means of late steps. Where drafts are all that there is, contexts grow and the
time without them stays: the share is believed to be larger than it is, until steps without drafts show what they take.
"""

from __future__ import annotations

FORGETS = 0.97
FAR_OFF = 3.0  # times the mean: a step that waited for the machine
BELIEVED, LEAST = 0.1, 0.002
TRIES = 4.0  # steps with drafts that the belief counts for
PER_MILLION = 1_000_000


class _LateMean:
    """A mean of late values, which bounds what one that is far off does."""

    __slots__ = ("_sum", "weight")

    def __init__(self) -> None:
        self.weight = self._sum = 0.0

    def add(self, value: float) -> None:
        if self.weight:
            value = min(value, FAR_OFF * self.mean)
        self.weight, self._sum = FORGETS * self.weight + 1, FORGETS * self._sum + value

    @property
    def mean(self) -> float:
        return self._sum / self.weight if self.weight else 0.0


class StepShare:
    """Keeps the times. Steps that computed prompts are not given to it."""

    def __init__(self) -> None:
        self._plain, self._drafting, self._tokens = _LateMean(), _LateMean(), _LateMean()

    def add(self, drafted: int, took_ns: int) -> None:
        """Notes a step that computed so many tokens of drafts."""
        if drafted:
            self._drafting.add(took_ns)
            self._tokens.add(drafted)
        else:
            self._plain.add(took_ns)

    @property
    def ppm(self) -> int:
        """The share in millionths: a number that a group's leader can tell the others."""
        share = BELIEVED
        if self._plain.weight and self._tokens.weight:
            found = max(LEAST, (self._drafting.mean / self._plain.mean - 1) / self._tokens.mean)
            weight = self._tokens.weight
            share = (found * weight + BELIEVED * TRIES) / (weight + TRIES)
        return int(PER_MILLION * share)


class StepShares:
    """Keeps a StepShare of each size of batch, by octave: a step of few rows waits for memory, and a token more costs
    next to nothing; what was measured while many rows ran says nothing about the few that are left of them."""

    def __init__(self) -> None:
        self._shares: dict[int, StepShare] = {}

    def of(self, rows: int) -> StepShare:
        """Returns what is known of steps of about so many rows."""
        return self._shares.setdefault(rows.bit_length(), StepShare())
