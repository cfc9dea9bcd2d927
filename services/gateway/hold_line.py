"""Requests for a model of which no instance is there, in a line: who waits, whose turn it is, whose time is over. Pure:
times are arguments, in seconds of one clock.

While a model is absent nobody has a turn. Once it is there one request has the turn at a time, who came first first:
it is placed, and the next one has it. So a line that has grown for minutes does not reach admission in one step. Where
the instances refuse it for their load, it keeps its place in the line, and has another turn when they said to come
again. Those who come meanwhile ask the conductor themselves (`joins`): the line only ever gets shorter then, so it is
no queue in front of a mesh that is busy for good.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvmesh.errors import Unavailable

RETRY_AFTER_MS = 5_000


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """Bounds of all lines of a gateway together. `requests` 0: nobody is held."""

    requests: int
    held_bytes: int
    seconds: float


@dataclass(eq=False, slots=True)
class HeldTicket:
    """One request's place. `order` is the time at which it came to the gateway: places go by that."""

    model: str
    order: int
    nbytes: int
    since: float
    until: float


class HeldNews(Enum):
    """What `HoldLine.advance` tells of a ticket."""

    TURN = "turn"
    EXPIRED = "expired"


@dataclass(slots=True)
class _ModelLine:
    absent: bool = False
    waiting: list[HeldTicket] = field(default_factory=list)
    turn: HeldTicket | None = None
    not_before: float = -math.inf  # of the next turn
    crowded: bool = False  # the last turn ended with a refusal for load


class HoldLine:
    """The lines of all models of one gateway. A ticket is in it from `join` until `leave`, or until `advance` has told
    that it has expired."""

    def __init__(self, limits: HoldLimits) -> None:
        self._limits = limits
        self._lines: dict[str, _ModelLine] = {}
        self._tickets: set[HeldTicket] = set()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def nbytes(self) -> int:
        """The bytes of all that are held."""
        return self._bytes

    @property
    def limits(self) -> HoldLimits:
        return self._limits

    def counts(self) -> Mapping[str, int]:
        """Returns how many requests are held, of each model that has any."""
        return {
            model: count
            for model, line in self._lines.items()
            if (count := len(line.waiting) + (line.turn is not None))
        }

    def set_absent(self, model: str, absent: bool) -> None:
        """Takes it that no instance of a model may get work now, or that one may."""
        line = self._lines.setdefault(model, _ModelLine())
        if absent and not line.absent:
            line.not_before, line.crowded = -math.inf, False  # refusals were those of instances that are gone
        line.absent = absent

    def joins(self, model: str) -> bool:
        """Says whether a request that comes now is to be held."""
        line = self._lines.get(model)
        if line is None or not self._limits.requests:
            return False
        return line.absent or (not line.crowded and (line.turn is not None or bool(line.waiting)))

    def join(self, model: str, order: int, nbytes: int, now: float) -> HeldTicket:
        """Returns a request's ticket. Raises Unavailable when there is no room for it."""
        limits = self._limits
        if len(self._tickets) >= limits.requests:
            raise self._full(model, f"{len(self._tickets)} requests are held here: hold_requests={limits.requests}")
        if self._bytes + nbytes > limits.held_bytes:
            text = f"{self._bytes} bytes are held here, {nbytes} more are over hold_bytes={limits.held_bytes}"
            raise self._full(model, text)
        ticket = HeldTicket(model, order, nbytes, now, now + limits.seconds)
        self._tickets.add(ticket)
        self._bytes += nbytes
        self._insert(self._lines.setdefault(model, _ModelLine()), ticket)
        return ticket

    def take_back(self, ticket: HeldTicket, now: float, wait_s: float = 0.0) -> None:
        """Has a request whose turn ended without a placement wait again, in the place that it had. `wait_s`: its
        instances are busy, and said to come again after so long; 0: there is none."""
        line = self._lines[ticket.model]
        assert line.turn is ticket, "only who has the turn can give it back"
        line.turn = None
        line.crowded = wait_s > 0
        line.not_before = now + wait_s
        self._insert(line, ticket)

    def leave(self, ticket: HeldTicket) -> None:
        """Takes a request out, wherever it is: it was placed, or has failed, or its client went away. One that is out
        stays out."""
        if ticket not in self._tickets:
            return
        line = self._lines[ticket.model]
        if line.turn is ticket:
            line.turn = None
            line.crowded = False
        else:
            line.waiting.remove(ticket)
        self._drop(ticket)

    def advance(self, now: float) -> list[tuple[HeldTicket, HeldNews]]:
        """Returns whose time is over, and who has the turn now."""
        news = list[tuple[HeldTicket, HeldNews]]()
        for line in self._lines.values():
            if any(ticket.until <= now for ticket in line.waiting):
                over = [ticket for ticket in line.waiting if ticket.until <= now]
                line.waiting = [ticket for ticket in line.waiting if ticket.until > now]
                for ticket in over:
                    self._drop(ticket)
                    news.append((ticket, HeldNews.EXPIRED))
            if line.waiting and line.turn is None and not line.absent and now >= line.not_before:
                line.turn = line.waiting.pop(0)
                news.append((line.turn, HeldNews.TURN))
        return news

    def next_at(self) -> float:
        """Returns when `advance` may tell something new though nothing has happened; inf: never."""
        at = math.inf
        for line in self._lines.values():
            at = min((at, *(ticket.until for ticket in line.waiting)))
            if line.waiting and line.turn is None and not line.absent:
                at = min(at, line.not_before)
        return at

    def _insert(self, line: _ModelLine, ticket: HeldTicket) -> None:
        bisect.insort_right(line.waiting, ticket, key=lambda one: one.order)

    def _drop(self, ticket: HeldTicket) -> None:
        self._tickets.discard(ticket)
        self._bytes -= ticket.nbytes

    def _full(self, model: str, text: str) -> Unavailable:
        return Unavailable(f"no instance of model {model!r} is there yet, and {text}", retry_after_ms=RETRY_AFTER_MS)
