"""The decode side of a push between two vLLM engines: what a worker waits for, and who may touch which memory when.

    order ─▶ rounds of blocks ─▶ take: WINDOW open over one staging ─▶ answered: FENCING ─▶ fenced ─▶ COPYING ─▶ copied
                                             │ deadline, abort, error       │                 only if all landed, and
                                             └──────────────────────────────┘                 the load still waits

One engine has never all threads, as it may freeze: a round of another one finds a thread free.

A prefill engine writes into staging alone, and only into a window; a page is written by this process's own copy, after
the fence. So a load can be over at its deadline whatever the writer does: what comes late lands in staging that no copy
reads any more, or behind the fence and not at all. A staging is used again only after its fence.

Pure: time is an argument, and the caller locks.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from kvmesh.connectors.vllm.book import ReceiveOrder


class RoundState(enum.Enum):
    """Says where the blocks of one window are."""

    WINDOW = "window"  # the writer may write
    FENCING = "fencing"  # it may not, and what it wrote may still land
    COPYING = "copying"  # nothing lands any more; the pages are being written
    ENDED = "ended"


@dataclass(slots=True)
class _Arrival:
    """Is one request's load."""

    order: ReceiveOrder
    deadline: float
    begun: float
    missing: dict[int, None]  # pages without their content, in order
    waiting: int = 0  # rounds that nobody has taken
    running: int = 0  # rounds that are not ENDED
    copying: int = 0
    asked: bool = False  # a round was taken
    broken: bool = False  # a round failed: what comes after its blocks is of no use
    cancelled: bool = False


@dataclass(eq=False, slots=True)
class PushRound:
    """Is what goes through one window: blocks of the prompt from `first` on, for these pages."""

    arrival: _Arrival
    epoch: int
    first: int
    pages: tuple[int, ...]
    state: RoundState = RoundState.WINDOW
    landed: bool = False

    @property
    def order(self) -> ReceiveOrder:
        return self.arrival.order

    @property
    def deadline(self) -> float:
        return self.arrival.deadline


@dataclass(frozen=True, slots=True)
class ReceivedPages:
    """Tells which loads are over, and which of their pages have no content; `late`: those whose engine was asked and
    ran out of time, `ms`: how long each took."""

    orders: tuple[ReceiveOrder, ...] = ()
    failed_pages: frozenset[int] = frozenset()
    late: frozenset[str] = frozenset()
    ms: tuple[int, ...] = ()


class PageArrivals:
    """Keeps the loads of one worker that come by pushes."""

    def __init__(self, timeout_s: float, blocks: int, threads: int) -> None:
        """`threads` take rounds, each with a staging for `blocks` blocks."""
        self._timeout_s = timeout_s
        self._blocks = blocks
        self._most = max(threads - 1, 1)  # rounds of one engine at once
        self._busy: Counter[str] = Counter()  # engine → rounds that have a staging
        self._arrivals: dict[str, _Arrival] = {}
        self._rounds: list[tuple[_Arrival, int, tuple[int, ...]]] = []  # that wait for a thread
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._arrivals)

    def order(self, order: ReceiveOrder, now: float) -> None:
        """Begins a load, which `poll` tells the end of: at its deadline at the latest."""
        pages = order.block_ids
        arrival = _Arrival(order, now + self._timeout_s, now, dict.fromkeys(pages))
        self._arrivals[order.request_id] = arrival
        for at in range(0, len(pages), self._blocks):
            self._rounds.append((arrival, order.first_block + at, pages[at : at + self._blocks]))
            arrival.waiting += 1

    def take(self, now: float) -> PushRound | None:
        """Returns the next round, for a staging that is free; its epoch is used by no other. The caller opens the
        window, has the writer asked, and must tell `answered` and `fenced` of it, however it went."""
        for at, (arrival, first, pages) in enumerate(self._rounds):
            engine = arrival.order.source.engine_id
            if self._is_over(arrival) or arrival.broken or now >= arrival.deadline or self._busy[engine] >= self._most:
                continue
            del self._rounds[at]
            arrival.waiting -= 1
            arrival.running += 1
            arrival.asked = True
            self._busy[engine] += 1
            self._epoch += 1
            return PushRound(arrival, self._epoch, first, pages)
        return None

    def answered(self, round_: PushRound, landed: bool) -> None:
        """Tells that the writer has answered or will not be waited for; `landed`: it says that all blocks lie here. The
        caller fences the window now."""
        assert round_.state is RoundState.WINDOW
        round_.state, round_.landed = RoundState.FENCING, landed
        if not landed:
            round_.arrival.broken = True

    def fenced(self, round_: PushRound) -> bool:
        """Tells that no byte of the window can land any more, so its staging is free for the next one. Returns whether
        the blocks are to be copied into their pages, after which `copied` must be told."""
        assert round_.state is RoundState.FENCING
        arrival = round_.arrival
        if round_.landed and not self._is_over(arrival):
            round_.state = RoundState.COPYING
            arrival.copying += 1
            return True
        self._end(round_)
        return False

    def copied(self, round_: PushRound) -> None:
        """Tells that the pages of a round have their content."""
        assert round_.state is RoundState.COPYING
        self._end(round_)
        round_.arrival.copying -= 1
        for page in round_.pages:
            del round_.arrival.missing[page]

    def _end(self, round_: PushRound) -> None:
        round_.state = RoundState.ENDED
        round_.arrival.running -= 1
        engine = round_.order.source.engine_id
        self._busy[engine] -= 1
        if not self._busy[engine]:
            del self._busy[engine]

    def cancel(self, request_ids: Collection[str]) -> None:
        """Gives up loads whose requests have been aborted."""
        for request_id in request_ids:
            arrival = self._arrivals.get(request_id)
            if arrival is not None:
                arrival.cancelled = True

    def cancel_all(self) -> None:
        """Gives up every load: pages that are not being written yet stay as they are."""
        self.cancel(list(self._arrivals))

    def gives_up(self, round_: PushRound, now: float) -> bool:
        """Returns whether the writer of a round need not be waited for any more."""
        arrival = round_.arrival
        return arrival.cancelled or now >= arrival.deadline or self._is_over(arrival)

    def poll(self, now: float) -> ReceivedPages:
        """Returns the loads that are over since the last call: their pages are written by nobody from here on."""
        over = [one for one in self._arrivals.values() if self._ends(one, now)]
        if not over:
            return ReceivedPages()
        failed: set[int] = set()
        late: set[str] = set()
        for one in over:
            del self._arrivals[one.order.request_id]
            failed.update(one.missing)
            if now >= one.deadline and one.missing and one.asked and not one.cancelled:
                late.add(one.order.request_id)
        self._rounds = [each for each in self._rounds if not self._is_over(each[0])]
        return ReceivedPages(
            tuple(one.order for one in over),
            frozenset(failed),
            frozenset(late),
            tuple(int((now - one.begun) * 1000) for one in over),
        )

    def _ends(self, one: _Arrival, now: float) -> bool:
        if one.copying:  # a copy within this process, soon done
            return False
        done = not one.running and (one.broken or not one.waiting)
        return done or one.cancelled or now >= one.deadline

    def _is_over(self, arrival: _Arrival) -> bool:
        return arrival.cancelled or self._arrivals.get(arrival.order.request_id) is not arrival
