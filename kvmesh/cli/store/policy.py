"""`kvmesh store pin`, `unpin`, `replicas` and `quota`: what is to stay, how often, and how much of whom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kvmesh.cli.console import console, one_line_errors, wide_enough
from kvmesh.cli.store.target import Namespace, RunDirOption, StoreOption, patiently, ref_of, run, shown_ref, with_advice
from kvmesh.errors import ConfigError, KvmeshError, Unavailable

if TYPE_CHECKING:
    from kvmesh.storeclient import Quota, StoreClient

MIN_TTL_S, MAX_TTL_S = 0.001, 4_000_000  # milliseconds, 32 bits, on the wire
PIN_HELP = """Keep blocks when memory is short, at every node that has them now.

Hard (the default): they are brought into memory, and stay until `unpin` or `rm`; half of a node's memory can be \
pinned so. With --ttl, softly: what is in memory goes after all others, for so many seconds. \
Copies that are made later are not pinned; `replicas --hard` \
pins those too. Leaves with 1 when no node has pinned one of them. Examples:

    kvmesh store pin report

    kvmesh store pin 3f786850e387550fdab836ed7e6dc881 photos --ttl 3600
"""
UNPIN_HELP = """Let blocks go again when memory is short: neither hard nor soft pins are left, at any node.

`replicas N --hard` pins again: end that with `replicas 0`. Examples:

    kvmesh store unpin report

    kvmesh store unpin report photos --namespace alice
"""
REPLICAS_HELP = """Say how many nodes are to hold blocks, N (at most 64); 0: as many as there happen to be.

The store master sees to it in the background, as long as it knows of it: pool nodes copy what is missing, superfluous \
copies go. What is told is how many have each now; `stat` shows where they are. Leaves with 1 when nobody has one of \
them. Examples:

    kvmesh store replicas report 2

    kvmesh store replicas report photos 3 --hard

    kvmesh store replicas report 0
"""
QUOTA_HELP = """Show how many blocks namespaces may have in memory, and set it.

BLOCKS counts over all nodes, every copy; above it the namespace's own coldest blocks go first, those of others stay. \
0 lifts the limit; SSD and object storage have none. NAMESPACE is what --namespace means elsewhere, and the salt of an \
API key, so it holds a tenant's KV blocks as well; '' is everybody who names none. Examples:

    kvmesh store quota

    kvmesh store quota alice 10000

    kvmesh store quota alice 0
