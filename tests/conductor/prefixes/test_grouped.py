"""Surveys, promises and fetch plans of several cache groups, against what each token sees."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout
from kvmesh.kvcache.tiers import Tier, store_name
from kvmesh.services.conductor.costs.cache_cost import CacheCost
from kvmesh.services.conductor.domain import Member, Ref
from kvmesh.services.conductor.loads.outgoing import Outgoing
from kvmesh.services.conductor.prefixes.fetch_plan import MAX_RANGES, FetchPlanner, FetchSegment, sizes_of
from kvmesh.services.conductor.prefixes.grouped_plan import GroupedFetch
from kvmesh.services.conductor.prefixes.grouped_survey import GroupedSurvey
from kvmesh.services.conductor.prefixes.index import Index, PrefixPlace
from kvmesh.services.conductor.prefixes.pending import ends, marks
from tests.support.conductor.brain import chain

B = 16
LAYOUT = CacheLayout(2, 1, 8)
ALL = CacheGroup("all", (0,), LAYOUT)
WINDOW = CacheGroup("window40", (1,), LAYOUT, CacheKind.WINDOW, 40)
CHUNK = CacheGroup("chunk100", (2,), LAYOUT, CacheKind.CHUNK, 100)
STATE = CacheGroup("state", (3,), LAYOUT, CacheKind.STATE, 4)
DRAFT = CacheGroup("draft", (4,), LAYOUT, optional=True)
MODELS = (
    (ALL, WINDOW),
    (ALL, STATE),
    (ALL, WINDOW, STATE, DRAFT),
    (WINDOW,),
    (ALL, CHUNK),
    (WINDOW, DRAFT),
)
STORES = ("a", "b", "c")
Has = dict[str, list[int]]  # by store: a mask of groups for each block


def sees(group: CacheGroup, at: int, cut: int) -> set[int]:
    """The blocks that the token at `at` needs of the group, if a prefix of `cut` blocks is before it."""
    if group.kind is CacheKind.STATE:
        return {cut - 1} if cut else set()
    seen = range(at)
    if group.kind is CacheKind.WINDOW:
        seen = range(max(0, at - group.keep + 1), at)
    if group.kind is CacheKind.CHUNK:
        seen = range(at // group.keep * group.keep, at)
    return {token // B for token in seen}


def lacks(groups: Iterable[CacheGroup], masks: list[int], cut: int) -> set[tuple[int, int]]:
    """(block, group) that a prefix of `cut` blocks needs, and none of the masks has; optional groups apart."""
    return {
        (block, g)
        for g, group in enumerate(groups)
        if not group.optional
        for block in sees(group, cut * B, cut)
        if not masks[block] >> g & 1
    }


def longest(groups: tuple[CacheGroup, ...], masks: list[int], most: int) -> int:
    return max(cut for cut in range(most + 1) if not lacks(groups, masks, cut))


def union(*some: list[int]) -> list[int]:
    return [a | b for a, b in zip(*some, strict=True)] if len(some) == 2 else some[0]


def told(groups: tuple[CacheGroup, ...], has: Has, tokens: int, blocks: int) -> tuple[Index, GroupedSurvey]:
    index, keys = Index(), chain("x", blocks)
    for name, masks in has.items():
        held = [(key, mask) for key, mask in zip(keys, masks, strict=True) if mask]
        sealed, of_each = tuple(key for key, _ in held), bytes(mask for _, mask in held)
        assert index.hear(Announcement(name, 1, 1, sealed, snapshot=True, groups=of_each), None, None)
    cost = CacheCost(B, 0, tuple((group, 100 + g) for g, group in enumerate(groups)))
    survey = index.survey(keys, cost, tokens)
    assert isinstance(survey, GroupedSurvey)
    return index, survey


def planner(index: Index, survey: GroupedSurvey, among: Iterable[str]) -> FetchPlanner:
    holders = {}
    slots = 0
    for name in among:
        if (slot := index.truth.slot(name)) is not None:
            holders[slot] = Member(Ref(name, f"{name}:1", 1), f"node-{name}")
            slots |= 1 << slot
    return FetchPlanner(survey, holders, slots & survey.everyone, Outgoing())


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[CacheGroup, ...], Has, int, int]:
    """Groups, what each store has, the prompt's tokens and full blocks. Holes are few, as prefixes are else short."""
    groups = draw(st.sampled_from(MODELS))
    blocks = draw(st.integers(0, 14))
    full = (1 << len(groups)) - 1
    mask = st.one_of(st.just(full), st.just(full), st.integers(0, full))
    has = {name: draw(st.lists(mask, min_size=blocks, max_size=blocks)) for name in STORES}
    return groups, has, blocks * B + draw(st.integers(0 if blocks else 1, B - 1)), blocks


