"""Batches of KV events: what vLLM publishes, now and in older versions, and what nobody should."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.external.kv_events import AllRemoved, BlocksRemoved, BlocksStored, KvEventsUnusable, events_of
from kvmesh.kvcache.keys import pack_tokens

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [b"a" * 32, b"b" * 32],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def batch(*events: Any, rank: Any = 0) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), rank])


def test_maps_and_lists_say_the_same() -> None:
    told = BlocksStored((b"a" * 32, b"b" * 32), None, pack_tokens([1, 2, 3, 4]), 2)
    as_list = ["BlockStored", STORED["block_hashes"], None, [1, 2, 3, 4], 2, None, "GPU"]
    assert events_of(batch(STORED)) == events_of(batch(as_list)) == [told]
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": None}
    assert events_of(batch(removed, {"type": "AllBlocksCleared"})) == [BlocksRemoved((7,)), AllRemoved()]
    assert events_of(batch(["BlockRemoved", [7], "GPU"], ["AllBlocksCleared"], rank=None)) == [
        BlocksRemoved((7,)),
        AllRemoved(),
    ]


def test_what_lies_elsewhere_and_what_is_not_known_is_passed_over() -> None:
    there = STORED | {"medium": "CPU", "group_idx": 3, "later": [1]}
    assert events_of(batch(there, {"type": "BlockMoved"}, STORED | {"later": {}})) == events_of(batch(STORED))


@pytest.mark.parametrize(
    ("extra", "salt", "foreign"),
    [
        (None, "", False),
        ([None, None], "", False),
        ([["s"], None], "s", False),
        ([["lora", "s"], ["lora"]], "", True),
        ([None, [["image", 3]]], "", True),
        ([["s"], ["s"]], "s", True),
    ],
)
def test_what_blocks_depend_on(extra: Any, salt: str, foreign: bool) -> None:
    [told] = events_of(batch(STORED | {"extra_keys": extra}))
    assert isinstance(told, BlocksStored) and (told.salt, told.foreign) == (salt, foreign)
    [after] = events_of(batch(STORED | {"extra_keys": [["s"], None], "parent_block_hash": b"p"}))
    assert isinstance(after, BlocksStored) and after.foreign, "a salt stands at the first block alone"
    [tuned] = events_of(batch(STORED | {"lora_name": "l"}))
    assert isinstance(tuned, BlocksStored) and tuned.foreign


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"\xc1", "no MessagePack"),
        (b"\x91" * 200_000, "no MessagePack"),
        (msgspec.msgpack.encode({"ts": 1}), r"not \[time, events\]"),
        (msgspec.msgpack.encode([1.0, 3]), r"not \[time, events\]"),
        (batch(3), "neither a map nor a list"),
        (batch(*["x"] * 70_000), "more than 65536"),
        (batch(STORED, rank=1), "data_parallel_rank=1"),
        (batch(STORED | {"group_idx": 1}), "several groups"),
        (batch(STORED | {"block_hashes": "a"}), "block_hashes"),
        (batch(STORED | {"block_hashes": [b"", b"b"]}), "is no hash"),
        (batch(STORED | {"block_hashes": [b"a", [1]]}), "is no hash"),
        (batch(STORED | {"block_size": 0}), "block_size=0"),
        (batch(STORED | {"block_size": True}), "block_size=True"),
        (batch(STORED | {"token_ids": [1, 2, 3]}), "3 of them for 2 blocks of 2"),
        (batch(STORED | {"token_ids": [1, 2, 3, -1]}), "token_ids"),
        (batch(STORED | {"token_ids": [1, 2, 3, "4"]}), "token_ids"),
        (batch(STORED | {"parent_block_hash": 1.5}), "is no hash"),
        (batch(STORED | {"extra_keys": "s"}), "extra_keys"),
        (batch(["BlockStored"]), "block_hashes"),
    ],
)
def test_what_cannot_be_is_named(payload: bytes, why: str) -> None:
    with pytest.raises(KvEventsUnusable, match=why):
        events_of(payload)


JSONISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.binary(max_size=4)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*STORED, "extra_keys", "group_idx"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.lists(st.one_of(JSONISH, st.tuples(st.sampled_from([*STORED, "extra_keys"]), JSONISH)), max_size=3))
def test_nothing_but_its_own_error_comes_out(events: list[Any]) -> None:
    told = [STORED | {one[0]: one[1]} if isinstance(one, tuple) else one for one in events]
    for payload in (batch(*told), batch(*told)[:-1]):
        with contextlib.suppress(KvEventsUnusable):
            events_of(payload)
