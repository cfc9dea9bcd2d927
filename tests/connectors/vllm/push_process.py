"""Is one end of a push in a process of its own, which strikes itself in the middle:

    python -m tests.connectors.vllm.push_process send|receive SIGNAL COPIES TRANSPORT [JSON of a RemotePrefill's params]

`send` holds request "r" and prints where it is; `receive` asks for what the params say. Either raises SIGNAL (0: none)
when it has copied COPIES blocks. Whatever it counts is printed line by line. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np

from kvmesh.connectors.vllm.book import HandoffOrders, HoldOrder, ReceiveOrder
from kvmesh.connectors.vllm.config import ConnectorConfig
from kvmesh.connectors.vllm.mover import Pages
from kvmesh.connectors.vllm.push.staging import WorkerPages
from kvmesh.connectors.vllm.push.worker import PushWorker
from kvmesh.connectors.vllm.remote import PushRank, RemotePrefill

BLOCKS, BYTES, LAYERS = 24, 40_000, 5
TICKET = bytes(range(16))
LAYOUT = "layout"


def pages(seed: int) -> list[Pages]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (BLOCKS, BYTES), np.uint8) for _ in range(LAYERS)]


def config(transport: str, **more: Any) -> ConnectorConfig:
    words = {"pool": False, "push": True, "transports": transport, "push_staging_mb": 1, "push_threads": 1, **more}
    return ConnectorConfig(**words)


def source(rank: PushRank, **more: Any) -> RemotePrefill:
    words = {
        "engine_id": "prefill",
        "request_id": "r",
        "ticket": TICKET.hex(),
        "tokens": BLOCKS * 32,
        "digest": "0" * 64,
        "block_tokens": 32,
        "layout": LAYOUT,
        "ranks": (rank,),
        **more,
    }
    return RemotePrefill(**words)


def strike_after(copies: int, number: int) -> None:
    """Has this process strike itself when it has copied so many blocks, in either direction."""
    left = [copies]
    for name in ("copy_in", "copy_out"):
        copy = getattr(WorkerPages, name)

        def striking(self: WorkerPages, page: int, block: Any, copy: Any = copy) -> None:
            copy(self, page, block)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), number)

        setattr(WorkerPages, name, striking)


def main() -> None:
    role, number, copies, transport = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    strike_after(copies, number)
    sends = role == "send"
    worker = PushWorker(pages(1), 0, LAYOUT, config(transport), sends=sends, receives=not sends)
    told: dict[str, Any] = {}
    if sends:
        worker.carry_out(HandoffOrders(holds=(HoldOrder("r", TICKET, tuple(range(BLOCKS))),)))
        told = source(worker.place).params()
    print(json.dumps(told), flush=True)
    if not sends:
        worker.receive(ReceiveOrder("d", RemotePrefill.of(json.loads(sys.argv[5])), 0, tuple(range(BLOCKS))))
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.is_set():
        worker.poll()
        worker.freed()
        if counts := worker.take_counts():
            print(json.dumps(counts), flush=True)
        time.sleep(0.002)
    worker.close()


if __name__ == "__main__":
    main()
