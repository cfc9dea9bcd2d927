"""Whether a mesh serves: a store master leads, and every instance is known to it and gets work from a conductor."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from kvmesh.cli.up.plan import identity
from kvmesh.cli.up.settings import INSTANCES

if TYPE_CHECKING:
    from kvmesh.cli.up.mesh import Mesh

PATIENCE_S = 20.0  # registration takes some heartbeats, a first leader waits for a lease
POLL_S = 0.25
UNFIT = "its KV does not fit "  # in the conductor's reason for an instance without partners


def wait_serving(mesh: Mesh, timeout_s: float, stopped: threading.Event) -> list[str]:
    """What still keeps the mesh from serving when time is up or `stopped` is set, a line each; empty: it serves."""
    left = timeout_s
    while found := problems(mesh):
        if left <= 0 or stopped.wait(POLL_S):
            break
        left -= POLL_S
    return found


def problems(mesh: Mesh) -> list[str]:
    """What keeps the mesh from serving now, a line each."""
    from kvmesh.cli.collect import ask_conductors, ask_masters
    from kvmesh.rpc import security

    async def ask() -> tuple[dict[str, Any], dict[str, Any]]:
        addresses = {
            service: ",".join(one.spec.address for one in mesh.processes.values() if one.spec.service == service)
            for service in ("store", "conductor")
        }
        conductor, store = await asyncio.gather(ask_conductors(addresses["conductor"]), ask_masters(addresses["store"]))
        return conductor, store

    before = security.use(mesh.security)  # this process itself is no member of the mesh
    try:
        conductor, store = asyncio.run(ask())
    finally:
        security.use(before)
    spec = {one.name: one.spec.service for one in mesh.processes.values()}
    nodes = {
        identity(mesh.settings, name): service for name, service in spec.items() if service in (*INSTANCES, "pool")
    }
    if "external" in mesh.processes:
        nodes |= {one.name: "external" for one in mesh.settings.externals}
    return judged(nodes, conductor, store, mixed=mesh.settings.mixed)


def judged(
    nodes: dict[str, str], conductor: dict[str, Any], store: dict[str, Any], *, mixed: bool = False
) -> list[str]:
    """The same from what conductors and masters have answered; `nodes`: the service of each node by its name. `mixed`:
    instances of one model were asked for in several dtypes, so some may wait for a partner of theirs."""
    found = []
    if "error" in store:
        found.append(f"store master: {store['error']}; see `kvmesh terms show` and its log")
    members = {one["instance"]["instance_id"] for one in store.get("members", [])}
    if "error" not in store:
        found += [
            f"{name}: no store master has taken it; its log says why"
            for name, service in nodes.items()
            if service != "external" and name not in members  # an engine of others has no store
        ]
    if "error" in conductor:
        return [*found, f"conductor: {conductor['error']}; see its log"]
    known = {one["instance"]["instance_id"]: one for one in conductor.get("instances", [])}
    for name, service in nodes.items():
        works = service in (*INSTANCES, "external")
        if works and name not in known:
            found.append(f"{name}: no conductor has registered it; its log says why")
        elif works and not known[name]["ready"]:
            why = known[name].get("not_ready_reason") or "it gave no reason"
            if mixed and UNFIT in why:
                continue  # said by `kvmesh status`; the mesh serves without it
            found.append(f"{name}: gets no work: {why}")
    return found
