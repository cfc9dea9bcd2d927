"""A process that writes into an SSD tier until it is killed, and says on stdout what was acknowledged.

    python -m tests.support.ssd_victim FOLDER SEED FIRST CAPACITY_BUCKETS DIRECT READ_PERCENT

A line for each: `P n` block n is stored, `A n` block n is about to be removed, `R n` that is acknowledged. Lines are
written whole, from whichever thread knows first. Blocks are numbered from FIRST on, each put once.
"""

from __future__ import annotations

import os
import random
import sys
from concurrent.futures import Future
from pathlib import Path

from kvmesh.tiers.ssd import SsdTier
from tests.support.ssd_blocks import BUCKET, WAIT_S, config, key, memory, payload

TOTAL = 20_000  # a victim lives for hundreds


def length(n: int) -> int:
    """Of block n's payload: one to some pages."""
    return 1 + n * 2654435761 % 30_000


def say(what: str, n: int) -> None:
    os.write(1, f"{what} {n}\n".encode())


def main(folder: str, seed: str, first: str, capacity: str, direct: str, read_percent: str) -> None:
    rng = random.Random(int(seed))
    again = 25 if int(read_percent) else 0
    made = config(Path(folder), capacity_bytes=int(capacity) * BUCKET, direct=direct, reinsert_percent=again)
    tier = SsdTier(made)
    n = int(first)

    def told(future: Future[bool], n: int) -> None:
        if future.result():
            say("P", n)

    while n < int(first) + TOTAL:
        batch = range(n, n + rng.randint(1, 12))
        n = batch.stop
        futures = tier.put_many([(key(m), payload(m, length(m))) for m in batch])
        for m, future in zip(batch, futures, strict=True):
            future.add_done_callback(lambda future, m=m: told(future, m))
        if rng.random() < 0.3:
            futures[-1].result(WAIT_S)
        old = rng.randrange(int(first), n)
        if rng.random() * 100 < int(read_percent):
            tier.get_into(key(old), memory(length(old)))
        if rng.random() < 0.1:
            say("A", old)
            if tier.remove([key(old)]).result(WAIT_S):
                say("R", old)


if __name__ == "__main__":
    main(*sys.argv[1:])
