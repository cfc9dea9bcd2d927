"""What a device gets by itself: dtype, sizes of steps, pages. Numbers in, settings out."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import ConfigError
from kvmesh.ranks.sizing import (
    CPU_SHARE,
    GIB,
    MIB,
    MOST_CPU_BYTES,
    STEP_KEYS,
    GroupNeed,
    PageNeed,
    choose_dtype,
    choose_order,
    choose_pages,
    choose_steps,
    cuda_room,
    host_room,
    longest_context,
    named_counts,
    split,
    step_tokens,
)

# Qwen3-0.6B in bfloat16: 28 layers, 8 KV heads of 128, 64 tokens a block, 40,960 of context.
QWEN = PageNeed(64 * 28 * 2 * 8 * 128 * 2, 64, 2, 40_960, False, 64)
KINDS = st.sampled_from(("cpu", "cuda"))


def test_the_dtype_goes_by_checkpoint_and_device() -> None:
    def chosen(stored: str, kind: str, operators: bool) -> str:
        return choose_dtype("auto", stored, kind, operators)[0]

    assert [chosen(one, "cuda", False) for one in ("float32", "bfloat16", "float16")] == [
        "float32", "bfloat16", "float16",
    ]  # fmt: skip
    assert [chosen(one, "cpu", True) for one in ("float32", "bfloat16", "float16")] == [
        "float32", "bfloat16", "float32",
    ]  # fmt: skip
    assert chosen("bfloat16", "cpu", False) == "float32"
    assert choose_dtype("float16", "bfloat16", "cpu", True) == ("float16", "as told")


@given(st.dictionaries(st.sampled_from(STEP_KEYS), st.integers(0, 5000)), KINDS, st.integers(0, 200 * GIB))
def test_named_sizes_win_and_the_rest_is_chosen(asked: dict[str, int], kind: str, memory: int) -> None:
    steps = choose_steps(asked, kind, memory)
    assert steps.keys() == asked.keys() and all(steps.values())
    assert all(steps[key] == value for key, value in asked.items() if value)
    assert step_tokens(steps, 64) >= max((steps.get(key, 0) for key in STEP_KEYS[:2]), default=0)


def test_sizes_by_device() -> None:
    free = dict.fromkeys(STEP_KEYS, 0)
    assert list(choose_steps(free, "cpu", 0).values()) == [512, 512, 256, 64]
    assert list(choose_steps(free, "cuda", 80 * GIB).values()) == [8192, 8192, 1024, 256]
    assert list(choose_steps(free, "cuda", 24 * GIB).values()) == [2048, 2048, 512, 256]
    assert step_tokens({"max_running": 64}, 64) == 0, "a decode instance computes no prompts"


def test_steps_are_launched_ahead_where_the_device_runs_behind_one_host() -> None:
    chosen = {(kind, ranks): choose_order("auto", kind, ranks)[0] for kind in ("cpu", "cuda") for ranks in (1, 2)}
    assert chosen == {("cpu", 1): False, ("cpu", 2): False, ("cuda", 1): True, ("cuda", 2): False}
    assert choose_order("on", "cpu", 1) == (True, "as told") and choose_order("off", "cuda", 1) == (False, "as told")
    with pytest.raises(ConfigError, match=r"async_steps='on': 2 ranks wait for each step"):
        choose_order("on", "cuda", 2)


def test_a_named_chunk_bounds_the_batch_that_nobody_names() -> None:
    assert (
        choose_steps({"prefill_chunk_tokens": 100, "max_batch_tokens": 0}, "cuda", 80 * GIB)["max_batch_tokens"] == 100
    )


needs = st.builds(
    PageNeed,
    page_bytes=st.integers(1, 64 * MIB),
    block_tokens=st.sampled_from((16, 64, 512)),
    copies=st.sampled_from((1, 2)),
    max_context_tokens=st.integers(1, 200_000),
    context_named=st.booleans(),
    rows=st.integers(1, 256),
)


@given(needs, st.integers(0, 200 * GIB), st.integers(0, 100 * GIB), st.sampled_from((0, MOST_CPU_BYTES)))
def test_pages_fit_beside_what_is_taken_and_hold_a_request(need: PageNeed, room: int, taken: int, most: int) -> None:
    least = need.max_context_tokens if need.context_named else min(1024, need.max_context_tokens)
    fits = taken + need.pages_for(least) * need.page_bytes * need.copies <= room
    if not fits:
        with pytest.raises(ConfigError, match=f"memory_mb={need.memory_mb(least)} ") as raised:
            choose_pages(room, {"weights": taken}, need, "all", most)
        assert raised.value.field == "memory_mb"
        return
    pages = choose_pages(room, {"weights": taken}, need, "all", most)
    assert taken + pages.count * need.page_bytes * need.copies <= room
    assert pages.count * need.block_tokens >= least
    assert pages.count <= need.rows * need.pages_for(need.max_context_tokens) + 1
    assert not most or pages.count <= max(most // need.page_bytes, need.pages_for(need.max_context_tokens))
    if need.memory_mb(least):  # what the error names would do
        assert need.memory_mb(least) * MIB // need.page_bytes * need.block_tokens >= least


@given(st.integers(1, 64), st.integers(0, 1 << 42), st.integers(0, 1 << 42))
def test_parts_of_one_memory_never_come_to_more_than_there_is(ranks: int, total: int, free: int) -> None:
    room, _ = cuda_room(total, min(total, free), ranks)
    assert room <= min(total, free) and (ranks * room <= total or room < total // ranks)
    assert 2 * ranks * host_room(total, ranks, 2, 0)[0] <= CPU_SHARE * total + ranks
    assert 4 * ranks * host_room(total, 0, ranks, 0)[0] <= total + ranks, "four may start and not know of each other"
    assert host_room(total, ranks, 1, 5 * GIB)[0] == 5 * GIB


def test_a_small_model_on_a_usual_machine_has_long_contexts() -> None:
    """Qwen3-0.6B, one prefill and one decode instance on a machine with 22 GiB available."""
    room, source = host_room(22 * GIB, 2, 1, 0)
    taken = {"weights": 1137 * MIB, "a step": 200 * MIB, "the process": 384 * MIB}
    pages = choose_pages(room, taken, QWEN, source, MOST_CPU_BYTES)
    assert pages.count * 64 > 25_000
    assert "weights 1,137" in pages.why and "memory_mb=4,480" in pages.why


def test_too_little_memory_is_one_error_that_says_what_is_missing() -> None:
    with pytest.raises(ConfigError) as raised:
        choose_pages(1500 * MIB, {"weights": 1137 * MIB, "the process": 384 * MIB}, QWEN, "70% of it")
    assert raised.value.field == "memory_mb"
    # 1,024 tokens are 16 pages of 7 MiB, twice; 21 MiB are missing already.
    assert "1,500 MiB; weights 1,137, the process 384" in raised.value.message
    assert "a request of 1024 tokens needs 245 MiB more (memory_mb=112 for" in raised.value.message
    named = dataclasses.replace(QWEN, context_named=True)
    with pytest.raises(ConfigError, match=r"max_context_tokens=40960 needs .* MiB more \(memory_mb=4480 for"):
        choose_pages(4 * GIB, {"weights": 1137 * MIB}, named, "all")


def test_a_bound_never_takes_away_the_longest_request() -> None:
    wide = dataclasses.replace(QWEN, page_bytes=4 * QWEN.page_bytes)
    pages = choose_pages(200 * GIB, {}, wide, "all", MOST_CPU_BYTES)
    assert pages.count == wide.pages_for(40_960) and "where nobody names memory_mb" in pages.why


# ── by cache group ───────────────────────────────────────────────────────────────────────────────

ALL, WINDOW, STATE = GroupNeed(1000, None), GroupNeed(500, 33), GroupNeed(20_000, 2)


def test_windows_get_what_rows_fill_and_the_rest_is_for_all_tokens() -> None:
    assert split(1_000_000, [ALL, WINDOW], rows=4) == ((1_000_000 - 4 * 33 * 500) // 1000, 4 * 33)
    assert split(10_000_000, [ALL, WINDOW, STATE], rows=10)[1:] == (330, 20)


@given(
    st.integers(10_000, 50_000_000),
    st.lists(st.tuples(st.integers(1, 5000), st.none() | st.integers(1, 300)), min_size=1, max_size=5),
    st.integers(1, 300),
)
def test_windows_and_states_take_half_at_most(nbytes: int, told: list[tuple[int, int | None]], rows: int) -> None:
    needs = [GroupNeed(*one) for one in told]
    counts = split(nbytes, needs, rows)
    bounded = [at for at, need in enumerate(needs) if at and need.peak is not None and counts[at] != counts[0]]
    taken = sum(counts[at] * needs[at].block_bytes for at in bounded)
    least = sum((needs[at].peak or 0) * needs[at].block_bytes for at in bounded)
    assert taken <= max(nbytes // 2 + sum(needs[at].block_bytes for at in bounded), least + nbytes // 2)
    assert all((needs[at].peak or 0) <= counts[at] <= rows * (needs[at].peak or 0) for at in bounded)
    if counts[0]:
        assert sum(count * need.block_bytes for count, need in zip(counts, needs, strict=True)) <= nbytes
    assert all(count == counts[0] for count, need in zip(counts, needs, strict=True) if need.peak is None)


def test_no_window_has_more_blocks_than_there_are_tokens_for() -> None:
    assert split(150_000, [ALL, WINDOW], rows=100) == (100, 100)
    assert split(99_000, [WINDOW], rows=2) == (198,), "the first group gets all that there is"


def test_what_the_operator_names_is_the_first_groups() -> None:
    assert named_counts(50, [ALL, WINDOW, STATE], rows=3) == (50, 50, 6)
    assert named_counts(1, [ALL, STATE], rows=3) == (1, 2), "a request has two"


def test_a_window_that_is_whole_bounds_no_context() -> None:
    assert longest_context((50, 33, 2), [ALL, WINDOW, STATE], 16) == 800
    assert longest_context((33,), [WINDOW], 16) is None
    assert longest_context((32,), [WINDOW], 16) == 512
