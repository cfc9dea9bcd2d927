"""`kvmesh sim --decisions FILE`: what a conductor decided, decided again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from kvmesh.cli.console import console, one_line_errors
from kvmesh.cli.sim.progress import progress
from kvmesh.errors import ConfigError

SHOWN = 3  # differences on the screen


@one_line_errors
def decisions(
    context: typer.Context,
    decisions: Annotated[
        Path | None,
        typer.Option(help="Decide a conductor's decision log again, and compare bit for bit.", metavar="FILE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --decisions: as JSON.")] = False,
) -> None:
    """The log's decisions by the brain of this version. Leaves with 1 when one comes out otherwise."""
    if context.invoked_subcommand is not None:
        if decisions is not None:
            raise ConfigError(f"decisions={str(decisions)!r}: not with {context.invoked_subcommand}", field="decisions")
        return
    if decisions is None:
        raise ConfigError("decisions='': give a file, or a command: kvmesh sim --help", field="decisions")
    told = _replayed(decisions)
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        _show(told)
    if told["different"]:
        raise typer.Exit(1)


def _replayed(path: Path) -> dict[str, Any]:
    from kvmesh.sim.fitting.decisions import replay

    try:
        with path.open("rb") as file, progress(f"replaying {path.name}", None, "lines") as tell:
            found = replay(_lines(file), lambda lines: tell(lines, ""))
    except OSError as err:
        raise ConfigError(f"decisions={str(path)!r}: {err.strerror}", field="decisions") from None
    differences = [
        {"line": one.line, "request_id": one.request_id, "fields": {k: list(v) for k, v in one.fields().items()}}
        for one in found.differences
    ]
    counts = {name: getattr(found, name) for name in ("events", "decisions", "placed", "refused", "different")}
    return {"kind": "sim decisions", "log": str(path), **counts, "differences": differences}


def _lines(file: BinaryIO) -> Iterator[bytes]:
    yield from file


def _show(told: dict[str, Any]) -> None:
    out = console()
    out.print(
        f"{told['decisions']:,} decisions among {told['events']:,} events: {told['placed']:,} placed, "
        f"{told['refused']:,} refused, {told['different']:,} came out otherwise",
        markup=False,
    )
    for one in told["differences"][:SHOWN]:
        out.print(f"line {one['line']}, request {one['request_id']}:", markup=False)
        for name, (logged, made) in one["fields"].items():
            out.print(f"    {name}: logged {logged!r}, now {made!r}", markup=False)
