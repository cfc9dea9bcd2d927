"""The SSD tier beside what it cannot beat: plain pwrite and pread of the same values on the same file system.

    python -m benchmarks.ssd [--folder DIR] [--quick] [--json benchmarks/results/ssd.json]

For each size of value, with O_DIRECT and through the page cache, contenders take turns within each round; medians of
GB/s and of CPU seconds a GB (of this process, all threads, user and system) are told, and ratios, which travel better.

    put          put_many of new blocks, --batch at a time, until all are acknowledged
    plain write  pwrite of each value into a new file with reserved space, one thread, then fdatasync
    in place     pwrite of each value over the old ones in one file, one thread: what no log can do
    get          get_many_into, --batch at a time, in random order; every block's checksum is verified
    get 1        get_into, one after the other
    get chain    as get, in the order of writing: neighbours are read in one call
    plain read   preadv of each value, in random order, as many threads as the tier has
    plain read 1 the same, one thread

Values lie in page-aligned memory, as in a host segment. Through the page cache what is read was written just now: that
is memory against memory. xxh3_64 of the same values is told once: it is the price of never serving a wrong byte.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvmesh.tiers.ssd import SsdConfig, SsdTier
from kvmesh.tiers.ssd.format import PAGE, checksum, pages

SIZES = (65_536, 1 << 20, 16 << 20)
THREADS = 4
Spent = tuple[float, float]  # wall and CPU seconds


class Plain:
    """One file with room for `count` values of `size` bytes."""

    def __init__(self, path: Path, size: int, count: int, *, direct: bool) -> None:
        self.step = pages(size)
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0))
        os.posix_fallocate(self.fd, 0, self.step * count)

    def write(self, values: Sequence[memoryview]) -> None:
        for at, value in enumerate(values):
            assert os.pwritev(self.fd, [value], at * self.step) == len(value)

    def read(self, order: Sequence[int], into: Sequence[memoryview]) -> None:
        for at in order:
            assert os.preadv(self.fd, [into[at]], at * self.step) == len(into[at])

    def sync(self) -> None:
        os.fdatasync(self.fd)

    def close(self) -> None:
        os.close(self.fd)
        self.path.unlink()


def views(count: int, size: int, rng: random.Random | None) -> list[memoryview]:
    """Page-aligned values; random bytes, or memory that has been touched."""
    room = memoryview(mmap.mmap(-1, count * pages(size)))
    for at in range(0, len(room), 1 << 20):
        part = room[at : at + (1 << 20)]
        part[:] = rng.randbytes(len(part)) if rng else bytes(len(part))
    return [room[at * pages(size) : at * pages(size) + size] for at in range(count)]


def timed(work: Callable[[], None]) -> Spent:
    cpu, began = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def measure(folder: Path, size: int, total: int, rounds: int, batch: int, direct: str) -> dict[str, Any]:
    """Every contender in turn, `rounds` times after one that is not counted."""
    rng = random.Random(size)
    count = max(2, total // size)
    values, into = views(count, size, rng), views(count, size, None)
    bucket = max(128 << 20, 4 * pages(size) + (1 << 20))
    made = SsdConfig(
        path=folder / "tier",
        capacity_bytes=max(6 * bucket, 4 * count * pages(size)),
        identity="benchmark",
        bucket_bytes=bucket,
        threads=THREADS,
        queue_ops=4096,
        queue_bytes=1 << 30,
        direct="on" if direct == "on" else "off",
        sketch_keys=1 << 14,
    )
    spent: dict[str, list[Spent]] = {}
    plain = Plain(folder / "plain", size, count, direct=direct == "on")
    with SsdTier(made) as tier, ThreadPoolExecutor(THREADS) as pool:
        for turn in range(rounds + 1):
            keys = [rng.randbytes(16) for _ in range(count)]
            order = rng.sample(range(count), count)

            def put(keys: list[bytes] = keys) -> None:
                for first in range(0, count, batch):
                    part = slice(first, first + batch)
                    futures = tier.put_many(list(zip(keys[part], values[part], strict=True)))
                    assert all(future.result() for future in futures)

            def get(keys: list[bytes] = keys, order: list[int] = order) -> None:
                for first in range(0, count, batch):
                    futures = tier.get_many_into([(keys[at], into[at]) for at in order[first : first + batch]])
                    assert all(future.result() for future in futures)

            def get_chain(keys: list[bytes] = keys) -> None:
                get(keys, list(range(count)))

            def get_one(keys: list[bytes] = keys, order: list[int] = order) -> None:
                for at in order:
                    assert tier.get_into(keys[at], into[at]).result()

            def write_new() -> None:
                new = Plain(folder / "new", size, count, direct=direct == "on")
                new.write(values)
                new.sync()
                new.close()

            def read_all(order: list[int] = order) -> None:
                parts = [order[first::THREADS] for first in range(THREADS)]
                list(pool.map(lambda part: plain.read(part, into), parts))

            contenders: list[tuple[str, Callable[[], None]]] = [
                ("in place", lambda: plain.write(values)),
                ("plain write", write_new),
                ("put", put),
                ("plain read", read_all),
                ("get", get),
                ("get chain", get_chain),
                ("plain read 1", lambda order=order: plain.read(order, into)),  # type: ignore[misc]
                ("get 1", get_one),
            ]
            for what, work in contenders:
                used = timed(work)
                if turn:
                    spent.setdefault(what, []).append(used)
            assert bytes(into[order[0]]) == bytes(values[order[0]])
            tier.flush().result()
        sums = [timed(lambda: [checksum(value) for value in values] and None) for _ in range(3)]
        assert not tier.stats().counts.corrupt and not tier.stats().counts.io_errors
    plain.close()
    shutil.rmtree(made.path)
    gigabytes = count * size / 1e9
    return {
        "size": size,
        "direct": direct,
        "batch": batch,
        "gb_per_s": {what: gigabytes / statistics.median(wall for wall, _ in some) for what, some in spent.items()},
        "cpu_s_per_gb": {what: statistics.median(cpu for _, cpu in some) / gigabytes for what, some in spent.items()},
        "xxh3_cpu_s_per_gb": min(cpu for _, cpu in sums) / gigabytes,
    }


PAIRS = [
    ("put", "plain write"),
    ("put", "in place"),
    ("get", "plain read"),
    ("get chain", "plain read"),
    ("get 1", "plain read 1"),
]


def show(result: dict[str, Any]) -> None:
    speed, cpu = result["gb_per_s"], result["cpu_s_per_gb"]
    for what, limit in PAIRS:
        print(
            f"{result['size'] // 1024:7} KiB  direct {result['direct']:3}  {what:9}"
            f"{speed[what]:6.2f} GB/s; {limit:12} {speed[limit]:6.2f} ({speed[what] / speed[limit]:5.2f})"
            f"{cpu[what]:9.3f} CPU s/GB beside {cpu[limit]:6.3f} (xxh3 {result['xxh3_cpu_s_per_gb']:.3f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="", help="on the disk to measure; default: a temporary one")
    parser.add_argument("--mib", type=int, default=256, help="of values, each round")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="seconds: a look that it runs")
    parser.add_argument("--json", default="", help="also write the results here")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.rounds = 32, 2
    results = []
    with tempfile.TemporaryDirectory(dir=args.folder or None, prefix="kvmesh-ssd-") as folder:
        for direct in ("on", "off"):
            for size in SIZES:
                results.append(measure(Path(folder), size, args.mib << 20, args.rounds, args.batch, direct))
                show(results[-1])
    if args.json:
        meta = {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": THREADS, "page": PAGE}
        told = {k: v for k, v in vars(args).items() if k not in ("json", "folder")}
        Path(args.json).write_text(json.dumps({**meta, "args": told, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
