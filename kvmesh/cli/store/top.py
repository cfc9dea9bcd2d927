"""`kvmesh store top`: nodes, tiers, hit rates and traffic of a store, refreshed."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvmesh.cli.console import console, one_line_errors, wide_enough
from kvmesh.cli.store.target import RunDirOption, StoreOption, opened, size
from kvmesh.errors import KvmeshError

if TYPE_CHECKING:
    from kvmesh.storeclient import StoreClient

TIMEOUT_S = 2.0
WIDE = 100
COLUMNS = ("node", "role", "state", "blocks", "memory", "free", "below", "hits", "sending", "leases", "pulled")
LEFT = ("node", "role", "state", "below")
HELP = """Show every node of the store, refreshed: blocks, memory, tiers, hit rate, traffic, leases; and who leads.

hits: share of the blocks asked of the node that it had, since the last refresh (at first: since its start). \
sending: to readers. only here: of a draining node, blocks that no other has. Examples:

    kvmesh store top

    kvmesh store top --store 10.0.0.5:7002,10.0.0.6:7002 --interval 5
"""


@one_line_errors
def top(
    interval: Annotated[float, typer.Option(help="Seconds between refreshes.", min=0.2)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    store: StoreOption = None,
    run_dir: RunDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Once, as JSON.")] = False,
) -> None:
    asyncio.run(_top(interval, once, store, run_dir, as_json))


async def _top(interval: float, once: bool, store: str | None, run_dir: Any, as_json: bool) -> None:
    out = console()
    async with opened(store, run_dir, "") as client:
        told = await look(client)
        if as_json:
            out.out(json.dumps(told, indent=2), highlight=False)
            return
        if once:
            out.print(screen(told, None, wide_enough(out)))
            return
        before: dict[str, Any] | None = None
        gone = ""
        with Live(console=out, auto_refresh=False, screen=out.is_terminal) as live:
            while True:
                shown = screen(told, before, out.width)
                live.update(
                    Group(f"[red]no store master answers: {escape(gone)}[/]", shown) if gone else shown, refresh=True
                )
                await asyncio.sleep(interval)
                try:
                    before, told, gone = told, await look(client), ""
                except KvmeshError as error:  # one that is started again, or follows, is shown as soon as it answers
                    gone = error.message


async def look(client: StoreClient) -> dict[str, Any]:
    """What the master and every node say of themselves, as plain JSON; a node that does not answer has `error`."""
    import grpc

    from kvmesh.cli.collect import plain
    from kvmesh.rpc import channels, status
    from kvmesh.rpc.authorisation import ServerRole
    from kvmesh.rpc.pb import blocks_pb2, blocks_pb2_grpc

    master = await client.directory.status(TIMEOUT_S)

    async def ask(address: str) -> dict[str, Any]:
        channel = channels.connect(address, ServerRole.NODE)
        try:
            rpc = blocks_pb2_grpc.NodeStoreStub(channel)
            return plain(await rpc.GetStore(blocks_pb2.GetNodeStoreRequest(), timeout=TIMEOUT_S))
        except grpc.RpcError as error:
            return {"error": status.from_rpc_error(error).message}
        finally:
            await channel.close()

    answers = await asyncio.gather(*(ask(one.member.instance.address) for one in master.stores))
    told = plain(master)
    told["asked"] = time.monotonic()
    told["masters"] = client.config.store
    for one, answer in zip(told["stores"], answers, strict=True):
        one["node"] = answer
    return told


def screen(told: dict[str, Any], before: dict[str, Any] | None, width: int) -> RenderableType:
    """For people. `before`: what was told last time, for rates. A narrow screen shows no role and nothing pulled."""
    past = {one["member"]["store_id"]: one["node"] for one in (before or {}).get("stores", [])}
    passed_s = told["asked"] - before["asked"] if before else 0.0
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    shown = [name for name in COLUMNS if width >= WIDE or name not in ("role", "pulled")]
    for name in shown:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name not in ("state", "below"))
    stores = sorted(told["stores"], key=lambda one: (one["member"]["role"], one["member"]["store_id"]))
    for one in stores:
        node = one["node"]
        last = past.get(one["member"]["store_id"])
        row = _row(told, one, node, last if last and "error" not in last else None, passed_s)
        table.add_row(*(cell for name, cell in zip(COLUMNS, row, strict=True) if name in shown))
    errors = [
        f"[red]{escape(one['member']['store_id'])}: {escape(one['node']['error'])}[/]"
        for one in stores
        if "error" in one["node"]
    ]
    nobody = "[yellow]no node has joined: start one with[/] kvmesh serve pool"
    return Group(_head(told, width), "", table if stores else nobody, *errors)


def _head(told: dict[str, Any], width: int) -> str:
    leader = told["leader"] or (told["masters"] if told["leading"] else "nobody")
    leads = f"[bold]leader[/] {escape(leader)}  term {told['term']}"
    lines = [_fit(leads, f"  masters {escape(told['masters'])}", width)]
    blocks, replicas = told["blocks"], told["replicas"]
    each = f" ({replicas / blocks:.2f} each)" if blocks else ""
    limit = f" of {size(told['map_limit_bytes'])}" if told["map_limit_bytes"] else ""
    held = f"[bold]map[/]    {blocks:,} blocks, {replicas:,} replicas{each},"
    rest = f" {size(told['map_bytes'])}{limit}, {told['names']:,} names, {told['tombstones']:,} tombstones"
    lines.append(_fit(held, rest, width))
    if told["shed"]:
        lines.append(f"[yellow]{told['shed']:,} of the coldest keys were left out of the map: its memory is full[/]")
    if told["rebuilding"]:
        lines.append(f"[yellow]rebuilding: not heard in full from {escape(', '.join(told['rebuilding']))}[/]")
    return "\n".join(lines)


def _fit(first: str, second: str, width: int) -> str:
    """One line, or two where that is too long: the second under the words beside "leader" and "map"."""
    line = first + second
    return line if Text.from_markup(line).cell_len <= width else f"{first}\n       {second.lstrip()}"


def _row(
    told: dict[str, Any], one: dict[str, Any], node: dict[str, Any], last: dict[str, Any] | None, passed_s: float
) -> list[str]:
    member, usage = one["member"], one.get("usage") or {}
    name, role = escape(member["store_id"]), member["role"].removeprefix("ROLE_").lower()
    capacity, free = usage.get("capacity_bytes", 0), usage.get("free_bytes", 0)
    if "error" in node:
        state = "[red]no answer[/]"
    elif one["draining"]:
        state = f"[yellow]draining, {one['sole_blocks']:,} only here[/]"
    elif member["store_id"] in told["rebuilding"]:
        state = "[yellow]announcing[/]"
    else:
        state = "[green]ready[/]"
    memory = [size(capacity), f"{free / capacity:.0%}" if capacity else "-"]
    if "error" in node:
        return [name, role, state, f"{one['blocks']:,}", *memory, "", "-", "-", "-", "-"]
    return [
        name,
        role,
        state,
        f"{one['blocks']:,}",
        *memory,
        _below(node.get("tiers", [])),
        _hits(node, last),
        f"{usage.get('sending_bytes_per_s', 0) / 1e9:.2f} GB/s",
        f"{node['pools']['store_leases']:,}",
        _rate(node["pulled_bytes"], last["pulled_bytes"] if last else 0, passed_s),
    ]


def _below(tiers: list[dict[str, Any]]) -> str:
    """The tiers below memory: "ssd 1,204 in 3.1 GiB"."""
    parts = []
    for tier in tiers:
        name = tier["tier"].removeprefix("TIER_").lower()
        used = f"{name} {tier['blocks']:,} in {size(tier['used_bytes'])}"
        parts.append(f"[yellow]{name}: {escape(tier['why_not'])}[/]" if tier.get("why_not") else used)
    return ", ".join(parts) or "[dim]none[/]"


def _hits(node: dict[str, Any], last: dict[str, Any] | None) -> str:
    hits, misses = node["block_hits"], node["block_misses"]
    if last and hits >= last["block_hits"] and misses >= last["block_misses"]:
        hits, misses = hits - last["block_hits"], misses - last["block_misses"]
    return f"{hits / (hits + misses):.0%}" if hits + misses else "-"


def _rate(now: int, last: int, passed_s: float) -> str:
    """Per second since the last look; in all, when there was none."""
    return f"{(now - last) / passed_s / 1e9:.2f} GB/s" if passed_s and now >= last else size(now)
