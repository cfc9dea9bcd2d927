"""kvmesh's own client: `put_many_from` and `get_many_into` on memory that `allocate` gave, on a uvloop."""

from __future__ import annotations

from typing import Any

import uvloop

from benchmarks.peers.link import Memory, serve
from benchmarks.peers.store_base import GAP, StoreEnd
from kvmesh.kvcache.client import Buffer, ClientConfig, StoreClient


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

    def put(self, names: list[str], length: int) -> list[bytes]:
        puts = self.loop.run_until_complete(self.client.put_many_from(_spans(self.buffers[0], len(names), length)))
        for one in puts:
            if not one.held:
                raise RuntimeError(f"put: {one.cause}")
        return [one.key for one in puts]

    def get(self, handle: list[bytes], length: int) -> None:
        spans = _spans(self.buffers[1], len(handle), length)
        for one in self.loop.run_until_complete(self.client.get_many_into(handle, spans)):
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
