"""Before a node leaves: what nobody else holds is moved to others, for as long as there is time.

The store master finds and moves it (services/store/policy/drains.py); the node asks again and again how far that is.
The request names the node's life, so a master forgets it with that life: a node that is killed meanwhile comes back as
one that does not drain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvmesh.errors import KvmeshError
from kvmesh.rpc.leader_client import LeaderClient, LeaderTracker
from kvmesh.rpc.pb import common_pb2, store_pb2

log = logging.getLogger(__name__)

SERVICE = store_pb2.DESCRIPTOR.services_by_name["StoreMaster"]
ASK_S = 0.1
CALL_S = 2.0
STUCK_S = 3.0  # nobody has room: waiting longer than a master's second try would be waiting for a miracle


@dataclass(frozen=True, slots=True)
class Evacuated:
    """What came of an evacuation. `left` counts the blocks that still lie only here; `why` is "" when there are
    none."""

    moved: int
    left: int
    why: str


async def evacuate(
    ask: Callable[[float], Awaitable[store_pb2.DrainResponse]], within_s: float, clock: Callable[[], float]
) -> Evacuated:
    """Ask until all is moved, nothing goes on any more, or `within_s` are over. `ask(timeout_s)` asks the master
    once."""
    end, stuck_at, last = clock() + within_s, float("inf"), store_pb2.DrainResponse(why_not="no master answered")
    moved = -1
    while (left_s := end - clock()) > 0:
        try:
            last = await ask(min(CALL_S, left_s))
        except KvmeshError as err:
            last = store_pb2.DrainResponse(moved=last.moved, sole_blocks=last.sole_blocks, why_not=err.message)
        if last.done:
            return Evacuated(last.moved, 0, "")
        if last.moved != moved or not last.why_not:
            moved, stuck_at = last.moved, clock() + STUCK_S
        elif clock() >= stuck_at:
            return Evacuated(last.moved, last.sole_blocks, last.why_not)
        await asyncio.sleep(min(ASK_S, max(0.0, end - clock())))
    return Evacuated(last.moved, last.sole_blocks, last.why_not or f"not done within {within_s:g} s")


async def evacuate_node(ref: common_pb2.InstanceRef, masters: str, within_s: float) -> Evacuated:
    """Evacuate the node `ref` as `evacuate` does, and log what came of it. Masters' failures are never raised."""
    master = LeaderClient(SERVICE, LeaderTracker(masters))
    request = store_pb2.DrainRequest(instance_id=ref.instance_id, incarnation=ref.incarnation)

    async def once(timeout_s: float) -> store_pb2.DrainResponse:
        answer: store_pb2.DrainResponse = await master.call("Drain", request, timeout_s)
        return answer

    try:
        done = await evacuate(once, within_s, asyncio.get_running_loop().time)
    finally:
        await master.close()
    if done.why:
        log.warning(
            "%d blocks moved away, up to %d that only this node holds are lost: %s", done.moved, done.left, done.why
        )
    else:
        log.info("%d blocks moved away; others hold all the rest", done.moved)
    return done
