"""`kvmesh status`: what every service and instance of a mesh is doing."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from kvmesh.cli import runs
from kvmesh.cli.console import RunDir, console, one_line_errors, wide_enough
from kvmesh.cli.instances import axes_text, ranks_text
from kvmesh.cli.store.target import patiently, size

TIERS = ("device", "host", "remote")
_TEXTS = (
    "service",
    "address",
    "state",
    "instance",
    "instances",
    "rank host",
    "role",
    "model",
    "axes",
    "node store",
    "tier",
    "",
)
_ORDER = {"ROLE_PREFILL": 0, "ROLE_DECODE": 1, "ROLE_BOTH": 2, "ROLE_POOL": 3}
_WIDE = 110
_NO_BIAS = 0.03
# Kinds of predictions: in words, and what is counted.
_PREDICTED = {
    "ttft": ("time to first token", "request"),
    "tbt": ("time between tokens", "request"),
    "output_tokens": ("length of answers", "answer"),
    "prefill": ("computing a prompt", "prompt"),
    "decode_step": ("a decode step", "step"),
    "transfer": ("sending KV to decode", "prompt"),
    "pull": ("fetching blocks of other nodes", "prompt"),
    "tier_load": ("reading SSD or object storage", "read"),
}


@one_line_errors
def status(
    run_dir: RunDir = None,
    conductor: Annotated[
        str | None,
        typer.Option(help="Conductors of a mesh that `kvmesh up` did not start here.", metavar="HOST:PORT[,...]"),
    ] = None,
    gateway: Annotated[str | None, typer.Option(help="Its gateway (gRPC).", metavar="HOST:PORT")] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Its store masters: they tell of the map and of pool nodes.", metavar="HOST:PORT[,...]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    watch: Annotated[float | None, typer.Option(help="Show it again every so many seconds.", min=0.2)] = None,
) -> None:
    """Show services, instances and their load, what every node store holds, and where prompts found their prefixes.

    free pages, free extents: of all there are; cached blocks that may go count as free. blocks: sealed/all; of a pool
    node that does not hold blocks of exactly one model, sealed in all its memory. device, host, remote, hits: share of
    the prompt tokens of an instance, since its start, found in its device pages, its own host segment, other nodes,
    all together. axes: along which axes, and how many, ranks share an instance's model. tier: what a node keeps below
    its memory; block: how long reading one block of it is expected to take.

    Leaves with 1 when a service does not answer. Examples:

        kvmesh status

        kvmesh status --watch 1

        kvmesh status --conductor 10.0.0.5:7001 --json
    """
    from kvmesh.cli.collect import collect

    def look() -> dict[str, Any]:
        if conductor:
            runs.secure(None)
            asking = collect(conductor, gateway or "", store or "")
            return asyncio.run(patiently(f"asking {conductor}", asking) if watch is None else asking)
        run = runs.find_running(run_dir)
        runs.secure(run)
        address = {name: one["address"] for name, one in run.services.items()}
        asking = collect(runs.conductors(run), address.get("gateway", ""), runs.masters(run))
        found = asyncio.run(patiently("asking the mesh", asking) if watch is None else asking)
        return {"run": run.told, **found}

    out = console()
    if as_json:
        found = look()
        told = {**found, "hit_rates": hit_rates(found["conductor"].get("instances", []))}
        out.out(json.dumps(told, indent=2), highlight=False)
        _end(found)
    elif watch is None:
        found = look()
        out.print(_screen(found, wide_enough(out)))
        _end(found)
    else:
        with Live(console=out, auto_refresh=False, screen=out.is_terminal) as live:
            while True:
                live.update(_screen(look(), out.width), refresh=True)
                time.sleep(watch)


def _end(found: dict[str, Any]) -> None:
    """Leave with 1 when a service did not answer: scripts ask, too."""
    if any("error" in found[name] for name in ("gateway", "conductor", "store") if name in found):
        raise typer.Exit(1)


def _screen(found: dict[str, Any], width: int) -> RenderableType:
    parts: list[RenderableType] = []
    run = found.get("run")
    if run:
        names = ", ".join(run.get("models") or [run["model"]])
        parts.append(f"[bold]{escape(names)}[/] {_at(run)}\n[dim]{escape(run['run_dir'])}[/]\n")
    parts.append(_services(found))
    if run and (metrics := [f"{name} {one['metrics']}" for name, one in run["services"].items() if one.get("metrics")]):
        parts.append(f"[dim]metrics (Prometheus): {escape(', '.join(metrics))}[/]")
    if "error" not in found["conductor"]:
        parts += ["", _instances(found["conductor"].get("instances", []), width)]
        if hosts := found.get("rank_hosts", {}).get("hosts"):
            parts += ["", _rank_hosts(hosts)]
        if errors := found["conductor"].get("group_errors"):
            parts += ["", _predictions(errors)]
    if found["node_stores"]:
        parts += ["", _stores(found, width), ""]
        if lower := _lower_tiers(found):
            parts += [lower, ""]
        parts += _cache(found)
    return Group(*parts)


def _rank_hosts(hosts: list[dict[str, Any]]) -> Table:
    """Shows the machines that lend ranks, and to whom."""
    table = _table("rank host", "address", "ranks", "GPUs", "instances")
    for one in hosts:
        uses = [f"{use['instance_id']} ({ranks_text(use['ranks'])})" for use in one["uses"]]
        count = sum(len(use["ranks"]) for use in one["uses"])
        texts = (one["node_id"], one["instance"]["address"], f"{count}/{one['max_ranks']}", str(one["gpus"]))
        table.add_row(*map(escape, texts), escape(", ".join(uses)) or "[dim]free[/]")
    return table


def _at(run: dict[str, Any]) -> str:
    if joined := run.get("joined"):
        return f"in the mesh of {', '.join(joined['conductors'])}"
    return f"at {run['url']}  gRPC {run['grpc']}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXTS else "right", no_wrap=column != "")
    return table


def _services(found: dict[str, Any]) -> Table:
    table = _table("service", "address", "state", "restarts", "")
    supervised = (found.get("run") or {}).get("services", {})
    for name in ("gateway", "conductor", "store"):
        told = found.get(name)
        if told is None:
            continue
        several = told.get("masters") or told.get("conductors", [])
        for one in several if len(several) > 1 else [told]:
            life: dict[str, Any] = next((x for x in supervised.values() if x["address"] == one["address"]), {})
            whole = told if one["address"] == told["address"] else one
            table.add_row(name, one["address"], _state(name, one), str(life.get("restarts", "")), _says(name, whole))
    return table


def _state(name: str, told: dict[str, Any]) -> str:
    if "error" in told:
        return "[red]no answer[/]"
    if name == "gateway" and not told["ready"]:
        return "[yellow]not ready[/]"
    if name == "store" and not told.get("leading", True):
        return "[green]standby[/]"
    return "[green]ready[/]"


def _says(name: str, told: dict[str, Any]) -> str:
    if "error" in told:
        return escape(str(told["error"]))
    if name == "gateway":
        reason = told["not_ready_reason"]
        return (
            escape(reason)
            if reason
            else f"{count(told['requests'], 'request')}, {count(told['streams'], 'decode stream')}"
        )
    if name == "conductor":
        known = told["known_instances"] if "known_instances" in told else len(told["instances"])
        return f"{_leads(told)}{count(known, 'instance')}{_beats(told)}, store master {escape(told['store_master'])}"
    if "members" not in told:  # one of several, and not the leader
        return f"leader: {escape(told['leader'] or 'unknown')}"
    rebuilding = told["map"].get("rebuilding", [])
    late = f", {len(rebuilding)} have not announced yet" if rebuilding else ""
    term = f"leads, term {told['map']['term']}, " if "term" in told["map"] else ""
    return f"{term}{count(len(told['members']), 'member')}{_beats(told['map'])}{late}"


def _beats(told: dict[str, Any]) -> str:
    """Says how often members report, and for how long they may be silent."""
    if not told.get("heartbeat_interval_ms"):
        return ""
    interval_s, lease_s = told["heartbeat_interval_ms"] / 1000, told.get("lease_ms", 0) / 1000
    return f", beats {interval_s:.3g} s, lease {lease_s:.3g} s"


def _leads(conductor: dict[str, Any]) -> str:
    """Of several: "leads, term 3, "."""
    told = conductor.get("leadership", {})
    if told.get("role") == "leader":
        return f"leads, term {told['term']}, "
    return f"places, leader: {escape(told['leader'] or 'unknown')}, " if told.get("role") == "standby" else ""


def _instances(instances: list[dict[str, Any]], width: int) -> RenderableType:
    if not instances:
        return "[yellow]no instance has registered[/]"
    several = len({one["model"] for one in instances}) > 1
    kind = ["model"] if several else []
    if not several or width >= _WIDE:
        kind.insert(0, "role")
    if any(axes_text(one) for one in instances):
        kind.append("axes")
    notes = {_id(one): _notes(one, one["pools"]) for one in instances}
    beside = width >= _WIDE  # a narrow screen has no room for them in the table
    more = [""] if beside else []
    table = _table("instance", *kind, "state", "queued", "run", "wait", "free pages", "free extents", "silent", *more)
    for one in sorted(instances, key=lambda one: (one["model"], one["role"] != "ROLE_PREFILL", _id(one))):
        load, pools = one.get("load", {}), one["pools"]
        broken = "error" in pools
        table.add_row(
            escape(_id(one)),
            *(_of_kind(one, word) for word in kind),
            _work(one),
            str(load.get("queued_requests", 0)),
            str(load.get("running_requests", 0)),
            str(load.get("waiting_requests", 0)),
            "?" if broken else f"{pools['pages_free'] + pools['pages_cached']}/{pools['pages_total']}",
            "?" if broken else f"{pools['extents_free']}/{pools['extents_total']}",
            f"{one['silent_ms']} ms",
            *([f"[dim]{escape(notes[_id(one)])}[/]"] if beside else []),
        )
    below = [] if beside else [f"[dim]{escape(name)}: {escape(note)}[/]" for name, note in notes.items() if note]
    return Group(table, *below)


def _of_kind(one: dict[str, Any], word: str) -> str:
    if word == "axes":
        return escape(axes_text(one))
    return _role(one) if word == "role" else escape(one["model"])


def _work(one: dict[str, Any]) -> str:
    """Whether it gets some."""
    if one["ready"]:
        return "[green]ready[/]"
    cordon = str(one.get("cordon", "")).removeprefix("CORDON_STATE_").lower()
    if cordon in ("cordoned", "draining"):
        return f"[yellow]{cordon}[/]"
    return "[yellow]resting[/]" if one.get("breaker") == one["not_ready_reason"] != "" else "[yellow]not ready[/]"


def _predictions(errors: list[dict[str, Any]]) -> Table:
    """In plain words how far predictions were off, kind by kind, group by group where there are several."""
    names = list(_PREDICTED)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(style="dim")
    groups = sorted({one.get("group", "") for one in errors})
    for group in groups:
        whose = f"of {group}, " if len(groups) > 1 else ""
        table.add_row("[not dim]predictions[/]", escape(f"{whose}against what happened in the last 10 minutes"))
        of = [one for one in errors if one.get("group", "") == group]
        for one in sorted(of, key=lambda one: (*names, one["what"]).index(one["what"])):
            what, counted = _PREDICTED.get(one["what"], (one["what"].replace("_", " "), "sample"))
            table.add_row(escape(what), f"{worth(one)} ({count(one['samples'], counted)})")
    return table


def worth(error: dict[str, Any]) -> str:
    """ "usually within 18%, 9 of 10 within 55%; runs 10% longer than predicted"."""
    bias = error["bias"]
    said = f"usually within {_within(error['p50'])}, 9 of 10 within {_within(error['p90'])}"
    if abs(bias) < _NO_BIAS:
        return said
    if bias > 1:
        return f"{said}; runs {1 + bias:.1f} times as long as predicted"
    return f"{said}; runs {abs(bias):.0%} {'longer' if bias > 0 else 'shorter'} than predicted"


def _within(error: float) -> str:
    """Shorter than predicted it can be by 100% at most: what is more is so many times as long."""
    return f"{error:.0%}" if error <= 1 else f"a factor of {1 + error:.1f}"


def _id(one: dict[str, Any]) -> str:
    return str(one["instance"]["instance_id"])


def _role(one: dict[str, Any]) -> str:
    return str(one["role"]).removeprefix("ROLE_").lower()


def _notes(one: dict[str, Any], pools: dict[str, Any]) -> str:
    notes = [one["not_ready_reason"], pools.get("error", "")]
    if one.get("http_url"):
        knowledge = str(one.get("knowledge", "")).removeprefix("BLOCK_KNOWLEDGE_").lower()
        notes.append(f"external: {one['http_url']}, blocks {knowledge}")
    counted = (("handoffs", "handoff"), ("quarantined", "quarantined extent"))
    notes += [count(pools[key], word) for key, word in counted if pools.get(key)]
    return ", ".join(note for note in notes if note)


# ── the shared pool ───────────────────────────────────────────────────────────────────────────────


def _stores(found: dict[str, Any], width: int) -> RenderableType:
    """Every node's host segment; instances also tell where the tokens of their prompts were found."""
    instances = {_id(one): one for one in found["conductor"].get("instances", [])}
    members = {_id(one): one for one in found.get("store", {}).get("members", [])}
    wide = width >= _WIDE
    more = ("pulled", "offloaded", "in the map") if wide else ()
    columns = [
        "node store",
        *(["role"] if wide else []),
        "blocks",
        "device",
        "host",
        "remote",
        "hits",
        "leases",
        "pulls",
    ]
    table = _table(*columns, "evicted", *more)
    known = {one["member"]["store_id"]: one["blocks"] for one in _map(found).get("stores", [])}

    def role(name: str) -> str:
        return str((instances.get(name) or members[name])["role"])

    errors = []
    for name in sorted(found["node_stores"], key=lambda name: (_ORDER.get(role(name), 9), name)):
        told = found["node_stores"][name]
        shown = [escape(name), *([role(name).removeprefix("ROLE_").lower()] if wide else [])]
        if "error" in told:
            table.add_row(*shown, "[red]?[/]")
            errors.append(f"[red]{escape(name)}: {escape(told['error'])}[/]")
            continue
        pools = told["pools"]
        rest = [mebibytes(told["pulled_bytes"]), str(told["offloaded_blocks"]), str(known.get(name, "-"))]
        table.add_row(
            *shown,
            _held(role(name), told),
            *_hits(instances.get(name, {}).get("load") or {}),
            str(pools["store_leases"]),
            str(pools["pulls"]),
            str(told["evicted"]),
            *(rest if wide else []),
        )
    return Group(table, *errors, *_said(found, "transports"), *_said(found, "settings"))


