"""Bytes of prefixes and handoffs: of one group the product that they always were, of several what a hit needs."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvcache.cache_groups import (
    CacheGroup,
    CacheKind,
    CacheLayout,
    handoff_bytes,
    needed_blocks,
    object_shard,
    prefix_bytes,
)
from kvmesh.services.conductor.costs.cache_cost import CacheCost
from kvmesh.services.conductor.mapping import card_in, card_out
from tests.support.conductor.brain import card

B = 16
LAYOUT = CacheLayout(2, 1, 8)
GROUPS = (
    CacheGroup("all", (0, 1), LAYOUT),
    CacheGroup("window", (2, 3), LAYOUT, CacheKind.WINDOW, 40),
    CacheGroup("chunk", (4,), LAYOUT, CacheKind.CHUNK, 64),
    CacheGroup("state", (5, 6), CacheLayout(1, 1, 64, "float32"), CacheKind.STATE, 8),
)
SIZES = (2, 2, 2, 4)
OBJECTS = tuple(object_shard(group, B, size).shard_bytes for group, size in zip(GROUPS, SIZES, strict=True))
SEVERAL = CacheCost(B, 999, tuple(zip(GROUPS, OBJECTS, strict=True)))
ONE = CacheCost(B, 100)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_one_group_weighs_its_tokens(first: int, cut: int, end: int) -> None:
    assert ONE.prefix(first, cut) == max(0, cut - first) * B * 100
    assert ONE.prefix(first, cut, end) == max(0, min(cut, end) - first) * B * 100
    assert ONE.handoff(cut, first) == max(0, cut - first * B) * 100
    assert ONE.masks(first, cut) == b"" and ONE.least_token_bytes == 100


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_several_weigh_what_is_needed_and_parts_add_up(first: int, cut: int, middle: int) -> None:
    assert SEVERAL.prefix(0, cut) == prefix_bytes(GROUPS, B, SIZES, cut)
    if first <= middle <= cut:
        assert SEVERAL.prefix(first, cut) == SEVERAL.prefix(first, cut, middle) + SEVERAL.prefix(middle, cut)
    masks = SEVERAL.masks(first, cut)
    assert len(masks) == max(0, cut - first)
    assert SEVERAL.prefix(first, cut) == sum(OBJECTS[g] for mask in masks for g in range(4) if mask >> g & 1)
    for at, mask in enumerate(masks, first):
        assert mask == sum(1 << g for g in range(4) if at in needed_blocks(GROUPS[g], B, cut * B))


@given(st.integers(1, 1000), st.integers(0, 60))
def test_a_handoff_of_several_is_that_of_the_rules_and_over_its_bound(tokens: int, at_decode: int) -> None:
    assert SEVERAL.handoff(tokens, at_decode) == handoff_bytes(GROUPS, B, SIZES, tokens, at_decode)
    assert SEVERAL.handoff(tokens, at_decode) >= max(0, tokens - at_decode * B) * SEVERAL.least_token_bytes


@given(st.integers(0, 40), st.integers(0, 60), st.integers(0, 200_000))
def test_the_longest_cut_stays_within_the_limit(first: int, most: int, limit: int) -> None:
    for cost in (ONE, SEVERAL):
        cut = cost.longest(first, most, limit)
        assert first <= cut <= max(first, most)
        assert cut == first or cost.prefix(first, cut) <= limit
    assert ONE.longest(first, most, -1) == first
    plain = ONE.longest(first, most, limit)
    assert plain in (first, most) or ONE.prefix(first, plain + 1) > limit


def test_a_card_keeps_its_groups_on_the_wire() -> None:
    plain = card()
    assert card_in(card_out(plain)) == plain and not card_out(plain).cache_groups
    grouped = dataclasses.replace(plain, cache_groups=SEVERAL.groups)
    assert card_in(card_out(grouped)) == grouped
    assert grouped.cost.handoff(100, 2) == SEVERAL.handoff(100, 2)
