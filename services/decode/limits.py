"""The brain decides by these numbers: limits from the configuration, sizes from the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, peak_blocks

if TYPE_CHECKING:
    from kvmesh.ranks.protocol import GroupMemory  # imports what a simulation does without

NS_PER_MS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Has the settings that the brain decides by; DecodeConfig says what each means."""

    max_running: int = 64
    max_waiting: int = 256
    queue_ms: int = 60_000
    fill_begin_ms: int = 10_000
    lease_ms: int = 5_000
    lease_margin_ms: int = 500
    drain_ms: int = 2_000
    batch_wait_ms: int = 60_000
    token_ms: int = 30_000
    watermark_percent: int = 2
    swap_percent: int = 25
    lookahead_tokens: int = 16
    pull_timeout_ms: int = 2_000


@dataclass(frozen=True, kw_only=True)
class RankShape:
    """Says where the pages and extents of one rank lie in its segment, in bytes."""

    segment: str
    shard_bytes: int
    page_base_offset: int
    extent_base_offset: int
    groups: tuple[GroupMemory, ...] = ()  # instead, where the model has several cache groups: of each, by number


@dataclass(frozen=True, kw_only=True)
class GroupRoom:
    """Says how many pages and extents every rank has of one cache group."""

    group: CacheGroup
    num_pages: int
    num_extents: int

    def claim(self, block_tokens: int, blocks_max: int) -> int | None:
        """Returns how many pages are reserved for a row that has `blocks_max` blocks in the end: those that its tokens
        see at most, and one that is granted ahead of its use. None if the group keeps all, so that pages are granted as
        the row grows."""
        peak = peak_blocks(self.group, block_tokens, 1)
        if peak is None or self.group.kind is CacheKind.STATE:
            return peak
        return min(peak + 1, blocks_max)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Describes the memory of the ranks: every rank has the same number of pages and extents, and a shard of each
    block."""

    block_tokens: int
    num_pages: int
    num_extents: int
    direct_landing: bool
    max_context_tokens: int
    ranks: tuple[RankShape, ...]
    groups: tuple[GroupRoom, ...] = ()  # of a model of several cache groups; `num_pages`, `num_extents` are group 0's

    @property
    def context_limit(self) -> int:
        """The most tokens that prompt and answer may have together: the model's limit, or what all pages hold."""
        if not self.groups:
            return min(self.max_context_tokens, self.num_pages * self.block_tokens)
        limits = [self.max_context_tokens]
        for room in self.groups:
            claim = room.claim(self.block_tokens, room.num_pages + 1)
            if claim is None or claim > room.num_pages:
                limits.append(room.num_pages * self.block_tokens if room.group.kind is not CacheKind.STATE else 0)
        return min(limits)

    def blocks(self, tokens: int) -> int:
        """Returns how many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)
