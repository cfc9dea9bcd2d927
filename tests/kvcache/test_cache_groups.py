"""Cache groups: what a prefix needs against a model that looks token by token, objects against arrays that are really
cut, sizes by hand. Broken rules are found by the same checks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvmesh.engine.config import ModelConfig
from kvmesh.errors import ConfigError
from kvmesh.kvcache import cache_groups as rules
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout, PrefixHit, longest_hit, needed_blocks
from kvmesh.kvcache.layout import ShardLayout

LAYOUT = CacheLayout(planes=2, heads=4, dim=2)


def group(kind: CacheKind, keep: int = 0, name: str = "g", *, optional: bool = False) -> CacheGroup:
    return CacheGroup(name, (0, 2, 3), LAYOUT, kind, keep, optional)


ALL = group(CacheKind.ALL, name="all")

# ── the model: one token after the other ─────────────────────────────────────────────────────────────


def sees(of: CacheGroup, position: int, other: int) -> bool:
    """Whether the token at `position` sees the one at `other`, by the words of each kind."""
    if other > position:
        return False
    if of.kind is CacheKind.WINDOW:
        return position - other < of.keep
    return of.kind is CacheKind.ALL or position // of.keep == other // of.keep


def is_usable(of: CacheGroup, block: int, cut: int, held: int) -> bool:
    """Whether a request can go on after `cut` blocks with what is held: all that any later token sees of them."""
    if of.kind is CacheKind.STATE:
        return cut == 0 or bool(held >> (cut - 1) & 1)
    holes = [other for other in range(cut * block) if not held >> other // block & 1]
    later = range(cut * block, cut * block + of.keep + 1)
    return not any(sees(of, position, other) for position in later for other in holes)


def model_hit(groups: Sequence[CacheGroup], block: int, most: int, held: Sequence[int]) -> PrefixHit:
    usable = [{c for c in range(most + 1) if is_usable(g, block, c, h)} for g, h in zip(groups, held, strict=True)]
    asked = [g for g, of in enumerate(groups) if not of.optional]
    blocks = max(set.intersection(*(usable[g] for g in asked)))
    limits = tuple(max(one) for one in usable)
    longest = max(limits[g] for g in asked)
    short = tuple(g for g in asked if longest not in usable[g])
    gaps = tuple(g for g, of in enumerate(groups) if of.optional and blocks not in usable[g])
    return PrefixHit(blocks, limits, short, gaps)


@st.composite
def caches(draw: st.DrawFn) -> tuple[list[CacheGroup], int, int, list[int]]:
    """Groups, tokens of a block, blocks of a prompt, and what is held of each group: mostly all of it."""
    block, most = draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 9))
    kinds = draw(st.lists(st.sampled_from(list(CacheKind)), min_size=1, max_size=3))
    groups, held = [], []
    for at, kind in enumerate(kinds):
        keep = 0 if kind is CacheKind.ALL else draw(st.integers(1, 14))
        groups.append(group(kind, keep, f"g{at}", optional=at > 0 and draw(st.booleans())))
        missing = draw(st.integers(0, (1 << most) - 1)) & draw(st.integers(0, (1 << most) - 1))
        held.append(((1 << most) - 1) ^ missing | draw(st.sampled_from([0, 1 << most])))
    return groups, block, most, held


Rule = Callable[[Sequence[CacheGroup], int, int, Sequence[int]], PrefixHit]


def check(rule: Rule, examples: int, *, shrink: bool = True) -> None:
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, phases=phases, report_multiple_bugs=False
    )
    @given(caches())
    def agrees(case: tuple[list[CacheGroup], int, int, list[int]]) -> None:
        assert rule(*case) == model_hit(*case)

    agrees()


def test_the_hit_is_what_the_tokens_see() -> None:
    check(longest_hit, 250)


def test_what_is_needed_is_just_enough() -> None:
    """Each needed block is seen by a later token, and no other is; also where the last block is filled in part."""
    for of in (ALL, *(group(kind, keep) for kind in (CacheKind.WINDOW, CacheKind.CHUNK) for keep in range(1, 12))):
        for block, tokens in itertools.product((1, 3, 4), range(30)):
            seen = {other // block for other in range(tokens) if sees(of, tokens, other)}
            needed = set(needed_blocks(of, block, tokens))
            assert seen <= needed, (of, block, tokens)
            assert needed - seen <= {tokens // block}, (of, block, tokens)  # the page that the next token is written to
            assert rules.freed_blocks(of, block, tokens) == min(needed, default=tokens // block)


@pytest.mark.parametrize(
    ("of", "tokens", "needed"),
    [
        (group(CacheKind.WINDOW, 1), 160, range(10, 10)),
        (group(CacheKind.WINDOW, 16), 160, range(9, 10)),
        (group(CacheKind.WINDOW, 17), 160, range(9, 10)),
        (group(CacheKind.WINDOW, 18), 160, range(8, 10)),
        (group(CacheKind.WINDOW, 4096), 1600, range(100)),
        (group(CacheKind.WINDOW, 18), 161, range(9, 11)),
        (group(CacheKind.CHUNK, 8192), 8192, range(512, 512)),
        (group(CacheKind.CHUNK, 8192), 8176, range(511)),
        (group(CacheKind.CHUNK, 8192), 8208, range(512, 513)),
        (group(CacheKind.CHUNK, 100), 112, range(6, 7)),
        (group(CacheKind.STATE, 8), 256, range(15, 16)),
        (group(CacheKind.STATE, 8), 0, range(0)),
        (ALL, 161, range(11)),
    ],
)
def test_worked_cases(of: CacheGroup, tokens: int, needed: range) -> None:
    assert needed_blocks(of, 16, tokens) == needed


def test_a_state_falls_back_to_its_last_snapshot() -> None:
    groups, full = (ALL, group(CacheKind.STATE, 8, "state")), (1 << 32) - 1
    snapshots = 1 << 7 | 1 << 15
    assert longest_hit(groups, 16, (300 - 1) // 16, (full, snapshots)) == PrefixHit(16, (18, 16), (1,), ())
    assert longest_hit(groups, 16, (257 - 1) // 16, (full, snapshots)).blocks == 16
    assert longest_hit(groups, 16, (256 - 1) // 16, (full, snapshots)).blocks == 8
    with pytest.raises(ValueError, match="tokens=100"):
        needed_blocks(groups[1], 16, 100)


def test_it_says_which_group_was_short() -> None:
    window, extra = group(CacheKind.WINDOW, 33, "window"), group(CacheKind.ALL, 0, "extra", optional=True)
    full = (1 << 10) - 1
    found = longest_hit((ALL, window, extra), 16, 10, (full, full & ~(1 << 8), full & ~(1 << 3)))
    assert found == PrefixHit(8, (10, 8, 3), (1,), (2,))
    assert longest_hit((ALL, window), 16, 10, (full, full & ~(1 << 3))) == PrefixHit(10, (10, 10), (), ())
    assert longest_hit((ALL, window), 16, 10, (full & ~(1 << 3), full)) == PrefixHit(3, (3, 10), (0,), ())
    with pytest.raises(ValueError, match="1 bitsets for 2 groups"):
        longest_hit((ALL, window), 16, 10, (full,))


# ── broken rules ─────────────────────────────────────────────────────────────────────────────────────


def with_cuts(broken: Callable[[CacheGroup, int, int, int], int]) -> Callable[[pytest.MonkeyPatch], Rule]:
    def rule(patch: pytest.MonkeyPatch) -> Rule:
        right = rules._cuts
        patch.setattr(rules, "_cuts", lambda *case: broken(*case) if broken(*case) >= 0 else right(*case))
        return longest_hit

    return rule


def window_of(blocks: Callable[[int, int], int]) -> Callable[[CacheGroup, int, int, int], int]:
    def cuts(of: CacheGroup, block: int, most: int, held: int) -> int:
        if of.kind is not CacheKind.WINDOW:
            return -1
        return rules._cuts_of_window(blocks(of.keep, block), most, held & ((1 << most) - 1))

    return cuts


def state_at_the_cut(of: CacheGroup, block: int, most: int, held: int) -> int:
    return (held | 1) & ((1 << most + 1) - 1) if of.kind is CacheKind.STATE else -1


def state_on_the_grid(of: CacheGroup, block: int, most: int, held: int) -> int:
    grid = sum(1 << c for c in range(of.keep, most + 1, of.keep)) if of.kind is CacheKind.STATE else 0
    return held << 1 & grid | 1 if of.kind is CacheKind.STATE else -1


def chunk_of_blocks(of: CacheGroup, block: int, most: int, held: int) -> int:
    if of.kind is not CacheKind.CHUNK:
        return -1
    blocks = -(-of.keep // block)
    return sum(1 << c for c in range(most + 1) if all(held >> b & 1 for b in range(c // blocks * blocks, c)))


def beyond_the_prompt(of: CacheGroup, block: int, most: int, held: int) -> int:
    return (1 << rules._leading(held) + 1) - 1 if of.kind is CacheKind.ALL else -1


def optional_limits(patch: pytest.MonkeyPatch) -> Rule:
    def rule(groups: Sequence[CacheGroup], block: int, most: int, held: Sequence[int]) -> PrefixHit:
        strict = [CacheGroup(g.name, g.layers, g.layout, g.kind, g.keep) for g in groups]
        return longest_hit(strict, block, most, held)

    return rule


BROKEN = {
    "a window of W // B blocks": with_cuts(window_of(lambda keep, block: keep // block)),
    "a window of ceil(W / B) blocks": with_cuts(window_of(lambda keep, block: -(-keep // block))),
    "a window of one block more": with_cuts(window_of(lambda keep, block: -(-(keep - 1) // block) + 1)),
    "a state behind the cut": with_cuts(state_at_the_cut),
    "a state where snapshots should lie, alone": with_cuts(state_on_the_grid),
    "a chunk counted in blocks": with_cuts(chunk_of_blocks),
    "a cut beyond the prompt": with_cuts(beyond_the_prompt),
    "an optional group limits": optional_limits,
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BROKEN[name](monkeypatch)
    with pytest.raises(AssertionError):
        check(broken, 600, shrink=False)


# ── pages ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", [CacheKind.WINDOW, CacheKind.CHUNK])
def test_the_most_pages_that_a_request_has(kind: CacheKind) -> None:
    """A step of q tokens from s on needs the blocks from what its first token sees to where its last one is written:
    never more than `peak_blocks`, and for a window just so many at some step."""
    for keep, block, step in itertools.product(range(1, 20), (1, 4), (1, 2, 7)):
        of = group(kind, keep)
        live = [(s + step - 1) // block - rules.freed_blocks(of, block, s) + 1 for s in range(4 * keep + 8)]
        most = rules.peak_blocks(of, block, step)
        assert most is not None and max(live) <= most, (keep, block, step)
        assert kind is CacheKind.CHUNK or max(live) == most, (keep, block, step)
    assert rules.peak_blocks(ALL, 16, 1) is None
    assert rules.peak_blocks(group(CacheKind.STATE, 8), 16, 512) == 2


# ── objects ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layers", [range(4), range(2), range(1, 4), range(3, 4)])
@pytest.mark.parametrize("heads", [range(4), range(2, 4), range(1, 2)])
def test_a_cut_is_these_bytes_of_the_object(layers: range, heads: range) -> None:
    whole = rules.object_shard(ALL, 8, 2)
    cut = rules.rank_shard(ALL, layers, heads, 8, 2)
    assert cut is not None
    model = np.arange(3 * 2 * 4 * 8 * 2, dtype=np.uint16).reshape(whole.shape)  # of the group's layers 0, 2, 3
    mine = [i for i, layer in enumerate(ALL.layers) if layer in layers]
    shard = np.ascontiguousarray(model[mine[0] : mine[-1] + 1, :, heads.start : heads.stop]).tobytes()
    stored, found = model.tobytes(), rules.byte_ranges(cut, whole)
    assert b"".join(stored[at : at + length] for at, length in found) == shard
    assert all(a + length < b for (a, length), (b, _) in itertools.pairwise(found)), "neighbours are joined"


def test_cuts_of_all_ranks_make_the_object() -> None:
    whole = rules.object_shard(ALL, 8, 2)
    written: list[int] = []
    for layers, heads in itertools.product((range(1), range(1, 4)), repeat=2):
        cut = rules.rank_shard(ALL, layers, heads, 8, 2)
        assert cut is not None
        for first, length in rules.byte_ranges(cut, whole):
            written += range(first, first + length)
    assert sorted(written) == list(range(whole.shard_bytes))
    assert rules.rank_shard(ALL, range(1, 2), range(4), 8, 2) is None
    assert rules.byte_ranges(whole, whole) == ((0, whole.shard_bytes),)
    with pytest.raises(ConfigError, match="heads"):
        rules.rank_shard(ALL, range(4), range(2, 5), 8, 2)


def test_one_group_is_the_shard_of_today() -> None:
    (only,) = rules.derive_groups([0] * 80, kv_heads=8, head_dim=128)
    assert rules.is_single([only])
    assert rules.object_shard(only, 64, 2) == ShardLayout(80, 8, 64, 128, 2)
    of_rank = rules.rank_shard(only, range(80), range(2, 4), 64, 2)
    assert of_rank == ShardLayout(80, 2, 64, 128, 2, first_head=2)
    latent = CacheGroup("latent", (0, 1), CacheLayout(planes=1, heads=1, dim=576))
    assert rules.object_shard(latent, 64, 2).shard_bytes == 2 * 64 * 576 * 2
    state = CacheGroup("delta", (0, 1), CacheLayout(1, 32, 128 * 128, "float32"), CacheKind.STATE, 8)
    assert rules.object_shard(state, 64, 4).shard_bytes == 2 * 32 * 128 * 128 * 4
    assert not rules.is_single([state]) and not rules.is_single([only, latent])


# ── models ───────────────────────────────────────────────────────────────────────────────────────────

DENSE = {"num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
DENSE |= {"head_dim": 8, "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 4096}


def groups_of(architecture: str, **keys: object) -> tuple[CacheGroup, ...]:
    config = ModelConfig.from_hf(DENSE | {"architectures": [architecture], "rms_norm_eps": 1e-6} | keys)
    return rules.derive_groups(config.windows, config.kv_heads, config.head_dim)


def test_groups_of_the_families_of_today() -> None:
    shape = CacheLayout(2, 4, 8)
    everything = CacheGroup("all", tuple(range(12)), shape)
    assert groups_of("LlamaForCausalLM") == groups_of("Qwen3ForCausalLM") == (everything,)
    gemma2 = groups_of("Gemma2ForCausalLM", sliding_window=512)
    assert gemma2 == (
        CacheGroup("all", (1, 3, 5, 7, 9, 11), shape),
        CacheGroup("window512", (0, 2, 4, 6, 8, 10), shape, CacheKind.WINDOW, 512),
    )
    gemma3 = groups_of("Gemma3ForCausalLM", sliding_window=1024)
    assert [(g.name, g.layers) for g in gemma3] == [
        ("all", (5, 11)),
        ("window1024", (0, 1, 2, 3, 4, 6, 7, 8, 9, 10)),
    ]
    (mistral,) = groups_of("MistralForCausalLM", sliding_window=256)
    assert (mistral.kind, mistral.keep) == (CacheKind.WINDOW, 256) and not rules.is_single([mistral])
    assert groups_of("MistralForCausalLM", sliding_window=None) == (everything,)


def test_groups_of_llama_4() -> None:
    """Layers with rope see chunks, the others everything, unless `layer_types` says otherwise."""
    text = {"intermediate_size_mlp": 96, "num_local_experts": 2}
    shape = CacheLayout(2, 4, 8)

    def groups(**keys: object) -> tuple[CacheGroup, ...]:
        raw = DENSE | {"architectures": ["Llama4ForCausalLM"], "rms_norm_eps": 1e-6} | text | keys
        return ModelConfig.from_hf(raw).cache_groups

    assert groups() == (
        CacheGroup("all", (3, 7, 11), shape),
        CacheGroup("chunk8192", (0, 1, 2, 4, 5, 6, 8, 9, 10), shape, CacheKind.CHUNK, 8192),
    )
    assert groups(attention_chunk_size=None) == (CacheGroup("all", tuple(range(12)), shape),)
    types = ["full_attention"] * 2 + ["chunked_attention"] * 10
    all_, chunk = groups(layer_types=types, no_rope_layers=[0, 1] * 6, attention_chunk_size=100)
    assert (all_.layers, chunk.layers, chunk.keep) == ((0, 1), tuple(range(2, 12)), 100)
    mixed = rules.derive_groups([0, 16, 0, 0], 4, 8, chunks=[0, 0, 64, 512])
    assert [of.name for of in mixed] == ["all", "window16", "chunk512", "chunk64"]


def test_numbers_of_groups_are_the_same_everywhere() -> None:
    """They are bits of masks that nodes send each other: what sees all is 0, then the longest window."""
    found = rules.derive_groups([16, 64, 0, 16, 0], kv_heads=4, head_dim=8)
    assert [(of.name, of.layers) for of in found] == [("all", (2, 4)), ("window64", (1,)), ("window16", (0, 3))]


def test_bytes_of_a_hit_and_of_a_handoff() -> None:
    all_, window = groups_of("Gemma2ForCausalLM", sliding_window=512)
    state = CacheGroup("state", (0,), CacheLayout(1, 4, 64), CacheKind.STATE, 8)
    groups, sizes, one = (all_, window, state), (2, 2, 4), 6 * 2 * 4 * 16 * 8 * 2
    assert rules.prefix_bytes(groups, 16, sizes, 0) == 0
    assert rules.prefix_bytes(groups, 16, sizes, 100) == (100 + 32) * one + 1024
    assert rules.handoff_bytes(groups, 16, sizes, 1601) == (101 + 33) * one + 1024
    assert rules.handoff_bytes(groups, 16, sizes, 1601, at_decode=90) == (11 + 11) * one + 1024
    assert rules.handoff_bytes((all_,), 16, (2,), 1600) == 1600 * all_.layout.planes * 6 * 4 * 8 * 2


@pytest.mark.parametrize(
    ("why", "bad"),
    [
        ("layers", lambda: CacheGroup("g", (2, 1), LAYOUT)),
        ("layers", lambda: CacheGroup("g", (), LAYOUT)),
        ("keep", lambda: CacheGroup("g", (0,), LAYOUT, CacheKind.WINDOW)),
        ("keep", lambda: CacheGroup("g", (0,), LAYOUT, CacheKind.ALL, 4)),
        ("name", lambda: CacheGroup("", (0,), LAYOUT)),
        ("heads", lambda: CacheLayout(2, 0, 8)),
        ("cache_groups", lambda: rules.check_groups([ALL, ALL])),
        ("cache_groups", lambda: rules.check_groups([group(CacheKind.ALL, optional=True)])),
        ("cache_groups", lambda: rules.derive_groups(list(range(9)), 4, 8)),
    ],
)
def test_what_cannot_be_is_named(why: str, bad: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        bad()
    assert raised.value.field == why


def test_chunks_end_at_the_snapshots_of_every_group() -> None:
    layout = CacheLayout(1, 1, 4)
    everything = CacheGroup("all", (0,), layout)
    states = [CacheGroup(f"state{keep}", (1,), layout, CacheKind.STATE, keep) for keep in (8, 12)]
    assert rules.snapshot_grid([everything], 16) == 0
    assert rules.snapshot_grid([everything, states[0]], 16) == 128
    assert rules.snapshot_grid([everything, *states], 16) == 64


def test_snapshots_at_most_double_a_prefix() -> None:
    """Qwen3-Next-80B: 36 layers of 32 states of 128 x 128 float32 and 3 inputs of 8,192 bf16 are 77,266,944 bytes; a
    block's KV in 12 layers of 2 heads of 256 are 1,572,864: 49.1 blocks."""
    kept = rules.CacheGroup("all", tuple(range(12)), rules.CacheLayout(2, 2, 256))
    states = (rules.CacheLayout(1, 32, 128 * 128, "float32"), rules.CacheLayout(3, 16, 512))
    assert rules.snapshot_blocks(kept, 36, states) == 64
    one = rules.CacheLayout(1, 1, 64 * 2 * 2 * 256, "float32")  # as many bytes as 8 blocks of `few`
    few = rules.CacheGroup("all", (0,), rules.CacheLayout(1, 1, 256))
    assert [rules.snapshot_blocks(few, layers, [one]) for layers in (1, 2, 3, 5, 99)] == [8, 16, 32, 64, 128]
    assert rules.snapshot_blocks(kept, 1, [rules.CacheLayout(1, 1, 1)]) == 8
