"""`kvmesh apikey`: a new API key, and its entry for the gateway's file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvmesh.cli.console import console, one_line_errors
from kvmesh.errors import ConfigError


@one_line_errors
def apikey(
    name: Annotated[str, typer.Argument(help="Of the tenant: tenants share no cached KV.")],
    file: Annotated[
        Path | None, typer.Option(help="Append the entry to this file; by default it is printed.", metavar="FILE")
    ] = None,
) -> None:
    """Make an API key. It is printed once and kept nowhere: the gateway's file holds only its digest.

    Examples:

        kvmesh apikey alice --file keys.toml

        kvmesh up --api-keys keys.toml
    """
    from kvmesh.services.gateway.api_keys import KeyRing, make_entry

    key, entry = make_entry(name)
    if file is None:
        console(stderr=True).print(f"[dim]key of {name}:[/]")
        console().out(key, highlight=False)
        console(stderr=True).print("[dim]for the gateway's file of keys:[/]")
        console().out(entry, highlight=False, end="")
        return
    try:
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        text = f"{before.rstrip()}\n\n{entry}" if before.strip() else entry
        KeyRing.parse(text)
        part = file.with_name(f".{file.name}.{os.getpid()}")
        part.touch(mode=0o600)
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"file={str(file)!r}: {getattr(err, 'strerror', None) or err}", field="file") from None
    console(stderr=True).print(f"[dim]added to {file}; the key, which is kept nowhere:[/]")
    console().out(key, highlight=False)
