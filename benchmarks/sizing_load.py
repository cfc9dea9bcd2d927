"""Clients of benchmarks/sizing.py: streamed answers over REST (text prompts) and over gRPC (token ids)."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from tokenizers import Tokenizer

from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import gateway_pb2, gateway_pb2_grpc
from tests.support.mesh.client import packed

ANSWER_S = 120.0
LOWEST_ID = 20  # ids below are special


@dataclass(frozen=True, slots=True)
class Work:
    """One request; `text` is what `ids` say, about: REST sends it, and the gateway tokenizes."""

    text: str
    ids: list[int]
    max_tokens: int


class Prompts:
    """Prompts that no other one begins like, so that no prefix cache answers."""

    def __init__(self, model: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        vocabulary = self._tokenizer.get_vocab()
        # Words of letters alone: nothing in a text of them joins with what stands next to it.
        self._words = sorted(word[1:] for word in vocabulary if word[0] == "Ġ" and word[1:].isalpha() and len(word) > 3)
        self._highest = len(vocabulary) - 1
        self._random = random.Random(seed)

    def make(self, tokens: int, max_tokens: int) -> Work:
        """A prompt of about `tokens` tokens as text, and of exactly so many ids."""
        text = " ".join(self._random.choices(self._words, k=tokens))
        ids = [self._random.randint(LOWEST_ID, self._highest) for _ in range(tokens)]
        return Work(text, ids, max_tokens)

    def count(self, text: str) -> int:
        """Its tokens."""
        return len(self._tokenizer.encode(text).ids)


async def rest(address: str, work: Work) -> int:
    """Tokens of a streamed completion. RuntimeError: it was refused, or failed."""
    body = json.dumps(
        {
            "model": "m", "prompt": work.text, "max_tokens": work.max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True,
        }
    ).encode()  # fmt: skip
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {(await reader.read())[:500]!r}")
        events = 0
        async for line in reader:
            if line.startswith(b"data: {"):
                if b'"error"' in line[:20]:
                    raise RuntimeError(line.decode())
                events += 1
        return events
    finally:
        writer.close()


class Rpc:
    """A gRPC client of one gateway; owns its channel."""

    def __init__(self, address: str) -> None:
        self._channel: grpc.aio.Channel = connect(address)
        self._stub = gateway_pb2_grpc.GatewayStub(self._channel)

    async def ask(self, work: Work) -> int:
        """Tokens of a streamed answer. AioRpcError: it was refused, or failed."""
        request = gateway_pb2.GenerateRequest(
            token_ids=packed(work.ids), max_tokens=work.max_tokens, temperature=0.0, ignore_eos=True
        )
        return sum([len(part.token_ids) async for part in self._stub.Generate(request, timeout=ANSWER_S)])

    async def close(self) -> None:
        await self._channel.close(grace=None)


@dataclass
class Clients:
    """Both doors of every gateway; requests go to gateways in turn."""

    http: Sequence[str]
    rpcs: Sequence[Rpc]

    @classmethod
    def of(cls, http: Sequence[str], grpc_addresses: Sequence[str]) -> Clients:
        """Connections are made in the running event loop."""
        return cls(http, [Rpc(address) for address in grpc_addresses])

    async def run(self, door: str, works: Sequence[Work], concurrency: int) -> None:
        """All of them, so many at a time. TimeoutError: they take more than ANSWER_S together."""
        left = iter(enumerate(works))

        async def one() -> None:
            for i, work in left:
                await self.ask(door, i, work)

        async with asyncio.timeout(ANSWER_S):
            await asyncio.gather(*(one() for _ in range(concurrency)))

    async def ask(self, door: str, turn: int, work: Work) -> int:
        """One request at the gateway whose turn it is; its tokens."""
        if door == "rest":
            return await rest(self.http[turn % len(self.http)], work)
        return await self.rpcs[turn % len(self.rpcs)].ask(work)

    async def close(self) -> None:
        for rpc in self.rpcs:
            await rpc.close()