def _said(found: dict[str, Any], what: str) -> list[str]:
    """What nodes move blocks by (`transports`) or compute with (`settings`), and why so: a line for each answer that
    there is."""
    nodes: dict[str, list[str]] = {}
    for name, told in sorted(found["node_stores"].items()):
        if told.get(what):
            nodes.setdefault(told[what], []).append(name)
    return [
        f"[dim]{what} of {'all' if len(nodes) == 1 else escape(', '.join(names))}: {escape(text)}[/]"
        for text, names in nodes.items()
    ]


def _held(role: str, told: dict[str, Any]) -> str:
    """Sealed blocks of all there can be. A pool node divides its memory when it sees what is to be held: the counters
    tell of the slabs in use, and with several models or none there is no number of blocks."""
    blocks, total = told["pools"]["store_blocks"], told["pools"]["extents_total"]
    if role == "ROLE_POOL":
        if not told.get("shard_bytes"):
            return f"{blocks} in {told['capacity_bytes'] >> 20:,} MiB"
        total = told["capacity_bytes"] // told["shard_bytes"]
    return f"{blocks}/{total}"


def _lower_tiers(found: dict[str, Any]) -> Table | None:
    """Below the memory of node stores, where there is anything: what is there, how often it helped, and how long the
    conductor expects one block to take (a pool node: as it says itself)."""
    expected = {
        (_id(one), tier["usage"]["tier"]): tier["expected_ms"]
        for one in found["conductor"].get("instances", [])
        for tier in one.get("tiers", [])
    }
    table = _table("node store", "tier", "blocks", "used", "of", "hits", "misses", "block, ms", "MiB/s", "")
    for name, told in sorted(found["node_stores"].items()):
        for tier in told.get("tiers", []):
            block_ms = expected.get((name, tier["tier"]), tier["read_ns"] / 1e6)
            table.add_row(
                escape(name),
                str(tier["tier"]).removeprefix("TIER_").lower(),
                f"{tier['blocks']:,}",
                mebibytes(tier["used_bytes"]),
                mebibytes(tier["capacity_bytes"]),
                f"{tier['hits']:,}",
                f"{tier['misses']:,}",
                f"{block_ms:.2f}" if block_ms else "-",
                f"{tier['bytes_per_s'] / 2**20:,.0f}" if tier["bytes_per_s"] else "-",
                f"[yellow]{escape(tier['why_not'])}[/]" if tier["why_not"] else "",
            )
    return table if table.row_count else None


