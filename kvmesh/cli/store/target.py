"""Which store a `kvmesh store` command means, and how long things take."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kvmesh.cli import runs
from kvmesh.cli.console import RunDir, console
from kvmesh.errors import ConfigError, KvmeshError, NotLeader, PinLimit, Unavailable

if TYPE_CHECKING:
    from kvmesh.storeclient import StoreClient

T = TypeVar("T")

PATIENCE_S = 2.0  # what takes longer says what it is at
KNOCK_S = 6.0  # until then a master must answer: longer than the default lease of a leader that has just died

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="KVMESH_STORE",
        help="Store masters of a store that `kvmesh up` did not start here: whichever leads is asked.",
        metavar="HOST:PORT[,...]",
    ),
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", envvar="KVMESH_NAMESPACE", help="Whose blocks.", metavar="NAME")
]
RunDirOption = RunDir

_KEY = re.compile(r"[0-9a-fA-F]{32}")


def ref_of(text: str) -> bytes | str:
    """A key, when it is 32 hex digits, else a name."""
    return bytes.fromhex(text) if _KEY.fullmatch(text) else text


def shown_ref(text: str) -> str:
    return f"block {text}" if _KEY.fullmatch(text) else f"a block of the name {text!r}"


def with_advice(error: KvmeshError) -> KvmeshError:
    """Returns `error`, and where a limit of pins refuses, with advice what can be done."""
    if isinstance(error, PinLimit):
        advice = "`kvmesh store unpin` some, or give pool nodes more memory (`kvmesh serve pool --memory-mb`)"
        error = type(error)(f"{error.message}; {advice}", field=error.field)
    return error


def masters_of(store: str | None, run_dir: Path | None) -> str:
    """Addresses, and this process secured as that store wants it. ConfigError: none is named, and none runs here."""
    if store:
        runs.secure(None)
        return store
    try:
        run = runs.find_running(run_dir)
    except ConfigError as error:
        raise ConfigError(f"{error.message}; or name a store with --store HOST:PORT", field="store") from None
    runs.secure(run)
    return runs.masters(run)


@asynccontextmanager
async def opened(store: str | None, run_dir: Path | None, namespace: str, **more: Any) -> AsyncIterator[StoreClient]:
    """A client of it, whose master has answered. ConfigError, TransferError; Unavailable: none does."""
    from kvmesh.storeclient import ClientConfig, StoreClient

    masters = masters_of(store, run_dir)
    settings: dict[str, Any] = {"staging_mb": 16, **more}
    if os.environ.get("KVMESH_NODE_ID"):
        settings["node_id"] = os.environ["KVMESH_NODE_ID"]
    async with StoreClient(ClientConfig(store=masters, namespace=namespace, **settings)) as client:
        try:
            await patiently(f"asking {masters}", client.directory.status(KNOCK_S))
        except NotLeader:
            why = "no store master leads: is their Redis there? `kvmesh status` shows them"
            raise Unavailable(f"store={masters!r}: {why}", field="store") from None
        except KvmeshError as error:
            why = f"no store master answers there ({error.message.rsplit(': ', 1)[-1]})"
            text = f"store={masters!r}: {why}; `kvmesh serve store` starts one, --store names another"
            raise Unavailable(text, field="store") from None
        yield client


def run(store: str | None, run_dir: Any, namespace: str, work: Callable[[StoreClient], Awaitable[T]], **more: Any) -> T:
    """`work(client)` to its end. KvmeshError."""

    async def all_of_it() -> T:
        async with opened(store, run_dir, namespace, **more) as client:
            return await work(client)

    return asyncio.run(all_of_it())


async def patiently(what: str, work: Awaitable[T]) -> T:
    """Its result; on a terminal, a line that says so once it takes longer than PATIENCE_S."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
        if not done:
            with console(stderr=True).status(f"{what} ..."):
                await asyncio.wait({task})
        return task.result()
    finally:
        task.cancel()


def size(nbytes: float) -> str:
    """ "1.5 MiB"."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:.0f} B"
