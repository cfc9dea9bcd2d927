"""Wires and devices that flows share fairly: max-min, by progressive filling.

A *link* is one direction of one NIC, or a device that is read: so many bytes a second for all flows over it. A flow
takes a path of links. What it may send is *fed*: all at once, or as it is *produced* at some rate (the KV of a prompt
that is being computed). A flow that has sent all there is asks for no more than its production; else for all it can
get. Every change re-rates only the flows that it can reach over links where demand exceeds capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from kvmesh.sim.loop import Loop, ScheduledCall

NOTHING = 1e-3  # bytes: rounding leaves no less


class Link:
    """Bytes a second for all flows over it."""

    __slots__ = ("capacity", "flows", "name", "sent")

    def __init__(self, name: str, capacity: float) -> None:
        if not capacity > 0:
            raise ValueError(f"link {name}: capacity={capacity}: must be above 0 bytes/s")
        self.name = name
        self.capacity = capacity
        self.flows: dict[Flow, None] = {}
        self.sent = 0.0

    @property
    def tight(self) -> bool:
        """Whether its flows ask for more than it carries."""
        return sum([flow.cap for flow in self.flows]) > self.capacity


class Flow:
    """Bytes over one path. `done` is called once, when it was closed and all of it has arrived."""

    __slots__ = ("_done", "_links", "_produced", "_since", "_timer", "busy_s", "cap", "closed", "left", "path", "rate")

    def __init__(self, links: Links, path: Sequence[Link], done: Callable[[], None]) -> None:
        self.path = tuple(dict.fromkeys(path))
        self._links = links
        self._done = done
        self._since = links.loop.now
        self._produced = 0.0  # bytes a second, now
        self._timer: ScheduledCall | None = None
        self.busy_s = (
            0.0  # with bytes on their way; what is sent as it is produced goes out piece by piece at full speed
        )
        self.left = 0.0  # fed and not sent
        self.cap = 0.0  # what it asks for: bytes a second
        self.rate = 0.0
        self.closed = False

    def feed(self, nbytes: float, *, produced: float = 0.0, close: bool = False) -> None:
        """`nbytes` may be sent at once, and `produced` bytes more each second from now on, until it is said otherwise.
        `close`: there will be no more than is fed now."""
        assert not self.closed, "a flow that was closed is fed"
        self.settle(self._links.loop.now)
        self.left += nbytes
        self._produced = 0.0 if close else produced
        self.closed = close
        self._links.changed(self)

    def cancel(self) -> None:
        """What was not sent never is; `done` is not called."""
        self.settle(self._links.loop.now)
        self.closed, self.left, self._produced = True, 0.0, 0.0
        self._done = _nobody
        self._links.changed(self)

    # ── for Links ────────────────────────────────────────────────────────────────────────────────

    def settle(self, now: float) -> None:
        """Count what was sent up to `now`."""
        passed, self._since = now - self._since, now
        if passed > 0:
            sent = self.rate * passed
            if self.left > 0:
                self.busy_s += passed
            elif sent:
                self.busy_s += sent / min(link.capacity for link in self.path)
            left = self.left + self._produced * passed - sent
            if left < NOTHING:
                sent, left = sent + left, 0.0
            self.left = left
            for link in self.path:
                link.sent += sent

    def asks(self) -> None:
        """Say what it wants at this moment."""
        self.cap = inf if self.left > 0 else self._produced
        for link in self.path:
            if self.cap:
                link.flows[self] = None
            else:
                link.flows.pop(self, None)

    def rated(self, rate: float) -> None:
        """From now on it is sent so fast."""
        self.rate = rate
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = self._links.loop
        if self.left > 0 and rate > self._produced:
            self._timer = loop.after(self.left / (rate - self._produced), self._empty)
        elif self.closed and not self.left:
            self._timer = loop.after(0.0, self._end)

    def _empty(self) -> None:
        self._timer = None
        self.settle(self._links.loop.now)
        self.left = 0.0  # but for rounding it is
        self._links.changed(self)

    def _end(self) -> None:
        self._timer = None
        done, self._done = self._done, _nobody
        done()


def _nobody() -> None:
    """In place of whoever waited."""


class Links:
    """All flows of one simulation."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def open(self, path: Sequence[Link], done: Callable[[], None]) -> Flow:
        """A flow that nothing was fed to yet."""
        return Flow(self, path, done)

    def changed(self, flow: Flow) -> None:
        """Rates a flow anew that asks for something else than before, and all flows that this concerns."""
        was_tight = {link for link in flow.path if link.tight}
        flow.asks()
        now = self.loop.now
        if not was_tight and not any(link.tight for link in flow.path):
            flow.settle(now)
            flow.rated(alone_rate(flow))
            return
        concerned = self._reach(flow, was_tight)
        for one, rate in zip(concerned, fair_rates(concerned), strict=True):
            if one is flow or rate != one.rate:
                one.settle(now)
                one.rated(rate)

    def resize(self, link: Link, capacity: float) -> None:
        """From now on it carries so many bytes a second. ValueError: none at all."""
        if not capacity > 0:
            raise ValueError(f"link {link.name}: capacity={capacity}: must be above 0 bytes/s")
        for flow in link.flows:
            flow.settle(self.loop.now)
        link.capacity = capacity
        first = next(iter(link.flows), None)
        if first is None:
            return
        first.asks()
        concerned = self._reach(first, {link})
        for one, rate in zip(concerned, fair_rates(concerned), strict=True):
            if rate != one.rate:
                one.settle(self.loop.now)
                one.rated(rate)

    def _reach(self, flow: Flow, was_tight: set[Link]) -> list[Flow]:
        """`flow` and those that its change can touch: over links that were or are tight."""
        found, new, seen = {flow: None}, [flow], set()
        now = self.loop.now
        while new:
            one = new.pop()
            for link in one.path:
                if link in seen:
                    continue
                if link.tight or link in was_tight:
                    seen.add(link)
                    for other in list(link.flows):
                        if other not in found:
                            found[other] = None
                            new.append(other)
                            # One that fell behind its production asks for all by now.
                            other.settle(now)
                            other.asks()
        return list(found)


