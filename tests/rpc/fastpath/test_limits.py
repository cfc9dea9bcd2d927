"""What callers may take of a process through its fast path: bytes, connections, time."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

import pytest

from kvmesh.errors import Overloaded
from kvmesh.kvcache.announce import BATCH_KEYS, MAX_KEYS
from kvmesh.rpc.call_queue import CallQueue
from kvmesh.rpc.fastpath import frames, server
from kvmesh.rpc.fastpath.client import Way
from kvmesh.rpc.fastpath.server import FastPathLimits
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import store_pb2
from tests.rpc.fastpath.test_server import LONG_S, refused, sure
from tests.support.fastpath_service import LIFE, opened, serving, streams

CALLERS = 20
HEADER = struct.Struct("<IIBBHI")


@contextlib.asynccontextmanager
async def raw(way: Way) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await streams(way)
    writer.write(frames.hello(LIFE))
    assert await reader.readexactly(len(frames.hello(LIFE))) == frames.hello(LIFE)
    try:
        yield reader, writer
    finally:
        writer.close()


async def ended(reader: asyncio.StreamReader) -> None:
    try:
        assert await asyncio.wait_for(reader.read(), LONG_S) == b""
    except ConnectionError:
        pass


def unfinished(length: int) -> bytes:
    return HEADER.pack(length, 1, frames.CALL, 5, 0, 9_000) + b"Lease"


async def test_a_frame_that_is_too_long_ends_its_connection_before_it_is_kept() -> None:
    """Audit 12: frames of 16 MiB were gathered for whoever began one."""
    async with serving() as (made, _, way), raw(way) as (reader, writer):
        writer.write(unfinished((1 << 20) + 1) + bytes(100))
        await ended(reader)
        assert len(made) == 0 and made.held_bytes == 0


async def test_unfinished_frames_of_many_callers_stay_within_one_budget() -> None:
    limits = FastPathLimits(memory_bytes=4 << 20)
    async with serving(limits=limits) as (made, _, way), contextlib.AsyncExitStack() as stack:
        most = 0
        for _ in range(CALLERS):
            _, writer = await stack.enter_async_context(raw(way))
            writer.write(unfinished(1 << 20) + bytes((1 << 20) - 50))
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(writer.drain(), LONG_S)
            await asyncio.sleep(0)
            most = max(most, made.held_bytes)
        await sure(lambda: made.held_bytes <= limits.memory_bytes)
        assert 0 < most <= limits.memory_bytes
        await sure(lambda: len(made) <= 4)
        async with opened(way) as door:
            body = pb.LeaseRequest(keys=bytes(900_000)).SerializeToString()
            assert await door.call(b"Lease", body, LONG_S) is not None, "the oldest unfinished frame makes room"
    assert made.held_bytes == 0


async def test_a_frame_that_is_not_finished_in_time_ends_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    """However often another byte of it comes."""
    async with serving(limits=FastPathLimits(frame_s=0.2)) as (made, _, way), raw(way) as (reader, writer):
        writer.write(unfinished(1000))

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b"x")
                    await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        await ended(reader)
        dripping.cancel()
        assert len(made) == 0 and made.held_bytes == 0
        assert "not finished within 0.2 s" in caplog.text


async def test_frames_that_are_finished_are_taken_however_slowly_others_come() -> None:
    async with serving(limits=FastPathLimits(frame_s=0.3)) as (made, _, way), opened(way) as door:
        for _ in range(8):
            assert await door.call(b"Lease", pb.LeaseRequest(keys=b"k").SerializeToString(), LONG_S) is not None
            await asyncio.sleep(0.06)
        assert door.usable and made.held_bytes == 0


async def test_the_connection_that_is_idle_longest_makes_room() -> None:
    limits = FastPathLimits(connections=3)
    async with serving(limits=limits) as (made, desk, way), opened(way) as busy, opened(way) as idle:
        waiting = asyncio.ensure_future(busy.call(b"Exists", b"", LONG_S))
        await sure(lambda: len(made.tasks) == 1)
        async with opened(way) as third, opened(way) as fourth:
            await sure(lambda: not idle.open)
            assert third.open and fourth.open and busy.open and len(made) == 3
            desk.go.set()
            await waiting


async def test_connections_take_a_share_of_the_descriptors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_descriptors", lambda: 1024)
    async with serving(limits=FastPathLimits(connections=16_384)) as (made, _, _):
        assert made.connections == 256


async def test_strangers_make_room_for_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 3)
    async with serving() as (made, _, way), opened(way) as door, contextlib.AsyncExitStack() as stack:
        readers = []
        for _ in range(8):
            reader, writer = await streams(way)
            stack.callback(writer.close)
            readers.append(reader)
        for reader in readers[:5]:
            await ended(reader)
        assert len(made) == 4 and door.open


async def test_calls_that_wait_hold_their_bytes_of_the_budget() -> None:
    async with serving(limits=FastPathLimits(memory_bytes=2 << 20)) as (made, desk, way), opened(way) as door:
        body = pb.ExistsRequest(keys=bytes(900_000)).SerializeToString()
        waiting = [asyncio.ensure_future(door.call(b"Exists", body, LONG_S)) for _ in range(2)]
        await sure(lambda: made.call_bytes == 2 * len(body))
        assert isinstance(await refused(door.call(b"Exists", body, LONG_S)), Overloaded)
        desk.go.set()
        await asyncio.gather(*waiting)
        await sure(lambda: made.held_bytes == made.call_bytes == 0)


async def test_who_reads_no_answers_is_ended_when_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 2 << 20)
    async with serving(limits=FastPathLimits(memory_bytes=2 << 20)) as (made, desk, way), raw(way) as (_, writer):
        body = pb.ExistsRequest(keys=bytes(90_000)).SerializeToString()
        for number in range(1, 15):
            writer.write(frames.encode(frames.CALL, number, body, b"Exists", 20_000))
        await sure(lambda: len(made.tasks) == 14)
        for number in range(15, 20):
            writer.write(frames.encode(frames.CALL, number, body, b"Exists", 20_000))
        desk.go.set()
        await sure(lambda: not made.tasks)
        unread = sum(one.unread_bytes for one in made._unread)
        assert unread <= made.limits.memory_bytes + frames.MAX_FRAME


async def test_a_call_that_may_wait_does_not_hold_up_the_others() -> None:
    """Audit 6: what came first was carried out first, a thousand placements before one heartbeat."""
    queue = CallQueue(1000, "most")
    done: list[str] = []

    def slow() -> None:
        done.append("slow")
        end = asyncio.get_running_loop().time() + 0.003
        while asyncio.get_running_loop().time() < end:
            pass

    async with serving() as (_, _, way), opened(way) as door:
        for _ in range(100):
            queue.submit(slow)
        await door.call(b"Lease", b"", LONG_S)
        done.append("urgent")
        await sure(lambda: len(queue) == 0)
    assert done.index("urgent") <= 20, "some turns of the loop, a call in each"
    assert done.count("slow") == 100


def test_what_members_say_fits() -> None:
    """The longest announcement that kvmesh makes is an eighth of a frame; one that others may make goes over gRPC."""
    ours = store_pb2.Announcement(store_id="s" * 200, sealed=bytes(16 * BATCH_KEYS))
    assert len(ours.SerializeToString()) < frames.MAX_REQUEST // 4
    theirs = store_pb2.Announcement(store_id="s", sealed=bytes(16 * MAX_KEYS))
    assert len(theirs.SerializeToString()) > frames.MAX_REQUEST
