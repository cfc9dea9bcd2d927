"""Holds requests while no instance of their model is there, for a mesh that scales to zero: see hold_line.py, which
decides, and docs/adr/0062-scale-to-zero.md."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from kvmesh.errors import KvmeshError, Overloaded, Unavailable
from kvmesh.services.gateway.hold_line import RETRY_AFTER_MS, HeldNews, HeldTicket, HoldLimits, HoldLine
from kvmesh.telemetry import names

LEAST_WAIT_S = 0.05  # before a request that was refused for load has another turn


class HeldTurn:
    """A request's place in the line of its model. Whoever has it leaves it, whatever happens: `placed`, or `leave`."""

    def __init__(self, gate: HoldGate, ticket: HeldTicket, refused: KvmeshError | None) -> None:
        self.ticket = ticket
        self._gate = gate
        self._turn = asyncio.get_running_loop().create_future()
        self._last = refused  # what its last attempt to be placed ended with; None: there was none

    async def wait(self) -> None:
        """Returns when it has the turn. Raises Unavailable when its time is over: the gate's timer ends every wait, and
        what `fail` was given."""
        self._gate.advance()
        await self._turn

    def refuse(self, err: KvmeshError) -> None:
        """The conductor has refused it in its turn: it waits again."""
        wait_s = max(LEAST_WAIT_S, err.retry_after_ms / 1000) if isinstance(err, Overloaded) else 0.0
        self._last = err
        self._turn = asyncio.get_running_loop().create_future()
        self._gate.take_back(self, wait_s)

    def placed(self) -> None:
        """It has its placement: the next one has the turn."""
        self._gate.leave(self, "placed")

    def leave(self) -> None:
        """It waits no longer, and is not placed. Again: nothing."""
        self._gate.leave(self, "left")

    def fail(self, err: KvmeshError) -> None:
        """Ends its wait, if it waits, with this error."""
        if not self._turn.done():
            self._turn.set_exception(err)
            self._gate.leave(self, "failed")

    def give(self) -> None:
        """The line gives it the turn."""
        if not self._turn.done():  # else it is being cancelled, and will leave
            self._turn.set_result(None)

    def expire(self, seconds: float) -> None:
        """The line has put it out."""
        if not self._turn.done():
            why = self._last.message if self._last is not None else "none has come"
            text = (
                f"no instance of model {self.ticket.model!r} took the request within hold_ms={1000 * seconds:g}: {why}"
            )
            self._turn.set_exception(Unavailable(text, retry_after_ms=RETRY_AFTER_MS))


class HoldGate:
    """The lines of one gateway on its event loop, to which all methods belong."""

    def __init__(self, limits: HoldLimits, models: Collection[str] = ()) -> None:
        self._line = HoldLine(limits)
        self._turns: dict[HeldTicket, HeldTurn] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._models = models
        self._closed: KvmeshError | None = None
        for model in models if self.holds else ():
            self._line.set_absent(model, True)  # until a conductor has told of an instance
        self._show()

    @property
    def holds(self) -> bool:
        """Whether requests are held at all."""
        return self._line.limits.requests > 0

    def counts(self) -> Mapping[str, int]:
        """Returns how many requests are held, of each model that has any."""
        return self._line.counts()

    def set_absent(self, model: str, absent: bool) -> None:
        """Takes it that no instance of a model may get work now, or that one may."""
        if self.holds:
            self._line.set_absent(model, absent)
            self.advance()

    def join(self, model: str, received_ns: int, nbytes: int, *, refused: KvmeshError | None = None) -> HeldTurn | None:
        """Returns the place of a request that has to wait, None where it has not. `refused`: it was placed nowhere, as
        there is no instance; so it waits until the catalog has looked again. Raises Unavailable when there is no
        room."""
        if self._closed is not None or not self.holds:
            return None
        if refused is not None:
            self._line.set_absent(model, True)
        if not self._line.joins(model):
            return None
        try:
            ticket = self._line.join(model, received_ns, nbytes, asyncio.get_running_loop().time())
        except Unavailable:
            names.GATEWAY_REFUSED.labels(what="held").inc()
            raise
        turn = self._turns[ticket] = HeldTurn(self, ticket, refused)
        self._show()
        return turn

    def take_back(self, turn: HeldTurn, wait_s: float) -> None:
        """See HeldTurn.refuse."""
        if not wait_s:
            self._line.set_absent(turn.ticket.model, True)
        self._line.take_back(turn.ticket, asyncio.get_running_loop().time(), wait_s)
        self.advance()

    def leave(self, turn: HeldTurn, outcome: str) -> None:
        """See HeldTurn. Who has left has left."""
        if self._turns.pop(turn.ticket, None) is not None:
            self._line.leave(turn.ticket)
            self._ended(turn.ticket, outcome)
            self.advance()

    def advance(self) -> None:
        """Gives turns, ends waits, and comes again when something may be due."""
        loop = asyncio.get_running_loop()
        for ticket, news in self._line.advance(loop.time()):
            if news is HeldNews.TURN:
                self._turns[ticket].give()
                continue
            turn = self._turns.pop(ticket)
            self._ended(ticket, "expired")
            turn.expire(self._line.limits.seconds)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self._line.next_at()) < float("inf"):
            self._timer = loop.call_at(at, self.advance)
        self._show()

    def close(self) -> None:
        """Ends all waits: the gateway stops. Nobody is held any more."""
        self._closed = Unavailable("this gateway is shutting down", retry_after_ms=RETRY_AFTER_MS)
        for turn in list(self._turns.values()):
            turn.fail(self._closed)
        if self._timer is not None:
            self._timer.cancel()

    def _ended(self, ticket: HeldTicket, outcome: str) -> None:
        seconds = asyncio.get_running_loop().time() - ticket.since
        names.GATEWAY_HOLD_SECONDS.labels(model=ticket.model, outcome=outcome).observe(seconds)

    def _show(self) -> None:
        counts = self._line.counts()
        for model in self._models:
            names.GATEWAY_HELD.labels(model=model).set(counts.get(model, 0))
