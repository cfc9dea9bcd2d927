"""These rules say who may have a seat, pages or a landing, and who gives them back, as numbers and orders alone. Pure.

The scheduler carries these decisions out with memory, the simulator (`kvmesh.sim.decoder`) in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from kvmesh.clock import NEVER
from kvmesh.services.decode.limits import NS_PER_MS, Limits
from kvmesh.services.decode.step_times import StepTimes

MAX_RETRY_AFTER_MS = 30_000


class Ordered(Protocol):
    """Has an order: priority, then arrival. The smaller one goes first."""

    @property
    def order(self) -> tuple[int, int]: ...


R = TypeVar("R", bound=Ordered)


def in_order(requests: Iterable[R]) -> list[R]:
    """Returns the requests in their order, the first to go first."""
    return sorted(requests, key=lambda request: request.order)


def watermark(num_pages: int, limits: Limits) -> int:
    """Returns how many pages new requests leave free while others run, so that the running ones can grow."""
    return max(1, num_pages * limits.watermark_percent // 100)


def swap_reserve(num_extents: int, limits: Limits) -> int:
    """Returns how many extents landings leave free for requests that must give up their pages."""
    return num_extents * limits.swap_percent // 100


def admits(live: int, limits: Limits) -> bool:
    """Whether one more request is taken beside `live` that have not ended."""
    return live < limits.max_running + limits.max_waiting


class MeanRequest:
    """How long requests take here, in ms; the last ones count most."""

    def __init__(self) -> None:
        self.mean = 1_000.0

    def add(self, took_ms: float) -> None:
        """One has ended."""
        self.mean += 0.1 * (took_ms - self.mean)


def retry_after_ms(mean_request_ms: float, leaving: float) -> int:
    """When whoever is refused may come again: once one of `leaving` requests has gone."""
    return max(100, min(int(mean_request_ms / leaving), MAX_RETRY_AFTER_MS))


class Claim(NamedTuple):
    """What a request that is here asks of the steps: the tokens of its KV, the TBT that is held for it (0: whatever it
    becomes), and when the conductor expects it to leave."""

    context: int
    held_tbt_ns: int
    leaves_ns: int


class SlowStep(NamedTuple):
    """A step that would be longer than somebody in it may have."""

    predicted_ns: float
    bound_ns: int
    rows: int

    def __str__(self) -> str:
        predicted, bound = self.predicted_ns / NS_PER_MS, self.bound_ns / NS_PER_MS
        return f"predicted TBT {predicted:.0f} ms with {self.rows} rows is over the SLO of {bound:.0f} ms"


def too_slow(
    times: StepTimes,
    tokens: int,
    slo_ns: int,
    joins_ns: int,
    claims: Iterable[Claim],
    max_running: int,
    now: int,
) -> SlowStep | None:
    """Why steps would become longer than a request of `tokens` tokens, or one beside it, may have. The conductor has
    asked the same, of what it knew; this is what is here now. Beside it are those that will not have left when it joins
    the batch, and those that should have left and have not. `slo_ns` 0: it does not ask. Alone it is taken in any case:
    it shows how long steps are."""
    if not slo_ns:
        return None
    beside = [one for one in claims if one.leaves_ns > joins_ns or one.leaves_ns <= now]
    if not beside:
        return None
    rows = min(len(beside) + 1, max_running)
    context = (sum(one.context for one in beside) + tokens) * rows // (len(beside) + 1)
    bound_ns = min(slo_ns, *(one.held_tbt_ns or NEVER for one in beside))
    predicted_ns = times.predict_ns(rows, context)
    return SlowStep(predicted_ns, bound_ns, rows) if predicted_ns > bound_ns else None


def has_seat(seats: int, limits: Limits) -> bool:
    """Whether the batch has a free place beside `seats` taken ones."""
    return seats < limits.max_running


def may_load(free_pages: int, need: int, spare: int, seats: int) -> bool:
    """Whether a request whose KV waits in extents gets the `need` pages that it runs in. `spare` is the watermark."""
    return free_pages >= need + (spare if seats else 0)


def may_land_in_pages(free_pages: int, blocks: int, spare: int, holders: int, limits: Limits, *, idle: bool) -> bool:
    """Whether a prompt may be written straight into device pages, which is only for requests that will run soon.
    `holders` counts the requests that have pages; `idle` says that nobody has any."""
    return free_pages >= blocks + (0 if idle else spare) and holders < limits.max_running


def may_land_in_extents(free_extents: int, blocks: int, reserve: int, *, idle: bool) -> bool:
    """Whether a landing of `blocks` blocks is given in host memory. `idle` says that no request holds any of it."""
    return free_extents >= blocks + (0 if idle else reserve)


def victim(holders: Sequence[R]) -> R | None:
    """Returns who gives its pages back when a running request gets none. `holders` are the requests in the batch or
    ready for it, in order. Returns None if there is only one: it waits for hands that come off by a timer."""
    return holders[-1] if len(holders) > 1 else None


def grow_at(pages: int, blocks_max: int, prompt_tokens: int, block_tokens: int, lookahead: int) -> int:
    """Returns the length of its answer from which on a request with `pages` pages wants another one; NEVER if it has
    all that it can use. With m tokens made, m - 1 of them are in the pages, and the next step writes one more."""
    if pages >= blocks_max:
        return NEVER
    return pages * block_tokens - prompt_tokens + 1 - lookahead
