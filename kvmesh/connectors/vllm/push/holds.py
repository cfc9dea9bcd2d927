"""The prefill side of a push between two vLLM engines: how long a worker keeps the pages of a prompt that is computed.

    hold ─▶ HELD ── claim ─▶ being read ── done ─▶ HELD
              │ release, or the time is over          │
              └──────────▶ ENDING ◀───────────────────┘
                              │ nothing reads the pages
                              └─▶ freed: told once, and vLLM may give the pages to another request

The one rule: pages are freed only when no push reads them. Pure: time is an argument, and the caller locks.
"""

from __future__ import annotations

import enum
import hmac
from collections import OrderedDict
from dataclasses import dataclass

from kvmesh.connectors.vllm.book import HoldOrder
from kvmesh.errors import HandoffLost, InvalidRequest, PermissionDenied

MAX_ENDED = 4096  # requests that were freed and are remembered, so that who asks late is told at once


class HoldState(enum.Enum):
    """Says what is known of a request's pages."""

    UNKNOWN = "unknown"  # the order to hold them may be on its way
    HELD = "held"
    ENDED = "ended"


@dataclass(slots=True)
class _Hold:
    order: HoldOrder
    until: float
    reading: int = 0  # pushes that read the pages
    ending: bool = False
    lapsed: bool = False


class HeldPages:
    """Keeps which pages of one worker wait to be pushed. Each request that is held is freed exactly once."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._holds: dict[str, _Hold] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self.lapsed = 0  # freed since nobody came in time

    def __len__(self) -> int:
        return len(self._holds)

    def hold(self, order: HoldOrder, now: float) -> None:
        """Keeps the pages of a request, for `hold_s` at most."""
        self._ended.pop(order.request_id, None)
        self._holds[order.request_id] = _Hold(order, now + self._hold_s)

    def state(self, request_id: str) -> HoldState:
        """Returns what is known of a request's pages."""
        hold = self._holds.get(request_id)
        if hold is not None:
            return HoldState.ENDED if hold.ending else HoldState.HELD
        return HoldState.ENDED if request_id in self._ended else HoldState.UNKNOWN

    def claim(self, request_id: str, ticket: bytes, first: int, count: int, now: float) -> tuple[int, ...]:
        """Returns the pages of `count` blocks from `first` on, which stay until `done`. Raises HandoffLost when they
        are not held any more, PermissionDenied for a wrong ticket, InvalidRequest for blocks that are not there."""
        hold = self._holds.get(request_id)
        if hold is None or hold.ending or now >= hold.until:
            raise HandoffLost(f"the pages of request {request_id[:80]!r} are not held any more")
        _check_ticket(hold, ticket)
        pages = hold.order.block_ids
        if count < 1 or first + count > len(pages):
            why = f"the prompt has {len(pages)} blocks"
            raise InvalidRequest(f"first_block={first}, {count} blocks: {why}", field="first_block")
        hold.reading += 1
        return pages[first : first + count]

    def done(self, request_id: str) -> None:
        """Ends a claim: that push reads the pages no more."""
        self._holds[request_id].reading -= 1

    def release(self, request_id: str, ticket: bytes) -> bool:
        """Ends a hold early. Returns False when there is none. Raises PermissionDenied for a wrong ticket."""
        hold = self._holds.get(request_id)
        if hold is None:
            return False
        _check_ticket(hold, ticket)
        hold.ending = True
        return True

    def freed(self, now: float) -> set[str]:
        """Returns the requests whose pages may be given to others from now on, each once."""
        found = set()
        for request_id, hold in self._holds.items():
            if now >= hold.until and not hold.ending:
                hold.ending = hold.lapsed = True
            if hold.ending and not hold.reading:
                found.add(request_id)
        for request_id in found:
            self.lapsed += self._holds.pop(request_id).lapsed
            self._ended[request_id] = None
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
        return found


def _check_ticket(hold: _Hold, ticket: bytes) -> None:
    if not hmac.compare_digest(hold.order.ticket, ticket):
        raise PermissionDenied(f"request {hold.order.request_id[:80]!r}: that is not its ticket")
