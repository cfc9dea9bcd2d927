"""The Transfer Engine beside what others do with the same bytes on this machine.

    python -m benchmarks.transfer [--only tcp,shm,latency,growth,tls] [--quick] [--json FILE]

tcp      against plain sockets over loopback (1, 2 and 4 streams; the best of them counts) and against Mooncake's
         Transfer Engine over TCP, from PyPI in an environment of its own, made on first use
shm      against memcpy within one process between two memfd maps, by as many threads as submit
latency  one operation of 4 KiB, 64 KiB and 1 MiB at a time
tls      tcp with mutual TLS against plain tcp: GB/s, CPU s/GB, and what times as long a turn takes, with an interval
growth   1 to 256 peers, 100,000 queued slices: memory and time for each slice
rdma     python -m benchmarks.transfer_rdma, where there is RDMA

Contenders are pairs of processes that take turns within each round; every row's bytes are verified before and after.
GB/s are of 10^9 bytes, CPU is that of both processes together. Compare within a run only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import transfer_growth
from benchmarks.peers import mooncake_env
from benchmarks.peers.link import PeerMissing, Worker
from benchmarks.transfer_contest import (
    QUICK_SIZES,
    SIZES,
    Contender,
    Result,
    compete,
    latencies,
    row_title,
    size,
    span,
)
from benchmarks.turns import interval, ratios
from benchmarks.turns import over as over_ratio
from kvmesh.rpc.certificates import make_certificates
from kvmesh.transfer.config import tls_fields

PARTS = ("tcp", "shm", "latency", "growth", "tls")
STREAMS = (1, 2, 4)
SOCKETS = [f"sockets ×{n}" for n in STREAMS]


def start_sockets(nbytes: int) -> list[Contender]:
    """One pair of processes under three names."""
    first = Contender.start(SOCKETS[0], "benchmarks.peers.raw", nbytes)
    first.threads = STREAMS[0]
    return [first] + [
        Contender(title, first.target, first.source, n) for title, n in zip(SOCKETS[1:], STREAMS[1:], strict=True)
    ]


def start_mooncake(nbytes: int) -> list[Contender]:
    """None, and a line that says why, where it cannot be had."""
    try:
        if not mooncake_env.made():
            print("Mooncake: making its environment, once", flush=True)
        python, env, version = mooncake_env.ready()
        found = Contender.start("Mooncake", "benchmarks.peers.mooncake", nbytes, python, env)
    except PeerMissing as err:
        print(f"without Mooncake: {err}")
        return []
    print(f"Mooncake: {mooncake_env.PACKAGE} {version}")
    return [found]


def start_ours(name: str, nbytes: int) -> Contender:
    return Contender.start(f"kvmesh {name}", "benchmarks.peers.ours", nbytes, options={"transports": [name]})


def start_memcpy(nbytes: int) -> Contender:
    worker = Worker("benchmarks.peers.copying")
    worker.call("source", nbytes=nbytes)
    return Contender("memcpy", worker, worker, alone=True)


def close(contenders: Sequence[Contender]) -> None:
    for contender in contenders:
        if contender.threads in (0, 1):
            contender.close()


def printer(ours: str, others: Sequence[Sequence[str]]) -> Callable[[Result], None]:
    """Prints one line a row. `others`: titles of which the fastest counts."""
    heads = [names[0].split(" ×")[0] for names in others]
    width = 9
    columns = "".join(f"{head:>{width}}" for head in [*heads, "kvmesh"])
    ratios = "".join(f"{'× ' + head:>{width + 2}}" for head in heads)
    print(f"{'':22}{'GB/s':>{width}}{'':{width * len(heads) + (width + 2) * len(heads)}}{'CPU s per GB':>14}")
    print(f"{'':14}{'threads':>8}{columns}{ratios}  {columns}")
    shown = ""

    def show(row: Result) -> None:
        nonlocal shown
        if row.op != shown:
            shown = row.op
            print(row.op)
        best = [row.best(names) for names in others]
        titles = [*best, ours]
        rates = "".join(f"{row.rate(title):{width}.2f}" for title in titles)
        times = "".join(f"{row.times(ours, title):{width + 2}.2f}" for title in best)
        cpu = "".join(f"{row.cpu_per_gb(title):{width}.2f}" for title in titles)
        print(f"  {row_title(row.count, row.length):12}{row.threads:8}{rates}{times}  {cpu}", flush=True)

    return show


def contest(name: str, rivals: Sequence[Contender], others: Sequence[Sequence[str]], quick: bool, rounds: int) -> Any:
    sizes = QUICK_SIZES if quick else SIZES
    ours = start_ours(name, span(sizes))
    contenders = [*rivals, ours]
    try:
        print(f"\n{name}")
        show, kept = printer(ours.title, others), []

        def keep(row: Result) -> None:
            kept.append(row.plain())
            show(row)

        compete(name, contenders, sizes, rounds, keep)
    finally:
        close(contenders)
    return kept


def tcp(quick: bool, rounds: int) -> Any:
    nbytes = span(QUICK_SIZES if quick else SIZES)
    rivals = start_sockets(nbytes)
    mooncake = start_mooncake(nbytes)
    others = [SOCKETS] + [[c.title] for c in mooncake]
    return contest("tcp", [*rivals, *mooncake], others, quick, rounds)


def shm(quick: bool, rounds: int) -> Any:
    return contest("shm", [start_memcpy(span(QUICK_SIZES if quick else SIZES))], [["memcpy"]], quick, rounds)


def tls(quick: bool, rounds: int) -> Any:
    """Plain tcp and TLS take turns within each round; ratios are taken round by round."""
    nbytes, kept = span(QUICK_SIZES if quick else SIZES), []
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-tls-") as folder:
        files: dict[str, Any] = tls_fields(make_certificates(Path(folder)).files, network="untrusted")
        plain = start_ours("tcp", nbytes)
        over = Contender.start("kvmesh tls", "benchmarks.peers.ours", nbytes, options={"transports": ["tcp"], **files})
        print(f"\ntls\n{'':20}threads{'GB/s plain':>12}{'TLS':>8}{'CPU s/GB plain':>16}{'TLS':>8}  TLS: times as long")

        def show(row: Result) -> None:
            walls = [[wall for wall, _ in row.turns[one.title]] for one in (over, plain)]
            low, high = interval(ratios(*walls))
            told = row.plain()
            told["tls_over_plain"] = {
                "median": round(over_ratio(*walls), 3),
                "interval": [round(low, 3), round(high, 3)],
            }
            kept.append(told)
            rates = f"{row.rate(plain.title):12.2f}{row.rate(over.title):8.2f}"
            cpu = f"{row.cpu_per_gb(plain.title):16.2f}{row.cpu_per_gb(over.title):8.2f}"
            times = f"{over_ratio(*walls):.2f} ({low:.2f} to {high:.2f})"
            print(f"{row.op:6}{row_title(row.count, row.length):14}{row.threads:7}{rates}{cpu}  {times}", flush=True)

        try:
            compete("tls", [plain, over], QUICK_SIZES if quick else SIZES, rounds, show)
        finally:
            close([plain, over])
    return kept


def latency(quick: bool, rounds: int) -> Any:
    nbytes = span(())
    contenders = start_sockets(nbytes)[:1] + start_mooncake(nbytes)
    contenders += [start_ours("tcp", nbytes), start_ours("shm", nbytes)]
    try:
        told = latencies("latency", contenders, rounds)
    finally:
        close(contenders)
    titles = [c.title for c in contenders]
    print("\nlatency of one operation, µs: p50 (p99)")
    print(f"{'':15}" + "".join(f"{title:>21}" for title in titles))
    for row in told:
        cells = [f"{row[t]['p50_us']:.0f} ({row[t]['p99_us']:.0f})" for t in titles]
        print(f"{row['op']:6}{size(row['length']):9}" + "".join(f"{cell:>21}" for cell in cells))
    return told


def growth(quick: bool, rounds: int) -> Any:
    return transfer_growth.measure(quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--rounds", type=int, help="that count, for each row (default 11; 5 with --quick)")
    parser.add_argument("--quick", action="store_true", help="small rows, few rounds: about a minute")
    parser.add_argument("--json", type=Path, help="write every turn there")
    options = parser.parse_args()
    parts = options.only.split(",")
    for part in parts:
        if part not in PARTS:
            parser.error(f"--only {part!r}: not one of {', '.join(PARTS)}")
    rounds = options.rounds or (5 if options.quick else 11)
    runs: dict[str, Callable[[bool, int], Any]] = {
        "tcp": tcp,
        "shm": shm,
        "latency": latency,
        "growth": growth,
        "tls": tls,
    }
    told: dict[str, Any] = {
        "arguments": {"only": parts, "rounds": rounds, "quick": options.quick},
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()},
    }
    for part in parts:
        try:
            told[part] = runs[part](options.quick, rounds)
        except PeerMissing as err:
            raise SystemExit(f"{part}: {err}") from err
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
        print(f"\nwritten: {options.json}")


if __name__ == "__main__":
    main()
