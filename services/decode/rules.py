"""These rules say who may have a seat, pages or a landing, and who gives them back, as numbers and orders alone. Pure.

The scheduler carries these decisions out with memory, the simulator (`kvmesh.sim.decoder`) in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from kvmesh.clock import NEVER
from kvmesh.services.decode.limits import Limits


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
