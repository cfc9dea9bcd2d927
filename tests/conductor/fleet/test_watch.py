"""The store master's stream, followed: a script plays the master."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvmesh.kvcache.announce import Announcement
from kvmesh.rpc import channels
from kvmesh.rpc.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, store_pb2, store_pb2_grpc
from kvmesh.rpc.server import Server
from kvmesh.services.conductor import main
from kvmesh.services.conductor.domain import (
    Blocks,
    Event,
    Member,
    MemberGone,
    MemberJoined,
    MembersReset,
    Ref,
    StoreLost,
)
from kvmesh.services.conductor.fleet.watch import StoreWatch
from tests.conductor.test_service import TIMEOUT, config, ref, registering
from tests.support.services import running, until


class Script(store_pb2_grpc.StoreMasterServicer):
    """A store master that says what it is told, one stream after another."""

    def __init__(self, *streams: list[Any]) -> None:
        self.streams = list(streams)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]  # noqa: N802
        for message in self.streams.pop(0) if self.streams else []:
            if message is None:
                await asyncio.Event().wait()
            yield message

    async def Join(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    Beat = Leave = ListMembers = Announce = Lookup = GetStatus = Join


KEYS = bytes(range(32))


def said(seq: int, *events: tuple[int, int, str], snapshot: bool = False, more: bool = False, master: int = 3) -> Any:
    """An event of change 0: the store of that name has sealed KEYS."""
    made = []
    for at, change, name in events:
        if change:
            member = store_pb2.Member(instance=ref(name), node_id="n")
            made.append(store_pb2.StoreEvent(seq=at, member=store_pb2.MemberEvent(change=change, member=member)))  # type: ignore[arg-type]
        else:
            blocks = store_pb2.Announcement(store_id=name, incarnation=1, seq=1, sealed=KEYS)
            made.append(store_pb2.StoreEvent(seq=at, blocks=blocks))
    return store_pb2.StoreEvents(master_incarnation=master, snapshot=snapshot, more=more, seq=seq, events=made)


def member(name: str) -> Member:
    return Member(Ref(name, "127.0.0.1:9", 1), "n")


JOINED, LEFT, DIED = store_pb2.MEMBER_CHANGE_JOINED, store_pb2.MEMBER_CHANGE_LEFT, store_pb2.MEMBER_CHANGE_DIED
SNAPSHOT = said(5, (5, JOINED, "a"), snapshot=True)
RESET = MembersReset(3, (member("a"),))
SEALED = Blocks(Announcement("a", 1, 1, (KEYS[:16], KEYS[16:])))
SSD = Blocks(Announcement("a#ssd", 1, 4, (KEYS[:16],)))
TIERS = store_pb2.StoreEvents(
    master_incarnation=3,
    seq=5,
    snapshot=True,
    events=[
        *SNAPSHOT.events,
        *(
            store_pb2.StoreEvent(
                seq=5,
                blocks=store_pb2.Announcement(
                    store_id="a",
                    incarnation=1,
                    seq=4,
                    sealed=KEYS[:16],
                    tier=tier,  # type: ignore[arg-type]
                ),
            )
            for tier in (common_pb2.TIER_SSD, 17)
        ),
    ],
)
TORN = store_pb2.StoreEvents(
    master_incarnation=3,
    seq=6,
    events=[store_pb2.StoreEvent(seq=6, blocks=store_pb2.Announcement(store_id="a", seq=1, sealed=b"torn"))],
)


@pytest.mark.parametrize(
    ("stream", "heard"),
    [
        (
            [SNAPSHOT, said(7, (6, LEFT, "a"), (7, JOINED, "b")), said(8, (8, DIED, "b"))],
            [RESET, MemberGone(("a", 1), "left"), MemberJoined(member("b")), MemberGone(("b", 1), "died"), StoreLost()],
        ),
        (
            [
                said(5, (5, JOINED, "a"), snapshot=True, more=True),
                said(5, (5, 0, "a"), snapshot=True),
                said(6, (6, 0, "a")),
            ],
            [SEALED, RESET, SEALED, StoreLost()],
        ),
        ([SNAPSHOT, said(7, (7, LEFT, "a"))], [RESET, StoreLost()]),
        ([SNAPSHOT, said(6)], [RESET, StoreLost()]),
        ([SNAPSHOT, said(6, (6, LEFT, "a"), master=4)], [RESET, StoreLost()]),
        ([SNAPSHOT, TORN], [RESET, StoreLost()]),
        ([said(6, (6, LEFT, "a"))], [StoreLost()]),
        ([said(5, (5, 0, "a"), snapshot=True, more=True), said(6, (6, LEFT, "a"))], [SEALED, StoreLost()]),
        ([TIERS, said(6, (6, LEFT, "a"))], [SSD, RESET, MemberGone(("a", 1), "left"), StoreLost()]),
        ([SNAPSHOT, None], [RESET, StoreLost()]),
        ([], [StoreLost()]),
    ],
    ids=[
        "in order",
        "blocks, snapshot in parts",
        "gap in events",
        "gap in seq",
        "another master",
        "half a key",
        "no snapshot",
        "half a snapshot",
        "a tier, and one that is not known here",
        "silence",
        "nothing",
    ],
)
async def test_the_watch_takes_no_gap_and_starts_over(stream: list[Any], heard: list[Event]) -> None:
    server = Server("127.0.0.1", 0)
    store_pb2_grpc.add_StoreMasterServicer_to_server(Script(stream, [SNAPSHOT, None]), server.grpc)
    await server.start()
    events: list[Event] = []
    stop = asyncio.Event()
    watch = StoreWatch(server.address, events.append, silence_s=0.5, rng=random.Random(0))
    task = asyncio.create_task(watch.run(stop))

    async def started_over() -> bool:
        return len(events) >= len(heard) + 1

    await until(started_over)
    assert events[: len(heard) + 1] == [*heard, RESET]
    stop.set()
    await asyncio.wait_for(task, TIMEOUT)
    await server.stop(0)


async def test_an_announcement_that_does_not_follow_starts_the_stream_over() -> None:
    skipped = said(6, (6, 0, "a"))
    skipped.events[0].blocks.seq = 9
    whole = said(6, (6, JOINED, "a"), (6, 0, "a"), snapshot=True)
    server = Server("127.0.0.1", 0)
    store_pb2_grpc.add_StoreMasterServicer_to_server(Script([SNAPSHOT, skipped, None], [whole, None]), server.grpc)
    await server.start()
    async with running(main.run, config(server.address)) as conductor, channels.connect(conductor.address) as channel:
        stub: Any = conductor_pb2_grpc.ConductorStub(channel)
        request = registering("p0")
        request.instance.instance_id = "a"
        await stub.Register(request, timeout=TIMEOUT)

        async def indexed() -> bool:
            (instance,) = (await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=TIMEOUT)).instances
            return bool(instance.indexed_blocks == 2)

        await until(indexed)
    await server.stop(0)
