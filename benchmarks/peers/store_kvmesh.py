"""kvmesh's own client: `put_many_from` and `get_many_into` on memory that `allocate` gave, on a uvloop."""

from __future__ import annotations

import time
from typing import Any

import uvloop

from benchmarks.peers.link import Memory, serve
from benchmarks.peers.store_base import GAP, StoreEnd
from kvmesh.storeclient import Buffer, ClientConfig, StoreClient


class Client(StoreEnd):
    def __init__(self, master: str, nbytes: int, transports: str, keys: str = "granted") -> None:
        self.loop = uvloop.new_event_loop()
        config = ClientConfig(store=master, transports=transports, keys=keys, namespace="bench")
        self.client = self.loop.run_until_complete(_made(config))
        super().__init__(nbytes)

    def memories(self, nbytes: int) -> tuple[Memory, Memory]:
        self.buffers = self.client.allocate(nbytes), self.client.allocate(nbytes)
        made = tuple(Memory(nbytes, one.view, one.region.address) for one in self.buffers)
        for one in made:
            one.fill(1)
        return made[0], made[1]

    def turn(self, op: str, count: int, length: int, times: int) -> tuple[float, float]:
        """On the loop from begin to end: entering it anew with each call is no part of a store."""
        return self.loop.run_until_complete(self._turn(op, count, length, times))

    async def _turn(self, op: str, count: int, length: int, times: int) -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(times):
            if op == "put":
                self.put_sets.append(await self._put(count, length))
            else:
                await self._get(self.put_sets[-1], length)
        return start, time.perf_counter()

    async def _put(self, count: int, length: int) -> list[bytes]:
        puts = await self.client.put_many_from(_spans(self.buffers[0], count, length))
        for one in puts:
            if not one.held:
                raise RuntimeError(f"put: {one.cause}")
        return [one.key for one in puts]

    async def _get(self, keys: list[bytes], length: int) -> None:
        for one in await self.client.get_many_into(keys, _spans(self.buffers[1], len(keys), length)):
            if one.nbytes != length:
                raise RuntimeError(f"get: {one.nbytes} bytes: {one.cause}")

    def remove(self, handle: list[bytes]) -> None:
        self.loop.run_until_complete(self.client.remove(*handle))

    def close(self) -> None:
        self.loop.run_until_complete(self.client.close())


async def _made(config: ClientConfig) -> StoreClient:
    return StoreClient(config)


def _spans(buffer: Buffer, count: int, length: int) -> list[Any]:
    return [buffer.span(i * (length + GAP), length) for i in range(count)]


if __name__ == "__main__":
    serve({"client": Client})
