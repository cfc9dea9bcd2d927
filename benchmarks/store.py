"""The Store's client and its master beside what others do with the same values on this machine.

    python -m benchmarks.store [--only data,clients,metadata,growth,names,gather] [--quick] [--json FILE]

data      put_from and get_into of 64 KiB, 1 MiB and 16 MiB, one value a call and many: kvmesh with its pool node on the
          same machine ("shm") and with tcp forced, as a remote node is reached ("tcp"); Mooncake's store over TCP (from
          PyPI, in an environment of its own; its memory in another process); Redis over loopback; memcpy
clients   the same with 1 to 8 clients at once, each a process
metadata  look-ups and announcements of 1, 64 and 512 keys a call against mooncake_master's (batch_is_exist; begin and
          end of puts without data): keys per second of one client that waits for each answer
growth    the same of our master at 10^4, 10^5 and 10^6 blocks, and bytes per block
names     binds, and puts with a name, per second at 0 to 10^6 names
gather    small blocks that lie side by side: one READ each, or one for all and a copy (storeclient/reading/leased.py)

Contenders take turns within each round; medians over the rounds, ratios are medians of the rounds' ratios. Random bytes
are put, got and compared before each row. GB/s are of 10^9 bytes. Compare within a run only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import store_gather, store_metadata
from benchmarks.peers.link import PeerMissing
from benchmarks.store_contest import OPS, Contest, Row, contenders

PARTS = ("data", "clients", "metadata", "growth", "names", "gather")
KIB, MIB = 1 << 10, 1 << 20
ROWS = [Row(n, batch, 1) for n in (64 * KIB, MIB) for batch in (1, 64)] + [Row(16 * MIB, 1, 1), Row(16 * MIB, 16, 1)]
PAIRS = (
    ("kvmesh shm", "memcpy"),
    ("kvmesh shm", "Mooncake"),
    ("kvmesh tcp", "Mooncake"),
    ("kvmesh shm", "Redis"),
)
CLIENT_ROWS = [Row(MIB, 16, clients) for clients in (1, 2, 4, 8)]


def data(rounds: int) -> Any:
    return _rows("data", ROWS, rounds)


def clients(rounds: int) -> Any:
    return _rows("clients", CLIENT_ROWS, rounds)


def _rows(what: str, rows: list[Row], rounds: int) -> Any:
    with contenders(rows) as found:
        titles = [one.title for one in found]
        print(f"\n{what}: GB/s, and how many times as fast kvmesh is")
        heads = "".join(f"{title:>14}" for title in titles)
        print(f"{'':22}{heads}   {'shm/memcpy':>10} {'shm/Mooncake':>13} {'tcp/Mooncake':>13} {'shm/Redis':>10}")
        told = []
        for row in rows:
            result = Contest(row, found).run(rounds)
            for op in OPS:
                here = [title for title in titles if (op, title) in result.turns]
                rates = "".join(f"{result.rate(op, t):14.2f}" if t in here else f"{'-':>14}" for t in titles)
                times = [f"{result.times(op, *pair):.2f}" if set(pair) <= set(here) else "-" for pair in PAIRS]
                cells = f"{times[0]:>10} {times[1]:>13} {times[2]:>13} {times[3]:>10}"
                print(f"{op:4}{row.title:18}{rates}   {cells}", flush=True)
            told.append(result.plain())
        return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--rounds", type=int, help="that count, for each row (default 11; 5 with --quick)")
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--json", type=Path, help="write every turn there")
    options = parser.parse_args()
    parts = options.only.split(",")
    for part in parts:
        if part not in PARTS:
            parser.error(f"--only {part!r}: not one of {', '.join(PARTS)}")
    rounds = options.rounds or (5 if options.quick else 11)
    runs: dict[str, Callable[[int], Any]] = {
        "data": data,
        "clients": clients,
        "metadata": store_metadata.against_mooncake,
        "growth": store_metadata.growth,
        "names": store_metadata.names,
        "gather": store_gather.measure,
    }
    told: dict[str, Any] = {
        "arguments": {"only": parts, "rounds": rounds},
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()},
    }
    for part in parts:
        try:
            told[part] = runs[part](rounds)
        except PeerMissing as err:
            raise SystemExit(f"{part}: {err}") from err
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
        print(f"\nwritten: {options.json}")


if __name__ == "__main__":
    main()
