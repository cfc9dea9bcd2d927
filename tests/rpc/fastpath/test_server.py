"""A door's two sides against each other: answers, errors by name, deadlines, ends, limits, strangers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from kvmesh.errors import (
    BodyTooLarge,
    ConfigError,
    DeadlinePassed,
    InternalError,
    InvalidRequest,
    KvmeshError,
    NotLeader,
    Overloaded,
    ProtocolMismatch,
    RequestCancelled,
    Unavailable,
)
from kvmesh.rpc.fastpath import client, frames, server
from kvmesh.rpc.fastpath.client import Way, dial
from kvmesh.rpc.fastpath.server import FastServer
from kvmesh.rpc.pb import blocks_pb2 as pb
from tests.support.fastpath_service import LIFE, SERVICE, Desk, opened, serving, streams
from tests.support.services import until

LONG_S = 60.0


async def sure(what: Callable[[], object]) -> None:
    async def asked() -> object:
        return what()

    await until(asked)


async def talk(kind: str) -> None:
    rng = random.Random(kind)
    async with serving(kind=kind) as (_, desk, way), opened(way) as door:
        waiting = {}
        for size in (1, 100, 70_000, 1_000_000):
            keys = rng.randbytes(size)
            body = pb.ExistsRequest(keys=keys).SerializeToString()
            waiting[keys] = asyncio.ensure_future(door.call(b"Exists", body, LONG_S))
        for size in (0, 16, 300_000):
            keys = rng.randbytes(size)
            told = await door.call(b"Lease", pb.LeaseRequest(keys=keys).SerializeToString(), LONG_S)
            answer = pb.LeaseResponse.FromString(told)
            assert answer.held == keys
            assert LONG_S * 500 < answer.lease_ms <= LONG_S * 1000, "the servicer knows how long its caller waits"
        assert not any(task.done() for task in waiting.values()), "these wait, and nobody waits behind them"
        desk.go.set()
        for keys, task in waiting.items():
            assert pb.ExistsResponse.FromString(await task).tiers == keys
        many = [rng.randbytes(40) for _ in range(500)]
        bodies = [pb.LeaseRequest(keys=keys).SerializeToString() for keys in many]
        answers = await asyncio.gather(*(door.call(b"Lease", body, LONG_S) for body in bodies))
        assert [pb.LeaseResponse.FromString(one).held for one in answers] == many


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_calls_are_answered(kind: str, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(talk(kind))


async def refused(call: Coroutine[object, object, bytes]) -> KvmeshError:
    with pytest.raises(KvmeshError) as caught:
        await call
    return caught.value


async def test_errors_come_by_name_with_their_field(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (_, _, way), opened(way) as door:
        full = await refused(door.call(b"Put", b"", LONG_S))
        assert isinstance(full, Overloaded)
        assert (full.message, full.field, full.retry_after_ms) == ("no room: it is full", "nbytes", 123)
        late = await refused(door.call(b"GetStore", b"", LONG_S))
        assert isinstance(late, NotLeader) and (late.leader, late.field) == ("there:1", "term")
        unreadable = await refused(door.call(b"Lease", b"\xff\xff", LONG_S))
        assert isinstance(unreadable, InvalidRequest) and unreadable.field == "message"
        assert isinstance(await refused(door.call(b"Remove", b"", LONG_S)), RequestCancelled)
        for unknown in (b"Nothing", b"ListBlocks", b"__init__", b""):
            assert isinstance(await refused(door.call(unknown, b"", LONG_S)), ProtocolMismatch)
        assert not caplog.records
        defect = await refused(door.call(b"Touch", b"", LONG_S))
        assert isinstance(defect, InternalError) and "ValueError: a defect" in defect.message
        assert "Touch failed" in caplog.text
        assert await door.call(b"Lease", b"", LONG_S) is not None, "alive"


async def test_a_call_whose_time_is_over_ends_on_both_sides() -> None:
    async with serving() as (made, desk, way), opened(way) as door:
        slow = asyncio.ensure_future(door.call(b"Pin", b"", 0.05))
        other = asyncio.ensure_future(door.call(b"Exists", pb.ExistsRequest(keys=b"k").SerializeToString(), LONG_S))
        late = await refused(slow)  # type: ignore[arg-type]
        assert isinstance(late, DeadlinePassed) and "Pin" in late.message
        await sure(lambda: desk.cancelled == 1)
        desk.go.set()
        assert pb.ExistsResponse.FromString(await other).tiers == b"k"
        assert door.usable, "it has spoken since"
        await sure(lambda: not made.tasks)


async def test_the_server_keeps_deadlines_by_itself() -> None:
    """For callers that are gone without a word."""
    async with serving() as (made, desk, way):
        reader, writer = await streams(way)
        writer.write(frames.hello(LIFE) + frames.encode(frames.CALL, 1, b"", b"Pin", 30))
        await sure(lambda: desk.begun == 1 and desk.cancelled == 1)
        assert not made.tasks and len(made) == 1
        writer.close()
        await reader.read()


async def test_a_caller_that_gives_up_ends_its_call() -> None:
    async with serving() as (made, desk, way), opened(way) as door:
        task = asyncio.ensure_future(door.call(b"Pin", b"", LONG_S))
        await desk.pinned.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sure(lambda: desk.cancelled == 1 and not made.tasks)
        assert door.usable and await door.call(b"Lease", b"", LONG_S) is not None


async def test_a_connection_that_breaks_ends_its_calls_and_no_others() -> None:
    async with serving() as (made, desk, way), opened(way) as door:
        async with opened(way) as other:
            task = asyncio.ensure_future(other.call(b"Pin", b"", LONG_S))
            await desk.pinned.wait()
        assert isinstance(await refused(task), Unavailable)  # type: ignore[arg-type]
        assert isinstance(await refused(other.call(b"Lease", b"", LONG_S)), Unavailable) and not other.usable
        await sure(lambda: desk.cancelled == 1 and len(made) == 1)
        assert await door.call(b"Lease", b"", LONG_S) is not None


async def test_closing_ends_all_of_it() -> None:
    async with serving() as (made, desk, way), opened(way) as door:
        tasks = [asyncio.ensure_future(door.call(b"Pin", b"", LONG_S)) for _ in range(5)]
        await sure(lambda: desk.begun == 5)
        await asyncio.wait_for(made.close(), 30)
        assert desk.cancelled == 5 and not made.tasks
        for task in tasks:
            assert isinstance(await refused(task), Unavailable)  # type: ignore[arg-type]
        await sure(lambda: not door.open)
        with pytest.raises(Unavailable):
            await dial((way,), LIFE, 1.0)
        await made.close()


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        frames.encode(frames.CALL, 1, b"", b"Lease", 5),  # no greeting
        frames.hello(LIFE + 1),
        frames.hello(LIFE) + frames.encode(frames.ANSWER, 1),
        frames.hello(LIFE) + frames.hello(LIFE),
        frames.hello(LIFE) + frames._HEADER.pack(frames.MAX_REQUEST + 1, 1, frames.CALL, 0, 0, 0),
        frames.hello(LIFE) + frames.encode(frames.CALL, 1, b"", b"Pin", 9_000) * 2,
    ],
)
async def test_noise_ends_its_connection_with_one_line(noise: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (made, _, way), opened(way) as door:
        reader, writer = await streams(way)
        writer.write(noise)
        heard = await asyncio.wait_for(reader.read(), 30)
        assert heard in (b"", frames.hello(LIFE))
        writer.close()
        await sure(lambda: len(made) == 1 and not made.tasks)
        assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING, caplog.text
        assert await door.call(b"Lease", b"", LONG_S) is not None, "the others do not notice"


async def test_a_caller_does_not_trust_every_answer(caplog: pytest.LogCaptureFixture) -> None:
    for noise in (b"\0" * 20, frames.hello(LIFE + 1), frames.hello(LIFE) + frames.encode(frames.CANCEL, 1)):
        ended = asyncio.Event()

        async def answer(
            reader: asyncio.StreamReader,
            writer: asyncio.StreamWriter,
            noise: bytes = noise,
            ended: asyncio.Event = ended,
        ) -> None:
            writer.write(noise)
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            ended.set()

        listening = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with listening:
            way = listening.sockets[0].getsockname()[:2]
            if noise.startswith(frames.hello(LIFE)):
                async with opened(way) as door:
                    await sure(lambda door=door: not door.open)  # type: ignore[misc]
            else:
                with pytest.raises(Unavailable):
                    await dial((way,), LIFE, 5.0)
            await asyncio.wait_for(ended.wait(), 30)
        assert "not understood" in caplog.text
        caplog.clear()


async def test_who_says_nothing_is_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GREETING_S", 0.05)
    async with serving() as (made, _, way):
        reader, writer = await streams(way)
        assert await asyncio.wait_for(reader.read(), 30) == b"" and len(made) == 0
        writer.close()


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_who_comes_while_it_closes_is_ended_at_once(
    loop: Callable[[], asyncio.AbstractEventLoop], turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop tells of some connections only after their listener was closed."""
    monkeypatch.setattr(server, "GREETING_S", LONG_S)

    async def close_while_one_comes() -> None:
        async with serving(kind="tcp") as (made, _, way):
            assert not isinstance(way, str)
            with socket.create_connection(way) as one:
                one.setblocking(False)
                for _ in range(turns):
                    await asyncio.sleep(0)
                await made.close()
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(one, 1), LONG_S / 2) == b""
                assert not len(made)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(close_while_one_comes())


