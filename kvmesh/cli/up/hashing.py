"""Takes fingerprints of checkpoints before anything is started, and shows how far that is: a bar on a terminal, now and
then a line elsewhere. What is known already takes no time and shows nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from kvmesh.cli.console import console

PATIENCE_S = 1.0  # what takes longer shows how far it is
LINE_S = 5.0  # between lines, where there is no terminal

Tell = Callable[[int, int], None]


def fingerprints(folders: Iterable[str], *, cache_dir: str = "", screen: Console | None = None) -> dict[str, str]:
    """Of each checkpoint, by folder. `screen`: where progress goes, by default standard error.

    Raises CheckpointError: a folder holds no checkpoint that the engine can run, or it cannot be read."""
    from kvmesh.engine.checkpoint import open_checkpoint

    found = {}
    for folder in folders:
        with (
            open_checkpoint(folder, cache_dir=cache_dir) as checkpoint,
            shown(checkpoint.path.name, screen or console(stderr=True)) as tell,
        ):
            found[folder] = checkpoint.fingerprinted(tell).hexdigest
    return found


def on_terminal() -> bool:
    """Whether somebody watches standard error."""
    return sys.stderr.isatty()


@contextmanager
def shown(name: str, screen: Console, clock: Callable[[], float] = time.monotonic) -> Iterator[Tell]:
    """A function that is told (bytes hashed, bytes to hash), by any thread but by one at a time."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    what = f"{escape(name)}: fingerprint of the weights"
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(TextColumn("{task.description}"), *columns, console=screen, transient=True)
    task = bar.add_task(what, total=None)
    began = clock()
    said, started = began, False

    def tell(done: int, total: int) -> None:
        nonlocal said, started
        now = clock()
        if screen.is_terminal:
            bar.update(task, completed=done, total=total)
            if not started and now - began >= PATIENCE_S:
                bar.start()
                started = True
        elif now - said >= LINE_S:
            said = now
            speed = done / (now - began) / 1e9
            screen.print(f"{what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB at {speed:.2f} GB/s", soft_wrap=True)

    try:
        yield tell
    finally:
        if started:
            bar.stop()
