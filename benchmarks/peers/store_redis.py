"""Redis over loopback with its own Python client: SET in a pipeline, MGET and a copy to where the bytes are wanted."""

from __future__ import annotations

import redis

from benchmarks.peers.link import serve
from benchmarks.peers.store_base import GAP, StoreEnd


class Client(StoreEnd):
    def __init__(self, port: int, nbytes: int) -> None:
        self.redis = redis.Redis(port=port)
        self.redis.ping()
        super().__init__(nbytes)

    def put(self, names: list[str], length: int) -> list[str]:
        with self.redis.pipeline(transaction=False) as pipe:
            for i, name in enumerate(names):
                at = i * (length + GAP)
                pipe.set(name, self.source.view[at : at + length])
            pipe.execute()
        return names

    def get(self, handle: list[str], length: int) -> None:
        for i, value in enumerate(self.redis.mget(handle)):
            at = i * (length + GAP)
            self.target.view[at : at + length] = value

    def remove(self, handle: list[str]) -> None:
        self.redis.delete(*handle)

    def close(self) -> None:
        self.redis.close()


if __name__ == "__main__":
    serve({"client": Client})
