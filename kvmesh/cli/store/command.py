"""`kvmesh store`: look into the shared pool of blocks, put and get some, look after its nodes."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvmesh.cli.console import console, one_line_errors, wide_enough
from kvmesh.cli.store import bench as store_bench
from kvmesh.cli.store import data as store_data
from kvmesh.cli.store import move as store_move
from kvmesh.cli.store import policy as store_policy
from kvmesh.cli.store import purge as store_purge
from kvmesh.cli.store import top as store_top
from kvmesh.cli.store.target import Namespace, RunDirOption, StoreOption, patiently, ref_of, run, shown_ref, size
from kvmesh.errors import ConfigError, InvalidRequest, Unavailable, UnknownInstance

if TYPE_CHECKING:
    from kvmesh.storeclient import Place, StoreClient

LIST_PAGE = 4096
POLL_S = 0.2

HELP = """Look into the shared pool of KV blocks, put and get data of your own, look after its nodes.

A REF is a block's key (32 hex digits) or a name that `put --name` gave it. The store is that of the latest \
`kvmesh up` on this machine, or the one that --store (or KVMESH_STORE) names.

    kvmesh store put report.pdf --name report

    kvmesh store get report -o copy.pdf

    kvmesh store pin report

    kvmesh store top
"""

app = typer.Typer(help=HELP, no_args_is_help=True)


@app.command("ls")
@one_line_errors
def ls(
    prefix: Annotated[
        str, typer.Argument(help="Only keys that begin with these hex digits: whole bytes, two digits each.")
    ] = "",
    limit: Annotated[int, typer.Option(help="At most so many keys.", min=1)] = 100,
    namespace: Namespace = None,
    store: StoreOption = None,
    run_dir: RunDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List blocks: key, size, and which node has it in which tier (as the nodes themselves say).

    Without --namespace: of everybody, KV blocks of served models included. Examples:

        kvmesh store ls

        kvmesh store ls --namespace docs --limit 1000 --json
    """
    packed = _prefix(prefix)

    async def work(client: StoreClient) -> tuple[list[bytes], list[list[Place]], bool]:
        begin = packed or (client.tag if namespace is not None else b"")
        keys: list[bytes] = []
        after, more = b"", True
        while more and len(keys) < limit:
            some, after = await client.directory.list_keys(
                begin, after, min(LIST_PAGE, limit - len(keys)), client.config.timeout_s
            )
            keys += some
            more = bool(after)
        return keys, await client.locate_many(keys), more

    keys, places, more = run(store, run_dir, namespace or "", lambda client: patiently("listing", work(client)))
    out = console()
    if as_json:
        told = [
            {"key": key.hex(), "replicas": [_plain(p) for p in some]} for key, some in zip(keys, places, strict=True)
        ]
        out.out(json.dumps(told, indent=2), highlight=False)
        return
    table = _table("key", "bytes", "nodes")
    for key, some in zip(keys, places, strict=True):
        nodes = ", ".join(f"{escape(p.holder.store_id)} [dim]{p.tier.name.lower()}[/]" for p in some)
        table.add_row(key.hex(), size(some[0].nbytes) if some else "-", nodes or "[dim]gone meanwhile[/]")
    wide_enough(out)
    if keys:
        out.print(table)
    note = f"{len(keys):,} {'block' if len(keys) == 1 else 'blocks'}"
    note += f", and more: raise --limit {limit}" if more else ""
    console(stderr=True).print(f"[dim]{note if keys else 'no blocks: `kvmesh store put FILE` makes one'}[/]")


