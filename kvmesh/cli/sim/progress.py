"""Shows how far a simulation is, where it takes longer than a moment."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvmesh.cli.console import console

PATIENCE_S = 2.0  # what takes longer shows how far it is
LINE_S = 10.0  # between lines of progress, where there is no terminal


@contextmanager
def progress(what: str, total: int | None, unit: str) -> Iterator[Callable[[int, str], None]]:
    """A function that is told (how many `unit` are done, a word): after PATIENCE_S it shows a bar where standard error
    is a terminal, elsewhere a line now and then. `total` None: unknown."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    screen = console(stderr=True)
    live = screen.is_terminal and sys.stderr.isatty()
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    bar = Progress(*columns, TextColumn("{task.fields[more]}"), TimeRemainingColumn(), console=screen, transient=True)
    task = bar.add_task(what, total=total, more="")
    shown = time.monotonic() + PATIENCE_S - (0 if live else LINE_S)
    started = False

    def tell(done: int, more: str) -> None:
        nonlocal shown, started
        now = time.monotonic()
        if live:
            if not started and now >= shown:
                bar.start()
                started = True
            bar.update(task, completed=done, more=more)
        elif now - shown >= LINE_S:
            shown = now
            of = f" of {total:,}" if total else ""
            screen.print(f"{what}: {done:,}{of} {unit}{', ' if more else ''}{more}", markup=False)

    try:
        yield tell
    finally:
        if started:
            bar.stop()
