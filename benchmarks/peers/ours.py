"""kvmesh.transfer, one transport at a time: submit, wait for the acknowledgement of the last slice."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.link import LIMIT_S, End, Initiator, Memory, Piece, serve, shares
from kvmesh.transfer import EngineConfig, Opcode, Range, Region, TransferEngine, TransferRequest, TransferState

EPOCH = 1


def _engine(name: str, options: dict[str, Any]) -> TransferEngine:
    """`options` are fields of EngineConfig."""
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    return TransferEngine(name, EngineConfig(**fields))


def _memory(engine: TransferEngine, nbytes: int) -> tuple[Region, Memory]:
    region = engine.allocate(nbytes, "cpu:0")
    assert region.memory is not None, "allocated memory has a view"
    return region, Memory(nbytes, region.memory, region.address)


class Target(End):
    def __init__(self, nbytes: int, options: dict[str, Any], peers: Sequence[str] = ("source",)) -> None:
        self.engine = _engine("target", options)
        self.region, self.memory = _memory(self.engine, nbytes)
        for peer in peers:
            self.engine.open_window(peer, EPOCH, [Range(self.region.base_offset, self.region.length)])
        descriptor = base64.b64encode(self.engine.local_descriptor().encode()).decode()
        self.told = [descriptor, self.region.base_offset]

    def close(self) -> None:
        self.engine.close()


class Source(Initiator):
    def __init__(self, nbytes: int, told: tuple[str, int], options: dict[str, Any]) -> None:
        super().__init__()
        self.engine = _engine("source", options)
        self.region, self.memory = _memory(self.engine, nbytes)
        self.segment = self.engine.open_segment(base64.b64decode(told[0]))
        self.base = told[1]

    def jobs(self, op: str, row: Sequence[Piece], threads: int) -> list[Callable[[], None]]:
        opcode = Opcode(op)
        epoch = EPOCH if opcode is Opcode.WRITE else 0

        def job(share: list[Piece]) -> Callable[[], None]:
            return lambda: self._move(opcode, epoch, share)

        return [job(share) for share in shares(row, threads)]

    def _move(self, opcode: Opcode, epoch: int, share: list[Piece]) -> None:
        engine, near, far, segment = self.engine, self.region.address, self.base, self.segment
        batch = engine.allocate_batch(len(share))
        engine.submit(batch, [TransferRequest(opcode, near + at, segment, far + at, n, epoch) for at, n in share])
        if not engine.wait_sync(batch, LIMIT_S):
            raise TimeoutError("the batch is not final")
        for status in engine.statuses(batch):
            if status.state is not TransferState.COMPLETED:
                raise RuntimeError(f"{status.state.value}: {status.cause}")
        engine.free_batch(batch)

    def counters(self) -> dict[str, int]:
        return self.engine.counters()

    def close(self) -> None:
        self.engine.close()


if __name__ == "__main__":
    serve({"target": Target, "source": Source})