@app.command("stat")
@one_line_errors
def stat(
    ref: Annotated[str | None, typer.Argument(help="A block's key or name; none: the whole store.")] = None,
    namespace: Namespace = None,
    store: StoreOption = None,
    run_dir: RunDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Tell what is known of one block, or of the store: its leader, its map, its nodes.

    Leaves with 1 when nobody has the block. Examples:

        kvmesh store stat

        kvmesh store stat report --json
    """
    out = console()
    if ref is None:
        told = run(store, run_dir, namespace or "", store_top.look)
        if as_json:
            out.out(json.dumps(told, indent=2), highlight=False)
        else:
            out.print(store_top.screen(told, None, wide_enough(out)))
        return
    wanted = ref_of(ref)
    looking = f"looking for {shown_ref(ref)}"
    places = run(store, run_dir, namespace or "", lambda client: patiently(looking, client.locate_many([wanted])))[0]
    if not places:
        raise Unavailable(f"no node has {shown_ref(ref)}; `kvmesh store ls` lists what there is")
    if as_json:
        out.out(json.dumps({"ref": ref, "replicas": [_plain(p) for p in places]}, indent=2), highlight=False)
        return
    table = _table("node", "address", "machine", "tier", "bytes")
    for place in places:
        holder = place.holder
        names = (escape(text) for text in (holder.store_id, holder.address, holder.node_id))
        table.add_row(*names, place.tier.name.lower(), f"{place.nbytes:,}")
    wide_enough(out)
    out.print(table)


@app.command("rm")
@one_line_errors
def rm(
    refs: Annotated[list[str] | None, typer.Argument(help="Blocks, by key or name.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every block of --namespace instead, its KV blocks included.")
    ] = False,
    namespace: Namespace = None,
    store: StoreOption = None,
    run_dir: RunDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Remove blocks from every node and tier. Who has acknowledged misses from now on.

    Leaves with 1 when a node could not be asked; it hears of it before it announces anything again. Examples:

        kvmesh store rm report

        kvmesh store rm --all --namespace docs
    """
    if everything and namespace is None:
        raise ConfigError("--all: name the namespace that is to be emptied with --namespace", field="namespace")
    if bool(refs) == everything:
        raise ConfigError("refs: name blocks, or --all with --namespace", field="refs")
    wanted = [ref_of(ref) for ref in refs or ()]

    def work(client: StoreClient) -> Any:
        return patiently("removing", client.remove_namespace() if everything else client.remove(*wanted))

    done = run(store, run_dir, namespace or "", work)
    if as_json:
        told = {"copies": done.blocks, "acknowledged": done.acknowledged, "pending": done.pending}
        console().out(json.dumps(told, indent=2), highlight=False)
    else:
        copies = f"{done.blocks:,} {'copy' if done.blocks == 1 else 'copies'}"
        heard = (
            f"acknowledged by {', '.join(done.acknowledged)}" if done.acknowledged else "there was nothing to remove"
        )
        console().print(f"{copies} removed; {escape(heard)}")
        if done.pending:
            console().print(f"[yellow]not reached: {escape(', '.join(done.pending))}[/] (they will hear of it)")
    if done.pending:
        raise typer.Exit(1)


@app.command("drain")
@one_line_errors
def drain(
    node: Annotated[str, typer.Argument(help="The node's name, as `kvmesh store top` shows it.")],
    cancel: Annotated[bool, typer.Option("--cancel", help="Take it back into service.")] = False,
    wait: Annotated[bool, typer.Option(help="Return when it may leave; --no-wait: at once.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.", min=0.1)] = 600.0,
    store: StoreOption = None,
    run_dir: RunDirOption = None,
) -> None:
    """Move what only this node holds to others, so that it can be stopped without a loss. It takes no new blocks.

    Leaves with 1 when that is not done in time, and says what is in the way. Examples:

        kvmesh store drain pool-2

        kvmesh store drain pool-2 --cancel
    """

    async def work(client: StoreClient) -> tuple[bool, str]:
        from kvmesh.rpc.pb import store_pb2 as pb

        request = pb.DrainRequest(instance_id=node, cancel=cancel)
        until = asyncio.get_running_loop().time() + timeout
        while True:
            try:
                told = await client.directory.call("Drain", request, client.config.timeout_s)
            except (InvalidRequest, UnknownInstance) as error:
                text = error.message.replace("instance_id=", "node=", 1)
                raise InvalidRequest(f"{text}; `kvmesh store top` shows the nodes", field="node") from None
            left = f"{told.sole_blocks:,} blocks lie only there, {told.moved:,} moved"
            if cancel or told.done:
                return True, left
            why = f"{left}{f': {told.why_not}' if told.why_not else ''}"
            if not wait or asyncio.get_running_loop().time() + POLL_S > until:
                return False, why
            await asyncio.sleep(POLL_S)

    done, why = run(store, run_dir, "", lambda client: patiently(f"draining {node}", work(client)))
    if cancel:
        console().print(f"{escape(node)} is back in service")
    elif done:
        console().print(f"[green]{escape(node)} can be stopped[/]: every block that it holds is elsewhere too")
    elif not wait:
        console().print(f"{escape(node)} is draining: {escape(why)}")
    else:
        raise Unavailable(f"{node} is not drained after {timeout:g} s: {why}; it goes on, --cancel ends it")


def _prefix(text: str) -> bytes:
    if text.strip("0123456789abcdefABCDEF"):
        raise InvalidRequest.of("prefix", text, "must be hex digits, two for each byte")
    if len(text) % 2:
        why = f"has {len(text)} hex digits; a store looks up whole bytes: leave the last digit out, or add the next one"
        raise InvalidRequest.of("prefix", text, why)
    return bytes.fromhex(text)


def _plain(place: Place) -> dict[str, Any]:
    holder = place.holder
    return {
        "node": holder.store_id,
        "address": holder.address,
        "machine": holder.node_id,
        "tier": place.tier.name.lower(),
        "bytes": place.nbytes,
    }


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    return table


app.command("put", help=store_data.PUT_HELP)(store_data.put)
app.command("get", help=store_data.GET_HELP)(store_data.get)
app.command("pin", help=store_policy.PIN_HELP)(store_policy.pin)
app.command("unpin", help=store_policy.UNPIN_HELP)(store_policy.unpin)
app.command("replicas", help=store_policy.REPLICAS_HELP)(store_policy.replicas)
app.command("copy", help=store_move.COPY_HELP)(store_move.copy)
app.command("move", help=store_move.MOVE_HELP)(store_move.move)
app.command("quota", help=store_policy.QUOTA_HELP)(store_policy.quota)
app.command("purge", help=store_purge.HELP)(store_purge.purge)
app.command("top", help=store_top.HELP)(store_top.top)
app.command("bench", help=store_bench.HELP)(store_bench.bench)
