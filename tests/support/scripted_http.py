"""A gateway that answers by script, on a real socket: what a live one does only by chance (429, a broken stream)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

CARD = {"id": "tiny", "object": "model", "max_context_tokens": 2048, "vocab_size": 2040, "block_tokens": 64}


def frame(text: str = "x", finish: str | None = None) -> bytes:
    body = {"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def usage(prompt: int, output: int, cached: int) -> bytes:
    told = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [], "usage": told}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def answer(output: int, cached: int = 0, prompt: int = 10) -> list[bytes]:
    """A whole stream, one piece a token."""
    last = frame() + frame("", "length") + usage(prompt, output, cached) + DONE
    return [*[frame()] * (output - 1), last]


Script = Callable[[dict[str, Any], int], "Reply | None"]


@dataclass
class Reply:
    """`pieces` are written one by one; with `hang` the connection then stays silent, with `cut` it breaks."""

    pieces: list[bytes] = field(default_factory=list)
    status: int = 200
    error: dict[str, Any] | None = None
    hang: bool = False
    cut: bool = False


@dataclass
class Gateway:
    url: str = ""
    cards: list[dict[str, Any]] = field(default_factory=lambda: [dict(CARD)])
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    script: Script = lambda body, index: Reply(answer(body["max_tokens"], 0, len(body["prompt"])))
    most: int = 0
    crowd: int = 0  # answers begin once so many were asked for at the same time
    together: asyncio.Event = field(default_factory=asyncio.Event)
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _open: int = 0

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._one(reader, writer):
                    pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers.append(head)
        if head.startswith("GET"):
            self._write(writer, 200, json.dumps({"data": self.cards}).encode())
            return True
        length = next(
            int(line.split(":")[1]) for line in head.split("\r\n") if line.lower().startswith("content-length")
        )
        body = json.loads(await reader.readexactly(length))
        self.asked.append(body)
        reply = self.script(body, len(self.asked) - 1)
        assert reply is not None
        if reply.error is not None:
            self._write(writer, reply.status, json.dumps({"error": reply.error}).encode())
            return True
        self._open += 1
        self.most = max(self.most, self._open)
        if self._open >= self.crowd:
            self.together.set()
        await self.together.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in reply.pieces:
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)
        if reply.hang:
            self.hanging.set()
            await reader.read()
        self._open -= 1
        if reply.cut or reply.hang:
            return False
        writer.write(b"0\r\n\r\n")
        return True

    def _write(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)


@contextlib.asynccontextmanager
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    made.url = f"http://{host}:{port}"
    try:
        yield made
    finally:
        server.close()
        for task in list(made.tasks):
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        await server.wait_closed()