def alone_rate(flow: Flow) -> float:
    """Returns the rate that `fair_rates` would give this flow while all others keep theirs."""
    rate = flow.cap
    if rate <= 0:
        return 0.0
    for link in flow.path:
        rate = min(rate, link.capacity - sum([f.rate for f in link.flows if f is not flow]))
    return rate


def fair_rates(flows: Iterable[Flow]) -> list[float]:
    """Max-min fair: nobody gets more than he asks for, and nobody could get more without somebody who has no more than
    he getting less. Links carry other flows, too, if they are not tight."""
    flows = list(flows)
    if len(flows) == 1:
        return [alone_rate(flows[0])]
    rates = dict.fromkeys(flows, 0.0)
    rising = {flow: flow.cap for flow in flows if flow.cap > 0}
    users: dict[Link, int] = {}
    for flow in rising:
        for link in flow.path:
            users[link] = users.get(link, 0) + 1
    room = {link: link.capacity - sum([f.rate for f in link.flows if f not in rates]) for link in users}
    level = 0.0
    while rising:
        shares = {link: level + room[link] / n for link, n in users.items() if n}
        share = min(shares.values())
        reached = min(share, min(rising.values()))
        full = {link for link, at in shares.items() if at <= share * (1 + 1e-12)} if reached == share else set()
        for link, n in users.items():
            room[link] -= (reached - level) * n
        level = reached
        ready = [f for f, cap in rising.items() if cap <= level or not full.isdisjoint(f.path)]
        for flow in ready:
            rates[flow] = level
            del rising[flow]
            for link in flow.path:
                users[link] -= 1
    return list(rates.values())
