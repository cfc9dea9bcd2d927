"""Which objects of a prompt's blocks a reader fetches from whom, where its model has several cache groups (ADR 37): for
each group the blocks that it needs, and no others. Pure.

A piece is a run of blocks and a mask of groups that some stores all have. One holder is asked for all groups of a block
where one has them; else the groups of a block come from several. What optional groups need comes last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvmesh.kvcache.cache_groups import longest_hit, needed_blocks
from kvmesh.services.conductor.prefixes.grouped_survey import GroupedSurvey
from kvmesh.services.conductor.prefixes.sources import FetchSources
from kvmesh.services.conductor.prefixes.survey import HeldRun, PrefixPlace


@dataclass(slots=True)
class FetchPiece:
    """Blocks [first, end) of the cache groups of a mask, which the stores `alive` of one of the sources have."""

    first: int
    end: int
    groups: int
    source: int
    alive: int
    needed: bool  # without it there is no such prefix


@dataclass(slots=True)
class GroupedFetch:
    """The plans of one reader, which has what a prefix of `start` blocks needs. `sources` are ranked, best first."""

    survey: GroupedSurvey
    own: PrefixPlace
    start: int
    sources: Sequence[FetchSources]

    def pieces(self, most: int, *, to_decode: bool) -> tuple[list[FetchPiece], int]:
        """Returns the pieces of the longest prefix of at most `most` blocks that can be had, needed ones before others
        and each kind by block, and its end; none and `start` when there is no longer one than the reader's. `to_decode`
        says that decode reads: it needs what comes after the whole prompt."""
        survey = self.survey
        slots = self.own.sealed
        for source in self.sources:
            slots |= source.slots
        held = [bitset | (1 << self.start) - 1 for bitset in survey.held(slots, self.own.coming)]
        if to_decode:
            end = survey.sent_from(held, self.start, most)
            needed = survey.at_decode()
        else:
            end = longest_hit(survey.groups, survey.block_tokens, min(most, survey.most), held).blocks
            needed = [needed_blocks(g, survey.block_tokens, end * survey.block_tokens) for g in survey.groups]
        if end <= self.start:
            return [], min(self.start, most)
        found: list[FetchPiece] = []
        for optional in (False, True):
            numbers = [g for g, group in enumerate(survey.groups) if group.optional is optional]
            found += self._joined(
                [range(0) if g not in numbers else r for g, r in enumerate(needed)], end, not optional
            )
        return found, end

    def _joined(self, needed: Sequence[range], end: int, required: bool) -> list[FetchPiece]:
        """Returns pieces for these blocks of each group from `start` to `end`, neighbours with a holder in common as
        one."""
        found: list[FetchPiece] = []
        growing: list[FetchPiece] = []  # those that the next run of blocks may continue
        for run, first, until in self._runs(needed, end):
            wanted = sum(1 << g for g, blocks in enumerate(needed) if first in blocks) & ~self._here(run)
            now = []
            for groups, source, alive in self._parts(run, wanted):
                for piece in growing:
                    key = piece.groups, piece.source, piece.end
                    if key == (groups, source, first) and piece.alive & alive:
                        piece.end, piece.alive = until, piece.alive & alive
                        break
                else:
                    piece = FetchPiece(first, until, groups, source, alive, required)
                    found.append(piece)
                now.append(piece)
            growing = now
        return found

    def _runs(self, needed: Sequence[range], end: int) -> Iterator[tuple[HeldRun, int, int]]:
        """Yields the runs between `start` and `end`, cut where a group begins or ends to be needed."""
        borders = sorted({border for blocks in needed for border in (blocks.start, blocks.stop)})
        for run in self.survey.runs:
            first, stop = max(run.first, self.start), min(run.end, end)
            inner = [border for border in borders if first < border < stop]
            for low, high in zip([first, *inner], [*inner, stop], strict=True):
                if low < high:
                    yield run, low, high

    def _here(self, run: HeldRun) -> int:
        """Returns the mask of groups that the reader has or will have of these blocks."""
        own = self.own
        return sum(
            1 << g
            for g, (held, soon) in enumerate(zip(run.groups, run.soon, strict=True))
            if held & own.sealed or soon & own.coming
        )

    def _parts(self, run: HeldRun, wanted: int) -> Iterator[tuple[int, int, int]]:
        """Yields (groups, source, who has all of these there) until nothing that anybody has is wanted any more. The
        best source that has anything is asked for as much as one store of it has."""
        for number, source in enumerate(self.sources):
            while wanted:
                alive, groups = source.slots, 0
                for g, holders in enumerate(run.groups):
                    if wanted >> g & 1 and (both := alive & holders):
                        alive, groups = both, groups | 1 << g
                if not groups:
                    break
                wanted &= ~groups
                yield groups, number, alive
