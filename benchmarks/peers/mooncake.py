"""Mooncake's Transfer Engine over TCP (P2PHANDSHAKE, its defaults), run by the Python of its own environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.link import End, Initiator, Memory, Piece, serve, shares


def _engine(nbytes: int) -> tuple[Any, Memory]:
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("initialize failed")
    memory = Memory(nbytes)
    if engine.register_memory(memory.address, nbytes) != 0:
        raise RuntimeError("register_memory failed")
    return engine, memory


class Target(End):
    def __init__(self, nbytes: int) -> None:
        self.engine, self.memory = _engine(nbytes)
        self.told = [f"127.0.0.1:{self.engine.get_rpc_port()}", self.memory.address]


class Source(Initiator):
    def __init__(self, nbytes: int, told: tuple[str, int]) -> None:
        super().__init__()
        self.engine, self.memory = _engine(nbytes)
        self.peer, self.far = told

    def jobs(self, op: str, row: Sequence[Piece], threads: int) -> list[Callable[[], None]]:
        move = self.engine.batch_transfer_sync_write if op == "write" else self.engine.batch_transfer_sync_read
        near, far = self.memory.address, self.far

        def job(share: list[Piece]) -> Callable[[], None]:
            def run() -> None:
                code = move(
                    self.peer, [near + at for at, _ in share], [far + at for at, _ in share], [n for _, n in share]
                )
                if code != 0:
                    raise RuntimeError(f"batch_transfer_sync_{op}: {code}")

            return run

        return [job(share) for share in shares(row, threads)]


if __name__ == "__main__":
    serve({"target": Target, "source": Source})
