"""Mooncake's store over TCP, run by the Python of its own environment: a node that gives memory, and clients that give
none (as its documentation has it: `put_from` and `get_into` on registered buffers)."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.link import End, Memory, serve
from benchmarks.peers.store_base import StoreEnd, spread


def _store(master: str, port: int, segment: int) -> Any:
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

    store = MooncakeDistributedStore()
    if store.setup(f"127.0.0.1:{port}", "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", master) != 0:
        raise RuntimeError("setup failed")
    return store


class Node(End):
    def __init__(self, master: str, port: int, nbytes: int) -> None:
        self.store = _store(master, port, nbytes)

    def close(self) -> None:
        self.store.close()


class Client(StoreEnd):
    def __init__(self, master: str, port: int, nbytes: int) -> None:
        self.store = _store(master, port, 0)
        super().__init__(nbytes)

    def memories(self, nbytes: int) -> tuple[Memory, Memory]:
        made = super().memories(nbytes)
        for one in made:
            if self.store.register_buffer(one.address, one.nbytes) != 0:
                raise RuntimeError("register_buffer failed")
        return made

    def put(self, names: list[str], length: int) -> list[str]:
        codes = self.store.batch_put_from(names, spread(self.source, len(names), length), [length] * len(names))
        if any(code != 0 for code in codes):
            raise RuntimeError(f"batch_put_from: {sorted(set(codes))}")
        return names

    def get(self, handle: list[str], length: int) -> None:
        got = self.store.batch_get_into(handle, spread(self.target, len(handle), length), [length] * len(handle))
        if any(n != length for n in got):
            raise RuntimeError(f"batch_get_into: {sorted(set(got))}")

    def remove(self, handle: list[str]) -> None:
        self.store.batch_remove(handle, True)

    # ── the master alone ─────────────────────────────────────────────────────────────────────────

    def announce(self, prefix: str, count: int, batch: int) -> float:
        """Seconds to make so many keys known: begin and end of puts, no bytes moved."""
        spent = 0.0
        for at in range(0, count, batch):
            names = [f"{prefix}-{i}" for i in range(at, min(at + batch, count))]
            start = time.perf_counter()
            begun = self.store.batch_put_session_start(names, [64] * len(names))
            ended = self.store.batch_put_session_end(names)
            spent += time.perf_counter() - start
            if any(begun) or any(ended):
                raise RuntimeError(f"put session: {sorted(set(begun))} {sorted(set(ended))}")
        return spent

    def look(self, prefix: str, known: int, batch: int, times: int) -> float:
        """Seconds for so many look-ups of `batch` keys each."""
        names = [[f"{prefix}-{(t * batch + i) % known}" for i in range(batch)] for t in range(times)]
        start = time.perf_counter()
        for some in names:
            found = self.store.batch_is_exist(some)
            if len(found) != batch or any(one != 1 for one in found):
                raise RuntimeError("batch_is_exist: a key is missing")
        return time.perf_counter() - start

    def close(self) -> None:
        self.store.close()


if __name__ == "__main__":
    serve({"node": Node, "client": Client})