@given(meshes())
def test_prefixes_are_as_long_as_tokens_see(mesh: tuple[tuple[CacheGroup, ...], Has, int, int]) -> None:
    groups, has, tokens, blocks = mesh
    index, survey = told(groups, has, tokens, blocks)
    most = (tokens - 1) // B
    a, b = (index.place_of((name, 1)) for name in "ab")
    assert survey.depth(a) == longest(groups, has["a"], most)
    assert survey.reach(a.sealed | b.sealed) == longest(groups, union(has["a"], has["b"]), most)
    for cut in range(most + 1):
        assert survey.usable(a, cut) == longest(groups, has["a"], cut)
        whole, _ = survey.everywhere(cut)
        if cut:
            assert bool(whole & a.sealed) == (not lacks(groups, has["a"], cut) and any(has["a"])), cut


@given(meshes())
def test_decode_is_sent_what_it_lacks_and_no_later_block(mesh: tuple[tuple[CacheGroup, ...], Has, int, int]) -> None:
    groups, has, tokens, blocks = mesh
    index, survey = told(groups, has, tokens, blocks)
    wanted = [set() if g.kind is CacheKind.STATE or g.optional else sees(g, tokens, 0) for g in groups]
    gaps = [at for at in range(blocks) if any(at in w and not has["a"][at] >> g & 1 for g, w in enumerate(wanted))]
    assert survey.landed(index.place_of(("a", 1))) == min([*gaps, blocks])


@given(meshes())
def test_a_plan_names_each_needed_object_once_and_its_holder_has_it(
    mesh: tuple[tuple[CacheGroup, ...], Has, int, int],
) -> None:
    groups, has, tokens, blocks = mesh
    index, survey = told(groups, has, tokens, blocks)
    plan, own = planner(index, survey, STORES), index.place_of(("a", 1))
    start, most = survey.depth(own), (tokens - 1) // B
    reach = plan.reach(own, start)
    everybody = [x | y | z for x, y, z in zip(*has.values(), strict=True)]
    assert reach == longest(groups, everybody, most)
    segments, end = plan.plan(own, "node-a", start, reach, plan.sources(own))
    assert len(segments) <= MAX_RANGES
    pieces, _ = GroupedFetch(survey, own, start, plan.sources(own)).pieces(reach, to_decode=False)
    assert (end < reach) == (sum(piece.needed for piece in pieces) > MAX_RANGES)
    named = [(block, g) for s in segments for block in range(s.first, s.end) for g in range(8) if s.groups >> g & 1]
    assert len(named) == len(set(named))
    for segment in segments:
        held = has[segment.holder.ref.instance_id]
        assert all(held[block] & segment.groups == segment.groups for block in range(segment.first, segment.end))
    needed = lacks(groups, has["a"], end) if end > start else set()
    assert {one for one in named if not groups[one[1]].optional} == needed
    optional = {one for one in named if groups[one[1]].optional}
    assert all(block in sees(groups[g], end * B, end) and not has["a"][block] >> g & 1 for block, g in optional)


