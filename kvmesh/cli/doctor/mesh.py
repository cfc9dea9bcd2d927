"""`kvmesh doctor --mesh`: a running mesh as this machine sees it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os

from rich.markup import escape

from kvmesh.cli import runs
from kvmesh.cli.console import console, wide_enough
from kvmesh.cli.doctor import mesh_judge
from kvmesh.cli.doctor.findings import MARKS, screen
from kvmesh.cli.doctor.mesh_look import Targets, find_targets, look
from kvmesh.cli.store.target import patiently
from kvmesh.errors import ConfigError


def show(conductor: str, store: str, redis: str, gateway: str, *, as_json: bool) -> int:
    """Looks and tells. 0: requests can be served; 1: they cannot. ConfigError: nobody says where the mesh is, or a TLS
    file is wrong."""
    targets = find_targets(Targets(conductor, store, redis, gateway), os.environ)
    runs.secure(_run_of(targets))
    seen = asyncio.run(patiently("asking the mesh", look(targets)))
    found, why_not = mesh_judge.findings(seen), mesh_judge.why_not(seen)
    out = console()
    if as_json:
        told = {"serves": not why_not, "why_not": why_not, "findings": [dataclasses.asdict(one) for one in found]}
        out.out(json.dumps(told, indent=2), highlight=False)
        return int(bool(why_not))
    wide_enough(out)
    out.print(f"[dim]where to look was told by {escape(targets.origin)}[/]\n")
    out.print(screen(found))
    counts = ", ".join(f"{n} {level}" for level in MARKS if (n := sum(one.level == level for one in found)))
    if why_not:
        out.print(f"\n[red]✗[/] requests cannot be served: {escape(why_not)} ({counts})")
    else:
        out.print(f"\n[green]✓[/] requests can be served ({counts})")
    return int(bool(why_not))


def _run_of(targets: Targets) -> runs.Run | None:
    """The local mesh, when it was that which told: its certificates are used."""
    try:
        run = runs.find_running(None)
    except ConfigError:
        return None
    return run if targets.origin == str(run.run_dir) else None
