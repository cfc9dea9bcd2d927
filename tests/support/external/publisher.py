"""A publisher of KV events as vLLM's: PUB and ROUTER sockets of ZMTP, with what gets lost between."""

from __future__ import annotations

import asyncio
import contextlib

from kvmesh.external import zmtp
from kvmesh.external.kv_event_reader import KvEventsAddress
from tests.support.external.vllm_blocks import ReportingCache

GREETING = zmtp._GREETING
END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Publishes and replays what an engine reports, on one port for each. `keeps`: the last batches that it replays."""

    def __init__(self, engine: ReportingCache) -> None:
        self.engine = engine
        self.subscribers: set[asyncio.StreamWriter] = set()
        self.servers: list[asyncio.Server] = []
        self.asked: list[int] = []
        self.sent = 0
        self.keeps = 1_000

    async def start(self) -> KvEventsAddress:
        self.servers = [await asyncio.start_server(one, "127.0.0.1", 0) for one in (self._subscribe, self._replay)]
        ports = [server.sockets[0].getsockname()[1] for server in self.servers]
        return KvEventsAddress("127.0.0.1", ports[0], "127.0.0.1", ports[1])

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: bytes) -> None:
        writer.write(GREETING)
        assert (await reader.readexactly(64))[:10] == GREETING[:10]
        writer.write(zmtp.ready_command(kind))
        flags, size = await reader.readexactly(2)
        assert flags == 4 and (await reader.readexactly(size)).startswith(b"\x05READY")

    async def _subscribe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._greet(reader, writer, b"PUB")
            assert await reader.readexactly(3) == b"\x00\x01\x01"
            self.subscribers.add(writer)
            await reader.read()
        self.subscribers.discard(writer)
        writer.close()

    async def _replay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._greet(reader, writer, b"ROUTER")
            assert await reader.readexactly(4) == b"\x01\x00\x00\x08"
            first = int.from_bytes(await reader.readexactly(8), "big")
            self.asked.append(first)
            count = len(self.engine.batches)
            for seq in range(max(first, count - self.keeps), count):
                writer.write(zmtp.message([b"", b"", seq.to_bytes(8, "big"), self.engine.batches[seq]]))
            writer.write(zmtp.message([b"", b"", END, b""]))
            await reader.read()
        writer.close()

    def publish(self, *, lose: bool = False) -> None:
        """Sends all that was not sent yet."""
        for seq in range(self.sent, len(self.engine.batches)):
            parts = [b"", seq.to_bytes(8, "big"), self.engine.batches[seq]]
            for writer in self.subscribers if not lose else ():
                writer.write(zmtp.message(parts))
        self.sent = len(self.engine.batches)

    def cut(self) -> None:
        for writer in list(self.subscribers):
            writer.transport.abort()
        self.subscribers.clear()

    def close(self) -> None:
        self.cut()
        for server in self.servers:
            server.close()