async def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CALLS", 3)
    async with serving() as (made, desk, way), opened(way) as door:
        waiting = [asyncio.ensure_future(door.call(b"Exists", b"", LONG_S)) for _ in range(3)]
        await sure(lambda: len(made.tasks) == 3)
        assert isinstance(await refused(door.call(b"Lease", b"", LONG_S)), Overloaded)
        desk.go.set()
        await asyncio.gather(*waiting)
        monkeypatch.setattr(frames, "MAX_FRAME", 100)
        large = pb.LeaseRequest(keys=bytes(200)).SerializeToString()
        assert isinstance(await refused(door.call(b"Lease", large, LONG_S)), BodyTooLarge)


async def test_a_caller_with_too_much_under_way_goes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_CALLS", 2)
    async with serving() as (_, desk, way), opened(way) as door:
        waiting = [asyncio.ensure_future(door.call(b"Exists", b"", LONG_S)) for _ in range(2)]
        await sure(lambda: not door.usable)
        desk.go.set()
        await asyncio.gather(*waiting)
        assert door.usable


async def test_a_caller_that_does_not_read_is_not_read_from() -> None:
    """Its answers would fill this process's memory."""
    keys = random.Random(9).randbytes(1_000_000)
    call = frames.encode(frames.CALL, 1, pb.LeaseRequest(keys=keys).SerializeToString(), b"Lease", 9_000)
    async with serving() as (_, _, way):
        reader, writer = await streams(way, limit=1 << 16)
        writer.write(frames.hello(LIFE) + call * 40)
        with pytest.raises(TimeoutError):  # it stops taking them
            await asyncio.wait_for(writer.drain(), 0.5)
        await reader.readexactly(len(frames.hello(LIFE)))
        one = frames.encode(frames.ANSWER, 1, pb.LeaseResponse(held=keys, lease_ms=9_000).SerializeToString())
        heard = await asyncio.wait_for(reader.readexactly(40 * len(one)), 20)
        assert all(keys in heard[at : at + len(one)] for at in range(0, len(heard), len(one)))
        writer.close()


