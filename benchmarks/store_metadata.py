"""What a store master does without data: look-ups, announcements, growth."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from typing import Any

import psutil

from benchmarks import progress
from benchmarks.peers.link import PeerMissing, Worker
from benchmarks.store_contest import free_port, mooncake_master, service
from kvmesh.storeclient import ClientConfig, SyncStoreClient

BATCHES = (1, 64, 512)
KNOWN = 10_000
SIZES = (10_000, 100_000, 1_000_000)
NAMES = (0, 10_000, 100_000, 1_000_000)
NAME_PUTS = 200
LEASE = ("--lease-ms", "3600000")  # the nodes of these benchmarks send no heartbeats


def calls(batch: int) -> int:
    return max(8, 400 // batch)


def against_mooncake(rounds: int) -> Any:
    """Keys per second, by operation and batch."""
    with contextlib.ExitStack() as stack:
        ours = _talker(stack, stack.enter_context(service("store", *LEASE)))
        ours.call("know", blocks=KNOWN)
        theirs = None
        try:
            master, python, env = stack.enter_context(mooncake_master())
            node = Worker("benchmarks.peers.store_mooncake", python=python, env=env)
            stack.callback(node.close)
            node.call("node", master=master, port=free_port(), nbytes=256 << 20)
            theirs = Worker("benchmarks.peers.store_mooncake", python=python, env=env)
            stack.callback(theirs.close)
            theirs.call("client", master=master, port=free_port(), nbytes=1 << 20)
            theirs.call("announce", prefix="known", count=KNOWN, batch=512)
        except PeerMissing as err:
            print(f"without Mooncake: {err}")
        print("\nmetadata: thousand keys per second, one call at a time")
        print(f"{'':24}{'kvmesh':>10}{'Mooncake':>10}{'ratio':>8}")
        told = []
        for op, batch in itertools.product(("look up", "announce"), BATCHES):
            row = _row(op, batch, rounds, ours, theirs)
            told.append(row)
            theirs_rate = f"{row['mooncake'] / 1e3:10.1f}{row['ratio']:8.2f}" if theirs else f"{'-':>10}{'-':>8}"
            grpc = f"   {row['grpc'] / 1e3:.1f} over gRPC alone: {row['over_grpc']:.2f} x" if "grpc" in row else ""
            print(f"{op:10}{batch:5} a call{'':3}{row['kvmesh'] / 1e3:10.1f}{theirs_rate}{grpc}", flush=True)
        return told


def _row(op: str, batch: int, rounds: int, ours: Worker, theirs: Worker | None) -> dict[str, Any]:
    times = calls(batch)
    mine: list[float] = []
    grpc: list[float] = []
    other: list[float] = []
    for round_ in range(rounds + 1):
        if op == "look up":
            spent = ours.call("look", batch=batch, times=times)
            slow = ours.call("look", batch=batch, times=times, grpc=True)
            its = theirs.call("look", prefix="known", known=KNOWN, batch=batch, times=times) if theirs else None
        else:
            spent, slow = ours.call("announce", count=batch * times, batch=batch), 0.0
            name = f"new-{batch}-{round_}"
            its = theirs.call("announce", prefix=name, count=batch * times, batch=batch) if theirs else None
        if round_:
            mine.append(batch * times / spent)
            grpc += [batch * times / slow] if slow else []
            other += [batch * times / its] if its else []
    row: dict[str, Any] = {"op": op, "batch": batch, "kvmesh": round(statistics.median(mine))}
    if grpc:
        row["grpc"] = round(statistics.median(grpc))
        row["over_grpc"] = round(statistics.median(a / b for a, b in zip(mine, grpc, strict=True)), 3)
    if other:
        row["mooncake"] = round(statistics.median(other))
        row["ratio"] = round(statistics.median(a / b for a, b in zip(mine, other, strict=True)), 3)
    return row


def growth(rounds: int) -> Any:
    """Of our master alone: what a call and a block cost, by the number of blocks."""
    print("\ngrowth: our master; µs a call of 512 keys, bytes of its memory and of its map for each block")
    print(f"{'blocks':>12}{'look up':>10}{'announce':>10}{'memory':>10}{'map':>8}")
    told = []
    for blocks in SIZES:
        progress.tell(f"{blocks:,} blocks")
        with contextlib.ExitStack() as stack:
            address = stack.enter_context(service("store", *LEASE))
            ours = _talker(stack, address)
            process = _listening(address)
            empty = process.memory_info().rss
            ours.call("know", blocks=blocks)
            grown = process.memory_info().rss - empty
            known, map_bytes = ours.call("map_bytes")
            looks = [ours.call("look", batch=512, times=8) / 8 * 1e6 for _ in range(rounds)]
            says = [ours.call("announce", count=512 * 8, batch=512) / 8 * 1e6 for _ in range(rounds)]
        progress.tell("")
        row = {
            "blocks": known,
            "look_up_us": round(statistics.median(looks), 1),
            "announce_us": round(statistics.median(says), 1),
            "rss_bytes_per_block": round(grown / known, 1),
            "map_bytes_per_block": round(map_bytes / known, 1),
        }
        told.append(row)
        print(
            f"{row['blocks']:12,}{row['look_up_us']:10.0f}{row['announce_us']:10.0f}"
            f"{row['rss_bytes_per_block']:10.0f}{row['map_bytes_per_block']:8.0f}",
            flush=True,
        )
    return told


def names(rounds: int) -> Any:
    """Of our master and one pool node: binds alone, and puts of 4 KiB with a name, by the number of names."""
    print("\nnames: one client, one call at a time")
    print(f"{'names':>12}{'binds/s':>10}{'named puts/s':>14}{'puts/s':>10}")
    told = []
    for count in NAMES:
        progress.tell(f"{count:,} names")
        with contextlib.ExitStack() as stack:
            address = stack.enter_context(service("store", *LEASE, "--max-names", str(2 * NAMES[-1])))
            stack.enter_context(service("pool", "--store", address, "--memory-mb", "256"))
            ours = _talker(stack, address)
            ours.call("bind", prefix="known", count=count, batch=4096)
            client = stack.enter_context(SyncStoreClient(ClientConfig(store=address, keys="granted", staging_mb=16)))
            data = bytes(4096)
            client.put(data)  # connections are made
            binds, named, plain = [], [], []
            for round_ in range(rounds):
                binds.append(NAME_PUTS / ours.call("bind", prefix=f"new-{round_}", count=NAME_PUTS, batch=1))
                named.append(_puts(client, data, f"put-{round_}"))
                plain.append(_puts(client, data, ""))
        progress.tell("")
        row = {
            "names": count,
            "binds_per_s": round(statistics.median(binds)),
            "named_puts_per_s": round(statistics.median(named)),
            "puts_per_s": round(statistics.median(plain)),
        }
        told.append(row)
        print(
            f"{count:12,}{row['binds_per_s']:10,}{row['named_puts_per_s']:14,}{row['puts_per_s']:10,}",
            flush=True,
        )
    return told


def _puts(client: SyncStoreClient, data: bytes, prefix: str) -> float:
    """A second; with names that begin so, if any."""
    start = time.perf_counter()
    for i in range(NAME_PUTS):
        client.put(data, name=f"{prefix}-{i}" if prefix else None)
    return NAME_PUTS / (time.perf_counter() - start)


def _talker(stack: contextlib.ExitStack, master: str) -> Worker:
    worker = Worker("benchmarks.peers.store_metadata")
    stack.callback(worker.close)
    worker.call("talker", master=master, name="bench-0")
    return worker


def _listening(address: str) -> psutil.Process:
    """The process behind a port of this machine: one of ours."""
    port = int(address.rpartition(":")[2])
    for child in psutil.Process().children(recursive=True):
        if any(c.laddr and c.laddr.port == port and c.status == "LISTEN" for c in child.net_connections()):
            return child
    raise PeerMissing(f"nobody listens at {address}")
