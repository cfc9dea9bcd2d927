"""`kvmesh sim`: what the product's decisions would do, without a mesh."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmesh.cli.console import console, one_line_errors, wide_enough
from kvmesh.cli.sim import decisions as sim_decisions
from kvmesh.cli.sim import fit as sim_fit
from kvmesh.cli.sim import run as sim_run
from kvmesh.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from kvmesh.sim.cache import CacheRun

POLICIES = "lru,lfu,length"
CAPACITIES = "1000,5859,10000,30000,50000,100000,inf"
PATIENCE_S = 2.0  # what takes longer shows how far it is
_LINE_S = 5.0  # between lines of progress, where there is no terminal

CACHE_HELP = """Hit rates of a trace in one cache, for each eviction policy and capacity.

Hit rate: hits / blocks, by block, over the whole trace in file order; the cache is empty at first. A request's hits \
are the blocks of its longest cached prefix, a partly filled last block included. After the look-up all its blocks are \
touched from head to tail, and each missing one takes the place of the block that the policy evicts. The policies are \
the node store's own: lru, lfu (counts lost on eviction, ties by last use), length (uses x recompute cost of the \
prompt, ageing). Printed too: the share of the prompts' compute that the hits spare, as length reckons it. Examples:

    kvmesh sim cache conversation_trace.jsonl

    kvmesh sim cache conversation_trace.jsonl --policy lru,lfu --capacity 1000,5859,inf --json
