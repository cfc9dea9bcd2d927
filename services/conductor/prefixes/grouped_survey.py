"""Who holds what of the blocks of one prompt of a model with several cache groups (ADR 37), and how long a prefix some
stores have together. Pure.

What is held beyond a prefix that somebody can use costs nothing there: of a longer prefix, a group needs none of the
blocks before the end of a usable one that this one did not need as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, PrefixHit, longest_hit, needed_blocks
from kvmesh.services.conductor.prefixes.pending import EACH
from kvmesh.services.conductor.prefixes.survey import HeldRun, PrefixPlace, PrefixSurvey


@dataclass(slots=True)
class GroupedSurvey(PrefixSurvey):
    """Runs with the holders of each group. A run may have no holder where no group needs all blocks."""

    groups: tuple[CacheGroup, ...]
    block_tokens: int
    most: int  # blocks that a prefix may have: the prompt's last token is computed
    tokens: int  # of the prompt

    def held(self, sealed: int, coming: int = 0) -> list[int]:
        """Returns, for each group, the bitset of blocks that these stores have or will have."""
        found = [0] * len(self.groups)
        for run in self.runs:
            span = (1 << run.end) - (1 << run.first)
            for g, group in enumerate(self.groups):
                if run.groups[g] & sealed:
                    found[g] |= span
                elif run.soon[g] & coming:
                    found[g] |= snapshots(group, run, self.most) if group.kind is CacheKind.STATE else span
        return found

    def hit(self, sealed: int, coming: int = 0, *, start: int = 0, most: int | None = None) -> PrefixHit:
        """Returns the longest prefix that these stores have together, if everything is had before block `start`."""
        held = [bitset | (1 << start) - 1 for bitset in self.held(sealed, coming)]
        return longest_hit(self.groups, self.block_tokens, self.most if most is None else min(self.most, most), held)

    def _depth(self, sealed: int, coming: int) -> int:
        return self.hit(sealed, coming).blocks

    def landed(self, place: PrefixPlace) -> int:
        return self.sent_from(self.held(place.sealed), 0, self.tokens // self.block_tokens)

    def sent_from(self, held: Sequence[int], start: int, end: int) -> int:
        """Returns the first block from `start` on, at most `end`, of which decode needs an object that is not among
        `held`, a bitset a group. States are sent in any case."""
        for g, needed in enumerate(self.at_decode()):
            if not self.groups[g].optional:
                first = max(start, needed.start)
                lacking = ~held[g] >> first << first
                end = min(end, (lacking & -lacking).bit_length() - 1) if first < needed.stop else end
        return max(start, end)

    def at_decode(self) -> list[range]:
        """Returns which blocks of each group decode needs to go on after the prompt; of a state none, as what it needs
        lies at no block's end."""
        return [
            range(0) if group.kind is CacheKind.STATE else needed_blocks(group, self.block_tokens, self.tokens)
            for group in self.groups
        ]

    def usable(self, place: PrefixPlace, most: int) -> int:
        return self.hit(place.sealed, most=most).blocks

    def everywhere(self, blocks: int) -> tuple[int, int]:
        if not self.runs or blocks > self.most:
            return 0, 0
        whole = coming = -1
        for g, group in enumerate(self.groups):
            needed = needed_blocks(group, self.block_tokens, blocks * self.block_tokens)
            if group.optional or not needed:
                continue
            reached = needed.start
            for run in self.runs:
                if run.end > needed.start and run.first < needed.stop:
                    whole &= run.groups[g]
                    coming &= run.soon[g]
                    reached = run.end
            if reached < needed.stop:
                return 0, 0
        return (0, 0) if whole < 0 else (whole, coming)

    def there(self, place: PrefixPlace, first: int, masks: bytes) -> bytes:
        held = self.held(place.sealed)
        of_block = (
            sum((bits >> at & 1) << g for g, bits in enumerate(held)) for at in range(first, first + len(masks))
        )
        return bytes(wanted & mask for wanted, mask in zip(masks, of_block, strict=True))

    def short(self, among: int) -> tuple[str, ...]:
        return tuple(self.groups[g].name for g in self.hit(among).short)

    def reach(self, among: int, start: int = 0) -> int:
        return max(start, self.hit(among, start=start).blocks)


def snapshots(group: CacheGroup, run: HeldRun, most: int) -> int:
    """Returns at which blocks of a run whoever computes it keeps a snapshot, of a prompt that can have a prefix of
    `most` blocks. It is known of each of the first blocks; behind them of those on the grid and, of a prompt as long as
    this one, of the last that it finds again."""
    first = run.first // group.keep * group.keep
    found = sum(1 << block for block in range(first + group.keep - 1, run.end, group.keep))
    found |= (1 << min(run.end, EACH)) - (1 << min(run.first, EACH))
    if run.first < most <= run.end:
        found |= 1 << (most - 1)
    return found & (1 << run.end) - (1 << run.first)
