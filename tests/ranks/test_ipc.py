"""Framing between front and rank."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks import protocol as m
from kvmesh.ranks.ipc import HEADER, RankFrames, RankPort, frame

LAYOUT = ShardLayout(2, 1, 16, 8, 4)
SAMPLING = m.Sampling(0.5, 0.9, 3, 7, -1)
BIASED = m.Sampling(0.0, 1.0, 0, 7, -1, 0.5, -2.0, 0.25, 1.5, ((3, -100.0), (2**31, 0.5)), 9)
EXAMPLES: list[m.ToRank] = [
    m.Ping(1),
    m.PrefillStep(3, (m.PrefillItem(1, (1, 2, 3), 0, (0, 5), SAMPLING), m.PrefillItem(2, (9,), 64, (1, 2), None))),
    m.PushOpen(1, 9, "seg", (0, 1), (0, 4096), 0, 64, 100, 123456789012345),
    m.PushOpen(1, 9, "", (0,), (), 0, 64, 64, 1, m.PushGroup(0, (LAYOUT,), (LAYOUT,), (m.PushTarget(0, "seg", (7,)),))),
    m.Join(4, (1, 2, 3), 130, 5, 0, 16, 0, (2, 3), SAMPLING),
    m.Join(4, (1,), 3, 5, 1, 16, 0, (2,), BIASED, m.TokenHistory(b"\1\0\0\0", b"\5\0\0\0\5\0\0\0")),
    m.Shutdown(),
]


@given(st.lists(st.sampled_from(EXAMPLES), max_size=8), st.integers(1, 64))
def test_messages_survive_any_cutting_of_the_stream(messages: list[m.ToRank], piece: int) -> None:
    data = b"".join(frame(x) for x in messages)
    frames = RankFrames(m.ToRank)
    got = [x for i in range(0, len(data), piece) for x in frames.feed(data[i : i + piece])]
    assert got == messages


def test_a_frame_no_peer_of_this_build_sends_is_refused() -> None:
    with pytest.raises(ValueError, match="frame of"):
        RankFrames(m.ToRank).feed(HEADER.pack(1 << 31))


def test_the_rank_ends_when_its_front_is_gone() -> None:
    ours, theirs = socket.socketpair()
    port = RankPort(theirs)
    ours.sendall(frame(m.Ping(7)))
    assert port.receive(1000) == [m.Ping(7)]
    ours.close()
    with pytest.raises(SystemExit):
        port.receive(None)
    theirs.close()
