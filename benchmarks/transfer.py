"""The Transfer Engine against what it cannot beat: a memcpy in one process, and a plain loopback socket.

    python -m benchmarks.transfer [--rounds 30] [--mib 64]

Two processes: this one writes into the other's memory and reads from it. All contenders take turns within each round,
so that what else the machine does hits them alike; medians are printed, and ratios, which travel better than times.

    memcpy    memmove within this process, the bytes of the row
    socket    sendall and recv_into over one loopback connection, then one byte of answer
    shm, tcp  the engine: submit, wait for the acknowledgement of the last slice
"""

from __future__ import annotations

import argparse
import ctypes
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from kvmesh.transfer import EngineConfig, Opcode, Range, Region, TransferEngine, TransferRequest, TransferState

EPOCH = 1


@dataclass(frozen=True)
class Row:
    """`count` pieces of `length` bytes, `stride` apart on both sides."""

    title: str
    count: int
    length: int
    stride: int

    @property
    def nbytes(self) -> int:
        return self.count * self.length


def recv_exact(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        got = sock.recv_into(view)
        if got == 0:
            raise ConnectionError("loopback peer ended")
        view = view[got:]


def peer_main(fd: int) -> None:
    """The other process: memory behind engines of both transports, and a plain socket."""
    pipe = Connection(fd)
    nbytes: int = pipe.recv()
    engines, descriptors = [], []
    for name in ("shm", "tcp"):
        engine = TransferEngine(f"sink-{name}", EngineConfig(transports=(name,)))
        region = engine.allocate(nbytes, "cpu:0")
        assert region.memory is not None
        region.memory[:] = bytes(region.length)
        engine.open_window(f"source-{name}", EPOCH, [Range(region.base_offset, region.length)])
        engines.append(engine)
        descriptors.append(engine.local_descriptor().encode())
    buffer = memoryview(bytearray(nbytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((descriptors, listener.getsockname()[1]))
        plain, _ = listener.accept()
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve() -> None:
        head = memoryview(bytearray(8))
        try:
            while True:
                recv_exact(plain, head)
                recv_exact(plain, buffer[: int.from_bytes(head, "little")])
                plain.send(b"k")
        except ConnectionError:
            return

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    try:
        pipe.recv()
    except EOFError:
        pass
    server.join(5)
    plain.close()
    for engine in engines:
        engine.close()


class Bench:
    """The four contenders, ready to run a row."""

    def __init__(self, nbytes: int) -> None:
        mine, its = socket.socketpair()
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.transfer", "--peer", str(its.fileno())], pass_fds=[its.fileno()]
            )
        self.pipe = Connection(mine.detach())
        self.pipe.send(nbytes)
        descriptors, port = self.pipe.recv()
        self.engines: dict[str, tuple[TransferEngine, Region, str, int]] = {}
        for name, descriptor in zip(("shm", "tcp"), descriptors, strict=True):
            engine = TransferEngine(f"source-{name}", EngineConfig(transports=(name,)))
            region = engine.allocate(nbytes, "cpu:0")
            assert region.memory is not None
            region.memory[:] = b"\x01" * region.length
            self.engines[name] = engine, region, engine.open_segment(descriptor), 4096
        self.copy = bytearray(nbytes)
        self.copy_address = ctypes.addressof(ctypes.c_char.from_buffer(self.copy))
        self.plain = socket.create_connection(("127.0.0.1", port))
        self.plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self.plain.close()
        self.pipe.close()
        for engine, *_ in self.engines.values():
            engine.close()
        self.process.wait(20)

    def memcpy(self, row: Row) -> None:
        source = self.engines["shm"][1].address
        for i in range(row.count):
            at = i * row.stride
            ctypes.memmove(self.copy_address + at, source + at, row.length)

    def socket(self, row: Row) -> None:
        memory = self.engines["shm"][1].memory
        assert memory is not None
        self.plain.send(row.nbytes.to_bytes(8, "little"))
        for i in range(row.count):
            at = i * row.stride
            self.plain.sendall(memory[at : at + row.length])
        self.plain.recv(1)

    def ours(self, name: str, opcode: Opcode) -> Callable[[Row], None]:
        engine, region, segment, base = self.engines[name]
        epoch = EPOCH if opcode is Opcode.WRITE else 0

        def run(row: Row) -> None:
            batch = engine.allocate_batch(row.count)
            requests = [
                TransferRequest(
                    opcode, region.address + i * row.stride, segment, base + i * row.stride, row.length, epoch
                )
                for i in range(row.count)
            ]
            engine.submit(batch, requests)
            engine.wait_sync(batch, 60)
            assert all(s.state is TransferState.COMPLETED for s in engine.statuses(batch)), engine.statuses(batch)
            engine.free_batch(batch)

        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--mib", type=int, default=64, help="size of the bulk row")
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer is not None:
        peer_main(options.peer)
        return
    bulk = options.mib << 20
    rows = [
        Row("one slice of 32 KiB", 1, 32 << 10, 32 << 10),
        Row("one layer of 5 blocks: 5 x 32 KiB", 5, 32 << 10, 256 << 10),
        Row("8 layers of 5 blocks: 40 x 32 KiB", 40, 32 << 10, 64 << 10),
        Row("500 blocks: 500 x 32 KiB", 500, 32 << 10, 64 << 10),
        Row(f"bulk: {options.mib} MiB", 1, bulk, bulk),
    ]
    bench = Bench(max(bulk, 500 * (64 << 10)))
    contenders: dict[str, Callable[[Row], None]] = {
        "memcpy": bench.memcpy,
        "socket": bench.socket,
        "shm write": bench.ours("shm", Opcode.WRITE),
        "shm read": bench.ours("shm", Opcode.READ),
        "tcp write": bench.ours("tcp", Opcode.WRITE),
        "tcp read": bench.ours("tcp", Opcode.READ),
    }
    try:
        for row in rows:
            times: dict[str, list[float]] = {name: [] for name in contenders}
            for turn in range(options.rounds + 3):
                for name, run in contenders.items():
                    started = time.perf_counter()
                    run(row)
                    if turn >= 3:
                        times[name].append(time.perf_counter() - started)
            print(f"\n{row.title}")
            print(
                f"  {'':10} {'p50 µs':>10} {'p99 µs':>10} {'GB/s':>7} {'x memcpy':>9} {'x socket':>9}   (time ratios)"
            )
            medians = {name: statistics.median(t) for name, t in times.items()}
            for name, median in medians.items():
                worst = sorted(times[name])[int(0.99 * (len(times[name]) - 1))]
                print(
                    f"  {name:10} {median * 1e6:10.0f} {worst * 1e6:10.0f} {row.nbytes / median / 1e9:7.2f} "
                    f"{median / medians['memcpy']:9.2f} {median / medians['socket']:9.2f}"
                )
    finally:
        bench.close()


if __name__ == "__main__":
    main()
