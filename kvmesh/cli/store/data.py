"""`kvmesh store put` and `get`: files into the pool and out of it."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from kvmesh.cli.console import console, one_line_errors
from kvmesh.cli.store.target import (
    Namespace,
    RunDirOption,
    StoreOption,
    opened,
    patiently,
    ref_of,
    shown_ref,
    size,
    with_advice,
)
from kvmesh.errors import ConfigError, InvalidRequest, KvmeshError, Unavailable

PUT_HELP = """Put a file (or - for standard input) into the pool as one block; prints its key.

Equal data has an equal key, so putting it twice changes nothing. Blocks are a cache: the least recently used go when \
memory is short, unless --pin. Examples:

    kvmesh store put report.pdf --name report

    tar c photos | kvmesh store put - --name photos --namespace alice --pin
"""
GET_HELP = """Get a block by its key or name; to standard output, or a file.

Says on standard error which node and tier served it; leaves with 1 when nobody has it. Examples:

    kvmesh store get report -o copy.pdf

    kvmesh store get 3f786850e387550fdab836ed7e6dc881 | sha256sum
"""


@one_line_errors
def put(
    file: Annotated[str, typer.Argument(help="The data; - reads standard input.", metavar="FILE|-")],
    name: Annotated[str | None, typer.Option(help="Bind this name to it.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="... though it stands for another block now.")] = False,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it whatever memory is short of.")] = False,
    namespace: Namespace = None,
    store: StoreOption = None,
    run_dir: RunDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Key, size and time as JSON.")] = False,
) -> None:
    data = _read(file)

    async def work() -> dict[str, Any]:
        from kvmesh.storeclient import Pin

        async with opened(store, run_dir, namespace or "", verify=True) as client:
            start = time.perf_counter()
            kind = Pin.HARD if pin else None
            work = client.put(data, name=name, replace=replace, pin=kind)
            try:
                key = await patiently(f"putting {size(len(data))}", work)
            except KvmeshError as error:
                raise with_advice(error) from None
            return {"key": key.hex(), "name": name, "bytes": len(data), "seconds": time.perf_counter() - start}

    told = asyncio.run(work())
    if as_json:
        console().out(json.dumps(told, indent=2), highlight=False)
        return
    console().out(told["key"], highlight=False)
    how = f"{size(len(data))} in {told['seconds'] * 1000:.1f} ms"
    whose = f" --namespace {shlex.quote(namespace)}" if namespace and name else ""
    next_ = f"kvmesh store get {shlex.quote(name or told['key'])} -o FILE{whose}"
    console(stderr=True).print(f"[dim]{how}; get it with `{escape(next_)}`[/]")


@one_line_errors
def get(
    ref: Annotated[str, typer.Argument(help="The block's key (32 hex digits) or name.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Write here.", metavar="FILE|-")] = "-",
    namespace: Namespace = None,
    store: StoreOption = None,
    run_dir: RunDirOption = None,
) -> None:
    wanted = ref_of(ref)
    if output == "-" and sys.stdout.isatty():
        raise ConfigError("output='-': this is a terminal; name a file with -o, or pipe it on", field="output")

    async def work() -> tuple[Any, float]:
        async with opened(store, run_dir, namespace or "", verify=True) as client:
            start = time.perf_counter()
            got = (await patiently(f"getting {ref}", client.get_many([wanted])))[0]
            return got, time.perf_counter() - start

    got, seconds = asyncio.run(work())
    if not got.here:
        why = f": {got.cause}" if got.cause else "; `kvmesh store ls` lists what there is"
        raise Unavailable(f"no node has given {shown_ref(ref)}{why}")
    _write(output, got.data)
    where = f"{got.store_id}, {got.tier.name.lower()}"
    console(stderr=True).print(f"[dim]{size(got.nbytes)} in {seconds * 1000:.1f} ms from {where}[/]")


def _read(file: str) -> bytes:
    """InvalidRequest: it is empty; ConfigError: it cannot be read."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"file={file!r}: {error.strerror}", field="file") from None
    if not data:
        raise InvalidRequest.of("file", file, "is empty; a block has at least one byte")
    return data


def _write(output: str, data: bytes) -> None:
    """Writes all of `data`, or, where it goes to a file and that fails, nothing."""
    if output == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    target = Path(output)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"output={output!r}: {error.strerror}", field="output") from None
