"""What every command prints with, and how an error ends a command."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.markup import escape
from rich.segment import Segment

from kvmesh.errors import ConfigError, KvmeshError
from kvmesh.telemetry.printable import printable

P = ParamSpec("P")
R = TypeVar("R")

USAGE_ERROR = 2
PIPE_COLUMNS = 160  # of what is no terminal

RunDir = Annotated[
    Path | None, typer.Option("--run-dir", help="Folder of the run; by default that of the latest `kvmesh up`.")
]

ApiKey = Annotated[
    str | None, typer.Option(envvar="KVMESH_API_KEY", help="API key, where the gateway wants one.", show_envvar=True)
]


def console(*, stderr: bool = False) -> Console:
    """A console that never colours numbers and paths by itself, and shows ":1234:" of an IPv6 address as it is."""
    made = Console(stderr=stderr, highlight=False, emoji=False, soft_wrap=not sys.stdout.isatty())
    made.push_render_hook(_Printable())
    return made


class _Printable(RenderHook):
    """Names, errors and texts of other processes cannot command the terminal: their control characters are shown."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """See RenderHook."""
        return [_Shown(one) for one in renderables]


class _Shown:
    """A renderable whose text is printable; what moves the cursor of a progress display comes apart from its text."""

    def __init__(self, inner: ConsoleRenderable) -> None:
        self._inner = inner

    def __rich_console__(self, out: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in out.render(self._inner, options):
            yield Segment(text if control else printable(text), style, control)


def die(message: str, code: int = USAGE_ERROR) -> NoReturn:
    """Print one line on standard error and leave with `code`."""
    line = " ".join(message.split())
    console(stderr=True).print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True)
    raise typer.Exit(code)


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """A KvmeshError of `command` becomes one line: exit code 2 for a bad configuration, 1 for the others. Its help, the
    docstring, breaks where the terminal ends."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except KvmeshError as err:
            die(err.message, USAGE_ERROR if isinstance(err, ConfigError) else 1)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    guarded.__doc__ = flowing(command.__doc__ or "")
    return guarded


def flowing(text: str) -> str:
    """Each paragraph of a docstring on one line; those that are indented (examples) as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(one if one.startswith(" ") else " ".join(one.split("\n")) for one in paragraphs)


def wide_enough(out: Console) -> int:
    """The width for tables: a terminal's own, elsewhere at least PIPE_COLUMNS, so that nothing is cut in a pipe."""
    if not out.is_terminal:
        out.width = max(out.width, PIPE_COLUMNS)
    return out.width


def state_dir() -> Path:
    """Where runs are kept: $XDG_STATE_HOME/kvmesh, by default ~/.local/state/kvmesh."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "kvmesh"