"""


def policies_of(text: str) -> list[str]:
    """Names, in their order. ConfigError names the first that is unknown or stands twice."""
    from kvmesh.kvcache.eviction import ORDERS

    names = [name.strip() for name in text.split(",")]
    for at, name in enumerate(names):
        if name not in ORDERS:
            raise ConfigError(f"policy={name!r}: choose among {', '.join(ORDERS)}", field="policy")
        if name in names[:at]:
            raise ConfigError(f"policy={name!r}: stands twice", field="policy")
    return names


def capacities_of(text: str) -> list[int | None]:
    """Blocks; None: inf. ConfigError names the first that is neither, or stands twice."""
    found: list[int | None] = []
    for word in (word.strip() for word in text.split(",")):
        if word != "inf" and not (word.isascii() and word.isdigit() and 0 < int(word) < 2**53):
            raise ConfigError(f"capacity={word!r}: must be a number of blocks, at least 1, or inf", field="capacity")
        blocks = None if word == "inf" else int(word)
        if blocks in found:
            raise ConfigError(f"capacity={word!r}: stands twice", field="capacity")
        found.append(blocks)
    return found


class CacheProgress:
    """How far it is, on standard error, once PATIENCE_S have passed: one line that is written over on a terminal, a
    line now and then elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = max(total, 1)
        self._shown = time.monotonic() + PATIENCE_S - _LINE_S
        self._terminal = sys.stderr.isatty()
        self._open = False

    def tell(self, done: int, what: str) -> None:
        """Tells that `done` of all steps are done, and what goes on now."""
        now = time.monotonic()
        if now - self._shown < (0.1 if self._open else _LINE_S):
            return
        self._shown, self._open = now, self._terminal
        text = f"{done / self._total:4.0%}  {what}"
        print(f"\r\x1b[K{text}" if self._terminal else text, end="" if self._terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def clear(self) -> None:
        """Nothing of it stays on a terminal."""
        if self._open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def _progress(total: int) -> Iterator[CacheProgress]:
    shown = CacheProgress(total)
    try:
        yield shown
    finally:
        shown.clear()


def label(capacity: int | None) -> str:
    """For a column."""
    return "inf" if capacity is None else f"{capacity:,}"


def report(runs: Sequence[CacheRun], trace: Path, requests: int, distinct: int, block_tokens: int) -> dict[str, Any]:
    """Everything, as plain JSON; a capacity of null is unbounded."""
    from kvmesh.sim.cache import DEFINITION, SAVED

    return {
        "kind": "sim cache",
        "trace": str(trace),
        "requests": requests,
        "blocks": runs[0].blocks if runs else 0,
        "distinct_blocks": distinct,
        "block_tokens": block_tokens,
        "definitions": {"hit_rate": DEFINITION, "compute_saved": SAVED},
        "runs": [
            {
                "policy": one.policy,
                "capacity_blocks": one.capacity,
                "hit_rate": round(one.hit_rate, 4),
                "hit_blocks": one.hits,
                "compute_saved": round(one.compute_saved, 4),
                "evicted_blocks": one.evicted,
            }
            for one in runs
        ],
    }


def show(runs: Sequence[CacheRun], told: dict[str, Any]) -> None:
    """Two tables: a line a policy, a column a capacity."""
    out = console()
    wide_enough(out)
    out.print(
        f"{told['requests']:,} requests, {told['blocks']:,} blocks of {told['block_tokens']} tokens, "
        f"{told['distinct_blocks']:,} distinct\n"
    )
    out.print(_table("hit rate", runs, lambda one: one.hit_rate))
    out.print(f"[dim]{told['definitions']['hit_rate']}[/]\n")
    out.print(_table("compute saved", runs, lambda one: one.compute_saved))
    out.print(f"[dim]{told['definitions']['compute_saved']}[/]")


def _table(title: str, runs: Sequence[CacheRun], figure: Callable[[CacheRun], float]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(title)
    for capacity in dict.fromkeys(one.capacity for one in runs):
        table.add_column(label(capacity), justify="right")
    for policy in dict.fromkeys(one.policy for one in runs):
        table.add_row(policy, *(f"{figure(one):.4f}" for one in runs if one.policy == policy))
    return table


@one_line_errors
def cache(
    trace: Annotated[Path, typer.Argument(help="JSON lines: timestamp, input_length, output_length, hash_ids.")],
    policy: Annotated[str, typer.Option(help="Eviction policies.", metavar="NAME,...")] = POLICIES,
    capacity: Annotated[str, typer.Option(help="Blocks of the cache; inf: unbounded.", metavar="N,...")] = CAPACITIES,
    block_tokens: Annotated[
        int, typer.Option(help="Tokens of the trace behind one hash id.", metavar="N", min=1)
    ] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with the definitions.")] = False,
) -> None:
    """Hit rates of a trace in one cache."""
    from kvmesh.sim import cache as caches
    from kvmesh.sim.workloads import trace as traces

    policies, capacities = policies_of(policy), capacities_of(capacity)
    prompts = [request.hash_ids for request in traces.read(trace, block_tokens, by_time=False)]
    if not prompts:
        raise ConfigError(f"trace={str(trace)!r}: holds no request", field="trace")
    blocks = sum(map(len, prompts))
    runs: list[caches.CacheRun] = []
    with _progress(blocks * len(policies) * len(capacities)) as shown:

        def done(now: int) -> None:
            shown.tell(blocks * len(runs) + now, f"{name}, {label(size)} blocks")

        for name in policies:
            for size in capacities:
                runs.append(caches.run(prompts, name, size, block_tokens=block_tokens, progress=done))
    distinct = len({block for ids in prompts for block in ids})
    told = report(runs, trace, len(prompts), distinct, block_tokens)
    if as_json:
        console().out(json.dumps(told, indent=2), highlight=False)
    else:
        show(runs, told)


app = typer.Typer(
    help="What the product's own decisions would do with a workload, without a mesh.\n\n"
    "Examples:\n\n    kvmesh sim run --trace conversation_trace.jsonl --prefill 8 --decode 8 --out run/\n\n"
    "    kvmesh sim cache conversation_trace.jsonl\n\n"
    "    kvmesh sim --decisions decisions.jsonl",
    no_args_is_help=True,
)
app.callback(invoke_without_command=True)(sim_decisions.decisions)
app.command("run", help=sim_run.HELP)(sim_run.command())
app.command("fit", help=sim_fit.HELP)(sim_fit.fit)
app.command("cache", help=CACHE_HELP)(cache)
