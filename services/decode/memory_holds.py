"""Whose hands are on a request's memory, and how it comes back when the last one is off. See docs/handoff.md."""

from __future__ import annotations

from services.decode import events as e
from services.decode.events import Phase
from services.decode.limits import NS_PER_MS
from services.decode.request import NEVER, Request, Window


class MemoryHolds(Request):
    """The end of every request, whatever came before. The one rule is `_settle`."""

    def _end(self, action: e.EmitFinish | e.EmitFail, now: int, out: list[e.Action]) -> None:
        assert not self.ended, "a request ends once"
        self.ended = True
        self.times.ended = now
        out.append(action)

    def _retire(self, phase: Phase, now: int, out: list[e.Action]) -> None:
        """The client has its end. What nobody touches goes back now, the rest when the last hand is off it."""
        self.phase = phase
        self.due = NEVER
        self._leave(out)
        if phase is Phase.CANCELLING and self.windows and self.landing_sent and not self.drained:
            self._arm(now, self.limits.drain_ms)
        else:
            self._fence(out)
        self._settle(now, out)

    def _fence(self, out: list[e.Action]) -> None:
        for key, window in self.windows.items():
            if window is not Window.FENCING:
                self.windows[key] = Window.FENCING
                out.append(e.Fence(*key))

    def _settle(self, now: int, out: list[e.Action]) -> None:
        if not self.ended or self.windows or self.loading or self.copying or self.in_batch:
            return
        if self.pages:
            out.append(e.FreePages(tuple(self.pages)))
        if self.extents or self.swap:
            out.append(e.FreeExtents((*self.extents, *self.swap)))
        self.pages, self.extents, self.swap = [], [], []
        self.seated = False
        self.phase = Phase.FREE
        self.due = NEVER
        out.append(e.Freed())

    def _leave(self, out: list[e.Action]) -> None:
        if self.in_batch and not self.leaving:
            self.leaving = True
            out.append(e.Leave())

    def _arm(self, now: int, ms: int) -> None:
        self.due = now + ms * NS_PER_MS
