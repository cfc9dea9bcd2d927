"""What strangers and bursts can do to a mesh: the figures of the audit of 2026-11 beside those of this checkout.

    python -m benchmarks.attacks                       # all of them: some ten minutes
    python -m benchmarks.attacks --only ports,grpc     # of: http, grpc, burst, frames, ports
    python -m benchmarks.attacks --json benchmarks/results/attacks.json

Each part starts real services on loopback, attacks them from other processes and reads memory, threads and answers. The
audit's figures were measured at commit 7974aa9 with the same attacks on a machine of the same size; a dash: the audit
has no figure. Figures are told as they come; the last column says whether the goal is met.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import attacks_burst, attacks_grpc, attacks_http, attacks_ports

GOAL_MB = 500


@dataclass(frozen=True)
class Row:
    """One figure of one attack. `met`: None where there is no goal."""

    attack: str
    what: str
    audit: str
    now: str
    goal: str
    met: bool | None


def http() -> list[Row]:
    header = attacks_http.long_header()
    bodies = attacks_http.many_bodies()
    idle = attacks_http.idle_connections()
    return [
        Row("a header of 160 MB", "others' /health, p99 ms", "8,600 (longest)", _n(header["health_p99_ms"]), "50",
            header["health_p99_ms"] <= 50),
        Row("a header of 160 MB", "gateway grows, MB", "529", _n(header["rss_peak_mb"] - header["rss_before_mb"]), "-",
            None),
        Row("1,000 bodies of max_body_bytes", "gateway RSS, MB", "-", _n(bodies["rss_peak_mb"]), str(GOAL_MB),
            bodies["rss_peak_mb"] <= GOAL_MB),
        Row("1,000 bodies of max_body_bytes", "answers", "-", _counts(bodies["statuses"]), "no 5xx",
            not any(str(status).startswith("5") for status in bodies["statuses"])),
        Row("1,100 idle connections", "an ordinary request", "locked out", _counts(idle["others"]), "200",
            set(map(str, idle["others"])) == {"200"}),
    ]  # fmt: skip


def grpc() -> list[Row]:
    audit = {0: "2,309", 2: "645 more"}
    found = []
    for at, one in enumerate(attacks_grpc.measure()):
        told = asdict(one)
        found += [
            Row(told["attack"], "gateway RSS, MiB", audit.get(at, "-"), _n(told["peak_mib"]), str(GOAL_MB),
                told["peak_mib"] <= GOAL_MB),
            Row(told["attack"], "ends", "-", _counts(told["codes"]), "-", None),
        ]  # fmt: skip
    return found


def burst() -> list[Row]:
    found = []
    for told, refusal in (
        (attacks_burst.burst_http(), "429"),
        (attacks_burst.burst_grpc(), "RESOURCE_EXHAUSTED"),
    ):
        attack = f"{told['requests']:,} at once, {'HTTP' if 'channels' not in told else '50 gRPC channels'}"
        allowed = {"200", "OK", refusal}
        found += [
            Row(attack, "answers", "650 of 2,000 were 503", _counts(told["statuses"]), f"200 or {refusal}",
                set(map(str, told["statuses"])) <= allowed),
            Row(attack, "connections refused", "-", str(told["refused_connections"]), "-", None),
            Row(attack, "looks with an unready instance", "healthy ones silent",
                f"{sum(told['unready_looks'].values())} of {told['looks']}", "0", not told["unready_looks"]),
        ]  # fmt: skip
    return found


def frames() -> list[Row]:
    told = attacks_burst.unfinished_frames()
    return [
        Row(f"{one['callers']} callers, unfinished frames of {one['frame_bytes'] >> 10} KiB", f"{name.split(',')[0]} "
            "grows, MB", "320 each", _n(one["grown_mb"]), "32", one["grown_mb"] <= 32)
        for name, one in told.items() if isinstance(one, Mapping) and "grown_mb" in one
    ]  # fmt: skip


def ports() -> list[Row]:
    told = attacks_ports.idle_metrics_connections()
    attack = f"{told['connections']:,} idle connections at the metrics port"
    return [
        Row(attack, "threads", "1,424", str(told["threads"]), "40", told["threads"] <= 40),
        Row(attack, "probes answered", "-", f"{told['probes_answered']} of {told['probes']}", "all",
            told["probes_answered"] == told["probes"]),
        Row(attack, "a probe, p99 ms", "-", str(told["probe_p99_ms"]), "-", None),
    ]  # fmt: skip


PARTS: dict[str, Callable[[], list[Row]]] = {
    "ports": ports, "http": http, "grpc": grpc, "burst": burst, "frames": frames,
}  # fmt: skip


def _n(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:,.1f}"


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count:,} x {status}" for status, count in counts.items())


def table(rows: list[Row]) -> str:
    head = ("attack", "figure", "audit", "now", "goal", "")
    met = {True: "met", False: "MISSED", None: ""}
    lines = [head, *((row.attack, row.what, row.audit, row.now, row.goal, met[row.met]) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between: %(default)s")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only {unknown[0]!r}: must be of {', '.join(PARTS)}")
    rows: list[Row] = []
    for name in names:
        print(f"{name} ...", flush=True)
        found = PARTS[name]()
        print(table(found), flush=True)
        rows += found
    print(f"\nall:\n{table(rows)}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
