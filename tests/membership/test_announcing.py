"""What a node store holds reaches a master that forgets, wants snapshots, fails, and is not there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from kvmesh.errors import InvalidRequest, Unavailable, UnknownInstance
from kvmesh.kvcache.announce import Announcement, Announcer
from kvmesh.kvcache.keys import split
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.membership import announcing
from kvmesh.membership.announcing import Announcing
from kvmesh.rpc.leader_client import LeaderTracker
from kvmesh.rpc.pb import common_pb2
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.rpc.pb import store_pb2_grpc as pb_grpc
from kvmesh.rpc.server import Server
from tests.support.nodes import keys_of, until


class Master(pb_grpc.StoreMasterServicer):
    """Says what it is told to, and keeps what it believes."""

    def __init__(self) -> None:
        self.heard: list[pb.Announcement] = []
        self.refused: list[pb.Announcement] = []
        # For the next calls: "unknown", "unavailable", "refused", "deaf" (heard, answer lost), "want".
        self.faults: list[str] = []
        self.refuse_tier: int | None = None
        self.blocks: set[bytes] = set()
        self.parts: set[bytes] = set()
        self.idle_ms = self.gap_ms = 0
        self.times: list[float] = []  # of what was heard

    async def Announce(self, request: pb.AnnounceRequest, context: Any) -> pb.AnnounceResponse:  # noqa: N802
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "unknown":
            self.blocks.clear()
            raise UnknownInstance("who are you?")
        if fault == "refused" or request.announcement.tier == self.refuse_tier:
            self.refused.append(request.announcement)
            raise InvalidRequest.of("announcement.seq", request.announcement.seq, "not this one")
        if fault == "unavailable":
            raise Unavailable("not now")
        word = request.announcement
        self.heard.append(word)
        self.times.append(time.monotonic())
        if fault == "want":
            return pb.AnnounceResponse(want_snapshot=True, idle_ms=self.idle_ms, gap_ms=self.gap_ms)
        if word.snapshot:
            self.parts = (set() if word.part == 0 else self.parts) | set(split(word.sealed))
            if not word.more:
                self.blocks = self.parts
        else:
            self.blocks = (self.blocks - set(split(word.removed))) | set(split(word.sealed))
        if fault == "deaf":
            raise Unavailable("the answer was lost")
        return pb.AnnounceResponse(seq=word.seq, idle_ms=self.idle_ms, gap_ms=self.gap_ms)


class Teller:
    def __init__(self, address: str, max_keys: int) -> None:
        self.store = NodeStore(64)
        self.rejoins = 0
        self.is_joined = True
        announcer = Announcer("s", 7, self.store, max_keys=max_keys)
        self.announcing = Announcing(announcer, LeaderTracker(address), 0.005, lambda: self.is_joined, self.rejoin)

    def rejoin(self) -> None:
        self.rejoins += 1

    def seal(self, *names: object) -> None:
        for key in keys_of(*names):
            self.store.begin([key])
            self.store.seal(key)


@asynccontextmanager
async def told(max_keys: int = 65_536) -> AsyncIterator[tuple[Teller, Master]]:
    master, server = Master(), Server("127.0.0.1", 0)
    pb_grpc.add_StoreMasterServicer_to_server(master, server.grpc)
    teller = Teller(f"127.0.0.1:{await server.start()}", max_keys)
    task = asyncio.create_task(teller.announcing.run())
    try:
        yield teller, master
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)


async def test_changes_arrive_and_an_empty_word_now_and_then() -> None:
    async with told() as (teller, master):
        teller.seal(1, 2)
        await until(lambda: master.blocks == set(keys_of(1, 2)))
        teller.store.drop_all()
        teller.seal(3)
        await until(lambda: master.blocks == set(keys_of(3)))
        last = master.heard[-1].seq
        assert [(w.store_id, w.incarnation) for w in master.heard] == [("s", 7)] * len(master.heard)
        await until(lambda: master.heard[-1].seq == last and not (master.heard[-1].sealed or master.heard[-1].removed))


async def test_a_master_that_wants_a_snapshot_gets_it_in_parts() -> None:
    async with told(max_keys=3) as (teller, master):
        master.faults = ["want"]
        teller.seal(*range(8))
        await until(lambda: len(master.blocks) == 8)
        parts = [w for w in master.heard if w.snapshot]
        assert [(w.part, w.more) for w in parts] == [(0, True), (1, True), (2, False)]
        assert len({w.seq for w in parts}) == 1


async def test_whatever_fails_the_truth_arrives() -> None:
    async with told() as (teller, master):
        for n, fault in enumerate(["unavailable", "deaf", "unknown", "unavailable", "want", "deaf", "unknown"]):
            master.faults.append(fault)
            teller.seal(("block", n))
            await until(lambda: not master.faults)
            await until(lambda: master.blocks == set(teller.store.keys()))
        assert teller.rejoins == 2


async def test_the_master_says_how_often_it_wants_to_hear() -> None:
    """A gap after each word of a busy store, none within a snapshot or after a quiet time; empty words when it says."""
    async with told(max_keys=3) as (teller, master):
        master.idle_ms, master.gap_ms = 60_000, 250
        for n in range(4):
            teller.seal(n)
            await until(lambda: master.blocks == set(teller.store.keys()))
        gaps = [later - sooner for sooner, later in pairwise(master.times)]
        assert min(gaps) >= 0.24, "the answer is heard a little after the word"
        master.faults = ["want"]
        teller.seal(*range(4, 12))
        await until(lambda: master.blocks == set(keys_of(*range(12))))
        parts = [at for word, at in zip(master.heard, master.times, strict=True) if word.snapshot]
        assert len(parts) == 4 and parts[-1] - parts[0] < 0.24
        assert not [word for word in master.heard if not (word.sealed or word.removed)]


async def test_a_store_with_nothing_to_tell_says_so_as_often_as_the_master_wants() -> None:
    async with told() as (teller, master):
        teller.seal(1)
        master.idle_ms = 40
        await until(lambda: len(master.heard) >= 8)
        assert all(word.seq == master.heard[-1].seq for word in master.heard[-5:])
        assert master.times[-1] - master.times[-5] >= 4 * 0.035


async def test_what_is_refused_is_not_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcing, "REFUSED_S", 0.02)
    async with told() as (teller, master):
        teller.seal(1)
        await until(lambda: len(master.blocks) == 1)
        master.faults = ["refused"] * 3
        teller.seal(2)
        await until(lambda: not master.faults)
        teller.store.drop_all()
        teller.seal(3)
        await until(lambda: master.blocks == set(keys_of(3)))
        assert len({word.seq for word in master.refused}) == 3
        assert [word.snapshot for word in master.refused] == [False, True, True]


async def test_nothing_is_said_before_the_node_has_joined() -> None:
    async with told() as (teller, master):
        teller.is_joined = False
        heard = len(master.heard)
        teller.seal(1)
        await asyncio.sleep(0.1)
        assert len(master.heard) <= heard + 1  # one may have been on its way
        assert not master.blocks
        teller.is_joined = True
        await until(lambda: master.blocks == set(keys_of(1)))


def test_the_wire_form_keeps_everything() -> None:
    from kvmesh.membership.announcing import to_proto

    keys = tuple(keys_of(1, 2))
    word = to_proto(Announcement("s", 5, 9, keys, keys[:1], True, 3, True))
    assert (word.store_id, word.incarnation, word.seq, word.part) == ("s", 5, 9, 3)
    assert (word.sealed, word.removed, word.snapshot, word.more) == (b"".join(keys), keys[0], True, True)
    assert word.tier == common_pb2.TIER_DRAM
    word = to_proto(Announcement("s#object", 5, 9))
    assert (word.store_id, word.tier) == ("s", common_pb2.TIER_OBJECT)


async def test_every_tier_has_numbers_snapshots_and_failures_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SSD's snapshot goes on for parts, and is refused; meanwhile what DRAM has to say is heard."""
    monkeypatch.setattr(announcing, "REFUSED_S", 60.0)
    async with told(max_keys=3) as (teller, master):
        teller.seal(1)
        ssd = NodeStore(64)
        for key in keys_of(*range(20, 40)):
            ssd.begin([key])
            ssd.seal(key)
        await until(lambda: len(master.blocks) == 1)
        teller.announcing.add(Announcer("s#ssd", 7, ssd, max_keys=3))
        teller.seal(2)
        await until(lambda: sum(word.tier == common_pb2.TIER_SSD for word in master.heard) >= 7)
        of = {tier: [w for w in master.heard if w.tier == tier] for tier in (common_pb2.TIER_DRAM, common_pb2.TIER_SSD)}
        assert {word.store_id for word in master.heard} == {"s"}
        assert {key for word in of[common_pb2.TIER_SSD] for key in split(word.sealed)} == set(ssd.keys())
        for words in of.values():
            seqs = [word.seq for word in words if word.sealed or word.removed]
            assert seqs == list(range(1, len(seqs) + 1))
        master.refuse_tier = common_pb2.TIER_SSD
        ssd.drop_all()
        await until(lambda: bool(master.refused))
        teller.seal(3)
        await until(lambda: any(set(keys_of(3)) == set(split(word.sealed)) for word in master.heard))
        assert len(master.refused) == 1


async def test_a_master_that_has_forgotten_the_node_hears_all_its_tiers_anew() -> None:
    async with told() as (teller, master):
        ssd = NodeStore(64)
        ssd.begin(keys_of(7))
        ssd.seal(keys_of(7)[0])
        teller.announcing.add(Announcer("s#ssd", 7, ssd))
        teller.seal(1)
        await until(lambda: {word.tier for word in master.heard if word.sealed} == {1, 2})
        master.heard.clear()
        master.faults = ["unknown"]
        await until(lambda: {word.tier for word in master.heard if word.snapshot} == {1, 2})
        assert teller.rejoins == 1
