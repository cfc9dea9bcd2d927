"""What many peers and long queues cost: the same slices to 1 to 256 peers, and 1,000 to 100,000 slices at once to one.

Slices are of 4 KiB, one request each. Linear time and flat memory show as columns that stay level. `bytes`: growth of
the writer's memory while the slices were queued, the first time; `MB`: all of it after a run, and after two more.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import progress
from benchmarks.peers.link import Worker

PEERS = (1, 8, 64, 256)
QUEUED = (1_000, 10_000, 100_000)
DEALT = 16_384
REPEATS = 3
HEADS = ("wall µs", "CPU µs", "submit µs", "bytes", "MB", "MB later", "threads")
MODULE = "benchmarks.peers.many"


def _pair(peers: int, transport: str) -> tuple[Worker, Worker]:
    targets, source = Worker(MODULE), Worker(MODULE)
    source.call("source", told=targets.call("targets", peers=peers, transport=transport), transport=transport)
    return targets, source


def _row(source: Worker, slices: int) -> dict[str, float]:
    """Medians of some repeats after one to connect."""
    first = source.call("deal", slices=slices)
    runs = [source.call("deal", slices=slices) for _ in range(REPEATS)]
    return {
        "wall_us": statistics.median(run["wall_s"] for run in runs) / slices * 1e6,
        "cpu_us": statistics.median(run["cpu_s"] for run in runs) / slices * 1e6,
        "submit_us": statistics.median(run["submit_s"] for run in runs) / slices * 1e6,
        "queued_bytes": first["queued_bytes"] / slices,
        "resident_mb": runs[0]["resident_bytes"] / 1e6,
        "resident_later_mb": runs[-1]["resident_bytes"] / 1e6,
        "threads": runs[-1]["threads"],
    }


def measure(quick: bool) -> dict[str, Any]:
    """Prints two tables a transport and returns them."""
    told: dict[str, Any] = {}
    for transport in ("tcp", "shm"):
        print(f"\ngrowth, {transport}: for each slice of 4 KiB, at the writer")
        print(f"{'':26}" + "".join(f"{head:>10}" for head in HEADS))
        rows = []
        for peers in PEERS[:3] if quick else PEERS:
            rows.append({"peers": peers, "slices": DEALT} | _measured(peers, transport, [DEALT])[0])
            _show(f"{peers} peer{'s' if peers > 1 else ''}, {DEALT:,} slices", rows[-1])
        counts = list(QUEUED[:2] if quick else QUEUED)
        for count, row in zip(counts, _measured(1, transport, counts), strict=True):
            rows.append({"peers": 1, "slices": count} | row)
            _show(f"1 peer, {count:,} slices", row)
        told[transport] = rows
    return told


def _measured(peers: int, transport: str, counts: list[int]) -> list[dict[str, float]]:
    progress.tell(f"growth over {transport}: {peers} peers")
    targets, source = _pair(peers, transport)
    try:
        return [_row(source, count) for count in counts]
    finally:
        source.close()
        targets.close()
        progress.tell("")


def _show(title: str, row: dict[str, float]) -> None:
    costs = f"{row['wall_us']:10.1f}{row['cpu_us']:10.1f}{row['submit_us']:10.1f}{row['queued_bytes']:10.0f}"
    print(
        f"  {title:24}{costs}{row['resident_mb']:10.0f}{row['resident_later_mb']:10.0f}{row['threads']:10.0f}",
        flush=True,
    )