@given(meshes(), st.integers(0, 14))
def test_decode_fetches_what_it_needs_after_the_whole_prompt(
    mesh: tuple[tuple[CacheGroup, ...], Has, int, int], until: int
) -> None:
    groups, has, tokens, blocks = mesh
    index, survey = told(groups, has, tokens, blocks)
    plan, own = planner(index, survey, STORES), index.place_of(("a", 1))
    start = survey.landed(own)
    until = min(until, (tokens - 1) // B)
    if until <= start:
        return
    segments, end = plan.plan(own, "node-a", start, until, plan.memory, to_decode=True)
    named = {(block, g) for s in segments for block in range(s.first, s.end) for g in range(8) if s.groups >> g & 1}
    wanted = {
        (block, g)
        for g, group in enumerate(groups)
        if group.kind is not CacheKind.STATE and not group.optional
        for block in sees(group, tokens, 0)
        if start <= block < end and not has["a"][block] >> g & 1
    }
    assert {one for one in named if not groups[one[1]].optional} == wanted and end <= until


# ── the variants that must not pass, one by one ───────────────────────────────────────────────────────


def full(groups: tuple[CacheGroup, ...], blocks: int) -> list[int]:
    return [(1 << len(groups)) - 1] * blocks


def test_an_optional_group_limits_nothing_and_is_fetched_where_it_is() -> None:
    groups = (ALL, DRAFT)
    has = {"a": [0] * 8, "b": [1, 3, 3, 1, 1, 1, 1, 1]}
    index, survey = told(groups, has, 200, 8)
    plan, own = planner(index, survey, "ab"), index.place_of(("a", 1))
    segments, end = plan.plan(own, "node-a", 0, plan.reach(own, 0), plan.sources(own))
    assert end == 8 and survey.short(plan.anywhere) == ()
    assert [(s.first, s.blocks, s.groups) for s in segments] == [(0, 8, 1), (1, 2, 2)]


def test_no_cut_is_beyond_the_prompts_last_token() -> None:
    has = {"a": full((ALL, WINDOW), 8)}
    for tokens, most in ((8 * B, 7), (8 * B + 1, 8)):
        index, survey = told((ALL, WINDOW), has, tokens, 8)
        assert survey.depth(index.place_of(("a", 1))) == most


def test_a_state_is_fetched_at_the_block_before_the_cut() -> None:
    states = [3 if (block + 1) % 4 == 0 else 1 for block in range(11)]
    index, survey = told((ALL, STATE), {"a": [0] * 11, "b": states}, 11 * B + 5, 11)
    plan, own = planner(index, survey, "ab"), index.place_of(("a", 1))
    segments, end = plan.plan(own, "", 0, plan.reach(own, 0), plan.sources(own))
    assert end == 8 and survey.short(plan.anywhere) == ("state",)
    assert [(s.first, s.end, s.groups) for s in segments] == [(0, 7, 1), (7, 8, 3)]
    cost = CacheCost(B, 0, ((ALL, 100), (STATE, 1000)))
    assert sizes_of(segments, cost) == [700, 1100] and sum(sizes_of(segments, cost)) == cost.prefix(0, 8)


def test_a_window_comes_from_one_store_and_the_rest_from_another() -> None:
    has = {"a": [0] * 10, "b": [1] * 10, "c": [0] * 7 + [2] * 3}
    index, survey = told((ALL, WINDOW), has, 10 * B + 1, 10)
    plan, own = planner(index, survey, "abc"), index.place_of(("a", 1))
    segments, end = plan.plan(own, "", 0, plan.reach(own, 0), plan.sources(own))
    # 39 tokens before it are seen: blocks 7 (its last 7 tokens), 8 and 9.
    assert end == 10
    assert {(s.holder.ref.instance_id, s.first, s.end, s.groups) for s in segments} == {
        ("b", 0, 10, 1), ("c", 7, 10, 2)
    }  # fmt: skip
    assert {(r.instance_id, r.groups) for r in (s.range for s in segments)} == {("b", 1), ("c", 2)}


def test_too_many_pieces_make_a_shorter_prefix() -> None:
    """Each block lies with another store, so eight of twelve can be named."""
    stores = [f"s{at:02}" for at in range(12)]
    has = {name: [3 if at == own else 0 for at in range(12)] for own, name in enumerate(stores)}
    has["a"] = [0] * 12
    index, survey = told((ALL, CHUNK), has, 12 * B + 1, 12)
    plan, own = planner(index, survey, has), index.place_of(("a", 1))
    segments, end = plan.plan(own, "", 0, 12, plan.sources(own))
    assert len(segments) == end == MAX_RANGES


def test_a_window_behind_a_gap_is_of_use_where_nothing_needs_all() -> None:
    index, survey = told((WINDOW,), {"a": [1, 0, 0, 1, 1, 1, 0]}, 7 * B + 3, 7)
    assert survey.depth(index.place_of(("a", 1))) == 6
    assert survey.short(index.place_of(("a", 1)).sealed) == ()


def test_an_instances_lower_tier_counts_with_its_memory() -> None:
    index, keys = Index(), chain("x", 4)
    cost = CacheCost(B, 0, ((ALL, 100), (WINDOW, 100)))
    index.hear(Announcement("a", 1, 1, keys, groups=b"\1\1\1\1"), None, None)
    index.hear(Announcement(store_name("a", Tier.SSD), 1, 1, keys[1:], groups=b"\2\2\2"), None, None)
    survey, own = index.survey(keys, cost, 4 * B + 1), index.place_of(("a", 1))
    assert own.lower and own.lower[0][0] is Tier.SSD
    assert (survey.depth(own), survey.depth_in_all(own)) == (0, 4)


# ── what placements will bring ────────────────────────────────────────────────────────────────────────

COST = CacheCost(B, 0, ((ALL, 100), (WINDOW, 100), (STATE, 100)))


def test_marks_have_masks_until_they_are_announced_or_withdrawn() -> None:
    index, keys, life = Index(), chain("x", 10), ("p", 1)
    slot = index.pending.open(100)
    masks = COST.coming(ends(10), 0)
    assert masks == bytes(7 if (block + 1) % 4 == 0 else 3 for block in range(10))
    index.place(life, slot, marks(keys), "r", masks)
    own = index.place_of(life, slot)
    assert index.survey(keys, COST, 161).depth(own) == 8
    # The states are announced without the rest, which is still to come.
    index.hear(Announcement("p", 1, 1, (keys[3], keys[7]), groups=b"\4\4"), life, slot)
    own = index.place_of(life, slot)
    survey = index.survey(keys, COST, 161)
    assert survey.depth(own) == 8 and survey.sealed_depth(own) == 0
    index.pending.withdraw(slot, marks(keys), "r")
    assert index.survey(keys, COST, 161).depth(own) == 0 and len(index.pending) == 0
    index.confirm(life, slot, marks(keys), 50.0, masks)
    assert index.survey(keys, COST, 161).depth(own) == 8
    index.expire(51.0, promises=True)
    assert len(index.pending) == 0
    index.place(life, slot, marks(keys), "r2", masks)
    index.pending.close(slot)
    assert len(index.pending) == 0 and index.pending.open(1) == slot


@pytest.mark.parametrize("tokens", [9 * B + 1, 10 * B, 10 * B + 1, 43 * B, 43 * B + 5, 44 * B])
def test_the_state_behind_a_prompts_last_block_is_coming(tokens: int) -> None:
    """Whoever repeats the prompt finds it there. A longer one that shares its blocks finds it where each block is
    known, else the last one on the grid; a shorter one finds that, too."""
    index, keys, life = Index(), chain("x", tokens // B), ("p", 1)
    slot, last = index.pending.open(100), (tokens - 1) // B
    index.place(life, slot, marks(keys), "r", COST.coming(ends(len(keys)), 0, last))
    own = index.place_of(life, slot)
    assert index.survey(keys, COST, tokens).depth(own) == last
    longer = (*keys, *chain("y", 8))
    exact = last if last <= 32 or last % 4 == 0 else last // 4 * 4
    found = index.survey(longer, COST, len(longer) * B + 1).depth(own)
    assert found == exact or (last > 32 and found <= exact and found % 4 == 0)
    shorter = keys[: last - 1]
    assert index.survey(shorter, COST, len(shorter) * B + 1).depth(own) == len(shorter) // 4 * 4


def test_a_snapshot_settles_each_group_by_itself() -> None:
    index, keys, life = Index(), chain("x", 4), ("p", 1)
    slot = index.pending.open(100)
    index.place(life, slot, marks(keys), "r", COST.coming(ends(4), 0))
    index.hear(Announcement("p", 1, 1, keys, snapshot=True, groups=b"\1\1\1\1"), life, slot)
    own = index.place_of(life, slot)
    assert index.survey(keys, COST, 65).depth(own) == 4  # the window and the state are still coming
    assert index.survey(keys, COST, 65).sealed_depth(own) == 0
    assert index.pending.blocks(slot) == 0


def test_of_what_a_placement_fetches_only_what_it_needs_is_coming() -> None:
    masks = COST.coming(ends(12), 8)
    # Blocks 5 to 7 are in the window of the token at 128; the snapshot is that of block 7; from 8 on it computes.
    assert masks == bytes([1, 1, 1, 1, 1, 3, 3, 7, 3, 3, 3, 7])
    assert CacheCost(B, 100).coming(ends(12), 8) == b""


@pytest.mark.parametrize("cached", [0, 35, 40])
def test_a_span_of_blocks_has_what_prefixes_over_its_end_need_of_it(cached: int) -> None:
    masks, before = COST.coming(ends(300), cached), 0
    for end, mask in zip(ends(300), masks, strict=True):
        span = range(before, end)
        assert mask & 1
        has = {block for block in span if block >= cached or block in sees(WINDOW, cached * B, cached)}
        needed = [sees(WINDOW, cut * B, cut) & set(span) for cut in range(end, 301) if cut >= cached or cut == end]
        assert bool(mask & 2) == all(some <= has for some in needed)
        kept = {block for block in span if (block >= cached and (block + 1) % 4 == 0) or block == cached - 1}
        assert bool(mask & 4) == bool(kept)
        before = end


def test_one_group_is_surveyed_as_ever() -> None:
    index, keys = Index(), chain("x", 5)
    index.hear(Announcement("a", 1, 1, keys[:3]), None, None)
    survey = index.survey(keys, CacheCost(B, 100), 81)
    assert not isinstance(survey, GroupedSurvey) and survey == index.survey(keys)
    assert survey.depth(PrefixPlace(index.place_of(("a", 1)).sealed)) == 3
    assert FetchSegment(Member(Ref("a", "a:1", 1)), 0, 3).range.groups == 0
