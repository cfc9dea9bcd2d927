"""Options of commands, made from the fields of dataclasses: what can be told is said once, where it is kept."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from kvmesh.config import flag_of

P = ParamSpec("P")
R = TypeVar("R")
Command = Callable[..., None]


def parameter(name: str, kind: Any, default: Any, info: Any) -> inspect.Parameter:
    """One option as Typer takes it; `info`: a typer.Option."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def taking(command: Command, name: str, parameters: Iterable[inspect.Parameter]) -> Command:
    """`command`, which takes any keywords, as a command of this name with these options."""
    found = [*parameters]
    command.__name__ = name
    command.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in found}
    return command


def of_fields(cls: type[Any]) -> list[inspect.Parameter]:
    """An option for each field of a dataclass whose fields are annotated as parameters of commands are."""
    kinds = typing.get_type_hints(cls, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=kinds[field.name])
        for field in dataclasses.fields(cls)
    ]


def together(command: Callable[..., R]) -> Callable[..., R]:
    """A command whose last parameter is such a dataclass takes an option for each of its fields instead."""
    own = [*inspect.signature(command).parameters.values()]
    hints = typing.get_type_hints(command, include_extras=True)
    group = own[-1].name
    kind: Any = hints[group]
    shared = of_fields(kind)

    @functools.wraps(command)
    def split(*args: Any, **given: Any) -> R:
        options = kind(**{name: given.pop(name) for name in (one.name for one in shared) if name in given})
        return command(*args, **given, **{group: options})

    parameters = [*(one.replace(annotation=hints[one.name]) for one in own[:-1]), *shared]
    split.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    split.__annotations__ = {one.name: one.annotation for one in parameters}
    return split


# ── of configurations ─────────────────────────────────────────────────────────────────────────────

CONFIG = parameter("config", Path | None, None, typer.Option(help="TOML file with these keys.", metavar="FILE"))


def of_config(cls: type[Any]) -> list[inspect.Parameter]:
    """An option for each key of a configuration class."""
    return [config_option(field, hint) for field, hint in fields_of(cls)]


def fields_of(cls: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    """Fields with their types: the class's own first, those of its bases after them."""
    hints = typing.get_type_hints(cls)
    inherited = {
        field.name for base in cls.__mro__[1:] if dataclasses.is_dataclass(base) for field in dataclasses.fields(base)
    }
    fields = [field for field in dataclasses.fields(cls) if field.init and not field.metadata.get("internal")]
    return [(field, hints[field.name]) for field in sorted(fields, key=lambda field: field.name in inherited)]


def config_option(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    """The command-line option of a configuration field. Text: `load` converts and refuses, whatever the origin."""
    text = field.metadata.get("help", "")
    if field.default_factory is not dataclasses.MISSING:
        shown = str(field.default_factory())
    elif field.default == ():
        shown = ""
    else:
        shown = "" if field.default in (dataclasses.MISSING, None) else str(field.default)
    flag = flag_of(field.name, field.metadata)
    kind: Any = bool if hint is bool else str
    if field.metadata.get("repeat"):
        kind = list[str]
    flags = [f"{flag}/--no-{flag[2:]}"] if hint is bool else [flag]
    metavar = None if hint is bool else field.metadata.get("metavar") or {int: "N", float: "X"}.get(hint, "TEXT")
    if shown and hint is not bool:
        text = f"{text} \\[default: {shown}]"
    info = typer.Option(*flags, help=text, show_default=False, metavar=metavar)
    return parameter(field.name, kind | None, None, info)
