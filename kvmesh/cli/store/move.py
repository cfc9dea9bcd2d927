"""`kvmesh store copy` and `move`: blocks to a node that is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from kvmesh.cli.console import console, one_line_errors
from kvmesh.cli.store.target import Namespace, RunDirOption, StoreOption, patiently, ref_of, run
from kvmesh.errors import InvalidRequest, Unavailable

if TYPE_CHECKING:
    from kvmesh.storeclient import Moved, StoreClient

COPY_HELP = """Have NODE copy blocks; those that it has already stay as they are.

NODE reads them from the nodes that have them, in whichever tier; `kvmesh store top` shows the nodes' names. Where \
`replicas` has set how many copies there are to be, one too many goes again. Leaves with 1 when NODE does not have one \
of them afterwards, and says why. Examples:

    kvmesh store copy report pool-1

    kvmesh store copy report photos 3f786850e387550fdab836ed7e6dc881 pool-1 --namespace alice
"""
MOVE_HELP = """Have NODE copy blocks, then remove the copies that they were made from; never is a block nowhere.

Where several nodes have a block, --from says whose copy goes; the others stay. A hard pin moves along, one \
with an end (`pin --ttl`) does not. A copy that is being read is waited for. A block can be moved on three seconds \
after its last move. Leaves with 1 when one has not been moved as wished, and says why; saying it again does the rest. \
Examples:

    kvmesh store move report pool-1

    kvmesh store move report photos pool-1 --from pool-0
"""

Refs = Annotated[list[str], typer.Argument(help="Blocks, by key (32 hex digits) or name.", metavar="REF")]
Node = Annotated[str, typer.Argument(help="Who is to have them, as `kvmesh store top` names it.", metavar="NODE")]
Timeout = Annotated[float, typer.Option(help="Seconds for all of it.", min=0.1, max=86_400)]
AsJson = Annotated[bool, typer.Option("--json", help="What became of each, as JSON.")]


@one_line_errors
def copy(
    refs: Refs,
    node: Node,
    timeout: Timeout = 600.0,
    namespace: Namespace = None,
    store: StoreOption = None,
    run_dir: RunDirOption = None,
    as_json: AsJson = False,
) -> None:
    wanted, timeout_ms = [ref_of(ref) for ref in refs], int(timeout * 1000)

    async def work(client: StoreClient) -> list[Moved]:
        return await _named(patiently(f"copying to {node}", client.copy(wanted, to=node, timeout_ms=timeout_ms)))

    _told("copied", refs, node, run(store, run_dir, namespace or "", work), as_json)


@one_line_errors
def move(
    refs: Refs,
    node: Node,
    source: Annotated[
        str | None, typer.Option("--from", help="Whose copy goes; none: the only other one.", metavar="NODE")
    ] = None,
    timeout: Timeout = 600.0,
    namespace: Namespace = None,
    store: StoreOption = None,
    run_dir: RunDirOption = None,
    as_json: AsJson = False,
) -> None:
    wanted, timeout_ms = [ref_of(ref) for ref in refs], int(timeout * 1000)

    async def work(client: StoreClient) -> list[Moved]:
        moving = client.move(wanted, to=node, source=source, timeout_ms=timeout_ms)
        return await _named(patiently(f"moving to {node}", moving))

    _told("moved", refs, node, run(store, run_dir, namespace or "", work), as_json)


async def _named(work: Any) -> list[Moved]:
    """Arguments called as they are here."""
    try:
        done: list[Moved] = await work
    except InvalidRequest as error:
        names = {"to": "node", "source": "--from"}
        if error.field not in names:
            raise
        text = error.message.replace(f"{error.field}=", f"{names[error.field]}=", 1)
        raise InvalidRequest(text, field=names[error.field]) from None
    return done


def _told(what: str, refs: Sequence[str], node: str, done: Sequence[Moved], as_json: bool) -> None:
    """One line for each. Unavailable: not all of it was done."""
    pairs = list(zip(refs, done, strict=True))
    if as_json:
        told = [
            {"ref": ref, "held": one.held, "from": one.source or None, "pinned": one.pinned, "cause": one.cause}
            for ref, one in pairs
        ]
        console().out(json.dumps(told, indent=2), highlight=False)
    else:
        for ref, one in pairs:
            console().print(f"{escape(ref)}: {_said(what, node, one)}", soft_wrap=True)
    if missing := [ref for ref, one in pairs if one.cause]:
        verb = "is" if len(missing) == 1 else "are"
        raise Unavailable(f"{len(missing)} of {len(refs)} {verb} not {what} as wished, {missing[0]!r} among them")


def _said(what: str, node: str, one: Moved) -> str:
    if one.cause:
        return f"[yellow]{'copied, but ' if what == 'moved' and one.held else f'not {what}: '}{escape(one.cause)}[/]"
    if what == "moved" and not one.source:
        return f"at {escape(node)} already, nothing to move"
    where = f" from {escape(one.source)} to {escape(node)}" if one.source else f" to {escape(node)}"
    return f"{what}{where}{', with its hard pin' if one.pinned else ''}"
