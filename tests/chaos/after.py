"""What is left when the storm is over: `survey` waits for all to settle, then asks everybody; `farewell` drains a node
and kills it."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

import grpc.aio

from kvmesh.kvcache.keys import split
from kvmesh.rpc.pb import store_pb2, store_pb2_grpc
from tests.chaos.checker import Rules, check
from tests.chaos.draining import call_off, drained
from tests.chaos.harness import NODES, Cluster, Striker
from tests.chaos.history import Aftermath, History, LimitAfter, NodeAfter
from tests.chaos.limits import LAST, LimitWork
from tests.chaos.probe import CALL_S, Probe, by_hex, leaks_of
from tests.chaos.violation import Violation
from tests.chaos.workload import LARGE, SMALL, Driver, get, put

SETTLE_S = 30.0
EMPTY_S = 20.0  # leases end, pulls end, tombstones arrive
AGREE_S = 15.0
FIND = 4096
DRAIN_S = 75.0  # what could not be pulled is tried again after up to 30 s
FAREWELL = "farewell"
ALONE = 30  # blocks of which there is one copy, pinned hard
CROWD = 80  # blocks that press on the memory


async def survey(
    cluster: Cluster, probe: Probe, used: Collection[bytes], limited: LimitWork, clock_s: float
) -> Aftermath:
    """`used`: every key that there was. AssertionError: no master leads, or a node is not known to it, after
    SETTLE_S; or the limit is not taken."""
    await cluster.settled(SETTLE_S)
    limit = await _limit(cluster, probe, limited)
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
    return Aftermath(clock_s, nodes, tuple(await cluster.leaders()), mapped, limit)


async def farewell(
    cluster: Cluster, striker: Striker, driver: Driver, history: History, spared: str, rules: Rules
) -> list[Violation]:
    """When all has settled, the node that was given most of what is pinned hard is drained and killed, the others are
    filled with what is not pinned; then all of that is read, and nothing is an excuse any more. AssertionError as
    `survey`."""
    for _ in range(ALONE):
        key, data = await driver.grant(CALL_S), os.urandom(SMALL[2])
        await put(history, driver, FAREWELL, key, data, True, CALL_S)
    pinned = Counter(op.holder for op in history.ops if op.pinned and op.outcome == "ok")
    leaver = max((name for name in NODES if name != spared), key=lambda name: pinned[name])
    kept = {op.key for op in history.ops if op.pinned and op.holder == leaver}
    began = history.clock()
    if not await drained(cluster.store, leaver, DRAIN_S):
        return [Violation("after", "", f"{leaver} was not drained within {DRAIN_S} s")]
    await striker.lose(leaver, began)
    await call_off(cluster.store, leaver, DRAIN_S)
    await cluster.settled(SETTLE_S)
    for _ in range(CROWD):
        key, data = await driver.grant(CALL_S), os.urandom(LARGE[-1])
        await put(history, driver, FAREWELL, key, data, False, CALL_S)
    for key in sorted(kept):
        await get(history, driver, FAREWELL, [key], CALL_S)
    found = check(history, None, replace(rules, recovery_s=0.0))
    return [one for one in found if one.key in kept and any(op.client == FAREWELL for op in one.ops)]


async def _limit(cluster: Cluster, probe: Probe, limited: LimitWork) -> LimitAfter:
    """Set for the last time, and given time; then lifted."""
    tag = bytes.fromhex(limited.tag)

    async def held() -> dict[str, int]:
        return {name: await probe.in_memory(_channel(cluster, name), tag) for name in NODES}

    await limited.settle(LAST)
    for _ in range(2 * LAST):
        await limited.put()
    deadline = time.monotonic() + AGREE_S
    while sum((here := await held()).values()) > LAST + len(NODES) and time.monotonic() < deadline:
        await limited.put()
    told = await limited.told()
    await limited.settle(0)
    lifted, deadline = 0, time.monotonic() + AGREE_S
    while (lifted := sum((await held()).values())) <= LAST + len(NODES) and time.monotonic() < deadline:
        await limited.put()
    await limited.settle(LAST)
    return LimitAfter(limited.tag, LAST, told, here, lifted)


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
