"""What is left when the storm is over: `survey` waits for all to settle, then asks everybody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable

import grpc.aio

from kvmesh.kvcache.keys import split
from kvmesh.rpc.pb import store_pb2, store_pb2_grpc
from tests.chaos.harness import NODES, Cluster
from tests.chaos.history import Aftermath, NodeAfter
from tests.chaos.probe import CALL_S, Probe, by_hex, leaks_of

SETTLE_S = 30.0
EMPTY_S = 20.0  # leases end, pulls end, tombstones arrive
AGREE_S = 15.0
FIND = 4096


async def survey(cluster: Cluster, probe: Probe, used: Collection[bytes], clock_s: float) -> Aftermath:
    """`used`: every key that there was. AssertionError: no master leads, or a node is not known to it, after
    SETTLE_S."""
    await cluster.settled(SETTLE_S)
    unusable = {name: await probe.works(_channel(cluster, name)) for name in NODES}
    leaks = {name: await _empty(cluster, probe, name) for name in NODES}
    deadline = time.monotonic() + AGREE_S
    while True:
        listed = {name: await probe.holds(_channel(cluster, name), used) for name in NODES}
        mapped = await _mapped(cluster, {*used, *(key for keys in listed.values() for key in keys)})
        same = all(mapped.get(name, frozenset()) == {key.hex() for key in listed[name]} for name in NODES)
        if same or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    nodes = {}
    for name in NODES:
        blocks = by_hex(await probe.read(_channel(cluster, name), listed[name]))
        keys = frozenset(key.hex() for key in listed[name])
        nodes[name] = NodeAfter(blocks, keys, leaks[name], unusable[name])
    return Aftermath(clock_s, nodes, tuple(await cluster.leaders()), mapped)


def _channel(cluster: Cluster, name: str) -> grpc.aio.Channel:
    return cluster.channel(cluster.nodes[name].address)


async def _empty(cluster: Cluster, probe: Probe, name: str) -> tuple[str, ...]:
    deadline = time.monotonic() + EMPTY_S
    while True:
        left = leaks_of(await probe.pools(_channel(cluster, name)))
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)


async def _mapped(cluster: Cluster, keys: Iterable[bytes]) -> dict[str, frozenset[str]]:
    """What the leader believes each node holds, of all keys that it or the caller knows."""
    (leader, *_) = await cluster.leaders() or [""]
    if not leader:
        return {}
    stub = store_pb2_grpc.StoreMasterStub(cluster.channel(cluster.masters[leader].address))
    asked, after = set(keys), b""
    while True:
        page = await stub.ListKeys(store_pb2.ListKeysRequest(after=after, limit=FIND), timeout=CALL_S)
        asked.update(split(page.keys))
        after = page.next
        if not after:
            break
    wanted, found = sorted(asked), {name: set[str]() for name in NODES}
    for at in range(0, len(wanted), FIND):
        some = wanted[at : at + FIND]
        answer = await stub.Find(store_pb2.FindRequest(keys=b"".join(some)), timeout=CALL_S)
        names = [one.member.instance.instance_id for one in answer.holders]
        for key, replicas in zip(some, answer.replicas, strict=True):
            for holder in replicas.holder:
                found.setdefault(names[holder], set()).add(key.hex())
    return {name: frozenset(held) for name, held in found.items()}
