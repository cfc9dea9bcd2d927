"""What vLLM's connector moves, by rdma alone: pages pushed from one worker to another, and pages that one worker saves
in a pool and another one loads. vLLM itself is not here: its workers call the same methods."""

from __future__ import annotations

import numpy as np

from kvmesh.connectors.vllm.book import LoadOrder, SaveOrder
from kvmesh.connectors.vllm.mover import LoadResults
from tests.connectors.vllm.push_process import LAYERS, pages
from tests.connectors.vllm.test_mover import keys, loaded, mover, save
from tests.connectors.vllm.test_push import check_pushed, receiver, sender
from tests.support.threads import in_thread

GUEST = {"rails": 2, "timeout_s": 400, "memory_mb": 3072}
A, B = {"nics": "rxa0,rxa1"}, {"nics": "rxb0,rxb1"}
SLOW = {"push_timeout_ms": 60_000, "load_timeout_ms": 60_000, "save_timeout_ms": 60_000}  # one processor


def test_pages_are_pushed() -> None:
    mine, theirs = pages(1), pages(2)
    with sender(mine, "rdma", **A, **SLOW) as prefill, receiver(theirs, "rdma", **B, **SLOW) as decode:
        check_pushed(prefill, decode, mine, theirs)


def test_pages_are_saved_in_a_pool_and_loaded_from_it() -> None:
    mine, theirs = pages(1), pages(2)
    wanted, first = keys("first", 8), range(8)
    with (
        in_thread("a", transports="rdma", **A) as store,
        mover(store.address, mine, transports="rdma", **B, **SLOW) as writer,
        mover(store.address, theirs, transports="rdma", **B, **SLOW) as reader,
    ):
        counts = save(writer, SaveOrder(tuple(first), wanted))
        assert (counts["blocks_saved"], counts["blocks_not_saved"]) == (8, 0)
        order = LoadOrder("r", tuple(23 - at for at in first), wanted)
        reader.load(order)
        assert loaded(reader) == LoadResults(frozenset({"r"}), frozenset(), 0)
        for layer in range(LAYERS):
            assert np.array_equal(theirs[layer][list(order.block_ids)], mine[layer][list(first)])
