"""Who holds the leading blocks of one prompt of a model that keeps all its tokens alike. Pure.

`grouped_survey.py` has the same of a model with several cache groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.kvcache.tiers import Tier


@dataclass(slots=True, unsafe_hash=True)
class PrefixPlace:
    """Where an instance's blocks show in a survey: its bits among blocks announced in memory, among pending blocks, and
    among blocks announced in its lower tiers; 0 for none."""

    sealed: int
    coming: int = 0
    lower: tuple[tuple[Tier, int], ...] = ()


class HeldRun(NamedTuple):
    """Prompt blocks [first, end) with the same holders: the stores `sealed`, and the instances to which they are
    `coming`. Of several cache groups these have any of a block's objects; `groups` and `soon` say for each group who
    has its own. A store's bit is that of its slot of group 0, whatever group is meant."""

    first: int
    end: int
    sealed: int
    coming: int
    groups: tuple[int, ...] = ()
    soon: tuple[int, ...] = ()


@dataclass(slots=True)
class PrefixSurvey:
    """Who holds the leading blocks of one prompt, in runs; it ends at the first block that nobody holds. Queries cost
    O(runs), whatever the number of blocks and instances."""

    runs: tuple[HeldRun, ...]

    @property
    def everyone(self) -> int:
        """The bitset of all slots of the block map that hold any of these blocks."""
        found = 0
        for run in self.runs:
            found |= run.sealed
        return found

    def depth(self, place: PrefixPlace) -> int:
        """Returns how many leading blocks are in memory there, or will be."""
        return self._depth(place.sealed, place.coming)

    def sealed_depth(self, place: PrefixPlace) -> int:
        """Returns how many leading blocks are announced in memory there."""
        return self._depth(place.sealed, 0)

    def depth_in_all(self, place: PrefixPlace) -> int:
        """Returns how many leading blocks are there or will be, in memory or a lower tier."""
        bits = place.sealed
        for _, bit in place.lower:
            bits |= bit
        return self._depth(bits, place.coming)

    def landed(self, place: PrefixPlace) -> int:
        """Returns before which block decode needs nothing sent, if what is sealed in memory there is its own."""
        return self.sealed_depth(place)

    def usable(self, place: PrefixPlace, most: int) -> int:
        """Returns the longest prefix of at most `most` blocks that is sealed in memory there."""
        return min(most, self.sealed_depth(place))

    def everywhere(self, blocks: int) -> tuple[int, int]:
        """Returns the slots of stores that have a prefix of so many blocks, and the pending slots to which all of it is
        coming."""
        if not self.runs or self.runs[-1].end < blocks:
            return 0, 0
        whole = coming = -1
        for run in self.runs:
            whole &= run.sealed
            coming &= run.coming
        return whole, coming

    def there(self, place: PrefixPlace, first: int, masks: bytes) -> bytes:
        """Returns those of the cache groups in `masks`, one a block from `first` on, that are sealed in memory
        there."""
        return masks

    def short(self, among: int) -> tuple[str, ...]:
        """Returns the names of cache groups because of which what is sealed at `among` is no longer a prefix; none
        where there is one group."""
        return ()

    def _depth(self, sealed: int, coming: int) -> int:
        depth = 0
        for run in self.runs:
            if not (run.sealed & sealed or run.coming & coming):
                break
            depth = run.end
        return depth

    def reach(self, among: int, start: int = 0) -> int:
        """Returns the block up to which each one from `start` on is sealed at some slot of `among`; at least
        `start`."""
        for run in self.runs:
            if run.end > start:
                if not run.sealed & among:
                    break
                start = run.end
        return start