async def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"door_port={port}") as caught:
            await FastServer(SERVICE, Desk(), LIFE).listen_tcp("127.0.0.1", port, "door_port")
    assert caught.value.field == "door_port"


async def test_the_first_way_that_leads_there() -> None:
    async with serving(kind="tcp") as (made, _, way):
        gone: Way = "@kvmesh-door-of-nobody"
        door = await dial((gone, ("127.0.0.1", 1), way), LIFE, 5.0)
        assert door.usable and len(made) == 1
        door.close()
        with pytest.raises(Unavailable):
            await dial((gone,), LIFE, 5.0)
        with pytest.raises(Unavailable):
            await dial((), LIFE, 5.0)
        with pytest.raises(Unavailable):
            await dial((way,), LIFE + 1, 5.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_another_user_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """By a child that has become nobody before it connects."""
    say = frames.hello(LIFE) + frames.encode(frames.CALL, 1, b"", b"Pin", 900)
    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534)\n"
        "sock = socket.socket(socket.AF_UNIX); sock.settimeout(10); sock.connect('\\0' + sys.argv[1])\n"
        "try:\n sock.sendall(bytes.fromhex(sys.argv[2])); print(sock.recv(100).hex())\n"
        "except (BrokenPipeError, ConnectionResetError): print()\n"
    )
    async with serving() as (made, desk, way):
        argv = [sys.executable, "-I", "-c", script, str(way)[1:], say.hex()]
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=30, check=True)
        assert done.stdout.strip() == "" and not desk.begun and len(made) == 0
        assert "another user" in caplog.text
