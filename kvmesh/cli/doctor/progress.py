"""What `kvmesh doctor --peer` shows while it works: one changing line on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

EVERY_S = 5.0  # a line in a pipe or a log


class Progress:
    """`out` is where results go, `err` where lines go when `out` is no terminal; `quiet`: neither. A context for the
    time that something is shown."""

    def __init__(self, out: Console, err: Console, *, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._err = err
        self._quiet = quiet
        self._clock = clock
        self._stack = ExitStack()
        self._status: Status | None = None
        self._told_at = 0.0

    def __enter__(self) -> Progress:
        if not self._quiet and self._out.is_terminal:
            self._status = self._stack.enter_context(self._out.status("..."))
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        self._status = None
        self._stack.close()

    def begin(self, transport: str, pairs: int, least_s: float) -> None:
        """All pairs of a transport are to be tried."""
        if pairs > 1:
            self._tell(f"{transport}: {pairs} pairs of NICs, {least_s:.0f} s and more", always=True)
        else:
            self._tell(f"{transport} ...", always=False)

    def step(self, transport: str, done: int, pairs: int, local: str, remote: str, what: str) -> None:
        """One direction of a pair begins."""
        names = f" {local} → {remote}" if local else ""
        self._tell(f"{transport}{names}: {what}{f', pair {done + 1} of {pairs}' if pairs > 1 else ''}", always=False)

    def _tell(self, text: str, *, always: bool) -> None:
        if self._status is not None:
            self._status.update(escape(text))
        elif not self._quiet and (always or self._clock() - self._told_at >= EVERY_S):
            if self._told_at or always:
                self._err.print(escape(text), soft_wrap=True)
            self._told_at = self._clock()
