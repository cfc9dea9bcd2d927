"""Gathers few running answers on fewer instances: when a rollout nears its end, what is left is spread thin. Pure.

A step over few rows waits for the weights to be read: a row more hardly lengthens it, and an instance without rows is
free for something else, as for training. So instances are freed, those with the fewest rows first, as long as

- no step of those that take answers is longer by more than the share `slower` than one over a single row: a bound that
  does not move, so to ask again and again slows nothing further;
- their pages and `max_running` hold what comes to them;
- the instance-seconds that are won are more than what it costs to compute the KV of moved answers again. (It costs less
  where blocks are found: the bound is for none found.)

Who prefills as well is kept first: answers that move want their KV computed somewhere.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.membership.places import instance_of
from kvmesh.services.conductor.fleet.instance import Instance

SLOWER = 0.25
MOST_MOVED = 16_384  # answers; instances say how many they have


@dataclass(frozen=True, slots=True)
class DecodeHolding:
    """What one instance that decodes has. `room_tokens` of KV fit beside its rows' `context_tokens`; `left_s` is how
    long its rows will run; `step_s(rows, context_tokens)` predicts a step; `places` share its rows."""

    name: str
    rows: int
    context_tokens: float
    room_tokens: float
    max_rows: float
    prefills: bool
    left_s: float
    step_s: Callable[[float, float], float]
    places: int = 1

    def step_with(self, rows: float, context_tokens: float) -> float:
        """Returns the seconds of a step over so many rows, which its places share."""
        return self.step_s(rows / self.places, context_tokens / self.places) if rows else 0.0


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Who is freed, who is kept, how many answers move, and why no more are freed."""

    kept: tuple[str, ...]
    freed: tuple[str, ...] = ()
    moved: int = 0
    why: str = ""


@dataclass(slots=True)
class _Kept:
    holding: DecodeHolding
    rows: float = field(init=False)
    context: float = field(init=False)

    def __post_init__(self) -> None:
        self.rows, self.context = self.holding.rows, self.holding.context_tokens


def plan_gather(
    holdings: Sequence[DecodeHolding], compute_s: Callable[[float], float], slower: float = SLOWER
) -> GatherPlan:
    """Returns who is freed. `compute_s(tokens)` predicts how long computing the KV of one answer of so many tokens
    takes."""
    order = sorted(holdings, key=lambda one: (not one.prefills, -one.rows, one.name))
    rows = sum(one.rows for one in order)
    context = sum(one.context_tokens for one in order) / rows if rows else 0.0
    alone_s = min((one.step_s(1, context) for one in order), default=0.0)
    best, why = GatherPlan(tuple(one.name for one in order)), ""
    for count in range(len(order) - 1, 0, -1):
        kept, freed = order[:count], order[count:]
        why = _why_not(kept, freed, alone_s, compute_s, slower)
        if why:
            break
        moved = sum(one.rows for one in freed)
        best = GatherPlan(tuple(one.name for one in kept), tuple(one.name for one in freed), moved)
    return GatherPlan(best.kept, best.freed, best.moved, why or "one is kept")


def _why_not(
    kept: Sequence[DecodeHolding],
    freed: Sequence[DecodeHolding],
    alone_s: float,
    compute_s: Callable[[float], float],
    slower: float,
) -> str:
    """Returns "" if these may be freed."""
    moving = [one for one in freed if one.rows]
    if not moving:
        return ""
    after = _spread(kept, moving)
    if after is None:
        return f"{freed[0].name} stays: the others have no room for its {freed[0].rows} answers"
    step_s = max(one.holding.step_with(one.rows, one.context) for one in after)
    if step_s > (1 + slower) * alone_s:
        return (
            f"{freed[0].name} stays: a step would take {1000 * step_s:.1f} ms, and of one row {1000 * alone_s:.1f}: it "
            f"may be {100 * slower:.0f}% longer"
        )
    now_s = max(one.step_with(one.rows, one.context_tokens) for one in (*kept, *freed))
    left_s = max(one.left_s for one in (*kept, *freed) if one.rows)
    longer = max(1.0, step_s / now_s) if now_s else 1.0
    won_s = len(freed) * left_s - len(kept) * left_s * (longer - 1)
    lost_s = sum(one.rows * compute_s(one.context_tokens / one.rows) for one in moving)
    if won_s <= lost_s:
        return (
            f"{freed[0].name} stays: its answers end within {left_s:.1f} s, and to compute the KV of those that move "
            f"takes {lost_s:.1f} s"
        )
    return ""


def _spread(kept: Sequence[DecodeHolding], moving: Sequence[DecodeHolding]) -> list[_Kept] | None:
    """Returns what the kept ones have when each answer that moves goes to who has the fewest; None: no room."""
    if sum(holding.rows for holding in moving) > MOST_MOVED:
        return None
    after = [_Kept(one) for one in kept]
    heap = [(one.rows, at) for at, one in enumerate(after)]
    heapq.heapify(heap)
    for holding in moving:
        each = holding.context_tokens / holding.rows
        for _ in range(holding.rows):
            while True:
                if not heap:
                    return None
                rows, at = heapq.heappop(heap)
                one, own = after[at], kept[at]
                if rows < own.max_rows and one.context + each <= own.context_tokens + own.room_tokens:
                    break  # else it is full, for all that follow: answers of one instance are taken as equals
            one.rows, one.context = one.rows + 1, one.context + each
            heapq.heappush(heap, (one.rows, at))
    return after


def holdings(instances: Sequence[Instance]) -> list[DecodeHolding]:
    """Returns what those that decode have, each with all its data-parallel places."""
    of: dict[str, list[Instance]] = {}
    for instance in instances:
        if instance.role.decodes:
            of.setdefault(instance_of(instance.ref.instance_id), []).append(instance)
    return [_holding(name, places) for name, places in of.items()]


def _holding(name: str, places: Sequence[Instance]) -> DecodeHolding:
    first = places[0]
    return DecodeHolding(
        name,
        rows=sum(place.batch.requests for place in places),
        context_tokens=sum(place.batch.context_tokens for place in places),
        room_tokens=sum(place.load.free_pages * place.model.block_tokens for place in places),
        max_rows=sum(place.max_running or math.inf for place in places),
        prefills=first.role.prefills,
        left_s=max(place.batch.residence_s for place in places),
        step_s=first.decode.predict,
        places=len(places),
    )


def prefill_s(instances: Sequence[Instance]) -> Callable[[float], float]:
    """Returns how long it takes to compute so many tokens at the first of those that prefill."""
    for instance in instances:
        if instance.role.prefills:
            return lambda tokens: instance.prefill.predict(tokens, 0)
    return lambda tokens: math.inf
