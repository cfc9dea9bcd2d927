"""kvmesh.transfer, one transport at a time: submit, wait for the acknowledgement of the last slice."""

from __future__ import annotations

import base64
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
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


class RdmaWatch:
    """Times what the rdma transport does for each chain: writing the work requests (Python, GIL held), posting them
    and polling (foreign calls, GIL released)."""

    def __init__(self) -> None:
        self.chains: dict[int, list[tuple[float, float]]] = {}  # work requests → seconds written, seconds posted
        self.polls: list[tuple[int, float]] = []  # completions, seconds
        self._posted = 0.0
        self._timed: set[int] = set()  # queue pairs
        reads = [time.perf_counter() for _ in range(200)]
        self._clock_s = statistics.median(b - a for a, b in pairwise(reads))  # a system call in guests

    def wrap(self, nic: Any) -> None:
        from kvmesh.transfer.transports.rdma.queue_pair import QueuePair

        calls, clock = nic.calls, time.perf_counter
        poll_cq, post = calls.poll_cq, QueuePair.post

        def timing(post_all: Callable[[], int]) -> Callable[[], int]:
            def timed_send() -> int:
                start = clock()
                code = post_all()
                self._posted = clock() - start
                return code

            return timed_send

        def timed_poll(*words: Any) -> int:
            start = clock()
            got: int = poll_cq(*words)
            self.polls.append((got, clock() - start))
            return got

        def timed_post(pair: Any, opcode: int, parts: Sequence[Any], *words: Any, **more: Any) -> None:
            if id(pair) not in self._timed:
                self._timed.add(id(pair))
                pair._post_all = timing(pair._post_all)
            start = clock()
            post(pair, opcode, parts, *words, **more)
            spent = clock() - start
            self.chains.setdefault(len(parts), []).append((spent - self._posted, self._posted))

        calls.poll_cq = timed_poll
        QueuePair.post = timed_post  # type: ignore[method-assign, assignment]

    def costs(self) -> dict[str, Any]:
        """Medians, µs for each work request by length of the chain; and of polls. Without what the clock itself takes:
        a chain's writing is timed with two of its readings in it, a foreign call with one."""
        clock = self._clock_s

        def middle(values: list[float], readings: int) -> float:
            return max(statistics.median(values) - readings * clock, 0.0)

        chains = {
            n: [round(middle([row[i] for row in rows], 2 - i) / n * 1e6, 3) for i in (0, 1)] + [len(rows)]
            for n, rows in sorted(self.chains.items())
        }
        empty = [seconds for got, seconds in self.polls if got <= 0]
        full = [(seconds, got) for got, seconds in self.polls if got > 0]
        return {
            "clock_us": round(clock * 1e6, 3),
            "chains": chains,
            "empty_poll_us": round(middle(empty, 1) * 1e6, 3) if empty else None,
            "poll_us": round(middle([s for s, _ in full], 1) * 1e6, 3) if full else None,
            "completions_a_poll": round(sum(got for _, got in full) / len(full), 2) if full else None,
        }


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

    def watch_rdma(self) -> None:
        """From now on every chain and every poll is timed."""
        from kvmesh.transfer.transports.rdma.transport import RdmaTransport

        self.watched = RdmaWatch()
        for transport in self.engine._transports:
            if isinstance(transport, RdmaTransport):
                for nic in transport.own_nics:
                    self.watched.wrap(nic)

    def rdma_costs(self) -> dict[str, Any]:
        return self.watched.costs()

    def close(self) -> None:
        self.engine.close()


if __name__ == "__main__":
    serve({"target": Target, "source": Source})
