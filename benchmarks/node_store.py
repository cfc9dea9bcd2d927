"""What the node store's metadata costs: time of a block's operations and memory for each block, at three sizes.

    python -m benchmarks.node_store [--policy lru,lfu,length] [--blocks 10000,100000,1000000] [--json FILE]

Each (policy, blocks) runs in a process of its own: a full store, then rounds of prompts of 128 blocks, medians of which
are told in microseconds a block:

    touch    a cached prompt was used
    hold     hold and release of a cached prompt
    lease    lease and unlease of one
    write    begin and seal of a new prompt, in place of the blocks that the policy evicts
    pin      soft pin and unpin of a cached prompt
    dict     get of each key in a dict of as many keys: what no store can beat

bytes/block: growth of the process's resident memory while the store is filled, over its blocks: keys, tables, order.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.progress import tell
from kvmesh.kvcache.eviction import POLICIES
from kvmesh.kvcache.node_store import NodeStore

PROMPT = 128
ROUNDS = 101
KINDS = ("touch", "hold", "lease", "write", "pin", "dict")


def filled(blocks: int, policy: str) -> tuple[NodeStore, list[list[bytes]]]:
    """A full store, and its prompts."""
    rng = random.Random(1)
    store = NodeStore(blocks, high_percent=100, low_percent=100, eviction=policy)
    prompts = []
    for _ in range(blocks // PROMPT):
        keys = new_prompt(rng)
        write(store, keys)
        prompts.append(keys)
    return store, prompts


def new_prompt(rng: random.Random) -> list[bytes]:
    packed = rng.randbytes(16 * PROMPT)
    return [packed[i : i + 16] for i in range(0, len(packed), 16)]


def write(store: NodeStore, keys: Sequence[bytes]) -> None:
    for key, extent in zip(keys, store.begin(keys), strict=True):
        if extent is not None:
            store.seal(key)


def measure(blocks: int, policy: str) -> dict[str, Any]:
    """Microseconds a block for each kind, bytes a block."""
    gc.collect()
    before = psutil.Process().memory_info().rss
    store, prompts = filled(blocks, policy)
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    rng = random.Random(2)
    plain = dict.fromkeys(key for keys in prompts for key in keys)
    kinds: dict[str, Callable[[list[bytes]], object]] = {
        "touch": store.touch,
        "hold": lambda keys: store.release(store.hold(keys)),
        "lease": lambda keys: store.unlease(store.lease(keys, 10, now=0).lease_id),
        "pin": lambda keys: (store.pin(keys, 10, now=0), store.unpin(keys)),
        "dict": lambda keys: [plain.get(key) for key in keys],
        "write": lambda keys: write(store, keys),  # last: it evicts
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, operation in kinds.items():
        for _ in range(ROUNDS):
            keys = new_prompt(rng) if kind == "write" else rng.choice(prompts)
            start = time.perf_counter_ns()
            operation(keys)
            times[kind].append((time.perf_counter_ns() - start) / 1000 / PROMPT)
    medians = {kind: round(statistics.median(times[kind]), 3) for kind in KINDS}
    return {"policy": policy, "blocks": store.total, "us_per_block": medians, "bytes_per_block": round(grown / blocks)}


def listed(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=",".join(POLICIES))
    parser.add_argument("--blocks", default="10000,100000,1000000")
    parser.add_argument("--json", default="", metavar="FILE")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(int(args.blocks), args.policy)))
        return
    found = []
    print(f"{'policy':8}{'blocks':>10}  " + "".join(f"{kind:>8}" for kind in KINDS) + "   us/block   bytes/block")
    for policy in listed(args.policy):
        for blocks in listed(args.blocks):
            tell(f"{policy}, {blocks} blocks ...")
            command = [sys.executable, "-m", "benchmarks.node_store", "--one", "--policy", policy, "--blocks", blocks]
            one = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            found.append(one)
            tell("")
            times = "".join(f"{one['us_per_block'][kind]:8.2f}" for kind in KINDS)
            print(f"{policy:8}{one['blocks']:10,}  {times}   {'':8}   {one['bytes_per_block']:8,}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
