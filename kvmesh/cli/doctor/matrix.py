"""What `kvmesh doctor --peer` found, and how it is shown: GB/s, rows local NICs, columns remote ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """GB/s (10^9 bytes), or why not."""

    gb_per_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Cell:
    """One pair of NICs. `detour`: they are not on one network, so that nothing may pass; names "" where the transport
    has no choice."""

    local: str
    remote: str
    detour: bool
    write: Figure
    read: Figure

    @property
    def failed(self) -> bool:
        return not self.detour and bool(self.write.error or self.read.error)


@dataclass(frozen=True)
class TransportOutcome:
    """One transport. `why_not`: it could not be tried; `wanted`: it had been asked for by name."""

    transport: str
    cells: tuple[Cell, ...] = ()
    why_not: str = ""
    wanted: bool = False
    locals: tuple[str, ...] = field(default=())
    remotes: tuple[str, ...] = field(default=())
    left_out: tuple[str, ...] = field(default=())  # NICs that were not tried, and why: "eth2 here (no link)"

    @property
    def failed(self) -> bool:
        return any(cell.failed for cell in self.cells) or (self.wanted and not self.works)

    @property
    def works(self) -> bool:
        return any(not cell.write.error and not cell.read.error for cell in self.cells)


def screen(outcome: TransportOutcome, width: int) -> RenderableType:
    """One transport's part of the screen, at most `width` wide where names allow it."""
    if outcome.why_not:
        mark = "[red]failed[/]" if outcome.wanted else "[yellow]not possible[/]"
        return f"[bold]{outcome.transport}[/]  {mark}: {escape(outcome.why_not)}"
    notes = _Notes()
    shown: list[RenderableType] = []
    if all(not cell.local for cell in outcome.cells):
        for cell in outcome.cells:
            figures = f"write {_figure(cell.write, cell, notes)}, read {_figure(cell.read, cell, notes)} GB/s"
            shown.append(f"[bold]{outcome.transport}[/]  {figures}")
    else:
        for what in ("write", "read"):
            shown.append(f"[bold]{outcome.transport}[/] {what}, GB/s (rows: NICs here, columns: there)")
            shown += _matrix(outcome, what, width, notes)
    if any(cell.detour and not cell.write.error for cell in outcome.cells):
        shown.append("[dim]*: a detour, the two are not on one network: used when nothing better is left[/]")
    if outcome.left_out:
        shown.append(f"[yellow]not tried:[/] {escape(', '.join(outcome.left_out))}")
    return Group(*shown, *notes.lines(), "")


def _matrix(outcome: TransportOutcome, what: str, width: int, notes: _Notes) -> list[RenderableType]:
    rows = outcome.locals or tuple(dict.fromkeys(cell.local for cell in outcome.cells))
    columns = outcome.remotes or tuple(dict.fromkeys(cell.remote for cell in outcome.cells))
    cells = {(cell.local, cell.remote): cell for cell in outcome.cells}
    needs = max(map(len, rows)) + 2 + sum(max(len(name), 6) + 2 for name in columns)
    numbered = needs > width
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for i, name in enumerate(columns):
        table.add_column(str(i + 1) if numbered else escape(name), justify="right", no_wrap=True)
    for row in rows:
        line = [escape(row)]
        for name in columns:
            cell = cells.get((row, name))
            line.append("–" if cell is None else _figure(cell.write if what == "write" else cell.read, cell, notes))
        table.add_row(*line)
    legend = ", ".join(f"{i + 1} {name}" for i, name in enumerate(columns))
    lines = [f"[dim]columns: {escape(legend)}[/]"] if numbered else []
    if len(cells) < len(rows) * len(columns):
        lines.append("[dim]–: no way, they are not on one network[/]")
    return [table, *lines]


def _figure(figure: Figure, cell: Cell, notes: _Notes) -> str:
    if figure.error and cell.detour:
        return f"[dim]–{notes.number('not on one network, and nothing passes', cell)}[/]"
    if figure.error:
        return f"[red]✗ {notes.number(figure.error, cell)}[/]"
    shown = f"{figure.gb_per_s:.2f}" if figure.gb_per_s < 100 else f"{figure.gb_per_s:.0f}"
    return f"{shown}*" if cell.detour else shown


class _Notes:
    """Numbers for causes; pairs with the same one share it."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[str]] = {}

    def number(self, text: str, cell: Cell) -> str:
        pairs = self._pairs.setdefault(text, [])
        pair = f"{cell.local} → {cell.remote}" if cell.local else ""
        if pair and pair not in pairs:
            pairs.append(pair)
        return f"({list(self._pairs).index(text) + 1})"

    def lines(self) -> list[str]:
        found = []
        for i, (text, pairs) in enumerate(self._pairs.items()):
            some = ", ".join(pairs[:4]) + (f" and {len(pairs) - 4} more" if len(pairs) > 4 else "")
            found.append(f"({i + 1}) {escape(f'{some}: {text}' if some else text)}")
        return found


def summary(outcomes: Sequence[TransportOutcome]) -> str:
    """One line."""
    tried = [outcome for outcome in outcomes if outcome.cells]
    cells = [cell for outcome in tried for cell in outcome.cells if not cell.detour]
    bad = sum(cell.failed for cell in cells)
    if not tried:
        return "nothing could be tried: no transport works between the two"
    names = ", ".join(outcome.transport for outcome in tried)
    if bad:
        return f"{bad} of {len(cells)} pairs failed ({names})"
    detours = sum(cell.detour and not cell.write.error and not cell.read.error for o in tried for cell in o.cells)
    told = f"{len(cells)} pair{'s' if len(cells) != 1 else ''}"
    told += f" and {detours} detour{'s' if detours != 1 else ''}" if detours else ""
    missed = sum(len(outcome.left_out) for outcome in tried)
    told_missed = f"; {missed} NIC{'s' if missed != 1 else ''} not tried" if missed else ""
    return f"every byte was right on {told} ({names}){told_missed}"
