"""Two-way streams, both sides of them over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import pytest

from kvmesh.errors import HandoffLost, InvalidRequest, ProtocolMismatch, Unavailable
from kvmesh.rpc import bidi, protocol
from kvmesh.rpc.bidi import ClientStream, ServerStream
from kvmesh.rpc.pb import decode_pb2, decode_pb2_grpc

Request, Response = decode_pb2.SessionRequest, decode_pb2.SessionResponse
HELLO = Request(hello=decode_pb2.SessionHello(protocol_version=protocol.PROTOCOL_VERSION))


class Echo(decode_pb2_grpc.DecodeServicer):
    """Answers credit for a slot with the end of that slot; refuses slot 13."""

    def __init__(self) -> None:
        self.version = protocol.PROTOCOL_VERSION
        self.mute = asyncio.Event()
        self.mute.set()
        self.over = False
        self.news = asyncio.Event()
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def Session(self, request_iterator: AsyncIterator[Request], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        stream = ServerStream[Request, Response](request_iterator, context)
        out: list[Response] = []

        def read(request: Request) -> None:
            if request.credit.slot == 13:
                raise InvalidRequest("unlucky", field="slot")
            response = Response()
            response.finished.add(slot=request.credit.slot)
            out.append(response)
            self.news.set()

        def outgoing() -> Sequence[Response]:
            taken = out.copy()
            out.clear()
            return taken

        try:
            await stream.hello()
            await self.mute.wait()
            await stream.write(Response(hello=decode_pb2.SessionHelloReply(protocol_version=self.version)))
            self.ended.set_result(await stream.serve(read, outgoing, self.news, lambda: self.over))
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Echo, str]]:
    echo, served = Echo(), grpc.aio.server()
    decode_pb2_grpc.add_DecodeServicer_to_server(echo, served)
    port = served.add_insecure_port("127.0.0.1:0")
    await served.start()
    yield echo, f"127.0.0.1:{port}"
    await served.stop(0)


def client(address: str) -> ClientStream[Request, Response]:
    return ClientStream("the echo", address, lambda channel: decode_pb2_grpc.DecodeStub(channel).Session())


def credit(slot: int) -> Request:
    return Request(credit=decode_pb2.Credit(slot=slot))


async def test_messages_go_both_ways_and_what_is_sent_early_follows_the_hello(server: tuple[Echo, str]) -> None:
    echo, address = server
    stream, heard, written = client(address), [], []
    stream.send(credit(1), lambda: written.append(1))
    await stream.open(HELLO, 10)

    def take(response: Response) -> None:
        heard.append(response.finished[0].slot)
        if heard == [1]:
            stream.send(credit(2))
        else:
            echo.over = True
            echo.news.set()

    why = await asyncio.wait_for(stream.read(take), 30)
    assert heard == [1, 2] and written == [1]
    assert isinstance(why, HandoffLost) and "closed the stream" in why.message
    assert await echo.ended is True
    await stream.close()


async def test_the_end_of_the_client_is_an_end_that_the_server_sees(server: tuple[Echo, str]) -> None:
    echo, address = server
    stream = client(address)
    await stream.open(HELLO, 10)
    await stream._call.done_writing()
    assert await asyncio.wait_for(echo.ended, 30) is False
    await stream.close()


async def test_what_the_reader_refuses_ends_the_stream_with_the_reason(server: tuple[Echo, str]) -> None:
    _, address = server
    stream = client(address)
    await stream.open(HELLO, 10)
    stream.send(credit(13))
    why = await asyncio.wait_for(stream.read(lambda response: None), 30)
    assert isinstance(why, HandoffLost) and "unlucky" in why.message
    await stream.close()


async def test_a_stream_begins_with_hello(server: tuple[Echo, str]) -> None:
    _, address = server
    stream = client(address)
    with pytest.raises(HandoffLost, match="begins with hello"):
        await stream.open(credit(1), 10)
    await stream.close()


async def test_another_version_of_the_protocol_is_refused(server: tuple[Echo, str]) -> None:
    echo, address = server
    echo.version += 1
    stream = client(address)
    with pytest.raises(ProtocolMismatch):
        await stream.open(HELLO, 10)
    await stream.close()


async def test_a_peer_that_does_not_answer(server: tuple[Echo, str]) -> None:
    echo, address = server
    echo.mute.clear()
    stream = client(address)
    with pytest.raises(Unavailable, match="did not answer within"):
        await stream.open(HELLO, 0.1)
    await stream.close()


async def test_a_queue_that_is_full_ends_the_stream(server: tuple[Echo, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, address = server
    monkeypatch.setattr(bidi, "MOST_QUEUED", 3)
    stream = client(address)
    await stream.open(HELLO, 10)
    for slot in range(4):
        stream.send(credit(slot))  # the writer has had no turn yet
    why = await asyncio.wait_for(stream.read(lambda response: None), 30)
    assert isinstance(why, HandoffLost) and "takes no messages" in why.message
    await stream.close()


async def test_a_message_that_cannot_be_read_ends_the_stream(server: tuple[Echo, str]) -> None:
    _, address = server
    stream = client(address)
    await stream.open(HELLO, 10)
    stream.send(credit(1))
    why = await asyncio.wait_for(stream.read(lambda response: [][1]), 30)
    assert why.code == "internal" and "IndexError" in why.message
    await stream.close()


async def test_a_write_that_nobody_takes_is_late_and_the_next_one_has_its_own_time() -> None:
    deadline, loop = bidi.WriteDeadline(), asyncio.get_running_loop()
    for _ in range(3):
        await deadline.wait(asyncio.sleep(0), 60)  # its timer would come too late for the next one
    start = loop.time()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(deadline.wait(loop.create_future(), 0.05), 60)
    assert 0.05 <= loop.time() - start < 30
    await deadline.wait(asyncio.sleep(0), 0.05)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(deadline.wait(loop.create_future(), 0.05), 60)
    assert loop.time() - start < 30
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()
    deadline.close()


async def test_many_writes_share_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline, loop = bidi.WriteDeadline(), asyncio.get_running_loop()
    timers, call_at = [], loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda when, *rest: timers.append(when) or call_at(when, *rest))
    for _ in range(100):
        await deadline.wait(asyncio.sleep(0), 60)
    assert len(timers) == 1
    deadline.close()


async def test_a_writer_that_is_cancelled_is_not_late() -> None:
    deadline, loop = bidi.WriteDeadline(), asyncio.get_running_loop()
    writing = asyncio.create_task(deadline.wait(loop.create_future(), 60))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    deadline.close()
