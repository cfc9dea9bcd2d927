"""What prefixes and handoffs of a model weigh, group by group of what it keeps. Pure.

A model of one group that keeps all weighs its tokens times their bytes, as if it had no groups. Of a model of several a
hit of c blocks reads what `cache_groups.needed_blocks` says, which is not in proportion to its length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, needed_blocks

CardGroups = tuple[tuple[CacheGroup, int], ...]  # each group with the bytes of a block; (): one group that keeps all


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Bytes of one model's KV, of all ranks together."""

    block_tokens: int
    token_bytes: int
    groups: CardGroups = ()

    @property
    def least_token_bytes(self) -> int:
        """What each further token of a prefix or a handoff weighs at least, which bounds go by."""
        if not self.groups:
            return self.token_bytes
        return sum(nbytes for group, nbytes in self.groups if _is_anchor(group)) // self.block_tokens

    @property
    def anchored(self) -> bool:
        """Whether every prefix needs all of its blocks."""
        return not self.groups or any(_is_anchor(group) for group, _ in self.groups)

    @property
    def block(self) -> int:
        """The bytes of a full block as it is stored; of a state its share of a snapshot."""
        if not self.groups:
            return self.block_tokens * self.token_bytes
        return sum(n // g.keep if g.kind is CacheKind.STATE else n for g, n in self.groups)

    def objects(self, mask: int) -> int:
        """Returns the bytes of a block's objects of these groups; 0: of all."""
        if not self.groups:
            return self.block_tokens * self.token_bytes
        return sum(nbytes for g, (_, nbytes) in enumerate(self.groups) if not mask or mask >> g & 1)

    def prefix(self, first: int, cut: int, end: int | None = None) -> int:
        """Returns the bytes that a hit of `cut` blocks reads of its blocks [first, end), up to its own end by
        default."""
        end = cut if end is None else min(end, cut)
        if not self.groups:
            return max(0, end - first) * self.block_tokens * self.token_bytes
        total = 0
        for group, nbytes in self.groups:
            needed = needed_blocks(group, self.block_tokens, cut * self.block_tokens)
            total += nbytes * max(0, min(needed.stop, end) - max(needed.start, first))
        return total

    def handoff(self, tokens: int, at_decode: int) -> int:
        """Returns the bytes that go to decode for a prompt of so many tokens whose first `at_decode` blocks lie there:
        of several groups whole pages, and a state as it is after the last token."""
        if not self.groups:
            return max(0, tokens - at_decode * self.block_tokens) * self.token_bytes
        total = 0
        for group, nbytes in self.groups:
            if group.kind is CacheKind.STATE:
                total += nbytes
            else:
                needed = needed_blocks(group, self.block_tokens, tokens)
                total += nbytes * max(0, needed.stop - max(needed.start, at_decode))
        return total

    def sent_tokens(self, tokens: int, at_decode: int) -> int:
        """Returns of how many tokens' computing a handoff is the fruit, whatever the groups keep of them."""
        return max(0, tokens - at_decode * self.block_tokens)

    def longest(self, first: int, most: int, nbytes: int) -> int:
        """Returns a cut of at most `most` blocks of which [first, cut) weigh at most `nbytes`; the longest one where
        longer prefixes weigh more. `first` when there is none."""
        if not self.groups:
            return max(first, min(most, first + nbytes // max(1, self.block_tokens * self.token_bytes)))
        cuts = range(first, most + 1)
        return first + max(0, bisect_right(cuts, nbytes, key=lambda cut: self.prefix(first, cut)) - 1)

    def masks(self, first: int, cut: int) -> bytes:
        """Returns what a hit of `cut` blocks needs of its blocks from `first` on, one mask of groups a block; b"" for
        one group that keeps all."""
        if not self.groups:
            return b""
        found = bytearray(max(0, cut - first))
        for number, (group, _) in enumerate(self.groups):
            needed = needed_blocks(group, self.block_tokens, cut * self.block_tokens)
            for block in range(max(needed.start, first), min(needed.stop, cut)):
                found[block - first] |= 1 << number
        return bytes(found)

    def coming(self, ends: Sequence[int], cached: int, last: int = 0) -> bytes:
        """Returns which groups of a prompt's blocks an instance has once it has computed what follows a prefix of
        `cached` blocks: a mask for each span of blocks, of which entry i ends before block `ends[i]`. `last` is how
        many blocks the prompt finds again, behind which states are kept, too. b"" for one group that keeps all. Whoever
        shares a span shares all blocks before it, too: so a span has a bit if a prefix that ends with it or later finds
        all that it needs there, and that of a state if any of its blocks has a snapshot."""
        if not self.groups:
            return b""
        found, before = bytearray(), 0
        needed = [needed_blocks(group, self.block_tokens, cached * self.block_tokens) for group, _ in self.groups]
        for end in ends:
            mask = 0
            for g, (group, _) in enumerate(self.groups):
                if group.kind is CacheKind.STATE:
                    here = before < cached <= end or before < last <= end
                    kept = here or end // group.keep * group.keep > max(before, cached)
                else:
                    kept = needed[g].start <= before or end >= cached
                mask |= kept << g
            found.append(mask)
            before = end
        return bytes(found)


def _is_anchor(group: CacheGroup) -> bool:
    return group.kind is CacheKind.ALL and not group.optional
