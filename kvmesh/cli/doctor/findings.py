"""What `kvmesh doctor` has found, and how that is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "missing": "[yellow]missing[/]", "broken": "[red]broken[/]"}


@dataclass(frozen=True)
class Finding:
    """`level`: ok; warn (it works, worse than it could); missing (kvmesh runs without it); broken (kvmesh does not
    run). `enables`: what the missing would give. `todo`: what to do next."""

    what: str
    level: str
    found: str
    enables: str = ""
    todo: str = ""
    group: str = ""


def screen(found: Sequence[Finding]) -> RenderableType:
    """Shows a line for each finding under its group, and what to do next on lines of their own."""
    shown: list[RenderableType] = []
    widest = max((len(one.what) for one in found), default=0) + 2
    for name, members in groupby(found, key=lambda one: one.group):
        shown += [*([""] if shown else []), f"[bold]{escape(name)}[/]", _table(widest, members)]
    return Group(*shown)


def _table(widest: int, members: Iterable[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, min_width=widest)
    table.add_column(no_wrap=True, min_width=len("missing"))
    table.add_column(overflow="fold")
    for one in members:
        text = escape(one.found)
        if one.enables:
            text += f"\n[dim]would enable: {escape(one.enables)}[/]"
        if one.todo:
            text += f"\n[dim]next: {escape(one.todo)}[/]"
        table.add_row(f"  {escape(one.what)}", MARKS[one.level], text)
    return table
