"""`kvmesh scale`: how many instances of each role the load wants."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvmesh.cli import runs
from kvmesh.cli.console import RunDir, console, one_line_errors
from kvmesh.errors import KvmeshError, Unavailable

if TYPE_CHECKING:
    from kvmesh.rpc.pb import conductor_pb2 as pb

TIMEOUT_S = 5.0
HOPS = 3  # from those that were named to the one that leads


@one_line_errors
def scale(
    run_dir: RunDir = None,
    conductor: Annotated[
        str | None,
        typer.Option(help="Conductors of a mesh that `kvmesh up` did not start here.", metavar="HOST:PORT[,...]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show how many instances of each role the load wants, for people and for autoscalers.

    load: what the pool's requests ask of it over what it can do within its SLOs. change: add so many, or take so many
    away. The conductor that leads says so, whichever is named here; its metrics `kvmesh_conductor_scale_hint_count` and
    `kvmesh_conductor_scale_wanted_count` say the same.

    Examples:

        kvmesh scale

        kvmesh scale --conductor 10.0.0.5:7001 --json
    """
    run = None if conductor else runs.find_running(run_dir)
    runs.secure(run)
    addresses = conductor or (runs.conductors(run) if run else "")
    hints = [_plain(hint) for hint in asyncio.run(scale_hints(addresses))]
    out = console()
    if as_json:
        out.out(json.dumps(hints, indent=2), highlight=False)
    else:
        out.print(_table(hints) if hints else "No instance gets work now.")


def _plain(hint: pb.ScaleHint) -> dict[str, Any]:
    from kvmesh.rpc.pb import common_pb2

    return {
        "model": hint.model,
        "role": common_pb2.Role.Name(hint.role).removeprefix("ROLE_").lower(),
        "instances": hint.instances,
        "change": hint.change,
        "load": hint.load if hint.load < float("inf") else None,  # there is nobody to carry it
        "reason": hint.reason,
    }


def _table(hints: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for column in ("model", "role"):
        table.add_column(column)
    for column in ("instances", "load", "change"):
        table.add_column(column, justify="right")
    table.add_column("")
    for hint in hints:
        load = "-" if hint["load"] is None else f"{hint['load']:.2f}"
        change = f"{hint['change']:+d}" if hint["change"] else "0"
        table.add_row(
            escape(hint["model"]),
            hint["role"],
            str(hint["instances"]),
            load,
            change,
            f"[dim]{escape(hint['reason'])}[/]",
        )
    return table


async def scale_hints(conductors: str) -> list[pb.ScaleHint]:
    """The hints for each pool, from the conductor that leads: one of "a:1,b:2", or one that these name.

    Raises KvmeshError as they answered; Unavailable: none leads."""
    from kvmesh.rpc.addresses import split

    asked: dict[str, pb.GetScaleHintsResponse | KvmeshError] = {}
    addresses = split(conductors, "conductor")
    for _ in range(HOPS):
        asked |= zip(addresses, await asyncio.gather(*map(_hints, addresses)), strict=True)
        told = [one for one in asked.values() if not isinstance(one, KvmeshError)]
        leading = [one for one in told if one.leadership.role != "standby"]
        if leading:  # one that was frozen may not know yet that another leads
            return list(max(leading, key=lambda one: one.leadership.term).hints)
        named = dict.fromkeys(one.leadership.leader for one in told if one.leadership.leader)
        addresses = tuple(name for name in named if name not in asked)
        if not addresses:
            break
    failed = {address: one for address, one in asked.items() if isinstance(one, KvmeshError)}
    if len(failed) == len(asked):
        raise next(iter(failed.values()))
    why = "; ".join(f"{address}: {error.message}" for address, error in failed.items())
    advice = "is their Redis there? `kvmesh status` shows them"
    raise Unavailable(f"no conductor leads that answers ({why})" if why else f"no conductor leads: {advice}")


async def _hints(conductor: str) -> pb.GetScaleHintsResponse | KvmeshError:
    import grpc

    from kvmesh.rpc.authorisation import ServerRole
    from kvmesh.rpc.channels import connect
    from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
    from kvmesh.rpc.status import from_rpc_error

    try:
        async with connect(conductor, ServerRole.CONDUCTOR) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            answer: conductor_pb2.GetScaleHintsResponse = await stub.GetScaleHints(
                conductor_pb2.GetScaleHintsRequest(), timeout=TIMEOUT_S
            )
            return answer
    except grpc.RpcError as error:
        return from_rpc_error(error)
    except KvmeshError as error:
        return error
