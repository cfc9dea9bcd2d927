"""`kvmesh store purge`: what object storage holds of which weights, and the removal of what nobody serves any more."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kvmesh.cli import runs
from kvmesh.cli.console import console, one_line_errors, wide_enough
from kvmesh.cli.store.target import RunDirOption, patiently, size
from kvmesh.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from kvmesh.tiers.object_store.purge import Folder, Weights

HELP = """Show what object storage holds, by layout and weights, and remove KV of weights that are served no more.

URL is what --object-url was. Nothing is removed without --yes. By age (--older-than) goes KV of known weights alone, \
and never that of weights that the mesh serves, which is asked; named folders go unless they are served or hold \
clients' data. Examples:

    kvmesh store purge s3://bucket/prefix

    kvmesh store purge s3://bucket/prefix --older-than 14 --yes

    kvmesh store purge s3://bucket/prefix 9f86d081884c7d659a2feaa0c55ad015 --yes
"""


@one_line_errors
def purge(
    url: Annotated[str, typer.Argument(help="Where blocks lie, like s3://bucket/prefix.")],
    folders: Annotated[list[str] | None, typer.Argument(help="Folders that go.", metavar="[FOLDER]...")] = None,
    older_than: Annotated[
        float | None, typer.Option(help="Also those that nobody has written to for so many days.", min=0)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it they are only shown.")] = False,
    conductor: Annotated[
        str | None,
        typer.Option(help="Conductors of a mesh that `kvmesh up` did not start here.", metavar="HOST:PORT[,...]"),
    ] = None,
    no_mesh: Annotated[bool, typer.Option("--no-mesh", help="No mesh uses this storage now.")] = False,
    run_dir: RunDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """See HELP."""
    from kvmesh import extras
    from kvmesh.blockservice.tiers.config import check_object_url

    check_object_url(url)
    if importlib.util.find_spec("obstore") is None:
        raise ConfigError(f"url={url!r}: needs the package obstore: {extras.install('object')}", field="url")
    from kvmesh.tiers.object_store import purge as store

    if no_mesh and conductor:
        raise ConfigError(f"conductor={conductor!r}: not with --no-mesh", field="conductor")
    removes = bool(folders) or older_than is not None
    served = set() if no_mesh or not removes else _served(conductor, run_dir)
    found, now = store.folders(url), datetime.now(UTC)
    age = timedelta(days=older_than) if older_than is not None else None
    going = store.chosen(found, set(folders or ()), age, served, now)
    removed = {one.name: store.remove(url, one.name) for one in going} if yes else {}
    if as_json:
        told = [_plain(one, one in going, removed.get(one.name, 0)) for one in found]
        console().out(json.dumps(told, indent=2), highlight=False)
    else:
        _show(found, going, now, yes)


def _served(conductor: str | None, run_dir: Path | None) -> set[Weights]:
    """The weights of every instance that conductors know. Unavailable: none answers, so nothing is known."""
    from kvmesh.cli.collect import ask_conductors

    run = None
    if conductor is None:
        run = runs.find_running(run_dir)
        conductor = runs.conductors(run)
    runs.secure(run)
    told = asyncio.run(patiently("asking the mesh", ask_conductors(conductor)))
    if "error" in told:
        why = "what is served is not known; --no-mesh where no mesh uses this storage"
        raise Unavailable(f"no conductor answers ({told['error']}): {why}")
    cards = [one["card"] for one in told["instances"] if one.get("card")]
    return {(card["fingerprint"][:16], int(card.get("weights_epoch", 0))) for card in cards}


def _show(found: Sequence[Folder], going: Sequence[Folder], now: datetime, yes: bool) -> None:
    out = console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("folder", "objects", "bytes", "days", "of", ""):
        table.add_column(column, justify="right" if column in ("objects", "bytes", "days") else "left", overflow="fold")
    word = "removed" if yes else "would go"
    for one in found:
        days = f"{(now - one.newest) / timedelta(days=1):.1f}"
        of = escape(one.identity) or "[dim]not known: an older version put them[/]"
        table.add_row(one.name, f"{one.objects:,}", size(one.nbytes), days, of, word if one in going else "")
    wide_enough(out)
    if found:
        out.print(table)
    what = f"{len(going)} of {len(found)} {word}, {size(sum(one.nbytes for one in going))}"
    out.print(f"{what}{'' if yes or not going else '; --yes removes them'}")


def _plain(one: Folder, goes: bool, removed: int) -> dict[str, object]:
    return {
        "folder": one.name,
        "identity": one.identity,
        "objects": one.objects,
        "bytes": one.nbytes,
        "newest": one.newest.isoformat(),
        "goes": goes,
        "removed_objects": removed,
    }
