"""`kvmesh apikey NAME`: a new API key, and what the gateway's file of keys holds of it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kvmesh.cli.console import console, one_line_errors


@one_line_errors
def apikey(name: Annotated[str, typer.Argument(help="Whose key it is: a tenant. Tenants share no KV blocks.")]) -> None:
    """Make an API key. The key goes to standard error, once; its entry for the file of keys to standard output.

    The gateway re-reads its file (--api-keys FILE) within a second. Example:

        kvmesh apikey alice >> keys.toml
    """
    from services.gateway.api_keys import make_entry

    key, entry = make_entry(name)
    sys.stdout.write(entry)
    sys.stdout.flush()
    console(stderr=True).print(f"[bold]{key}[/]   [dim]{name}'s key; it is shown only now[/]", soft_wrap=True)
