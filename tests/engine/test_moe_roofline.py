"""Where grouped products of experts become bound by the multipliers (benchmarks/moe.py)."""

from __future__ import annotations

import math

import pytest

from benchmarks.moe import H200, bound_from, reachable, rows_per_expert


def test_rows_of_an_expert_follow_from_cards_requests_and_choices() -> None:
    """DeepSeek-V3 at 128 requests a card: EP over n cards gathers n times as many tokens."""
    assert [rows_per_expert(cards, 128, 8, 256) for cards in (8, 128)] == [32, 512]


def test_a_product_is_bound_by_the_multipliers_from_where_its_share_is_all() -> None:
    rows = bound_from(7168, 4096, H200)
    assert reachable(rows, 7168, 4096, H200) == pytest.approx(1.0)
    assert reachable(rows / 2, 7168, 4096, H200) < 0.6 and reachable(2 * rows, 7168, 4096, H200) == 1.0
    # However many rows: reading 64 inputs and writing 64 outputs of each takes longer than multiplying them.
    assert bound_from(64, 64, H200) == math.inf and reachable(1e9, 64, 64, H200) < 1.0
