"""What bounds.py finds: one value an instance. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.conductor.candidates.fields import Floats, Mask


@dataclass(slots=True)
class Fetching:
    """One way to fetch, for all instances that have the same blocks: up to block `until`, `blocks` of them by wire."""

    until: int
    blocks: int
    ahead: int  # bytes
    holders: int
    read_s: float  # at the holders, before they send
    memory: bool  # all of it out of memory


@dataclass(slots=True)
class PromptBound:
    """One way to compute the prompt, at each. Seconds but for `computed`, `pairs`, `steps`."""

    ttft: Floats
    cost: Floats
    queue_s: Floats
    fetch_s: Floats | float
    computed: Floats | float
    pairs: Floats | float
    steps: Floats | None  # None: one, at each
    alone: Floats
    slower_s: Floats | None  # None: nothing, as the next one
    tail_s: Floats | None


class PromptBounds:
    """Of the ways of each instance: the least cost of those that may pass (inf: none does), the least TTFT by which
    they are judged, and the same of those whose queue can drain for long enough."""

    def __init__(self, count: int) -> None:
        self.kept = np.full((3, count), np.inf)
        self.cost, self.least, self.draining = self.kept

    def offer(self, cost: Floats, least: Floats, drains: Mask | None, here: Mask, *, instead: bool) -> None:
        """One way more, for those `here`. `drains`: whose queue can drain for long enough."""
        if instead:
            self.kept[:, here] = np.inf
        np.minimum(self.cost, cost, out=self.cost, where=here)
        np.minimum(self.least, least, out=self.least, where=here)
        if drains is not None:
            np.minimum(self.draining, least, out=self.draining, where=drains & here)

    def free(self, here: Mask, cost: Floats) -> None:
        """Those `here` may have a way that costs no less than this, in time whatever is asked."""
        np.minimum(self.cost, cost, out=self.cost, where=here)
        self.least[here] = -np.inf


@dataclass(slots=True)
class AnswerBounds:
    """Terms of the TBT at each, seconds. `short`: of pages for prompt and answer together."""

    tbt: Floats
    landing: Floats | float
    slot: Floats | float
    tail: Floats | float
    short: Mask
    sum: Floats | None = None  # of the four before, if it is known

    @property
    def score(self) -> Floats:
        """As `DecodeChoice.score_s`."""
        if self.sum is not None:
            return self.sum
        found = self.tbt
        for more in (self.landing, self.slot, self.tail):
            found = found if isinstance(more, float) else found + more  # a float is 0: nobody waits for that
        return found
