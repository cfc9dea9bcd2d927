"""Segments of peers are open while somebody uses them."""

from __future__ import annotations

import pytest

from kvmesh.blockservice.peer_segments import PeerSegments
from kvmesh.errors import TransferError
from kvmesh.ranks import protocol as m
from kvmesh.transfer import SegmentDescriptor


class Ear:
    def __init__(self) -> None:
        self.heard: list[m.ToRank] = []

    def send(self, message: m.ToRank) -> None:
        self.heard.append(message)


def descriptor(name: str, token: str = "t") -> bytes:
    return SegmentDescriptor(name, "machine", token, (), {}).encode()


def test_open_at_every_rank_once_and_closed_by_the_last_user() -> None:
    ranks = [Ear(), Ear()]
    segments = PeerSegments(ranks)
    d = descriptor("peer@1")
    assert segments.open(d) == segments.open(d) == "peer@1"
    segments.share("peer@1")
    assert [ear.heard for ear in ranks] == [[m.OpenSegment(d)]] * 2
    segments.release("peer@1")
    segments.release("peer@1")
    assert len(segments) == 1 and segments.users("peer@1") == 1
    segments.release("peer@1")
    segments.release("peer@1")
    segments.release("never heard of")
    assert [ear.heard[1:] for ear in ranks] == [[m.CloseSegment("peer@1")]] * 2
    assert len(segments) == 0
    segments.open(d)
    assert ranks[0].heard[2:] == [m.OpenSegment(d)]


def test_a_newer_descriptor_is_passed_on() -> None:
    ear = Ear()
    segments = PeerSegments([ear])
    old, new = descriptor("peer@1"), descriptor("peer@1", "other")
    for d in (old, new, new):
        segments.open(d)
    assert ear.heard == [m.OpenSegment(old), m.OpenSegment(new)]


def test_nonsense_opens_nothing() -> None:
    ear = Ear()
    segments = PeerSegments([ear])
    with pytest.raises(TransferError):
        segments.open(b"nonsense")
    assert not ear.heard and len(segments) == 0
