"""The reader of KV events before a publisher that speaks ZMTP, loses batches and dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from kvmesh.errors import InternalError, Unavailable
from kvmesh.external import zmtp
from kvmesh.external.engine_blocks import EngineBlocks
from kvmesh.external.kv_event_reader import KvEventReader, KvEventsAddress
from kvmesh.external.reported_blocks import ReportedBlocks
from tests.support.external.publisher import GREETING, EventPublisher
from tests.support.external.vllm_blocks import NAMESPACE, SIZE, ReportingCache
from tests.support.services import until

pytestmark = pytest.mark.timeout(60)

PLACES = 8


class Followed:
    def __init__(self, publisher: EventPublisher, address: KvEventsAddress) -> None:
        self.publisher = publisher
        self.held = EngineBlocks(PLACES)
        self.reported = ReportedBlocks(self.held, NAMESPACE.root(SIZE), SIZE, PLACES)
        self.told: list[bool] = []
        self.reader = KvEventReader(address, self.reported, self._note, who="test", timeout_s=2.0)

    def _note(self) -> None:
        if not self.told or self.told[-1] is not self.reported.exact:
            self.told.append(self.reported.exact)

    async def so(self, condition: Callable[[], bool]) -> None:
        async def look() -> bool:
            return condition()

        await until(look)

    async def equal(self) -> None:
        """It is exact, and right."""
        publisher = self.publisher
        await self.so(
            lambda: (
                self.reported.exact
                and self.reported.next == len(publisher.engine.batches)
                and bool(publisher.subscribers)
                and set(self.held.keys()) == publisher.engine.held()
            )
        )


@pytest.fixture
async def followed() -> AsyncIterator[Followed]:
    publisher = EventPublisher(ReportingCache(PLACES))
    publisher.engine.serve([1] * 8)
    found = Followed(publisher, await publisher.start())
    reading = asyncio.create_task(found.reader.run())
    try:
        yield found
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        publisher.close()


async def test_it_is_exact_from_the_first_replay_on_and_follows(followed: Followed) -> None:
    publisher = followed.publisher
    await followed.equal()
    assert publisher.asked == [0]
    publisher.sent = len(publisher.engine.batches)
    for tree in (2, 3, 4, 1):
        publisher.engine.serve([tree] * 16)
        publisher.publish()
    await followed.equal()
    publisher.engine.serve([5] * 8)
    publisher.publish(lose=True)
    publisher.engine.clear()
    publisher.publish()
    await followed.equal()
    assert publisher.asked == [0, 5] and followed.told == [True, False, True]


async def test_a_gap_that_nobody_fills_is_a_belief_until_the_cache_is_emptied(followed: Followed) -> None:
    publisher = followed.publisher
    await followed.equal()
    publisher.keeps = 0
    for lose in (True, False):
        publisher.engine.serve([7] * 8)
        publisher.publish(lose=lose)
    await followed.so(lambda: not followed.reported.exact and followed.reported.next == 3)
    publisher.engine.clear()
    publisher.publish()
    await followed.equal()


async def test_a_connection_that_breaks_is_made_again(followed: Followed) -> None:
    publisher = followed.publisher
    await followed.equal()
    publisher.cut()
    await followed.so(lambda: False in followed.told)
    await followed.equal()
    followed.reader.reconnect("its engine is silent")
    assert not followed.reported.exact
    publisher.engine = ReportingCache(PLACES)  # another engine, whose batches are numbered from 0 again
    publisher.sent = 0
    await followed.equal()
    assert not len(followed.held)


@pytest.mark.parametrize(
    ("sent", "error", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64), InternalError, "does not speak ZMTP"),
        (GREETING.replace(b"NULL\0", b"CURVE"), InternalError, "security mechanism b'CURVE'"),
        (GREETING[:30], Unavailable, "closed the connection"),
        (GREETING + b"\x04\x05\x05ERROR", InternalError, "refused the handshake"),
        (GREETING + b"\x06" + (1 << 40).to_bytes(8, "big"), InternalError, "more than"),
        (GREETING + b"\xf0\x00", InternalError, "flags 0xf0"),
        (GREETING + zmtp.ready_command(b"PUB") + b"\x02" + (1 << 30).to_bytes(8, "big"), InternalError, "more than"),
        (GREETING + zmtp.ready_command(b"PUB") + b"\x01\x00" * 9, InternalError, "more than 8 parts"),
        (GREETING + zmtp.ready_command(b"PUB"), Unavailable, "closed the connection"),
    ],
)
async def test_what_is_no_publisher_is_named(sent: bytes, error: type[Exception], why: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await reader.readexactly(64)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(error, match=why):
            async with zmtp.ZmtpConnection.open("127.0.0.1", port, b"SUB", 2.0) as connection:
                await connection.receive(2.0)


async def test_messages_of_any_length_come_whole() -> None:
    parts = [b"", b"a" * 255, b"b" * 256, b"c" * 70_000]
    reader = asyncio.StreamReader()
    reader.feed_data(zmtp.frame(b"\x04PINGxx", 4) + zmtp.message(parts))
    connection = zmtp.ZmtpConnection(reader, None, "here")  # type: ignore[arg-type]
    assert await connection.receive(5.0) == parts
