"""One storm from its start to its verdict."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from pathlib import Path

import grpc.aio

from tests.chaos import nemesis
from tests.chaos.after import survey
from tests.chaos.checker import Rules, Violation, check, explain
from tests.chaos.drivers import drivers
from tests.chaos.harness import MASTERS, NODES, Striker, cluster
from tests.chaos.history import History
from tests.chaos.network import Namespaces
from tests.chaos.probe import Probe
from tests.chaos.workload import OP_S, Workload

CLIENTS = 3
CALM_S = 1.5  # before the first blow and after the last
RULES = Rules(recovery_s=8.0, grace_s=4.0)


async def storm(seed: int, duration_s: float, folder: Path) -> str:
    """ "" when all went as it must; else what did not, with the histories of the keys in question."""
    history = History()
    async with cluster(folder) as made:
        schedule = nemesis.make(seed, duration_s, MASTERS, NODES, links=isinstance(made.net, Namespaces))
        probe = Probe(made.net.me)
        try:
            async with drivers(CLIENTS, made.store, made.net.me) as clients:
                work = Workload(history, clients, seed)
                striker = Striker(made, history, schedule, [client.engine for client in clients])
                working = asyncio.create_task(work.run())
                try:
                    await asyncio.sleep(CALM_S)
                    await _either(asyncio.create_task(striker.run()), working)
                    await asyncio.sleep(CALM_S)
                finally:
                    work.stop.set()
                await asyncio.wait_for(working, OP_S + RULES.grace_s)
            try:
                used = {bytes.fromhex(op.key) for op in history.ops}
                found = check(history, await survey(made, probe, used, history.clock()), RULES)
            except (AssertionError, grpc.aio.AioRpcError):
                told = traceback.format_exc(limit=-3)
                found = [*check(history, None, RULES), Violation("after", "", f"the survey failed: {told}")]
        finally:
            probe.close()
    _tell(history, schedule)
    if not found:
        return ""
    return explain(found, history, seed)


async def _either(striking: asyncio.Task[None], working: asyncio.Task[None]) -> None:
    """To the end of the storm; at once when the work ends before it, which only a bug makes it do."""
    await asyncio.wait({striking, working}, return_when=asyncio.FIRST_COMPLETED)
    if not striking.done():
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)
        await working
    await striking


def _tell(history: History, schedule: nemesis.Schedule) -> None:
    ends = Counter(f"{op.kind} {op.outcome}" for op in history.ops)
    errors = Counter(f"{op.kind} {op.error.partition(':')[0]}" for op in history.ops if op.error)
    served = Counter(f"{op.holder}/{op.tier}" for op in history.ops if op.kind == "get" and op.outcome == "ok")
    told: dict[str, object] = {
        f"seed {schedule.seed}": f"{len(history.ops)} operations, {schedule.spared} spared",
        "ends": dict(sorted(ends.items())),
        "errors": dict(sorted(errors.items())),
        "served by": dict(sorted(served.items())),
        "blows": [f"{one.what} {one.target}" for one in history.disturbances],
    }
    for name, value in told.items():
        print(f"  {name}: {value}")
