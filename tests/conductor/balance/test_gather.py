"""Few answers are gathered on fewer instances where that wins something, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.services.conductor.balance.gather import DecodeHolding, GatherPlan, plan_gather


def memory_bound(rows: float, context_tokens: float) -> float:
    """Weights take 20 ms; 64 rows or a million tokens of KV as long."""
    return 0.02 + 0.02 * rows / 64 + 0.02 * context_tokens / 1e6


def compute(tokens: float) -> float:
    return tokens / 20_000


def holding(name: str, rows: int, **other: object) -> DecodeHolding:
    one = DecodeHolding(name, rows, 1000.0 * rows, 1e6, 256, False, 60.0, memory_bound)
    return replace(one, **other)  # type: ignore[arg-type]


def plan(*holdings: DecodeHolding, slower: float = 0.25, compute_s: Callable[[float], float] = compute) -> GatherPlan:
    return plan_gather(holdings, compute_s, slower)


def test_a_thin_tail_is_gathered_on_one() -> None:
    found = plan(holding("a", 3), holding("b", 1), holding("c", 0), holding("d", 2))
    assert (found.kept, found.freed, found.moved) == (("a",), ("d", "b", "c"), 3)


def test_a_full_batch_is_left_alone_and_the_idle_are_freed() -> None:
    found = plan(*(holding(name, rows, max_rows=999) for name, rows in (("a", 200), ("b", 190), ("c", 0))))
    assert (found.kept, found.freed, found.moved) == (("a", "b"), ("c",), 0)
    assert found.why.startswith("b stays: a step would take")


def test_it_stops_where_steps_would_become_too_long() -> None:
    tail = [holding(name, 10) for name in "abcd"]  # steps of 23 ms, of one row 20; of all together, 33 ms
    assert len(plan(*tail).kept) == 3 and len(plan(*tail, slower=1.0).kept) == 1
    assert "may be 25% longer" in plan(*tail).why


def test_asked_again_it_slows_nothing_further() -> None:
    tail = [holding(name, 10) for name in "abcd"]
    kept = plan(*tail).kept
    again = plan(*(holding(name, 40 // len(kept)) for name in kept))
    assert again.kept == kept and not again.freed


def test_nothing_moves_where_there_is_no_room() -> None:
    found = plan(holding("a", 2, room_tokens=500), holding("b", 1))
    assert not found.freed and "no room for its 1 answers" in found.why
    assert not plan(holding("a", 2, max_rows=2), holding("b", 1)).freed


def test_nothing_moves_that_ends_sooner_than_it_is_computed_again() -> None:
    short = [holding("a", 2, left_s=0.04), holding("b", 1, left_s=0.04)]
    assert "to compute the KV of those that move takes 0.1 s" in plan(*short).why and not plan(*short).freed
    assert plan(*(replace(one, left_s=4.0) for one in short)).freed == ("b",)


def test_who_prefills_is_kept() -> None:
    assert plan(holding("a", 5), holding("b", 1, prefills=True)).kept == ("b",)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.floats(0, 3e5), st.booleans(), st.integers(1, 3)), min_size=1),
    st.floats(0.01, 2),
)  # fmt: skip
def test_what_is_promised_of_any_plan(told: list[tuple[int, float, bool, int]], slower: float) -> None:
    held = [
        holding(f"i{n}", rows, room_tokens=room, prefills=prefills, places=places)
        for n, (rows, room, prefills, places) in enumerate(told)
    ]
    found = plan(*held, slower=slower)
    of = {one.name: one for one in held}
    assert found.kept and sorted((*found.kept, *found.freed)) == sorted(of)
    assert found.moved == sum(of[name].rows for name in found.freed)
    kept = [of[name] for name in found.kept]
    assert any(one.prefills for one in held) <= any(one.prefills for one in kept)
    assert 1000 * found.moved <= sum(one.room_tokens for one in kept)
    rows = sum(one.rows for one in held) / sum(one.places for one in kept)
    least_s = memory_bound(rows, 1000 * rows) if rows else 0.0
    assert not found.moved or least_s <= (1 + slower) * memory_bound(1, 1000) + 1e-9
