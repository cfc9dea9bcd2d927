"""Keys of what vLLM computes: the house's chain, and one key for each rank and part of a block."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.connectors.vllm.keys import KvContent, TokenChain, part_key, split_layers
from kvmesh.kvcache.keys import Namespace, chain, split, tenant_tag

CONTENT = KvContent(
    engine="vllm 0.32.0",
    model="a",
    model_config="b",
    dtype="torch.bfloat16",
    kv_dtype="auto",
    block_tokens=4,
    ranks=1,
    layout="c",
    more={"quantization": "None"},
)
SPACE = Namespace(fingerprint=CONTENT.fingerprint(), kv_dtype="auto", tenant="t")


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=40), st.lists(st.integers(0, 10), max_size=5))
def test_a_chain_that_grows_has_the_keys_that_anybody_computes(tokens: list[int], steps: list[int]) -> None:
    grown = TokenChain(SPACE, 4)
    whole = len(tokens) // 4
    for blocks in sorted(min(step, whole) for step in steps):
        grown.reach(tokens, blocks)
        assert grown.keys == split(chain(SPACE, tokens, 4))[: len(grown.keys)]
    grown.reach(tokens, whole)
    assert grown.keys == split(chain(SPACE, tokens, 4))


def test_a_chain_cannot_reach_further_than_its_tokens() -> None:
    with pytest.raises(ValueError, match="7 tokens: fewer than 2 blocks of 4"):
        TokenChain(SPACE, 4).reach(range(7), 2)


@pytest.mark.parametrize("name", ["engine", "model", "model_config", "dtype", "kv_dtype", "layout"])
def test_whatever_decides_the_bytes_decides_the_keys(name: str) -> None:
    assert replace(CONTENT, **{name: "other"}).fingerprint() != CONTENT.fingerprint()  # type: ignore[arg-type]


def test_numbers_and_further_settings_decide_the_keys() -> None:
    others = [replace(CONTENT, block_tokens=8), replace(CONTENT, ranks=2), replace(CONTENT, more={"quantization": "x"})]
    assert len({one.fingerprint() for one in (CONTENT, *others)}) == 4


def test_each_rank_and_part_has_a_key_of_its_own_with_the_tag() -> None:
    key = tenant_tag("t") + bytes(12)
    places = [(rank, ranks, part, parts) for ranks in (1, 2) for rank in range(ranks) for parts in (1, 2, 3)
              for part in range(parts)]  # fmt: skip
    keys = {part_key(key, *place) for place in places}
    assert len(keys) == len(places)
    assert all(len(one) == 16 and one.startswith(tenant_tag("t")) for one in keys)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 5000))
def test_parts_cover_all_layers_once(sizes: list[int], least: int) -> None:
    parts = split_layers(sizes, least)
    assert [layer for first, end in parts for layer in range(first, end)] == list(range(len(sizes)))
    assert all(first < end for first, end in parts)
    assert len(parts) <= max(sum(sizes) // least, 1)


def test_equal_layers_make_equal_parts() -> None:
    assert split_layers([131_072] * 28, 1 << 20) == [(0, 10), (10, 19), (19, 28)]
    assert split_layers([100] * 4, 1000) == [(0, 4)]
    assert split_layers([100] * 4, 100) == [(0, 1), (1, 2), (2, 3), (3, 4)]
