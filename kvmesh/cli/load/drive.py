"""Runs a load to its end or to Ctrl-C, with a progress bar on a terminal, and reports what it measured."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvmesh.cli.console import console
from kvmesh.cli.load.load import Generator, Job
from kvmesh.cli.load.options import LoadOptions
from kvmesh.cli.load.report import show
from kvmesh.errors import ConfigError

_REFRESH_S = 0.1


def drive(
    generator: Generator, jobs: Iterable[Job], what: str, *, total: int | None = None, duration_s: float | None = None
) -> bool:
    """Send `jobs`; True when Ctrl-C or SIGTERM ended it early. `total`: how many there will be at most, None: nobody
    knows, `duration_s` ends it."""
    return asyncio.run(_drive(generator, jobs, what, total, duration_s))


async def _drive(
    generator: Generator, jobs: Iterable[Job], what: str, total: int | None, duration_s: float | None
) -> bool:
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        generator.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    show = asyncio.create_task(_show(generator, what, total, duration_s))
    try:
        await generator.run(jobs, duration_s)
    finally:
        show.cancel()
        await asyncio.gather(show, return_exceptions=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return stopped


def finish(load: LoadOptions, told: dict[str, Any], extra: Sequence[tuple[str, str]] = ()) -> None:
    """Print the report (`extra`: further lines), write its JSON, leave with 130 after Ctrl-C and 1 when nothing was
    answered."""
    out = load.screen
    if told["interrupted"]:
        out.print(f"[yellow]interrupted[/]; dropped in flight and not counted: {told['in_flight_dropped']}")
    out.print(show(told, extra))
    if load.json_to:
        write_json(load.json_to, told)
    if told["interrupted"]:
        raise typer.Exit(130)
    if told["requests"]["sent"] and not told["requests"]["answered"]:
        raise typer.Exit(1)


async def _show(generator: Generator, what: str, total: int | None, duration_s: float | None) -> None:
    """The bar, on standard error, where that is a terminal; ends by being cancelled."""
    out = console(stderr=True)
    if not (out.is_terminal and sys.stderr.isatty()):
        return
    by_time = total is None
    columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()]
    columns += [] if by_time else [MofNCompleteColumn()]
    with Progress(*columns, TextColumn("{task.fields[more]}"), TimeElapsedColumn(), console=out, transient=True) as bar:
        task = bar.add_task(what, total=duration_s if by_time else total, more="")
        while True:
            done = generator.wall_s if by_time else len(generator.results)
            failed = sum(not one.ok for one in generator.results[-1000:])
            more = f"{generator.in_flight} in flight" + (f", {failed} failed" if failed else "")
            bar.update(task, completed=done, more=more)
            await asyncio.sleep(_REFRESH_S)


def write_json(target: str, told: dict[str, Any]) -> None:
    """To a file, or with "-" to standard output. ConfigError: it cannot be written."""
    text = json.dumps(told, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"json={target!r}: {err.strerror}", field="json") from None


def check_writable(target: str | None) -> None:
    """ConfigError when a report could not be written later; asked before a long load."""
    if target in (None, "-"):
        return
    assert target is not None
    folder = Path(target).absolute().parent
    if Path(target).is_dir() or not folder.is_dir():
        raise ConfigError(f"json={target!r}: is no file that can be written", field="json")
