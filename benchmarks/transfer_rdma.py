"""rdma beside ib_write_bw and ib_read_bw moving as many bytes in operations of the same size.

    python -m benchmarks.transfer_rdma [--quick] [--json FILE] [--near mlx5_0 --far mlx5_1]

Runs where there are RDMA devices; where there are none, in the guest with Soft-RoCE (`make rdma-guest`): one CPU moves
every byte there, in the kernel, so times are to be compared and bandwidth means nothing; perftest's polling takes
part of that CPU. kvmesh uses other addresses for every operation, perftest the same buffer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.gil import watch
from benchmarks.peers.link import PeerMissing, Worker
from benchmarks.peers.perftest import Perftest
from benchmarks.transfer_contest import LATENCY_SIZES, Contender, Result, compete, latencies, row_title, size, span

SIZES = ((4096, 4 << 10), (512, 64 << 10), (32, 1 << 20), (4, 8 << 20))
QUICK_SIZES = ((1024, 4 << 10), (256, 64 << 10))
MODULE = "benchmarks.peers.ours"
DEVICES = Path("/sys/class/infiniband")
GUEST_LIMIT_S = 900.0


def start_ours(near: str, far: str, nbytes: int) -> Contender:
    target, source = Worker(MODULE), Worker(MODULE)
    try:
        told = target.call("target", nbytes=nbytes, options={"transports": ["rdma"], "nics": [far]})
        source.call("source", nbytes=nbytes, told=told, options={"transports": ["rdma"], "nics": [near]})
    except PeerMissing:
        source.close()
        target.close()
        raise
    return Contender("kvmesh", target, source)


def contest(ours: Contender, perftests: Sequence[Perftest], quick: bool, rounds: int) -> list[Any]:
    """Against perftest polling; reads against perftest waiting for events too, the faster one of the two."""
    print(f"\n{'':22}{'MB/s':>10}{'':10}{'ops/s':>10}{'':10}{'ms':>10}{'':10}{'× perf-':>10}")
    print(" " * 22 + f"{'perftest':>10}{'kvmesh':>10}" * 3 + f"{'test time':>10}")
    kept = []

    def keep(row: Result) -> None:
        kept.append(row.plain())
        best = row.best([title for title in row.turns if title != ours.title])
        titles = (best, ours.title)
        cells = [f"{row.rate(t) * 1e3:10.0f}" for t in titles]
        cells += [f"{row.count / row.wall(t):10,.0f}" for t in titles]
        cells += [f"{row.wall(t) * 1e3:10.0f}" for t in titles]
        slower = 1 / row.times(ours.title, best)
        mark = "  (-e)" if best.endswith("-e") else ""
        print(f"{row.op:6}{row_title(row.count, row.length):16}{''.join(cells)}{slower:10.2f}{mark}", flush=True)

    for op, rivals in (("write", perftests[:1]), ("read", perftests)):
        compete("rdma", [*rivals, ours], QUICK_SIZES if quick else SIZES, rounds, keep, (op,), (1,))
    return kept


def one_at_a_time(ours: Contender, perftest: Perftest, quick: bool, rounds: int) -> list[Any]:
    rows = latencies("rdma latency", [ours], rounds)
    print("\nlatency of one operation, µs: perftest's mean (one outstanding, polling), kvmesh p50 (p99)")
    for row in rows:
        times = (256 << 10 if quick else 1 << 20) // row["length"] * 64 + 64  # enough to last beside two starts
        times = min(times, 256 if quick else 4096)
        mean = perftest.latency(row["op"], row["length"], times)
        row[perftest.title] = {"mean_us": round(mean * 1e6, 1)}
        mine = row[ours.title]
        print(
            f"  {row['op']:6}{size(row['length']):9}{mean * 1e6:10.0f}{mine['p50_us']:10.0f} ({mine['p99_us']:.0f})",
            flush=True,
        )
    return rows


def costs(ours: Contender, quick: bool) -> dict[str, Any]:
    """What a work request costs where, and who holds the GIL meanwhile."""
    told: dict[str, Any] = {"gil": {}}
    print("\nshare of the time in which the GIL is held while rows are written: initiator, target")
    for count, length in QUICK_SIZES if quick else SIZES:
        try:
            shares = watch(ours.source, ours.target, "write", count, length, 1.0 if quick else 4.0)
        except PeerMissing as err:
            print(f"  {err}")
            break
        told["gil"][row_title(count, length)] = [round(share, 4) for share in shares]
        print(f"  {row_title(count, length):16}{shares[0]:8.1%}{shares[1]:8.1%}", flush=True)
    ours.source.call("watch_rdma")
    for count, length in [*(QUICK_SIZES if quick else SIZES), (1, 4 << 10), (8, 4 << 10), (32, 4 << 10)]:
        for _ in range(3 if count > 100 else 20):
            ours.source.call("run", op="write", count=count, length=length, threads=1)
    told |= ours.source.call("rdma_costs")
    print("\nµs for each work request of a write: written (Python), posted (GIL released)")
    for chain, (written, posted, times) in told["chains"].items():
        print(f"  chains of {chain:<6}{written:10.2f}{posted:10.2f}   ({times} chains)")
    print(f"  empty poll {told['empty_poll_us']}, other polls {told['poll_us']}", flush=True)
    return told


def here(quick: bool, rounds: int, near: str, far: str) -> dict[str, Any]:
    sizes = QUICK_SIZES if quick else SIZES
    perftests = [Perftest(near, far, sleeps=sleeps) for sleeps in (False, True)]
    ours = start_ours(near, far, max(span(sizes), max(LATENCY_SIZES)))
    try:
        return {
            "devices": [near, far],
            "rows": contest(ours, perftests, quick, rounds),
            "latency": one_at_a_time(ours, perftests[0], quick, rounds),
            "costs": costs(ours, quick),
        }
    finally:
        ours.close()


def in_guest(quick: bool, rounds: int) -> dict[str, Any]:
    """The same within the guest. PeerMissing says why there is none."""
    from tests.support.rdma.guest import GuestUnavailable, run_in_guest

    words = [sys.executable, "-m", "benchmarks.transfer_rdma", "--rounds", str(rounds)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rdma.json")
        try:
            done = run_in_guest(
                [*words, "--json", str(out), *(["--quick"] if quick else [])],
                timeout_s=GUEST_LIMIT_S,
                rails=1,
                out_dir=Path(folder),
                echo=True,
            )
        except GuestUnavailable as err:
            raise PeerMissing(str(err)) from err
        if done.rc or not out.exists():
            raise PeerMissing(f"in the guest: exit status {done.rc}")
        told: dict[str, Any] = json.loads(out.read_text())
        return told | {"guest": True}


def devices() -> tuple[str, str] | None:
    """The guest's own pair, or the first two that there are (one is its own peer)."""
    found = sorted(os.listdir(DEVICES)) if DEVICES.is_dir() else []
    if "rxa0" in found and "rxb0" in found:
        return "rxa0", "rxb0"
    return (found[0], found[-1]) if found else None


def measure(quick: bool, rounds: int) -> dict[str, Any]:
    """Prints the tables, or why there are none."""
    pair = devices()
    try:
        return in_guest(quick, rounds) if pair is None else here(quick, rounds, *pair)
    except PeerMissing as err:
        print(f"without rdma: {err}")
        return {"missing": str(err)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--near", help="device of the side that asks (default: the first one found)")
    parser.add_argument("--far", help="device of the other side (default: the last one found)")
    parser.add_argument("--rounds", type=int, help="that count, for each row (default 5; 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="small rows, few rounds")
    parser.add_argument("--json", type=Path, help="write every turn there")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 5)
    if bool(options.near) != bool(options.far):
        parser.error("--near and --far go together")
    told = here(options.quick, rounds, options.near, options.far) if options.near else measure(options.quick, rounds)
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    if "missing" in told:
        sys.exit(1)


if __name__ == "__main__":
    main()
