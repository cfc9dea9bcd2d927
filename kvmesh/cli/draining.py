"""How far the drain of an instance is, as `kvmesh cordon --drain` shows it until there is nothing left to wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvmesh.cli.console import console
from kvmesh.cli.status import count
from kvmesh.errors import KvmeshError, Unavailable, UnknownInstance
from kvmesh.membership.places import instance_of

LOOK_S = 0.5  # between two looks
ASK_S = 3.0  # a store master has so long to answer
LINE_S = 5.0  # between two lines that differ, where there is no terminal


class DrainEnd(Enum):
    """Why there is nothing more to wait for."""

    DRAINED = "drained"
    NO_TAKER = "no taker"
    TAKEN_BACK = "taken back"
    GONE = "gone"


@dataclass(frozen=True)
class DrainLook:
    """One look at an instance that drains. `blocks`: those that no other node holds, at most; None: no store master
    has said. `takers`: pool nodes that could have them; None: likewise. `minded`: whether every conductor that answers
    drains it; None: none answers."""

    requests: int = 0
    blocks: int | None = None
    moved: int = 0
    why_not: str = ""
    drained: bool = False  # as the store master says, of blocks
    takers: int | None = None
    minded: bool | None = True
    gone: bool = False

    @property
    def left(self) -> str:
        """What is still there."""
        blocks = "blocks not counted yet" if self.blocks is None else f"{count(self.blocks, 'block')} that no other has"
        return f"{count(self.requests, 'request')} and {blocks}"

    def __str__(self) -> str:
        moved = f", {self.moved:,} moved" if self.moved else ""
        return f"{self.left}{moved}{f': {self.why_not}' if self.why_not else ''}"


def end_of(look: DrainLook, began: bool) -> DrainEnd | None:
    """None: the drain goes on. `began`: all conductors have minded it before; at first some have yet to hear of it."""
    if look.gone:
        return DrainEnd.GONE
    if look.minded is False and began:
        return DrainEnd.TAKEN_BACK
    if look.requests or not look.minded:
        return None
    if look.drained:
        return DrainEnd.DRAINED
    return DrainEnd.NO_TAKER if look.takers == 0 and look.blocks and look.why_not else None


async def watch(
    instance: str,
    look: Callable[[], Any],
    tell: Callable[[str], None],
    timeout_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], Any] = asyncio.sleep,
) -> str:
    """Looks (`await look()` gives a DrainLook) until the drain is over; returns the last line of it. `tell` hears how
    far it is.

    Raises Unavailable: it is over and something would be lost, or it was not over in time."""
    until, before, began = clock() + timeout_s, DrainLook(), False
    while True:
        seen: DrainLook = await look()
        end = end_of(seen, began)
        if end is DrainEnd.DRAINED:
            return f"drained: {instance} holds nothing that is not elsewhere; stop it"
        if end is not None:
            raise Unavailable(_lost(instance, end, before if end is DrainEnd.GONE else seen))
        if clock() + LOOK_S > until:
            text = f"{instance} is not drained after {timeout_s:g} s: {seen}"
            raise Unavailable(f"{text}; the drain goes on, `kvmesh uncordon {instance}` ends it")
        tell(f"{instance}: {seen}")
        before, began = seen, began or bool(seen.minded)
        await pause(LOOK_S)


def _lost(instance: str, end: DrainEnd, look: DrainLook) -> str:
    if end is DrainEnd.TAKEN_BACK:
        return f"{instance} is not drained: somebody has taken the drain back while {look.left} were there"
    if end is DrainEnd.GONE:
        return f"{instance} has left the mesh before it was drained: it had {look.left}"
    blocks = count(look.blocks or 0, "block")
    return (
        f"{instance} has no request left, but {blocks} are nowhere else and there is no pool node to take them: stop "
        f"it and they are computed again when somebody asks for them; `kvmesh uncordon {instance}` gives it work again"
    )


@contextmanager
def shown() -> Any:
    """A function that shows a line: over the one before where standard error is a terminal, elsewhere when it differs
    and LINE_S have passed."""
    err = console(stderr=True)
    if err.is_terminal:
        with err.status("looking ...") as status:
            yield lambda line: status.update(_plain(line))
        return
    last, at = "", float("-inf")

    def tell(line: str) -> None:
        nonlocal last, at
        if line != last and time.monotonic() - at >= LINE_S:
            last, at = line, time.monotonic()
            err.print(line, markup=False, soft_wrap=True)

    yield tell


def _plain(line: str) -> Any:
    from rich.text import Text

    return Text(line)


# ── looking ───────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def looking(instance: str, conductors: Sequence[str], masters: str) -> AsyncIterator[Callable[[], Any]]:
    """A function that looks at the instance: at all conductors, and at the store masters, which the conductors name
    where `masters` is ""."""
    from kvmesh.rpc.leader_client import LeaderClient, LeaderTracker
    from kvmesh.rpc.pb import store_pb2

    service = store_pb2.DESCRIPTOR.services_by_name["StoreMaster"]

    callers: list[LeaderClient] = []

    async def look() -> DrainLook:
        from kvmesh.cli.collect import _pools, ask_conductor

        told = await asyncio.gather(*map(ask_conductor, conductors))
        answered = [one for one in told if "error" not in one]
        seen = [i for one in answered for i in one["instances"] if instance_of(_name(i)) == instance_of(instance)]
        if answered and not seen:
            return DrainLook(gone=True)
        places = {name: [i for i in seen if _name(i) == name] for name in dict.fromkeys(map(_name, seen))}
        pools = await asyncio.gather(*(_pools(same[0]) for same in places.values()))
        requests = sum(requests_of(same, own) for same, own in zip(places.values(), pools, strict=True))
        if not seen:
            return DrainLook(why_not="no conductor answers", minded=None)
        minded = all(one["cordon"] == "CORDON_STATE_DRAINING" for one in seen)
        if not minded:  # asking the master how far it is would begin it again
            return DrainLook(requests, minded=False)
        if not callers:
            named = masters or ",".join(next((one["store_masters"] for one in answered if one["store_masters"]), []))
            if not named:
                return DrainLook(requests, why_not="no conductor knows a store master")
            callers.append(LeaderClient(service, LeaderTracker(named)))
        return together([await _blocks(callers[0], place) for place in places], requests)

    try:
        yield look
    finally:
        for caller in callers:
            await caller.close()


def requests_of(seen: Sequence[dict[str, Any]], pools: dict[str, Any]) -> int:
    """Requests that are there or on their way. `seen`: the instance as each conductor tells of it, which alone knows
    what it has placed there and what has not come yet; `pools`: as the instance tells itself."""
    loads = [one.get("load") or {} for one in seen]
    words = ("queued_requests", "running_requests", "waiting_requests")
    there = max((sum(load.get(word, 0) for word in words) for load in loads), default=0)
    return int(max(there, sum(one.get("pending_requests", 0) for one in seen), pools.get("handoffs", 0)))


def together(looks: Sequence[DrainLook], requests: int) -> DrainLook:
    """Returns what was seen of an instance with so many requests, of whose places' blocks these looks are."""
    if any(look.gone for look in looks):
        return DrainLook(requests, gone=True)
    counted = [look.blocks for look in looks if look.blocks is not None]
    return DrainLook(
        requests,
        sum(counted) if len(counted) == len(looks) else None,
        sum(look.moved for look in looks),
        "; ".join(dict.fromkeys(look.why_not for look in looks if look.why_not)),
        all(look.drained for look in looks),
        looks[0].takers,
    )


def _name(seen: dict[str, Any]) -> str:
    return str(seen["instance"]["instance_id"])


async def _blocks(caller: Any, instance: str) -> DrainLook:
    from kvmesh.rpc.pb import common_pb2, store_pb2

    drain = store_pb2.DrainRequest(instance_id=instance)
    try:
        told = await caller.call("Drain", drain, ASK_S)
        members = (await caller.call("ListMembers", store_pb2.ListMembersRequest(), ASK_S)).members
    except UnknownInstance:
        return DrainLook(gone=True)
    except KvmeshError as error:
        return DrainLook(why_not=f"no store master tells of its blocks ({error.message})")
    takers = sum(m.role == common_pb2.ROLE_POOL and m.instance.instance_id != instance for m in members)
    return DrainLook(0, told.sole_blocks, told.moved, told.why_not, told.done, takers)
