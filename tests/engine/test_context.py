"""Which tokens of a context lie at which rank: tables by hand, and what holds for any."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.engine.axes import Axes
from kvmesh.engine.context import ContextShare, zigzag
from kvmesh.errors import ConfigError

turns, interleaves, lengths = st.integers(1, 5), st.integers(1, 9), st.integers(0, 200)


@pytest.mark.parametrize(
    ("interleave", "first", "second"),
    [  # of the first 0, 1, .. 8 tokens, at rank 0 and at rank 1 of 2
        (1, [0, 1, 1, 2, 2, 3, 3, 4, 4], [0, 0, 1, 1, 2, 2, 3, 3, 4]),
        (2, [0, 1, 2, 2, 2, 3, 4, 4, 4], [0, 0, 0, 1, 2, 2, 2, 3, 4]),
        (4, [0, 1, 2, 3, 4, 4, 4, 4, 4], [0, 0, 0, 0, 0, 1, 2, 3, 4]),
    ],
)
def test_the_tables_for_two_ranks(interleave: int, first: list[int], second: list[int]) -> None:
    for turn, wanted in enumerate((first, second)):
        own = ContextShare(turn, 2, interleave)
        print(f"D=2 I={interleave} rank {turn}: L=0..8 -> {[own.local_len(length) for length in range(9)]}")
        assert [own.local_len(length) for length in range(9)] == wanted
        assert own.local_lens(np.arange(9)).tolist() == wanted


def test_drafts_behind_a_history_and_after_a_rejection() -> None:
    """Five tokens are there, three drafts behind them: query j is at 5 + j and sees itself."""
    ranks = [ContextShare(turn, 2, 1) for turn in range(2)]
    assert [[own.local_len(5 + j + 1) for j in range(3)] for own in ranks] == [[3, 4, 4], [3, 3, 4]]
    # Only the first draft was right: 6 tokens, then the next query is at 6, and rank 1's slot 3 is written again.
    assert [own.local_len(6) for own in ranks] == [3, 3] and [own.local_len(7) for own in ranks] == [4, 3]
    assert [bool(own.here(np.array([7]))[0]) for own in ranks] == [False, True] and ranks[1].local_len(7) == 3
    # One token: the second rank has nothing to attend to.
    assert [own.local_len(1) for own in ranks] == [1, 0]


@given(turns, interleaves, lengths)
def test_every_token_lies_at_one_rank_in_order(count: int, interleave: int, length: int) -> None:
    ranks = [ContextShare(turn, count, interleave) for turn in range(count)]
    assert sum(own.local_len(length) for own in ranks) == length
    where = np.arange(length)
    for own in ranks:
        kept = [own.position(local) for local in range(own.local_len(length))]
        assert kept == where[own.here(where)].tolist()
        assert own.local_lens(where + 1).tolist() == np.cumsum(own.here(where)).tolist()
    # Page n of all ranks together has the tokens of block n, where the interleave divides a page.
    page, block = 2 * interleave, 2 * interleave * count
    for own in ranks:
        where = np.array([own.position(local) for local in range(own.local_len(length))], dtype=np.int64)
        assert (where // block).tolist() == [local // page for local in range(len(where))]


def test_the_place_of_a_rank() -> None:
    axes = Axes(cp=2, tp=4, dcp=2)
    shares = [ContextShare.of(axes, rank, 16) for rank in range(8)]
    assert [share.turn for share in shares] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert {(share.turns, share.interleave) for share in shares} == {(4, 16)}
    assert ContextShare.of(Axes(tp=2, dcp=2, interleave=1), 1, 16) == ContextShare(1, 2, 1)
    # A page of a rank is its part of a block of 64 tokens.
    assert [shares[5].position(16 * page) for page in range(3)] == [48, 112, 176]
    with pytest.raises(ConfigError, match="interleave=3 must divide the 16 tokens of a rank's page"):
        ContextShare.of(Axes(cp=2, interleave=3), 0, 16)
    with pytest.raises(ConfigError, match="turn 2 of 2 ranks"):
        ContextShare(2, 2, 1)


@given(st.integers(0, 300), st.integers(1, 8))
def test_zigzag_gives_all_ranks_as_much_to_do(length: int, ranks: int) -> None:
    runs = zigzag(length, ranks)
    assert sorted(token for own in runs for run in own for token in run) == list(range(length))
    pairs = [sum(token + 1 for run in own for token in run) for own in runs]
    assert max(pairs) - min(pairs) <= 2 * (length + 1)
