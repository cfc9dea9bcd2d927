"""`kvmesh store bench`: puts and gets of one client against a running store."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvmesh.cli.console import console, one_line_errors, wide_enough
from kvmesh.cli.store.target import RunDirOption, StoreOption, opened, patiently, size
from kvmesh.errors import ConfigError, InternalError, Overloaded
from kvmesh.quantiles import quantile

if TYPE_CHECKING:
    from kvmesh.storeclient import StoreClient

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
HELP = """Measure puts and gets of one client: GB/s, and microseconds of one call (median and 99th percentile).

Values lie in memory that nodes of this machine can map. They are put under granted keys in a namespace of their own \
and removed afterwards. `memcpy` is what copying as many bytes in this process takes. Examples:

    kvmesh store bench

    kvmesh store bench --size 64k,1m --batch 1,64 --transports tcp --json
"""


@dataclass(frozen=True)
class BenchRow:
    nbytes: int
    batch: int


@one_line_errors
def bench(
    sizes: Annotated[str, typer.Option("--size", help="Bytes of a value, with k, m or g.")] = "64k,1m,16m",
    batches: Annotated[str, typer.Option("--batch", help="Values in one call.")] = "1,16",
    seconds: Annotated[float, typer.Option(help="For each row and operation.", min=0.05)] = 1.0,
    transports: Annotated[str, typer.Option(help="Transports to use, preferred first.")] = "auto",
    store: StoreOption = None,
    run_dir: RunDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    rows = [BenchRow(nbytes, batch) for nbytes in parsed("size", sizes) for batch in parsed("batch", batches)]

    async def work() -> list[dict[str, Any]]:
        space = f"bench-{os.getpid()}-{time.time_ns()}"
        async with opened(store, run_dir, space, transports=transports, keys="granted") as client:
            try:
                return await patiently(f"{len(rows)} rows", _all(client, rows, seconds))
            finally:
                await client.remove_namespace()

    told = asyncio.run(work())
    out = console()
    if as_json:
        out.out(json.dumps(told, indent=2), highlight=False)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("values", "put GB/s", "µs (p99)", "get GB/s", "µs (p99)", "memcpy GB/s"):
        table.add_column(column, justify="right")
    for row in told:
        cells = [f"{row['batch']} × {size(row['bytes'])}"]
        for op in ("put", "get"):
            cells += [f"{row[op]['gb_per_s']:.2f}", f"{row[op]['p50_us']:,.0f} ({row[op]['p99_us']:,.0f})"]
        table.add_row(*cells, f"{row['memcpy_gb_per_s']:.2f}")
    wide_enough(out)
    out.print(table)


async def _all(client: StoreClient, rows: list[BenchRow], seconds: float) -> list[dict[str, Any]]:
    return [await measure(client, row, seconds) for row in rows]


async def measure(client: StoreClient, row: BenchRow, seconds: float) -> dict[str, Any]:
    """One row. Overloaded: the store has no room for its values; InternalError: bytes that come back differ."""
    buffer = client.allocate(2 * row.nbytes * row.batch)
    try:
        spans = [buffer.span(i * row.nbytes, row.nbytes) for i in range(2 * row.batch)]
        sources, targets = spans[: row.batch], spans[row.batch :]
        for span in sources:
            span.memory[:] = os.urandom(row.nbytes)
        keys: list[bytes] = []

        async def put() -> None:
            nonlocal keys
            puts = await client.put_many_from(sources)
            lost = next((one for one in puts if not one.held), None)
            if lost is not None:
                raise Overloaded(f"{row.batch} values of {row.nbytes} bytes are not taken: {lost.cause}")
            keys = [one.key for one in puts]

        async def get() -> None:
            got = await client.get_many_into(keys, targets)
            lost = next((one for one in got if not one.here), None)
            if lost is not None:
                raise Overloaded(f"{row.batch} values of {row.nbytes} bytes are not kept: {lost.cause or 'evicted'}")

        told: dict[str, Any] = {"bytes": row.nbytes, "batch": row.batch}
        for name, call in (("put", put), ("get", get)):
            took = await _timed(call, seconds)
            told[name] = {
                "gb_per_s": row.nbytes * row.batch / statistics.median(took) / 1e9,
                "p50_us": statistics.median(took) * 1e6,
                "p99_us": quantile(sorted(took), 0.99) * 1e6,
                "calls": len(took),
            }
        if any(source.memory != target.memory for source, target in zip(sources, targets, strict=True)):
            raise InternalError("the bytes that came back differ from those that were put")
        start = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            target.memory[:] = source.memory
        told["memcpy_gb_per_s"] = row.nbytes * row.batch / (time.perf_counter() - start) / 1e9
        return told
    finally:
        client.unregister(buffer)


async def _timed(call: Any, seconds: float) -> list[float]:
    """Of each call, after one that does not count, until so many seconds are over; at least three."""
    await call()
    took: list[float] = []
    until = time.perf_counter() + seconds
    while len(took) < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        await call()
        took.append(time.perf_counter() - start)
    return took


def parsed(field: str, text: str) -> list[int]:
    """ "64k,1m" → [65536, 1048576]. ConfigError names the first that is no number."""
    found = []
    for word in (word.strip().lower() for word in text.split(",")):
        digits, unit = (word[:-1], word[-1]) if word and word[-1] in "kmg" else (word, "")
        if not (digits.isascii() and digits.isdigit()) or not 0 < int(digits) * _UNITS[unit] <= 1 << 34:
            raise ConfigError(f"{field}={word!r}: must be a number, as 64k or 1m", field=field)
        found.append(int(digits) * _UNITS[unit])
    return found