"""

Refs = Annotated[list[str], typer.Argument(help="Blocks, by key (32 hex digits) or name.", metavar="KEY|NAME")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@one_line_errors
def pin(
    refs: Refs,
    ttl: Annotated[float | None, typer.Option("--ttl", help="Softly, for so many seconds.", metavar="S")] = None,
    hard: Annotated[bool, typer.Option("--hard", help="Until it is unpinned (the default).")] = False,
    namespace: Namespace = None,
    store: StoreOption = None,
    run_dir: RunDirOption = None,
    as_json: AsJson = False,
) -> None:
    if ttl is not None and hard:
        raise ConfigError(f"ttl={ttl:g}: a hard pin has no end: --ttl or --hard, not both", field="ttl")
    if ttl is not None and not MIN_TTL_S <= ttl <= MAX_TTL_S:
        raise ConfigError(f"ttl={ttl:g}: must be in {MIN_TTL_S:g}..{MAX_TTL_S:g} seconds", field="ttl")
    ttl_ms = 0 if ttl is None else int(ttl * 1000)
    nodes = _asked(refs, "pinning", namespace, store, run_dir, lambda client, some: client.pin(*some, ttl_ms=ttl_ms))
    how = "pinned" if ttl is None else f"pinned for {ttl:g} s"
    _told(refs, nodes, as_json, lambda n: f"{how} at {_nodes(n)}")
    if missing := [ref for ref, n in zip(refs, nodes, strict=True) if not n]:
        raise Unavailable(f"no node has pinned {shown_ref(missing[0])}; `kvmesh store stat` shows where a block is")


@one_line_errors
def unpin(
    refs: Refs,
    namespace: Namespace = None,
    store: StoreOption = None,
    run_dir: RunDirOption = None,
    as_json: AsJson = False,
) -> None:
    nodes = _asked(refs, "unpinning", namespace, store, run_dir, lambda client, some: client.unpin(*some))
    _told(
        refs,
        nodes,
        as_json,
        lambda n: f"unpinned at {_nodes(n)}" if n else "nothing to unpin, no node has it in memory",
    )


@one_line_errors
def replicas(
    refs: Refs,
    wanted: Annotated[int, typer.Argument(help="So many nodes; 0: no target.", metavar="N", min=0, max=64)],
    hard: Annotated[bool, typer.Option("--hard", help="Pinned hard at each.")] = False,
    namespace: Namespace = None,
    store: StoreOption = None,
    run_dir: RunDirOption = None,
    as_json: AsJson = False,
) -> None:
    if hard and not wanted:
        raise ConfigError("hard=True: N is 0, so there is nothing to pin; `unpin` ends pins", field="hard")
    nodes = _asked(
        refs,
        "asking for replicas",
        namespace,
        store,
        run_dir,
        lambda client, some: client.change_replica(some, wanted, hard=hard),
    )
    goal = f"{wanted} wanted" if wanted else "no target"
    _told(refs, nodes, as_json, lambda n: f"at {_nodes(n)} now, {goal}")
    if missing := [ref for ref, n in zip(refs, nodes, strict=True) if wanted and not n]:
        raise Unavailable(f"no node has {shown_ref(missing[0])}; `kvmesh store ls` lists what there is")


@one_line_errors
def quota(
    whose: Annotated[
        str | None, typer.Argument(help="Whose blocks; none: list all quotas.", metavar="NAMESPACE")
    ] = None,
    blocks: Annotated[
        int | None, typer.Argument(help="The limit from now on; 0: none.", metavar="BLOCKS", min=0)
    ] = None,
    store: StoreOption = None,
    run_dir: RunDirOption = None,
    as_json: AsJson = False,
) -> None:
    async def work(client: StoreClient) -> list[Quota]:
        if whose is not None and blocks is not None:
            await client.set_quota(whose, blocks)
        some = await client.quotas()
        return some if whose is None else [one for one in some if one.tag == client.tag]

    found = run(store, run_dir, whose or "", lambda client: patiently("asking for quotas", work(client)))
    if as_json:
        _json([{"namespace": q.namespace, "tag": q.tag.hex(), "limit": q.blocks, "used": q.used_blocks} for q in found])
        return
    out = console()
    if found:
        wide_enough(out)
        out.print(_quotas(found))
    elif whose is None:
        console(stderr=True).print("[dim]no quotas: `kvmesh store quota NAMESPACE BLOCKS` sets one[/]")
    else:
        console(stderr=True).print(f"[dim]namespace {escape(repr(whose))} has no quota[/]")


def _quotas(found: Sequence[Quota]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("namespace", "tag", "limit", "used"):
        table.add_column(name, justify="right" if name in ("limit", "used") else "left", overflow="fold")
    for one in sorted(found, key=lambda q: q.namespace):
        share = f"{one.used_blocks:,} ({one.used_blocks / one.blocks:.0%})"
        used = f"[yellow]{share}[/]" if one.used_blocks >= one.blocks else share
        table.add_row(escape(one.namespace) or "[dim]none[/]", one.tag.hex(), f"{one.blocks:,}", used)
    return table


def _asked(refs: Sequence[str], what: str, namespace: str | None, store: str | None, run_dir: Any, ask: Any) -> Any:
    """How many nodes, for each of `refs`: what `ask(client, refs)` says. KvmeshError."""
    wanted = [ref_of(ref) for ref in refs]
    try:
        return run(store, run_dir, namespace or "", lambda client: patiently(what, ask(client, wanted)))
    except KvmeshError as error:
        raise with_advice(error) from None


def _told(refs: Sequence[str], nodes: Sequence[int], as_json: bool, say: Any) -> None:
    """One line for each."""
    if as_json:
        _json([{"ref": ref, "nodes": n} for ref, n in zip(refs, nodes, strict=True)])
        return
    for ref, n in zip(refs, nodes, strict=True):
        console().print(f"{escape(ref)}: {say(n)}", soft_wrap=True)


def _json(told: list[dict[str, Any]]) -> None:
    console().out(json.dumps(told, indent=2), highlight=False)


def _nodes(n: int) -> str:
    return f"{n} {'node' if n == 1 else 'nodes'}"
