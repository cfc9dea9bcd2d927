"""Who copies: the copy engine where its time a piece does not show, else a kernel, small beside a large step."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.copy_rule import (
    FULL_STEP,
    FULL_STEP_PROGRAMS,
    IDLE_PROGRAMS,
    SMALL_STEP_PROGRAMS,
    kernel_programs,
)
from kvmesh.ranks.worker.worker import Worker
from tests.support.rank_driver import GREEDY, staged_configure

KIB = 1 << 10


def chosen(pieces: int, piece: int, *, into_pages: bool = False, step_tokens: int = 0) -> int:
    nbytes = pieces * piece
    return kernel_programs(pieces=pieces, nbytes=nbytes, longest=piece, into_pages=into_pages, step_tokens=step_tokens)


@pytest.mark.parametrize("into_pages", [False, True])
@pytest.mark.parametrize("step_tokens", [0, 32, 8192])
def test_short_pieces_go_by_the_kernel_and_long_or_few_ones_by_the_copy_engine(
    into_pages: bool, step_tokens: int
) -> None:
    beside = {"into_pages": into_pages, "step_tokens": step_tokens}
    assert chosen(64, 16 * KIB, **beside)  # a layer's runs of 32 blocks for a reader of other heads
    assert chosen(32, 64 * KIB, **beside)
    assert not chosen(32, 8 << 20, **beside)  # blocks of a model of 8B
    assert not chosen(1, 16 * KIB, **beside)
    assert not chosen(4, 64 * KIB, **beside)


def test_a_larger_step_is_left_more_processors() -> None:
    for into_pages in (False, True):
        small, full = SMALL_STEP_PROGRAMS[into_pages], FULL_STEP_PROGRAMS[into_pages]
        by_step = [
            chosen(1000, 16 * KIB, into_pages=into_pages, step_tokens=tokens)
            for tokens in (0, 1, FULL_STEP - 1, FULL_STEP, 8192)
        ]
        assert by_step == [IDLE_PROGRAMS, small, small, full, full]
        assert IDLE_PROGRAMS > small >= full


def test_one_long_piece_among_short_ones_does_not_take_the_kernel_as_many_turns() -> None:
    short, longest = 1000 * 16 * KIB, 8 << 20
    assert not kernel_programs(pieces=1001, nbytes=short + longest, longest=longest, into_pages=False, step_tokens=0)


@given(st.integers(1, 4096), st.integers(16, 1 << 20), st.booleans(), st.integers(0, 10_000))
def test_more_pieces_of_a_length_never_bring_the_copy_engine_back(
    pieces: int, piece: int, into_pages: bool, step_tokens: int
) -> None:
    beside = {"into_pages": into_pages, "step_tokens": step_tokens}
    if chosen(pieces, piece, **beside):
        assert chosen(pieces + 1, piece, **beside)
        assert chosen(2 * pieces, (piece + 1) // 2, **beside), "the same bytes in more pieces"


def test_the_rule_is_told_of_the_step_that_runs_and_then_of_the_rows_that_go_on(checkpoint: Path) -> None:
    worker = Worker(staged_configure(checkpoint), lambda _: None)
    try:
        seen: list[int] = []

        def look() -> None:
            seen.append(worker.memory.step_tokens)

        worker.step(m.PrefillStep(1, (m.PrefillItem(1, tuple(range(30)), 0, (0, 1), GREEDY, push=False),)), look)
        assert set(seen) == {30} and worker.memory.step_tokens == 0
        worker.handle(m.Join(1, (0, 1, 2), 30, 5, 0, 9, 0, (), GREEDY))
        seen.clear()
        worker.step(m.PrefillStep(2, (m.PrefillItem(2, tuple(range(17)), 0, (3, 4), GREEDY, push=False),)), look)
        assert set(seen) == {18} and worker.memory.step_tokens == 1
    finally:
        worker.close()