def _hits(load: dict[str, Any]) -> list[str]:
    """Shares of prompt tokens found in device pages, own host segment, other nodes, and all three together."""
    asked = load.get("prompt_tokens", 0)
    if not asked:
        return ["-"] * 4
    found = [load[f"{tier}_hit_tokens"] for tier in TIERS]
    return [f"{tokens / asked:.0%}" for tokens in (*found, sum(found))]


def hit_rates(instances: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all instances together since their starts: prompt tokens, and by tier the share of them found there."""
    loads = [one.get("load") or {} for one in instances]
    asked = sum(load.get("prompt_tokens", 0) for load in loads)
    found = {tier: sum(load.get(f"{tier}_hit_tokens", 0) for load in loads) for tier in TIERS}
    rates = {tier: round(tokens / asked, 4) if asked else 0.0 for tier, tokens in found.items()}
    return {"prompt_tokens": asked, **rates, "all": round(sum(found.values()) / asked, 4) if asked else 0.0}


def _map(found: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = found.get("store", {}).get("map", {})
    return told


def _cache(found: dict[str, Any]) -> list[RenderableType]:
    """One line on the prompts, one on the map."""
    rates = hit_rates(found["conductor"].get("instances", []))
    lines = []
    if rates["prompt_tokens"]:
        tiers = ", ".join(f"{tier} {rates[tier]:.1%}" for tier in TIERS)
        text = f"{rates['all']:.1%} of {rates['prompt_tokens']:,} prompt tokens ({tiers})"
        lines.append(f"[bold]hit rate[/]  {text}")
    told = _map(found)
    if told and "error" not in told:
        each = f", {told['replicas'] / told['blocks']:.1f} each" if told["blocks"] else ""
        pools = sum(one["role"] == "ROLE_POOL" for one in found["store"]["members"])
        lines.append(
            f"[bold]map[/]       {told['blocks']:,} distinct blocks, {count(told['replicas'], 'replica')}{each}; "
            f"{count(pools, 'pool node')}; the map itself takes {size(told['map_bytes'])} of the store master's memory"
        )
    elif told:
        lines.append(f"[bold]map[/]       [red]{escape(told['error'])}[/]")
    return ["\n".join(lines)] if lines else []


def mebibytes(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB"


def count(number: int, word: str) -> str:
    """ "1 request", "2,000 requests"."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"
