"""The other end of a rank's socket: nothing is lost, nothing blocks, and nothing grows without a bound."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence

import pytest

from kvmesh.instance import rank_host
from kvmesh.ranks.client import rank_socket
from kvmesh.ranks.front_port import FrontPort

PIECE = bytes(range(256)) * 1024


async def test_what_the_socket_does_not_take_follows_in_order() -> None:
    ours, theirs = rank_socket()
    closed: asyncio.Queue[str] = asyncio.Queue()
    port = FrontPort(ours, lambda _: None, closed.put_nowait)
    pieces = [bytes([at]) * (1 << 20) for at in range(16)]
    for piece in pieces:
        port.send(piece)
    assert port.queued
    expected = b"".join(pieces)
    assert await asyncio.to_thread(received, theirs, len(expected)) == expected
    assert not port.queued and closed.empty()
    theirs.close()
    async with asyncio.timeout(30):
        assert await closed.get() == ""
    port.send(b"nobody hears it")
    port.close()
    assert closed.empty()


async def test_a_front_that_takes_nothing_does_not_fill_the_rank_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[socket.socket] = []

    def start(filenos: Sequence[int], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        ends.append(socket.socket(fileno=os.dup(filenos[0])))
        return subprocess.Popen(["sleep", "60"])

    monkeypatch.setattr(rank_host, "start_process", start)
    news = asyncio.Event()
    rank = rank_host.HostedRank(0, 1, lambda configure: configure, news.set)
    (end,) = ends
    end.setblocking(False)
    try:
        sent, turned_away = 0, 0
        while turned_away < 100:  # turns of the loop in which nothing was read
            try:
                sent, turned_away = sent + end.send(PIECE), 0
            except BlockingIOError:
                turned_away += 1
            await asyncio.sleep(0)
            assert sent < 4 * rank_host.HELD_BYTES
        taken = bytearray()
        while len(taken) < sent:
            news.clear()
            taken += rank.take()
            if len(taken) < sent:
                async with asyncio.timeout(30):
                    await news.wait()
        assert len(taken) == sent
    finally:
        end.close()
        await rank.close()


def received(sock: socket.socket, count: int) -> bytes:
    sock.settimeout(30)
    found = bytearray()
    while len(found) < count:
        found += sock.recv(1 << 20)
    return bytes(found)
