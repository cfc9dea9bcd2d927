"""`kvmesh status`: what every service and instance of a mesh is doing."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kvmesh.cli import runs
from kvmesh.cli.console import RunDir, console, one_line_errors


@one_line_errors
def status(
    run_dir: RunDir = None,
    conductor: Annotated[
        str | None, typer.Option(help="Conductor of a mesh that `kvmesh up` did not start here.", metavar="HOST:PORT")
    ] = None,
    gateway: Annotated[str | None, typer.Option(help="Its gateway (gRPC).", metavar="HOST:PORT")] = None,
    store: Annotated[str | None, typer.Option(help="Its store master.", metavar="HOST:PORT")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    watch: Annotated[float | None, typer.Option(help="Show it again every so many seconds.", min=0.2)] = None,
) -> None:
    """Show services, instances, their load and their pools (pages and extents: available/all).

    Leaves with 1 when a service does not answer. Examples:

        kvmesh status

        kvmesh status --watch 1

        kvmesh status --conductor 10.0.0.5:7001 --json
    """
    from kvmesh.cli.collect import collect

    def look() -> dict[str, Any]:
        if conductor:
            return asyncio.run(collect(conductor, gateway or "", store or ""))
        run = runs.find_running(run_dir)
        address = {name: one["address"] for name, one in run.services.items()}
        found = asyncio.run(collect(address["conductor"], address["gateway"], address["store"]))
        return {"run": run.told, **found}

    out = console()
    if as_json:
        found = look()
        out.out(json.dumps(found, indent=2), highlight=False)
        _end(found)
    elif watch is None:
        found = look()
        out.print(_screen(found))
        _end(found)
    else:
        with Live(console=out, auto_refresh=False, screen=out.is_terminal) as live:
            while True:
                live.update(_screen(look()), refresh=True)
                time.sleep(watch)


def _end(found: dict[str, Any]) -> None:
    """Leave with 1 when a service did not answer: scripts ask, too."""
    if any("error" in found[name] for name in ("gateway", "conductor", "store") if name in found):
        raise typer.Exit(1)


def _screen(found: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = []
    run = found.get("run")
    if run:
        parts.append(f"[bold]{escape(run['model'])}[/] at {run['url']}  gRPC {run['grpc']}  [dim]{run['run_dir']}[/]\n")
    parts.append(_services(found))
    if "error" not in found["conductor"]:
        parts += ["", _instances(found["conductor"].get("instances", []))]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for column in columns:
        number = column in ("queued", "running", "waiting", "pages", "extents", "silent", "restarts")
        table.add_column(column, justify="right" if number else "left", no_wrap=column != "")
    return table


def _services(found: dict[str, Any]) -> Table:
    table = _table("service", "address", "state", "restarts", "")
    supervised = (found.get("run") or {}).get("services", {})
    for name in ("gateway", "conductor", "store"):
        told = found.get(name)
        if told is None:
            continue
        restarts = str(supervised.get(name, {}).get("restarts", ""))
        table.add_row(name, told["address"], _state(name, told), restarts, _says(name, told))
    return table


def _state(name: str, told: dict[str, Any]) -> str:
    if "error" in told:
        return "[red]no answer[/]"
    if name == "gateway" and not told["ready"]:
        return "[yellow]not ready[/]"
    return "[green]ready[/]"


def _says(name: str, told: dict[str, Any]) -> str:
    if "error" in told:
        return escape(str(told["error"]))
    if name == "gateway":
        reason = told["not_ready_reason"]
        return (
            escape(reason)
            if reason
            else f"{count(told['requests'], 'request')}, {count(told['streams'], 'decode stream')}"
        )
    if name == "conductor":
        return f"{count(len(told['instances']), 'instance')}, store master {escape(told['store_master'])}"
    return count(len(told["members"]), "member")


def _instances(instances: list[dict[str, Any]]) -> RenderableType:
    if not instances:
        return "[yellow]no instance has registered[/]"
    table = _table("instance", "role", "state", "queued", "running", "waiting", "pages", "extents", "silent", "")
    for one in sorted(instances, key=lambda one: (one["role"] != "ROLE_PREFILL", one["instance"]["instance_id"])):
        load, pools = one.get("load", {}), one["pools"]
        broken = "error" in pools
        table.add_row(
            escape(one["instance"]["instance_id"]),
            one["role"].removeprefix("ROLE_").lower(),
            "[green]ready[/]" if one["ready"] else "[yellow]not ready[/]",
            str(load.get("queued_requests", 0)),
            str(load.get("running_requests", 0)),
            str(load.get("waiting_requests", 0)),
            "?" if broken else f"{pools['pages_free'] + pools['pages_cached']}/{pools['pages_total']}",
            "?" if broken else f"{pools['extents_free']}/{pools['extents_total']}",
            f"{one['silent_ms']} ms",
            f"[dim]{escape(_notes(one, pools))}[/]",
        )
    return table


def _notes(one: dict[str, Any], pools: dict[str, Any]) -> str:
    notes = [one["not_ready_reason"], pools.get("error", "")]
    counted = (("pages_cached", "cached page"), ("handoffs", "handoff"), ("quarantined", "quarantined extent"))
    notes += [count(pools[key], word) for key, word in counted if pools.get(key)]
    return ", ".join(note for note in notes if note)


def count(number: int, word: str) -> str:
    """ "1 request", "2 requests"."""
    return f"{number} {word}{'' if number == 1 else 's'}"
