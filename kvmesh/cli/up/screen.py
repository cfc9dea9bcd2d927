"""What `kvmesh up` shows while services start: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from kvmesh.cli.up.joining import FoundMesh
from kvmesh.cli.up.mesh import Event, ProcessState
from kvmesh.cli.up.settings import MeshSettings

_WORDS = {
    ProcessState.STARTING: "starting",
    ProcessState.LOADING: "loading",
    ProcessState.READY: "ready",
    ProcessState.DOWN: "down",
}


def _loads(name: str) -> bool:
    """Does this process load a model?"""
    return any(f"{service}-" in name for service in ("prefill", "decode", "coupled"))


def joins(settings: MeshSettings, found: FoundMesh) -> str:
    """What this machine becomes part of, before anything is started."""
    assert settings.joined is not None, "it was asked"
    machines = len({one.node_id for one in found.bearers})
    there = f"{count(len(found.bearers), 'node')} on {count(machines, 'machine')}"
    serves = f"serves {settings.model_name}, {settings.dtype}, {settings.block_tokens} tokens a block"
    lines = (
        f"[bold]Joins[/] the mesh of {found.at}: {there}, leader {found.leader or 'unknown'}",
        f"  conductors     {', '.join(settings.joined.conductors)}",
        f"  store masters  {', '.join(settings.joined.masters)}",
        f"  this machine   {escape(settings.node_id)}, others dial it at {settings.advertise_host}"
        + (f"; {escape(serves)}" if settings.ranks else "")
        + ("; lends ranks" if settings.lends else ""),
    )
    return "\n".join(lines)


def count(number: int, word: str) -> str:
    """ "1 node", "2 nodes"."""
    return f"{number} {word}{'' if number == 1 else 's'}"


class StartProgress:
    """Takes a mesh's events from its thread. Until `done` it shows every service's way up; afterwards only what
    somebody should know: a death with its cause, and the return."""

    def __init__(self, out: Console, names: Iterable[str]) -> None:
        self._out = out
        self._start = time.monotonic()
        self._states: dict[str, tuple[ProcessState, str]] = dict.fromkeys(names, (ProcessState.STARTING, ""))
        self._lock = threading.Lock()
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live | None = None
        self._done = False
        self._silent = False

    def __enter__(self) -> StartProgress:
        if self._out.is_terminal:
            self._live = Live(self, console=self._out, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def done(self) -> None:
        """Everything is up: close the table, leave one line."""
        self.__exit__()
        with self._lock:
            self._done = True
        are = "service is" if len(self._states) == 1 else "services are"
        self._out.print(f"[green]✓[/] {len(self._states)} {are} up ({time.monotonic() - self._start:.1f} s)")

    def silence(self) -> None:
        """Show nothing more: the mesh is being stopped."""
        with self._lock:
            self._silent = True

    def __call__(self, event: Event) -> None:
        """A mesh's `on_event`."""
        with self._lock:
            before = self._states[event.name][0]
            self._states[event.name] = (event.state, event.text)
            if self._silent or event.state is ProcessState.STOPPED:
                return
            if event.state is ProcessState.DOWN:
                self._out.print(f"[red]✗[/] {event.name} died ({escape(event.text)}), starting it again")
            elif self._done and event.state is ProcessState.READY:
                self._out.print(f"[green]✓[/] {event.name} is up again ({event.text})")
            elif not self._done and not self._live and event.state is not before:
                if event.state is ProcessState.READY:
                    self._out.print(f"{event.name} is ready ({event.text})")
                elif event.state is ProcessState.LOADING and _loads(event.name):
                    self._out.print(f"{event.name} loads the model ...")

    def __rich__(self) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
        with self._lock:
            states = dict(self._states)
        for name, (state, text) in states.items():
            if state is ProcessState.READY:
                table.add_row("[green]✓[/]", name, f"[dim]{text}[/]")
            else:
                word = _WORDS.get(state, state.value)
                if state is ProcessState.LOADING and _loads(name):
                    word = "loading the model"
                table.add_row(self._spinner, name, f"[dim]{word}[/]")
        table.add_row("", "", f"[dim]{time.monotonic() - self._start:.0f} s[/]")
        return table
