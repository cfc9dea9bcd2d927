"""`kvmesh terms`: under which terms masters and conductors lead, what Redis keeps of it, and how to begin anew."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvmesh.cli import runs
from kvmesh.cli.console import RunDir, console, one_line_errors
from kvmesh.cli.cordon import Conductors
from kvmesh.cli.store.target import StoreOption
from kvmesh.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from kvmesh.leader.redis_lease import Redis

PARTS = {"store": "", "conductor": "conductor"}  # what leads → its part of the mesh's names in Redis
REDIS_S = 5.0

app = typer.Typer(help="Show the terms of leaders, and have a mesh begin anew with them.", no_args_is_help=True)

RedisUrl = Annotated[
    str | None,
    typer.Option(
        envvar="KVMESH_REDIS", help="Redis of the masters; by default that of the run.", metavar="redis://HOST:PORT/0"
    ),
]
MeshName = Annotated[str, typer.Option("--mesh", help="Name of the mesh in Redis.")]


@app.command("show")
@one_line_errors
def show(
    store: StoreOption = None,
    conductor: Conductors = None,
    redis: RedisUrl = None,
    mesh: MeshName = "default",
    run_dir: RunDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show the term of every master and conductor, the highest that each node has heard, and what Redis keeps.

    Examples:

        kvmesh terms show

        kvmesh terms show --store 10.0.0.1:7002 --conductor 10.0.0.1:7001 --redis redis://10.0.0.9:6379/0
    """
    run = None if store or conductor else runs.find_running(run_dir)
    runs.secure(run)
    masters, conductors = store or "", conductor or ""
    if run is not None:
        masters, conductors = runs.masters(run), runs.conductors(run)
    rows = asyncio.run(_all(masters, conductors, redis or _own_redis(run), mesh))
    out = console()
    if as_json:
        out.out(json.dumps(rows, indent=2), highlight=False)
        return
    from kvmesh.rpc.terms import most_credible

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("what", "where", "term", ""):
        table.add_column(column, justify="right" if column == "term" else "left")
    for row in rows:
        table.add_row(row["what"], escape(row["where"]), escape(str(row["term"])), escape(row["note"]))
    out.print(table)
    out.print(f"[dim]by the clock no member is believed that tells of a term above {most_credible()}[/]")


@app.command("reset")
@one_line_errors
def reset(
    redis: RedisUrl = None,
    mesh: MeshName = "default",
    run_dir: RunDir = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also while somebody holds the lease: it is deleted.")] = False,
) -> None:
    """Have Redis forget the terms of a mesh: the next leaders begin at the wall clock.

    Stop all masters and conductors first: while one leads it writes its own term again, so nothing is done. What is
    kept beside terms (names, quotas, removals, drains) stays. The next leader waits for one lease before it leads, and
    nodes that have heard of a higher term go with it after some ten seconds. A mesh without Redis keeps no term: there
    a restart of its master does the same. Example:

        kvmesh terms reset --redis redis://10.0.0.9:6379/0 --mesh prod
    """
    run = None
    if redis is None:
        run = runs.find(run_dir)
    url = redis or _own_redis(run)
    if not url:
        why = "give --redis URL; a mesh without Redis keeps no term, restart its store master"
        raise ConfigError(f"redis='': {why}", field="redis")
    before = asyncio.run(_kept(url, mesh))
    for part, (term, holder) in before.items():
        console().print(f"{part}: term {escape(term or 'none')}, {escape(holder or 'nobody holds the lease')}")
    held = [part for part, (_, holder) in before.items() if holder]
    if held and not force:
        raise Unavailable(
            f"{' and '.join(held)}: somebody holds the lease and would write its term again; stop masters and "
            "conductors and wait for a lease, or say --force"
        )
    if not yes:
        typer.confirm(f"Have Redis forget these terms of the mesh {mesh!r}?", abort=True)
    asyncio.run(_forget(url, mesh, force=force))
    console().print("forgotten: the next leaders begin at the wall clock")


def _own_redis(run: runs.Run | None) -> str:
    """Of a mesh that `kvmesh up --redis auto` started; "": it has none of its own."""
    found = run.services.get("redis") if run is not None else None
    return f"redis://{found['address']}/0" if found else ""


async def _all(masters: str, conductors: str, redis: str, mesh: str) -> list[dict[str, Any]]:
    from kvmesh.cli.collect import ask_conductors, ask_masters

    rows = []
    if masters:
        told = await ask_masters(masters)
        for one in told["masters"]:
            note = "leads" if one.get("leading") else one.get("error") or f"stands by for {one.get('leader') or '?'}"
            rows.append(_row("store master", one["address"], one.get("term", "-"), note))
        rows += await _nodes(told.get("members", []))
    if conductors:
        for one in (await ask_conductors(conductors))["conductors"]:
            said = one.get("leadership", {})
            rows.append(_row("conductor", one["address"], said.get("term", "-"), one.get("error") or said["role"]))
    if redis:
        for part, (term, holder) in (await _kept(redis, mesh)).items():
            rows.append(_row(f"redis ({part})", mesh, term or "none", _odd(term) or holder or "nobody holds the lease"))
    return rows


async def _nodes(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from kvmesh.cli.collect import _node_store

    refs = [one["instance"] for one in members]
    told = await asyncio.gather(*(_node_store(ref["address"]) for ref in refs))
    return [
        _row("node", ref["instance_id"], one.get("term", "-"), one.get("error", "has heard"))
        for ref, one in zip(refs, told, strict=True)
    ]


def _row(what: str, where: str, term: Any, note: str) -> dict[str, Any]:
    return {"what": what, "where": where, "term": term, "note": note}


def _odd(term: str) -> str:
    from kvmesh.rpc.terms import MAX_TERM, most_credible

    if not term:
        return ""
    if not term.isascii() or not term.isdigit() or int(term[:20]) >= MAX_TERM - 1:
        return "no leader can have written this: counted as forgotten"
    return "far above the clock: `kvmesh terms reset`" if int(term) > most_credible() else ""


async def _kept(url: str, mesh: str) -> dict[str, tuple[str, str]]:
    """By kind of leader the term and the lease, as Redis has them."""
    found = {}
    for name, part in PARTS.items():
        async with _opened(url, mesh, part) as redis:
            term = await redis.within(redis.client.hget(redis.key("terms"), "term"), REDIS_S)
            lease = await redis.within(redis.client.get(redis.key("leader")), REDIS_S)
        found[name] = ((term or b"").decode("utf-8", "replace")[:80], (lease or b"").decode("utf-8", "replace")[:120])
    return found


async def _forget(url: str, mesh: str, *, force: bool) -> None:
    for part in PARTS.values():
        async with _opened(url, mesh, part) as redis:
            keys = [redis.key("terms"), *([redis.key("leader")] if force else [])]
            await redis.within(redis.client.delete(*keys), REDIS_S)


@asynccontextmanager
async def _opened(url: str, mesh: str, part: str) -> AsyncIterator[Redis]:
    from kvmesh.leader.redis_lease import Redis

    redis = Redis(url, mesh, REDIS_S, part)
    try:
        yield redis
    finally:
        await redis.close()
