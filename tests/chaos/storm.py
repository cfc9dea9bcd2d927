"""One storm from its start to its verdict."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import grpc.aio

from kvmesh.errors import KvmeshError
from tests.chaos import nemesis
from tests.chaos.after import FAREWELL, farewell, survey
from tests.chaos.checker import Rules, check, explain
from tests.chaos.drivers import NearDriver, drivers
from tests.chaos.harness import MASTERS, NEAR, NEAR_HOST, NODES, Striker, cluster
from tests.chaos.history import History
from tests.chaos.limits import LimitWork
from tests.chaos.names import KEYS, NameWork
from tests.chaos.network import Namespaces
from tests.chaos.probe import Probe
from tests.chaos.violation import Violation
from tests.chaos.workload import OP_S, Workload

FAR_CLIENTS = 3
NEAR_CLIENTS = 2
CALM_S = 1.5  # before the first blow and after the last
RULES = Rules(recovery_s=8.0, grace_s=4.0)


async def storm(seed: int, duration_s: float, folder: Path) -> str:
    """ "" when all went as it must; else what did not, with the histories of the keys in question."""
    history = History()
    async with cluster(folder, seed) as made:
        links = isinstance(made.net, Namespaces)
        schedule = nemesis.make(seed, duration_s, MASTERS, NODES, links=links, near=NEAR)
        probe = Probe(made.net.me)
        try:
            async with drivers(FAR_CLIENTS, NEAR_CLIENTS, made.store, made.net.me, NEAR_HOST) as clients:
                *several, limited = clients
                work = Workload(history, several, seed)
                keys = [*work.keys[:KEYS], work.keys[-1]]
                names = NameWork(history, several, keys, seed, work.stop)
                limits = LimitWork(history, limited, seed, work.stop)
                near = [client for client in clients if isinstance(client, NearDriver)]
                readers = [work.read(client, i) for i, client in enumerate(near)]
                engines = [client.engine for client in clients if not isinstance(client, NearDriver)]
                striker = Striker(made, history, schedule, engines)
                working = asyncio.create_task(_together(work.run(), names.run(), limits.run(), *readers))
                try:
                    await asyncio.sleep(CALM_S)
                    await _either(asyncio.create_task(striker.run()), working)
                    await asyncio.sleep(CALM_S)
                finally:
                    work.stop.set()
                await asyncio.wait_for(working, OP_S + RULES.grace_s)
                try:
                    used = {bytes.fromhex(op.key) for op in history.ops if op.kind in ("put", "get", "remove")}
                    after = await survey(made, probe, used, limits, history.clock())
                    found = check(history, after, RULES)
                    found += await farewell(made, striker, several[0], history, schedule.spared, RULES)
                except (AssertionError, grpc.aio.AioRpcError, KvmeshError):
                    told = traceback.format_exc(limit=-3)
                    found = [*check(history, None, RULES), Violation("after", "", f"the survey failed: {told}")]
                near_hits = [client.client.counters()["near_hits"] for client in near]
            warm = made.came_back()
        finally:
            probe.close()
    _tell(history, schedule, warm)
    print(f"  read without a lease: {near_hits}")
    if not found:
        return ""
    return explain(found, history, seed)


async def _together(*works: Coroutine[Any, Any, None]) -> None:
    async with asyncio.TaskGroup() as group:
        for one in works:
            group.create_task(one)


async def _either(striking: asyncio.Task[None], working: asyncio.Task[None]) -> None:
    """To the end of the storm; at once when the work ends before it, which only a bug makes it do."""
    await asyncio.wait({striking, working}, return_when=asyncio.FIRST_COMPLETED)
    if not striking.done():
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)
        await working
    await striking


def _tell(history: History, schedule: nemesis.Schedule, warm: dict[str, int]) -> None:
    ends = Counter(f"{op.kind} {op.outcome}" for op in history.ops)
    errors = Counter(f"{op.kind} {op.error.partition(':')[0]}" for op in history.ops if op.error)
    served = Counter(f"{op.holder}/{op.tier}" for op in history.ops if op.kind == "get" and op.outcome == "ok")
    told: dict[str, object] = {
        f"seed {schedule.seed}": f"{len(history.ops)} operations, {schedule.spared} spared",
        "ends": dict(sorted(ends.items())),
        "errors": dict(sorted(errors.items())),
        "served by": dict(sorted(served.items())),
        "of a drained node": dict(Counter(f"{op.kind} {op.outcome}" for op in history.ops if op.client == FAREWELL)),
        "came back with their nodes": warm,
        "blows": [f"{one.what} {one.target}" for one in history.disturbances],
    }
    for name, value in told.items():
        print(f"  {name}: {value}")
