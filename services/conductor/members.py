"""What the store master has said about who lives."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from services.conductor.domain import Life

MAX_GONE = 4096


class Members:
    """Follows one member stream after another. Only the dead matter here: an instance that the master does not
    mention may have registered with the conductor first."""

    def __init__(self) -> None:
        self._master: int | None = None
        self._connected = False
        self._alive: set[Life] = set()
        self._gone: OrderedDict[Life, str] = OrderedDict()

    def verdict(self, life: Life) -> str:
        """ "left" or "died" when a connected master said so of this very incarnation, else ""."""
        return self._gone.get(life, "") if self._connected else ""

    def reset(self, master_incarnation: int, members: Iterable[Life]) -> list[Life]:
        """A snapshot. Returns the lives that ended while nobody was listening."""
        now_alive = set(members)
        # A restarted master has forgotten everybody: silence about a member means nothing until it had time to join.
        missed = self._alive - now_alive if master_incarnation == self._master else set()
        if master_incarnation != self._master:
            self._gone.clear()
        self._master, self._connected, self._alive = master_incarnation, True, now_alive
        for life in now_alive:
            self._gone.pop(life, None)
        for life in missed:
            self._bury(life, "died")
        return sorted(missed)

    def joined(self, life: Life) -> None:
        """It is a member (again)."""
        self._alive.add(life)
        self._gone.pop(life, None)

    def gone(self, life: Life, how: str) -> None:
        """It left or died."""
        self._alive.discard(life)
        self._bury(life, how)

    def lost(self) -> None:
        """The stream broke: verdicts rest until the next snapshot."""
        self._connected = False

    def _bury(self, life: Life, how: str) -> None:
        self._gone[life] = how
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
