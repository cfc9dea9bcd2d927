"""Plans between rank groups, against a model that moves element by element: every element of every reader's shard is
written exactly once, with the right value, by a rank that has it."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import ConfigError
from kvmesh.kvcache.groups import MAX_CELLS, GroupPlan, plan_group
from kvmesh.kvcache.layout import ShardLayout, joined

TOKENS, DIM = 12, 3  # of a block and of a head: small, a run is a run


def shard(layers: tuple[int, int], heads: tuple[int, int], planes: int = 2) -> ShardLayout:
    """Layers and heads as half-open ranges."""
    return ShardLayout(layers[1] - layers[0], heads[1] - heads[0], TOKENS, DIM, 4, layers[0], heads[0], planes=planes)


def even(layers: int, heads: int, pp: int, tp: int, planes: int = 2) -> tuple[ShardLayout, ...]:
    """pp × tp ranks, tensor-parallel ranks of one stage beside one another; beyond `heads` they are replicas."""
    width, copies = max(heads // tp, 1), max(tp // heads, 1)
    return tuple(
        shard((i * layers // pp, (i + 1) * layers // pp), (j // copies * width, j // copies * width + width), planes)
        for i in range(pp)
        for j in range(tp)
    )


def elements(s: ShardLayout, model: np.ndarray) -> np.ndarray:
    """This shard of the model's block, as a rank has it in memory."""
    part = model[s.first_layer : s.first_layer + s.layers, :, s.first_head : s.first_head + s.kv_heads]
    return np.ascontiguousarray(part[:, :, :, s.first_token : s.first_token + s.tokens]).reshape(-1)


def check(plan: GroupPlan, layers: int, heads: int, blocks: int, steps: list[list[tuple[int, int]]]) -> None:
    """Moves `blocks` blocks; `steps[w]` are the layer ranges in which writer w posts them."""
    for block in range(blocks):
        planes = plan.writers[0].planes
        model = np.arange(layers * planes * heads * TOKENS * DIM, dtype=np.uint32) + 1 + block * 1_000_003
        model = model.reshape(layers, planes, heads, TOKENS, DIM)
        for r, target in enumerate(plan.readers):
            landed = np.zeros(target.shard_bytes // 4, np.uint32)
            written = np.zeros(target.shard_bytes // 4, np.uint8)
            for w, source in enumerate(plan.writers):
                mine = elements(source, model)
                for layer0, layer1 in steps[w]:
                    for a, b, length in plan.runs(w, r, block, layer0, layer1):
                        assert w in plan.marks(r), "the reader would not wait for it"
                        assert r in plan.targets(w)
                        assert a % 4 == b % 4 == length % 4 == 0
                        first, last = source.layer_slice(layer0)[0], sum(source.layer_slice(layer1 - 1))
                        assert first <= a < a + length <= last, "a layer that is not computed yet"
                        landed[b // 4 : (b + length) // 4] = mine[a // 4 : (a + length) // 4]
                        written[b // 4 : (b + length) // 4] += 1
            assert written.tolist() == [1] * len(written), f"reader {r}, block {block}"
            assert landed.tolist() == elements(target, model).tolist(), f"reader {r}, block {block}"


def whole(plan: GroupPlan) -> list[list[tuple[int, int]]]:
    return [[(0, w.layers)] for w in plan.writers]


SPLITS = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 2)]


@pytest.mark.parametrize(("src", "dst"), list(itertools.product(SPLITS, repeat=2)))
@pytest.mark.parametrize("planes", [1, 2])
def test_even_splits(src: tuple[int, int], dst: tuple[int, int], planes: int) -> None:
    """TP, PP, both; TP 8 over 4 heads holds each head twice."""
    plan = plan_group(even(4, 4, *src, planes), even(4, 4, *dst, planes))
    check(plan, 4, 4, 3, whole(plan))


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, int, tuple[ShardLayout, ...], tuple[ShardLayout, ...]]:
    """Ranks with any layers and heads whatever, the writers at least once over the model."""
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    planes = draw(st.sampled_from([1, 2]))

    def span(n: int) -> tuple[int, int]:
        a, b = sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))
        return a, b

    readers = tuple(shard(span(layers), span(heads), planes) for _ in range(draw(st.integers(1, 4))))
    extra = tuple(shard(span(layers), span(heads), planes) for _ in range(draw(st.integers(0, 3))))
    pp = draw(st.sampled_from([n for n in (1, 2, 4) if n <= layers]))
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= 2 * heads and (heads % n == 0 or n % heads == 0)]))
    writers = draw(st.permutations([*even(layers, heads, pp, tp, planes), *extra]))
    return layers, heads, tuple(writers), readers


