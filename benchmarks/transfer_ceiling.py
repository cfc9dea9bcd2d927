"""What one Python process can ask of its NICs in a second: the cost of a slice in the engine and of a work request.

    python -m benchmarks.transfer_ceiling [--quick] [--json FILE]

engine        a request of one slice, and a slice of a larger request, through submit, scheduling, answer, status, over
              a transport that answers at once from another thread: CPU time of the process
work request  chains with other addresses in every post, written and posted by the very code of the rdma transport, but
              posted to a C function that does nothing: what is left is Python's part
completion    the poller's part, for each chain

Prints what that makes for 8 NICs of 400 Gb/s. Needs no RDMA.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import queue
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.transfer_contest import size
from kvmesh.transfer import EngineConfig, Opcode, Range, TransferEngine, TransferRequest, TransferState
from kvmesh.transfer.transports.base import Frame, FrameLimits
from kvmesh.transfer.transports.rdma import verbs
from kvmesh.transfer.transports.rdma.queue_pair import QueuePair
from kvmesh.transfer.transports.tcp.transport import TcpTransport

WIRE = 8 * 400e9 / 8  # bytes per second of 8 NICs of 400 Gb/s
CHAINS = (1, 4, 16, 64, 128)
FRAMES = (1, 4, 16, 128)  # slices in a frame; a frame is a chain
REQUESTS = (1, 16)  # slices in a request
SLICES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20)
EPOCH = 1
DEPTH = 256


class Instant:
    """Takes the place of the tcp transport's `post`: another thread answers every frame at once."""

    def __init__(self) -> None:
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def post(self, frame: Frame) -> None:
        self._frames.put(frame)

    def _answer(self) -> None:
        while (frame := self._frames.get()) is not None:
            frame.done()

    def close(self) -> None:
        self._frames.put(None)
        self._thread.join(5)


def engine_cost(slice_bytes: int, frame_parts: int, slices: int, per_request: int, repeats: int) -> float:
    """CPU seconds for each slice, `per_request` of them in each request; the least of the repeats, as others on the
    machine only add. Nothing is copied."""
    instant = Instant()
    with TransferEngine("target", EngineConfig(transports=("tcp",))) as target:
        far = target.register_memory(bytearray(per_request * slice_bytes), "cpu:0")
        target.open_window("source", EPOCH, [Range(far.base_offset, far.length)])
        with TransferEngine("source", EngineConfig(transports=("tcp",), nic_inflight_bytes=1 << 40)) as source:
            near = source.register_memory(bytearray(per_request * slice_bytes), "cpu:0")
            segment = source.open_segment(target.local_descriptor().encode())
            for transport in source._transports:
                assert isinstance(transport, TcpTransport), "the one that was asked for"
                transport.limits = FrameLimits(slice_bytes, frame_parts * slice_bytes, frame_parts, 64)
                transport.post = instant.post  # type: ignore[method-assign]
            costs = []
            for _ in range(repeats + 1):
                cpu = time.process_time()
                requests = [
                    TransferRequest(
                        Opcode.WRITE, near.address, segment, far.base_offset, per_request * slice_bytes, EPOCH
                    )
                    for _ in range(slices // per_request)
                ]
                batch = source.allocate_batch(len(requests))
                source.submit(batch, requests)
                source.wait_sync(batch, 60)
                states = [status.state for status in source.statuses(batch)]
                costs.append((time.process_time() - cpu) / slices)
                assert all(state is TransferState.COMPLETED for state in states), states[0]
                source.free_batch(batch)
            target.fence("source", EPOCH)
    instant.close()
    return min(costs[1:])


def queue_pair() -> tuple[QueuePair, list[object]]:
    """The transport's own, on a NIC of which only a C function is real. And what its chains were done with."""
    libc = ctypes.CDLL(None)
    # pthread_condattr_destroy does nothing and returns 0: a foreign call that releases the GIL, like post_send.
    nothing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
        ("pthread_condattr_destroy", libc)
    )
    done: list[object] = []
    nic: Any = SimpleNamespace(
        name="none",
        busy=set(),
        calls=SimpleNamespace(post_send=nothing),
        make_queue_pair=lambda *_: (SimpleNamespace(qp_num=1), 1, 1, None),
    )
    sink: Any = SimpleNamespace(chain_done=lambda _, token: done.append(token))
    return QueuePair(nic, DEPTH, 0, sink), done


def chain_cost(chain: int, times: int) -> tuple[float, float]:
    """Seconds of Python for each work request posted in chains so long, and for each completion of a chain; medians."""
    pair, done = queue_pair()
    posting, completing = [], []
    for k in range(times):
        parts = [(i, (1 << 32) + (k * chain + i) * 65536, (k * chain + i) * 65536, 61440) for i in range(chain)]
        start = time.perf_counter()
        pair.post(verbs.WRITE, parts, 1 << 40, 7, 9, k)
        middle = time.perf_counter()
        pair.completed(k + 1, verbs.SUCCESS, 0, 0)
        completing.append(time.perf_counter() - middle)
        posting.append((middle - start) / chain)
    assert done == list(range(times)), "every chain is done once"
    return statistics.median(posting), statistics.median(completing)


def measure(quick: bool) -> dict[str, Any]:
    """Prints the tables and returns their figures, in microseconds."""
    us: Callable[[float], float] = lambda seconds: round(seconds * 1e6, 3)  # noqa: E731
    slices, repeats = (4096, 3) if quick else (16384, 7)
    told: dict[str, Any] = {"work_request_us": {}, "completion_us": {}, "engine_us": {}}
    print("work requests, other addresses in every post: µs of Python for each, and for a chain's completion")
    for chain in CHAINS:
        post, completion = chain_cost(chain, 300 if quick else 3000)
        told["work_request_us"][chain], told["completion_us"][chain] = us(post), us(completion)
        print(f"  chains of {chain:<4}{us(post):8.2f}{us(completion):8.2f}", flush=True)
    print("engine: µs of CPU for each slice, by slices in a frame and in a request")
    print(f"  {'':16}" + "".join(f"{f'{n} a request':>16}" for n in REQUESTS))
    for parts in FRAMES:
        costs = [us(engine_cost(64 << 10, parts, slices, n, repeats)) for n in REQUESTS]
        told["engine_us"][parts] = dict(zip(REQUESTS, costs, strict=True))
        print(f"  frames of {parts:<6}" + "".join(f"{cost:16.2f}" for cost in costs), flush=True)
    told["python_share"] = _conclude(told)
    return told


def _conclude(told: dict[str, Any]) -> dict[int, dict[str, float]]:
    print(f"\n8 × 400 Gb/s are {WIRE / 1e9:.0f} GB/s. Seconds of Python for each second, in one process:")
    cases = [(parts, n) for n in REQUESTS for parts in (4, 16)]
    heads = "".join(f"{f'{parts} a frame,':>14}" for parts, _ in cases)
    print(f"  {'':24}{heads}\n  {'slice':10}{'slices/s':>14}" + "".join(f"{f'{n} a request':>14}" for _, n in cases))
    found: dict[int, dict[str, float]] = {}
    for slice_bytes in SLICES:
        rate = WIRE / slice_bytes
        shares = {}
        for parts, n in cases:
            cost = told["engine_us"][parts][n] + told["work_request_us"][parts] + told["completion_us"][parts] / parts
            shares[f"{parts} a frame, {n} a request"] = round(rate * cost / 1e6, 3)
        found[slice_bytes] = shares
        print(f"  {size(slice_bytes):10}{rate:14,.0f}" + "".join(f"{share:14.2f}" for share in shares.values()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer of everything: seconds")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    told = measure(options.quick)
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
