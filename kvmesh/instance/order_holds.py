"""Which order may change an instance now, and whether it is paused. Pure: it takes the time as an argument.

Conductors give orders for all instances of a model, and any of them may die in the middle of one. So an order holds
each instance by a lease, which its conductor renews. As long as it runs, nobody else changes the instance. When it ends
without news the order is over here, and the pause that it has made is over with it. A pause by hand is no order's: it
lasts until it is resumed, or for the time that it names.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from kvmesh.errors import InvalidRequest, OrderLapsed, Overloaded

MAX_NAME = 64  # characters of an order's id
MAX_CONDUCTOR = 256
LEAST_LEASE_MS, MOST_LEASE_MS = 1_000, 30_000
MOST_PAUSE_MS = 7 * 86_400_000  # of a pause by hand that names its time
MAX_RESULT = 65_536  # bytes
RESULTS_KEPT = 32


@dataclass(frozen=True, slots=True)
class OrderIdentity:
    """Names an order, and the life of the process that carries it out. Raises InvalidRequest for what names none."""

    id: str
    conductor: str

    def __post_init__(self) -> None:
        for field, value, most in (("id", self.id, MAX_NAME), ("conductor", self.conductor, MAX_CONDUCTOR)):
            if not 1 <= len(value) <= most or not value.isprintable():
                raise InvalidRequest.of(f"order.{field}", value, f"1 to {most} characters that can be printed")

    def __str__(self) -> str:
        return f"order {self.id} of {self.conductor}"


@dataclass(frozen=True, slots=True)
class HoldOutcome:
    """What became of an attempt to hold an instance: it is held unless `other` holds it for `left_s` more seconds, or
    this order was carried out before, with `result`. `seen`: this order was begun before, by whomever."""

    other: OrderIdentity | None = None
    left_s: float = 0.0
    result: bytes = b""
    seen: bool = False


class OrderHolds:
    """Keeps what holds one instance: at most one order, a pause by hand, and the epoch of weights that it needs before
    it goes on."""

    def __init__(self) -> None:
        self._order: OrderIdentity | None = None
        self._ends = 0.0  # of its lease
        self._order_pauses = ""  # why; "": it does not
        self._by_hand = ""
        self._by_hand_ends = math.inf
        self._needs_epoch = 0
        self._results: OrderedDict[str, bytes] = OrderedDict()  # of the last orders by id; b"": none yet

    def running(self, now: float) -> tuple[OrderIdentity, float] | None:
        """Returns the order that holds the instance, and for how many seconds it does if it is not renewed."""
        self._pass(now)
        return (self._order, self._ends - now) if self._order is not None else None

    def hold(self, order: OrderIdentity, lease_s: float, now: float) -> HoldOutcome:
        """Begins an order, or renews its lease, unless it was carried out before or another one runs; the same order at
        another conductor is another one."""
        seen = order.id in self._results
        if result := self._results.get(order.id, b""):
            return HoldOutcome(result=result, seen=True)
        running = self.running(now)
        if running is not None and running[0] != order:
            return HoldOutcome(*running, seen=seen)
        self._order, self._ends = order, now + lease_s
        self._keep(order.id, b"")
        return HoldOutcome(seen=seen)

    def check(self, order: OrderIdentity | None, now: float) -> None:
        """Raises OrderLapsed unless this order holds the instance; for None, which is somebody who changes one instance
        by hand, Overloaded while any does."""
        running = self.running(now)
        if order is None and running is not None:
            raise Overloaded(f"{running[0]} is being carried out", retry_after_ms=_ms(running[1]))
        if order is not None and (running is None or running[0] != order):
            other = f", and {running[0]} runs" if running is not None else ""
            raise OrderLapsed(f"order={order.id!r}: its lease has ended here{other}", field="order")

    def pause(self, order: OrderIdentity | None, reason: str, now: float, for_s: float = math.inf) -> None:
        """Pauses for an order as long as that runs, or by hand for `for_s`. Raises as `check` does."""
        self.check(order, now)
        if order is None:
            self._by_hand, self._by_hand_ends = reason, now + for_s
        else:
            self._order_pauses = reason

    def end(
        self,
        order: OrderIdentity,
        now: float,
        *,
        result: bytes = b"",
        needs_epoch: int = 0,
        pause_s: float = 0.0,
        ends_pause: bool = False,
    ) -> None:
        """Ends an order and the pause that it has made; one whose lease has ended before, too. Raises Overloaded where
        another runs, and OrderLapsed where this one was never begun, or is forgotten.

        `needs_epoch`: nothing runs until the instance has weights of this epoch or a later one. `pause_s`: it stays
        paused, as by hand; `ends_pause`: a pause by hand ends with the order."""
        running = self.running(now)
        if running is not None and running[0] != order:
            raise Overloaded(f"{running[0]} is being carried out", retry_after_ms=_ms(running[1]))
        if order.id not in self._results:
            raise OrderLapsed(f"order={order.id!r}: was not begun here", field="order")
        if ends_pause:
            self._by_hand = ""
        if pause_s:
            self._by_hand = self._by_hand or self._order_pauses or f"by {order}"
            self._by_hand_ends = now + pause_s
        self._needs_epoch = max(self._needs_epoch, needs_epoch)
        self._order, self._order_pauses = None, ""
        self._keep(order.id, result)

    def resume(self, now: float) -> None:
        """Ends a pause by hand, and the wait for newer weights. Raises Overloaded while an order runs."""
        self.check(None, now)
        self._by_hand, self._needs_epoch = "", 0

    def why_paused(self, epoch: int, now: float) -> str:
        """Returns why an instance with weights of this epoch takes no requests; "" if nothing holds it."""
        self._pass(now)
        if self._order_pauses or self._by_hand:
            return self._order_pauses or self._by_hand
        if epoch < self._needs_epoch:
            return f"has weights of epoch {epoch}, the model is at epoch {self._needs_epoch}: update them"
        return ""

    def _keep(self, order_id: str, result: bytes) -> None:
        self._results[order_id] = result
        while len(self._results) > RESULTS_KEPT:
            self._results.popitem(last=False)

    def _pass(self, now: float) -> None:
        """Ends what has ended by now."""
        if self._order is not None and now >= self._ends:
            self._order, self._order_pauses = None, ""
        if now >= self._by_hand_ends:
            self._by_hand, self._by_hand_ends = "", math.inf


def _ms(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))