@settings(max_examples=120, deadline=None)
@given(groups(), st.data())
def test_any_ranks_layer_by_layer(
    ranks: tuple[int, int, tuple[ShardLayout, ...], tuple[ShardLayout, ...]], data: st.DataObject
) -> None:
    layers, heads, writers, readers = ranks
    plan = plan_group(writers, readers)
    steps = []
    for w in writers:
        cuts = sorted({0, w.layers, *data.draw(st.lists(st.integers(1, w.layers), max_size=2))})
        steps.append(list(itertools.pairwise(cuts)))
    check(plan, layers, heads, 4, steps)


def test_equal_groups_are_pairs_with_one_run_each() -> None:
    ranks = even(4, 4, 2, 2)
    plan = plan_group(ranks, ranks)
    for r, layout in enumerate(ranks):
        assert plan.marks(r) == {r}
        assert plan.targets(r) == (r,)
        for block in range(3):
            assert plan.runs(r, r, block) == ((0, 0, layout.shard_bytes),)


def test_one_run_for_each_plane_of_each_layer_between_different_head_counts() -> None:
    """The fewest there can be: heads of one layer's K lie side by side at both ends, the next are elsewhere."""
    two, one = even(4, 8, 1, 2), even(4, 8, 1, 1)
    for writers, readers in ((two, one), (one, two)):
        plan = plan_group(writers, readers)
        for w, r in itertools.product(range(len(writers)), range(len(readers))):
            runs = plan.runs(w, r)
            assert [length for _, _, length in runs] == [4 * two[0].head_bytes] * 4 * 2
    stages, whole_model = even(4, 8, 4, 1), even(4, 8, 1, 1)
    assert all(len(plan_group(stages, whole_model).runs(w, 0)) == 1 for w in range(4))
    # Stages whose layers only partly overlap with the reader's: still one run each.
    assert all(len(plan_group(stages, even(4, 8, 2, 1)).runs(w, w // 2)) == 1 for w in range(4))


def loads(plan: GroupPlan, blocks: int) -> Counter[int]:
    sent: Counter[int] = Counter()
    for w, r, block in itertools.product(range(len(plan.writers)), range(len(plan.readers)), range(blocks)):
        sent[w] += sum(length for _, _, length in plan.runs(w, r, block))
    return sent


def test_replicas_share_the_work() -> None:
    latent = shard((0, 4), (0, 1), planes=1)
    # Four replicas to four: each its own. To one: in turns, whole shards. To two: two for each.
    assert [sorted(plan_group((latent,) * 4, (latent,) * 4).marks(r)) for r in range(4)] == [[0], [1], [2], [3]]
    for readers in (1, 2):
        plan = plan_group((latent,) * 4, (latent,) * readers)
        assert loads(plan, 4) == dict.fromkeys(range(4), readers * latent.shard_bytes)
        for block in range(4):
            runs = [plan.runs(w, 0, block) for w in range(4)]
            assert sorted(len(r) for r in runs) == [0, 0, 0, 1], "one large request a block"
    # One to four: every reader from the only one. Two to four: two readers each.
    assert loads(plan_group((latent,), (latent,) * 4), 1) == {0: 4 * latent.shard_bytes}
    assert loads(plan_group((latent,) * 2, (latent,) * 4), 1) == dict.fromkeys(range(2), 2 * latent.shard_bytes)
    # Twice as many ranks as heads: both ranks of a head work.
    plan = plan_group(even(4, 4, 1, 8), even(4, 4, 1, 1))
    assert len(set(loads(plan, 2).values())) == 1
    assert plan.marks(0) == set(range(8))
    # Replicas that serve readers of different halves take one each, and are not both waited for by both.
    plan = plan_group((shard((0, 4), (0, 4)),) * 2, even(4, 4, 1, 2))
    assert [sorted(plan.marks(r)) for r in range(2)] == [[0], [1]]


def test_what_nobody_holds_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no writer holds layers 2\.\.3 of heads 0\.\.3, which reader 1 needs"):
        plan_group((shard((0, 2), (0, 4)),), (shard((0, 2), (0, 4)), shard((0, 4), (0, 4))))
    with pytest.raises(ConfigError, match="differ in planes"):
        plan_group((shard((0, 2), (0, 1)),), (shard((0, 2), (0, 1), planes=1),))
    with pytest.raises(ConfigError, match="needs writers and readers"):
        plan_group((shard((0, 2), (0, 4)),), ())


def test_joined_has_a_limit() -> None:
    runs = [(i * 8, 100 + i * 8, 8) for i in range(6)]
    assert joined(runs) == [(0, 100, 48)]
    assert joined(runs, 24) == [(0, 100, 24), (24, 124, 24)]
    assert joined(runs, 4) == runs, "a run is never cut"
    assert joined([(0, 0, 8), (8, 16, 8), (24, 24, 8)]) == [(0, 0, 8), (8, 16, 8), (24, 24, 8)]
    assert joined([]) == []


# ── ranks that share the tokens of a block ────────────────────────────────────────────────────────


def by_turns(ranks: tuple[ShardLayout, ...], turns: int) -> tuple[ShardLayout, ...]:
    """Each rank `turns` times, with a part of the tokens each: what cp makes of them, or dcp of replicas."""
    return tuple(replace(one, turn=turn, turns=turns) for one in ranks for turn in range(turns))


def moved(plan: GroupPlan, blocks: int) -> int:
    return sum(loads(plan, blocks).values())


@settings(max_examples=80, deadline=None)
@given(groups(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 6]), st.data())
def test_any_turns_into_any_others(
    ranks: tuple[int, int, tuple[ShardLayout, ...], tuple[ShardLayout, ...]],
    writing: int,
    reading: int,
    data: st.DataObject,
) -> None:
    """Any cut reads what any cut wrote; bytes that move are what the readers have, each once."""
    layers, heads, writers, readers = ranks
    writers, readers = by_turns(writers, writing), by_turns(readers, reading)
    readers = tuple(data.draw(st.permutations(readers))[: data.draw(st.integers(1, len(readers)))])
    plan = plan_group(writers, readers)
    check(plan, layers, heads, 3, whole(plan))
    assert moved(plan, 4) == 4 * sum(shard.shard_bytes for shard in readers)


def test_a_latent_over_dcp_is_read_by_one_rank_and_back() -> None:
    latent = shard((0, 4), (0, 1), planes=1)
    two, four = by_turns((latent,), 2), by_turns((latent,), 4)
    for writers, readers in ((two, (latent,)), ((latent,), two), (two, two), (two, four)):
        plan = plan_group(writers, readers)
        check(plan, 4, 1, 2, whole(plan))
        assert moved(plan, 8) == 8 * latent.shard_bytes, "what one rank would have: no token moves twice"
    assert [sorted(plan_group(two, two).marks(r)) for r in range(2)] == [[0], [1]]
    assert [sorted(plan_group(two, four).marks(r)) for r in range(4)] == [[0], [0], [1], [1]]
    half = latent.head_bytes // 2
    layers = tuple((layer * half, layer * 2 * half + half, half) for layer in range(4))
    assert plan_group(two, (latent,)).runs(1, 0, 5) == layers, "a run for each layer: the second half of its tokens"
    # Two of one turn share its blocks: of those, every second one is each one's.
    plan = plan_group((*two, *two), (latent,))
    assert [[w for w in range(4) if plan.runs(w, 0, block)] for block in range(4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_heads_are_one_run_where_both_sides_have_the_same_tokens() -> None:
    whole_heads, two_heads = by_turns((shard((0, 2), (0, 4)),), 2), by_turns(even(2, 4, 1, 2), 2)
    assert [len(plan_group(whole_heads, two_heads).runs(0, r)) for r in (0, 1, 2)] == [4, 0, 4]
    assert len(plan_group(whole_heads, (shard((0, 2), (0, 4)),)).runs(0, 0)) == 2 * 2 * 4, "of each head another part"


def test_turns_that_cannot_be() -> None:
    one = shard((0, 1), (0, 1))
    with pytest.raises(ConfigError, match="turn=2 of turns=2"):
        replace(one, turn=2, turns=2)
    with pytest.raises(ConfigError, match="turns=1025"):
        replace(one, turns=1025)
    with pytest.raises(ConfigError, match="turns=5 must divide block_tokens=12"):
        replace(one, turns=5)
    with pytest.raises(ConfigError, match=r"layers 0\.\.0 of heads 0\.\.0 at tokens 6\.\.11 of a block"):
        plan_group((replace(one, turns=2),), (one,))
    many = [shard((layer, 600), (head, 600)) for layer, head in zip(range(300), range(300), strict=True)]
    with pytest.raises(ConfigError, match=f"cells, at most {MAX_CELLS}"):
        plan_group(tuple(many), (shard((0, 600), (0, 600)),))
