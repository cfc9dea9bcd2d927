"""A transfer engine in a process of its own, told what to do over a pipe.

`python -m tests.support.transfer.peer FD`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvmesh.errors import TransferError
from kvmesh.transfer import (
    EngineConfig,
    Notification,
    Opcode,
    Range,
    TransferEngine,
    TransferRequest,
    TransferState,
    TransferStatus,
)
from kvmesh.transfer.api import BatchId, Region

Copy = tuple[int, int, int]  # offset in the local region, offset in the remote segment, length


def pattern(seed: int, nbytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


class Actor:
    """What a test can ask for, in this process or in another one."""

    def __init__(self, name: str, config: EngineConfig) -> None:
        self.notified: list[Notification] = []
        self.engine = TransferEngine(name, config, on_notify=self.notified.append)
        self.region: Region | None = None
        self._flood: threading.Thread | None = None
        self._flood_result: list[TransferStatus] = []

    def allocate(self, nbytes: int, seed: int | None = None) -> int:
        """Its base offset."""
        self.region = region = self.engine.allocate(nbytes, "cpu:0")
        if seed is not None:
            assert region.memory is not None
            region.memory[:nbytes] = pattern(seed, nbytes)
        return region.base_offset

    def descriptor(self) -> bytes:
        return self.engine.local_descriptor().encode()

    def open(self, descriptor: bytes) -> str:
        return self.engine.open_segment(descriptor)

    def start(self, opcode: str, segment: str, copies: Sequence[Copy], epoch: int = 0) -> BatchId:
        assert self.region is not None
        batch = self.engine.allocate_batch(len(copies))
        self.engine.submit(
            batch,
            [
                TransferRequest(Opcode(opcode), self.region.address + near, segment, far, length, epoch)
                for near, far, length in copies
            ],
        )
        return batch

    def finish(self, batch: BatchId, timeout_s: float = 60.0) -> list[TransferStatus]:
        assert self.engine.wait_sync(batch, timeout_s), self.engine.statuses(batch)
        statuses = self.engine.statuses(batch)
        self.engine.free_batch(batch)
        return statuses

    def transfer(self, opcode: str, segment: str, copies: Sequence[Copy], epoch: int = 0) -> list[TransferStatus]:
        return self.finish(self.start(opcode, segment, copies, epoch))

    def flood(self, opcode: str, segment: str, copies: Sequence[Copy], epoch: int) -> None:
        """Repeats a transfer until one fails; `flood_result` waits for that."""

        def run() -> None:
            while True:
                try:
                    statuses = self.transfer(opcode, segment, copies, epoch)
                except TransferError as err:  # the engine was closed
                    self._flood_result = [TransferStatus(TransferState.FAILED, 0, str(err))]
                    return
                failed = [s for s in statuses if s.state.value != "completed"]
                if failed:
                    self._flood_result = failed
                    return

        self._flood = threading.Thread(target=run, daemon=True)
        self._flood.start()

    def flood_result(self) -> list[TransferStatus]:
        assert self._flood is not None
        self._flood.join(30)
        assert not self._flood.is_alive()
        return self._flood_result

    def flood_over(self) -> bool:
        return self._flood is not None and not self._flood.is_alive()

    def window(self, peer: str, epoch: int, ranges: Sequence[tuple[int, int]]) -> None:
        self.engine.open_window(peer, epoch, [Range(o, n) for o, n in ranges])

    def fence(self, peer: str, epoch: int) -> None:
        self.engine.fence(peer, epoch)

    def notify(self, segment: str, epoch: int, payload: bytes) -> TransferStatus:
        done = threading.Event()
        result: list[TransferStatus] = []

        def on_done(status: TransferStatus) -> None:
            result.append(status)
            done.set()

        self.engine.notify(segment, epoch, payload, on_done=on_done)
        assert done.wait(20)
        return result[0]

    def counter(self, what: str) -> int:
        return self.engine.counters().get(what, 0)

    def read(self, offset: int, nbytes: int) -> bytes:
        assert self.region is not None
        assert self.region.memory is not None
        return bytes(self.region.memory[offset : offset + nbytes])

    def close(self) -> None:
        self.engine.close()


class Peer:
    """An Actor in a spawned process (of `module`); attribute access calls it there."""

    def __init__(self, name: str, config: EngineConfig, module: str = "tests.support.transfer.peer") -> None:
        mine, its = socket.socketpair()
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(its.fileno())],
                pass_fds=[its.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.name = name
        self._pipe = Connection(mine.detach())
        self._pipe.send((name, config))

    def __getattr__(self, method: str) -> Any:
        def call(*args: object, **kwargs: object) -> Any:
            self._pipe.send((method, args, kwargs))
            assert self._pipe.poll(60), f"{method} does not answer"
            ok, value = self._pipe.recv()
            if not ok:
                raise AssertionError(f"{self.name}.{method}: {value}")
            return value

        return call

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> None:
        self._pipe.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)


def serve(kind: type[Actor]) -> None:
    """Does what the pipe of the command line says, until it is closed."""
    pipe = Connection(int(sys.argv[1]))
    name, config = pipe.recv()
    actor = kind(name, config)
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, getattr(actor, method)(*args, **kwargs)))
        except Exception as err:
            pipe.send((False, repr(err)))
    actor.close()


if __name__ == "__main__":
    serve(Actor)
