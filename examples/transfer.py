"""The transfer engine by itself: two processes, numpy buffers, a write, an end mark, a read. No model, no service.

    pip install kvmesh
    python examples/transfer.py

Across hosts: EngineConfig(host="0.0.0.0", advertise_host="10.0.0.5"); carry the descriptor over any channel you have.
"""

import multiprocessing
import threading
from multiprocessing.connection import Connection

import numpy as np

from kvmesh.transfer import EngineConfig, Opcode, Range, TransferEngine, TransferRequest, TransferState

EPOCH = 1  # names one invitation to write; the next one gets another number
FLOATS = 1 << 20


def serve(pipe: Connection) -> None:
    """The target: registers a numpy array of its own and invites one writer into half of it."""
    arrived = threading.Event()
    with TransferEngine("target#1", EngineConfig(), on_notify=lambda mark: arrived.set()) as engine:
        array = np.zeros(FLOATS, dtype=np.float32)
        region = engine.register_memory(array, "cpu:0")
        shared = engine.allocate(array.nbytes, "cpu:0")  # memory that a reader of this host may map: shm, no socket
        assert shared.memory is not None
        np.frombuffer(shared.memory, dtype=np.float32)[:] = 42.0
        engine.open_window("writer#1", EPOCH, [Range(region.base_offset, array.nbytes // 2)])
        pipe.send((engine.local_descriptor().encode(), region.base_offset, shared.base_offset))
        assert arrived.wait(30), "no end mark"
        engine.fence("writer#1", EPOCH)  # from here on nobody writes into it
        pipe.send((float(array[: FLOATS // 2].sum(dtype=np.float64)), float(array[FLOATS // 2 :].sum())))
        pipe.recv()  # until the writer has read


def transfer(engine: TransferEngine, request: TransferRequest) -> None:
    batch = engine.allocate_batch(1)
    engine.submit(batch, [request])
    assert engine.wait_sync(batch, 30), "no answer"
    status = engine.status(batch, 0)
    assert status.state is TransferState.COMPLETED, status
    engine.free_batch(batch)


def main() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    target = context.Process(target=serve, args=(theirs,))
    target.start()
    descriptor, offset, shared_offset = pipe.recv()
    with TransferEngine("writer#1", EngineConfig()) as engine:
        region = engine.allocate(FLOATS * 4, "cpu:0")
        assert region.memory is not None
        array = np.frombuffer(region.memory, dtype=np.float32)
        array[:] = np.arange(FLOATS)
        segment = engine.open_segment(descriptor)
        half = array.nbytes // 2
        transfer(engine, TransferRequest(Opcode.WRITE, region.address, segment, offset, half, EPOCH, verify=True))
        engine.notify(segment, EPOCH, b"done")
        written, untouched = pipe.recv()
        assert written == float(array[: FLOATS // 2].sum(dtype=np.float64)) and untouched == 0.0
        print(f"wrote {half} bytes, verified: {engine.counters()}")
        transfer(engine, TransferRequest(Opcode.READ, region.address, segment, shared_offset, array.nbytes))
        assert (array == 42.0).all()
        print(f"read {array.nbytes} bytes, verified: {engine.counters()}")
    pipe.send("read")
    target.join(30)
    assert target.exitcode == 0


if __name__ == "__main__":
    main()
