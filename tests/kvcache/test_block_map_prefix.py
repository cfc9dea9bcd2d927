"""`BlockMap.prefix` says of long prompts what `mask` says key by key, hidden contents or not."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.block_map import FIRST_PIECE, BlockMap

KEYS = tuple(i.to_bytes(16, "big") for i in range(5 * FIRST_PIECE))
spans = st.tuples(st.integers(0, len(KEYS)), st.integers(0, len(KEYS))).map(sorted)
changes = st.tuples(
    st.sampled_from("abcd"), st.sampled_from(["seal", "seal", "remove", "snapshot", "reborn", "drop"]), spans
)


def history(blocks: BlockMap, steps: list[tuple[str, str, list[int]]]) -> None:
    lives, seqs = dict.fromkeys("abcd", 1), dict.fromkeys("abcd", 0)
    for name, kind, (first, end) in steps:
        if kind == "drop":
            blocks.drop(name)
            lives[name], seqs[name] = lives[name] + 1, 0
            continue
        if kind == "reborn":
            lives[name], seqs[name] = lives[name] + 1, 0
        seqs[name] += 1
        sealed, removed = (KEYS[first:end], ()) if kind != "remove" else ((), KEYS[first:end])
        blocks.apply(Announcement(name, lives[name], seqs[name], sealed, removed, kind == "snapshot"))


def by_key(blocks: BlockMap, at_least: int) -> list[int]:
    """Masks of the leading keys, one by one."""
    found = [blocks.mask(key) for key in KEYS]
    end = next((i for i, mask in enumerate(found) if not mask and i >= at_least), len(KEYS))
    return found[: max(end, min(at_least, len(KEYS)))]


@settings(max_examples=200)
@given(st.lists(changes, max_size=12), st.integers(0, len(KEYS)), st.integers(0, 200))
def test_runs_are_what_each_key_says(steps: list[tuple[str, str, list[int]]], at_least: int, swept: int) -> None:
    blocks = BlockMap()
    history(blocks, steps)
    blocks.sweep(swept)
    shown = [
        mask
        for (end, mask), first in zip(*_firsts(blocks.prefix(KEYS, at_least)), strict=True)
        for _ in range(first, end)
    ]
    assert shown == by_key(blocks, at_least)


def _firsts(runs: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[int]]:
    return runs, [0, *(end for end, _ in runs)][: len(runs)]


def test_it_would_be_found_that_hidden_contents_show(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = BlockMap()
    history(blocks, [("a", "seal", [0, 100]), ("b", "seal", [0, 50]), ("a", "drop", [0, 0])])
    assert [end for end, _ in blocks.prefix(KEYS)] == [50]
    monkeypatch.setattr(blocks, "_hidden", 0)
    assert [end for end, _ in blocks.prefix(KEYS)] == [50, 100]


def test_keys_of_one_announcement_share_the_int_of_their_holders() -> None:
    """Memory: a second and a third holder of a long chain cost one int, not one a block."""
    rng, blocks = random.Random(1), BlockMap()
    for i in range(300):  # so that a bitset is long
        blocks.apply(Announcement(f"s{i}", 1, 1, (rng.randbytes(16),)))
    for name in ("s7", "s150", "s299"):
        blocks.apply(Announcement(name, 1, 2, KEYS))
    assert len({id(blocks._masks[key]) for key in KEYS}) == 1
    blocks.apply(Announcement("s150", 1, 3, (), KEYS[80:]))
    assert len({id(blocks._masks[key]) for key in KEYS}) == 2
    blocks.check_integrity()
