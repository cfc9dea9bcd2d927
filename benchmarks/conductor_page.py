"""The tables of docs/conductor-speed.md from what benchmarks/conductor.py has measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.sizing_page import table
from kvmesh.errors import ConfigError

GOAL_INSTANCES, GOAL_PROMPT = 1_000, 100_000
_PLACE = re.compile(r"(<!-- conductor: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, results: Mapping[str, Any]) -> str:
    """The page with its figures as measured. ConfigError: a place for them is missing, or unknown."""
    tables = {"rows": _rows(results), "stands": _stands(results), "rest": _rest(results), "calls": _calls(results)}
    places = [name for _, name, _ in _PLACE.findall(page)]
    if sorted(places) != sorted(tables):
        raise ConfigError(f"docs: places {sorted(places)}, figures {sorted(tables)}", field="docs")
    return _PLACE.sub(lambda found: f"{found[1]}\n{tables[found[2]]}\n\n{found[3]}", page)


def _rows(results: Mapping[str, Any]) -> str:
    head = (
        "instances",
        "prompt",
        "block",
        "alone/s",
        "flowing/s",
        "p99, us",
        "all of it/s",
        "one by one/s",
        "walk, us",
    )
    rows = [
        (
            f"{row['instances']:,}",
            f"{row['prompt']:,}",
            str(row["block"]),
            f"{row['alone']['per_s']:,.0f}",
            f"{row['flowing']['per_s']:,.0f}",
            f"{row['flowing']['p99_us']:,.0f}",
            f"{row['flowing']['all_per_s']:,.0f}",
            f"{row['one_by_one']['per_s']:,.1f}",
            f"{row['dict_walk_us']:,.0f}",
        )
        for row in results["rows"]
    ]
    return table(head, rows)


def _stands(results: Mapping[str, Any]) -> str:
    """Against the goal."""
    rows = [row for row in results["rows"] if row["prompt"] == GOAL_PROMPT]
    goal = {row["block"]: row for row in rows if row["instances"] == GOAL_INSTANCES}
    told = ", ".join(
        f"{row['flowing']['per_s']:,.0f} with blocks of {block} ({row['alone']['per_s']:,.0f} without anything between)"
        for block, row in sorted(goal.items())
    )
    grown = []
    for block in sorted(goal):
        of = {row["instances"]: row["flowing"]["per_s"] for row in rows if row["block"] == block}
        grown.append(f"{of[min(of)] / of[max(of)]:.1f}")
    least, most = min(row["instances"] for row in rows), max(row["instances"] for row in rows)
    return (
        f"At {GOAL_INSTANCES:,} instances with prompts of {GOAL_PROMPT:,} tokens and everything flowing: {told}; the "
        f"goal is 1,000 a second and core. From {least:,} to {most:,} instances a decision takes "
        f"{' and '.join(grown)} times as long."
    )


def _rest(results: Mapping[str, Any]) -> str:
    events, memory = results["events"], results["memory"]
    return (
        f"Events at 1,000 instances: {events['announcements_per_s']:,.0f} announcements a second of 64 + 64 blocks "
        f"({events['keys_per_s'] / 1e6:.2f} M keys), {events['heartbeats_per_s']:,.0f} heartbeats. Memory: "
        f"{memory['counted_bytes_per_block']:.0f} bytes an indexed block by its own count, "
        f"{memory['rss_bytes_per_block']:.0f} as the process grows, at {memory['blocks']:,} blocks."
    )


def _calls(results: Mapping[str, Any]) -> str:
    head = (
        "asked by",
        "block",
        "p50, ms",
        "p90",
        "p99",
        "empty calls: p50",
        "p90",
        "p99",
        "in its hands: p99",
        "cores",
    )
    rows = []
    for run in results["grpc"]:
        times = [f"{run[what][f'p{share}_ms']:.1f}" for what in ("schedule", "empty") for share in (50, 90, 99)]
        hands = f"<= {run['handled_within_ms']['p99']:g}"
        rows.append((run["way"], str(run["block"]), *times, hands, f"{run['conductor_cpu_share']:.2f}"))
    return table(head, rows)
