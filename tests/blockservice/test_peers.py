"""Channels and segments of holders: kept while they are of use, let go afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvmesh.blockservice import peers as peers_module
from kvmesh.blockservice.peer_segments import PeerSegments
from kvmesh.blockservice.peers import PeerPool
from kvmesh.errors import TransferError
from kvmesh.ranks import protocol as m
from tests.blockservice.test_peer_segments import Ear, descriptor


@pytest.fixture
async def peers() -> AsyncIterator[PeerPool]:
    made = PeerPool(PeerSegments([Ear()]), ("shm", "tcp"))
    yield made
    await made.close()


def heard(peers: PeerPool) -> list[m.ToRank]:
    (ear,) = peers._segments._ranks
    assert isinstance(ear, Ear)
    return ear.heard


async def test_a_peer_is_kept_and_its_segments_with_it(peers: PeerPool) -> None:
    async with peers.use("h:1") as first:
        assert peers.learn(first, ("a", 5), [descriptor("a@5")]) == ("a@5",)
    async with peers.use("h:1") as again:
        assert again is first and again.segments == {("a", 5): ("a@5",)}
        peers.learn(again, ("a", 6), [descriptor("a@6")])
        assert again.segments == {("a", 6): ("a@6",)}, "the earlier life is let go"
    assert m.CloseSegment("a@5") in heard(peers)
    assert m.CloseSegment("a@6") not in heard(peers)


async def test_a_forgotten_peer_is_closed_by_its_last_user(peers: PeerPool) -> None:
    async with peers.use("h:1") as one:
        peers.learn(one, ("a", 5), [descriptor("a@5")])
        async with peers.use("h:1") as same:
            peers.forget(same)
            peers.forget(same)
            async with peers.use("h:1") as fresh:
                assert fresh is not one
        assert m.CloseSegment("a@5") not in heard(peers)
    assert heard(peers).count(m.CloseSegment("a@5")) == 1


async def test_there_are_not_more_than_so_many(peers: PeerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "MAX_PEERS", 3)
    async with peers.use("busy:1"):
        for i in range(10):
            async with peers.use(f"h:{i}") as peer:
                peers.learn(peer, (f"i{i}", 1), [descriptor(f"i{i}@1")])
        assert len(peers) == 3
        async with peers.use("h:9") as last:
            assert last.segments, "the last ones stay"
    assert [x for x in heard(peers) if isinstance(x, m.CloseSegment)] == [
        m.CloseSegment(f"i{i}@1") for i in range(8)
    ], "the least recently used go first"


async def test_idle_ones_go_with_time(peers: PeerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with peers.use("h:1"):
        pass
    peers.tidy()
    assert len(peers) == 1
    monkeypatch.setattr(peers_module, "IDLE_S", -1.0)
    async with peers.use("h:2"):
        peers.tidy()
        assert len(peers) == 1, "one in use stays"
    peers.tidy()
    assert len(peers) == 0


async def test_a_bad_descriptor_opens_none_of_them(peers: PeerPool) -> None:
    async with peers.use("h:1") as peer:
        with pytest.raises(TransferError):
            peers.learn(peer, ("a", 5), [descriptor("a@5"), b"nonsense"])
        assert not peer.segments
    assert heard(peers)[-1] == m.CloseSegment("a@5")
