"""What one more token of a draft adds to a step, as a share of the step: learned from the times of steps. Pure.

    share = (time of a step with drafts / time of one without - 1) / tokens of its drafts

What a step with drafts costs whatever they are (to find them, to sort what is kept) is thereby spread over drafts as
long as they are of late; what a drafter that computes takes is counted apart (`DraftingTime`). Both times are means of
late steps. Where drafts are all that there is, contexts grow and the
time without them stays: the share is believed to be larger than it is, until steps without drafts show what they take.
"""

from __future__ import annotations

from typing import NamedTuple

FORGETS = 0.97
FAR_OFF = 3.0  # times the mean: a step that waited for the machine
# Before it was measured: a tenth, and of many rows a quarter of what a step takes that is bound by its computing, whose
# share is 1 / rows. A belief of that much would keep drafts from ever being tried.
BELIEVED, OF_MANY, LEAST = 0.1, 0.25, 0.002
TRIES = 4.0  # steps with drafts that the belief counts for
PER_MILLION = 1_000_000
MOST_PPM = 4_000 * PER_MILLION  # it is told as 32 bits


class DraftCosts(NamedTuple):
    """Says what a token of a draft costs, in millionths of a step of the live rows without drafts: in the step that
    verifies it, and to be drafted by a drafter that computes. A group's leader tells the others its own."""

    verified_ppm: int = 0
    drafted_ppm: int = 0


NO_COSTS = DraftCosts()


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
    """Keeps the times of steps of about so many rows. Steps that computed prompts are not given to it."""

    def __init__(self, rows: int = 1) -> None:
        self._believed = min(BELIEVED, OF_MANY / max(1, rows))
        self._plain, self._drafting, self._tokens = _LateMean(), _LateMean(), _LateMean()

    def add(self, drafted: int, took_ns: int) -> None:
        """Notes a step that computed so many tokens of drafts."""
        if drafted:
            self._drafting.add(took_ns)
            self._tokens.add(drafted)
        else:
            self._plain.add(took_ns)

    @property
    def plain_ns(self) -> float:
        """What a step without drafts takes; 0 where no step was timed."""
        if self._plain.weight or not self._tokens.weight:
            return self._plain.mean
        return self._drafting.mean / (1 + self._believed * self._tokens.mean)

    @property
    def ppm(self) -> int:
        """The share in millionths: a number that a group's leader can tell the others."""
        share = self._believed
        if self._plain.weight and self._tokens.weight:
            found = max(LEAST, (self._drafting.mean / self._plain.mean - 1) / self._tokens.mean)
            weight = self._tokens.weight
            share = (found * weight + self._believed * TRIES) / (weight + TRIES)
        return int(PER_MILLION * share)


class StepShares:
    """Keeps a StepShare of each size of batch, by octave: a step of few rows waits for memory, and a token more costs
    next to nothing; what was measured while many rows ran says nothing about the few that are left of them."""

    def __init__(self) -> None:
        self._shares: dict[int, StepShare] = {}

    def of(self, rows: int) -> StepShare:
        """Returns what is known of steps of about so many rows."""
        octave = rows.bit_length()
        if octave not in self._shares:
            self._shares[octave] = StepShare(1 << octave >> 1)
        return self._shares[octave]


class DraftingTime:
    """Keeps what a drafter that computes takes for a token of its drafts: a mean of late times over one of late
    counts, with what it computes first to know the row's text."""

    def __init__(self) -> None:
        self._took, self._tokens = _LateMean(), _LateMean()

    def add(self, tokens: int, took_ns: int) -> None:
        """Notes that so many tokens were drafted in this time. Where there are none the time is that of a prompt, once
        for each row, and says nothing about a token."""
        if tokens:
            self._took.add(took_ns)
            self._tokens.add(tokens)

    def ppm(self, step_ns: float) -> int:
        """Returns the time of a token in millionths of a step; 0 where either is not known."""
        if not self._tokens.weight or not step_ns:
            return 0
        return min(MOST_PPM, int(PER_MILLION * self._took.mean / self._tokens.mean / step_ns))
